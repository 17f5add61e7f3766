"""Which numbers descend from which example of a batch: does each loss of a batch depend on its own example alone?

One example of a small batch is marked. Every tensor that a function makes gets two masks. They say which of its numbers
depend on the marked example, and which on the others. For common functions the masks follow from the masks of the
arguments. Any other function is run again on made-up numbers. First the numbers of the marked example are replaced,
then the numbers of the others; a result that changes depends on the replaced numbers. So the name of a function does
not matter. Nor does it matter if what a function reads from a batch is 0 except for rare examples. If a function cannot
be run in this way, its results are taken to depend on all its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ggda_ext.data import batch_length, pick, tensors_in
from ggda_ext.gradients.observation import TELLERS, Watch
from ggda_ext.gradients.proof.truth import FAILS, Subject

RANDOM = "random numbers"
_TELLING = (7, 5, 3, 11, 13, 17, 19, 23)  # batch sizes to choose from; the chosen one should divide no other dimension
_MOST_NUMBERS = 2**24  # most numbers that are made up for a function

Masks = tuple[Tensor, Tensor]
"""Which numbers of a tensor depend on the marked example, and which on others.

A mask has length 1 along dimensions where all numbers are the same in this respect.
"""


def descent(subject: Subject, batch: Any, most: int, called: int | None = None) -> Descent:
    """Run a few examples, some of them more than once, and return what was seen to descend from them.

    Args:
        subject: the model and its loss.
        batch: the examples.
        most: most examples to run at once.
        called: `Watch.called` for the whole batch. If it differs for the few examples, the whole batch is run.
    """
    lengths = {length for value in subject.space.model.parameters() for length in value.shape}
    lengths |= {length for part in tensors_in(batch) if not part.is_nested for length in part.shape[1:]}
    telling = (s for s in _TELLING if s <= most and not any(length % s == 0 for length in lengths))
    size = next(telling, min(_TELLING[0], most))
    few = pick(batch, [at % batch_length(batch) for at in range(size)])
    found = _followed(subject, few, size)
    if called not in (None, found.called):
        found = _followed(subject, batch, batch_length(batch))
    return found


def _followed(subject: Subject, batch: Any, size: int) -> Descent:
    model = subject.space.model
    watch = Descent(size, batch, [*model.parameters(), *model.buffers()])
    with subject.space.require_gradients(of_chosen=True), watch:
        losses = subject.loss.each(model, batch)
    watch.judge(losses)
    return watch


class Descent(Watch):
    """Watches which numbers descend from the examples of a batch, and which from the places of the batch.

    Rows that do not descend from the examples and are not constants are taken to be made for the places of the batch.
    Rows are recognised by their number, so the number of examples should divide no other dimension.

    Args:
        size: number of examples in the batch.
        batch: the examples.
        held: the tensors of the model. Other rows that no watched function made are taken to be made from the whole
            batch by code that cannot be watched.

    Attributes:
        joins: the name of a function that combined several examples, if the losses depend on the result; `RANDOM` if
            random numbers were drawn, because the same examples may then have other losses; None otherwise.
        placed: whether rows of the examples were combined with rows that were made for their places.
    """

    def __init__(self, size: int, batch: Any, held: Sequence[Tensor] = ()) -> None:
        super().__init__(size)
        self.joins: str | None = None
        self.placed = False
        self._mixed: str | None = None
        self._told_of: str | None = None  # a function by which Python read a number made from several examples
        self._of: dict[int, Masks] = {}  # by id of the tensor, for tensors that descend from the batch
        self._constant: set[int] = set()
        self._seen = {id(tensor): tensor for tensor in held}  # kept alive, so that ids stay unique
        self._marked = size // 2
        parts = tensors_in(batch)
        as_list = len(parts) >= size  # the batch may have a tensor for each example
        alone = [{id(part) for part in tensors_in(pick(batch, [at]))} for at in range(size)] if as_list else []
        for tensor in parts:
            owners = [at for at, ids in enumerate(alone) if id(tensor) in ids]
            if not owners and tensor.dim() and len(tensor) == size:
                own = self._own(tensor)
                self._keep(tensor, (own, ~own))
            else:
                owners = owners or list(range(size))
                self._keep(tensor, _masks(tensor, self._marked in owners, any(at != self._marked for at in owners)))
        self._random = torch.get_rng_state()
        self._numbers = torch.Generator().manual_seed(0)

    def _keep(self, tensor: Tensor, masks: Masks) -> None:
        self._seen[id(tensor)] = tensor
        self._of[id(tensor)] = masks

    def _own(self, tensor: Tensor) -> Tensor:
        """A mask of the marked example's row, for a tensor with one row per example."""
        rows = torch.arange(self.size, device=tensor.device) == self._marked
        return rows.view(-1, *[1] * (tensor.dim() - 1))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        if func in TELLERS and not isinstance(found, bool):
            given = [masks for tensor in _tensors(args) for masks in (self._of.get(id(tensor)),) if masks is not None]
            if all(any(bool(masks[which].any()) for masks in given) for which in (0, 1)):
                self._told_of = func.__name__
        made = _tensors(args[:1] if found is None else found)
        if made and not any(tensor.is_meta for tensor in (*made, *_tensors((args, kwargs)))):
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._follow(func, args, kwargs or {}, made)
        return found

    def _follow(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        """Keep the masks of the tensors that a function made, or changed if it returned nothing."""
        given = _tensors((args, kwargs))
        for value in given:
            if id(value) not in self._seen and self._rows_in(value):
                self._keep(value, _masks(value, True, True))
        self._seen.update((id(tensor), tensor) for tensor in made)
        known = [value for value in given if id(value) in self._of]
        others = [value for value in given if id(value) not in self._of and self._rows_in(value)]
        constant = all(id(value) in self._constant for value in others)
        self.placed = self.placed or (bool(known) and not constant)
        found = self._masks(func, args, kwargs, known, made) if known else [None] * len(made)
        for tensor, masks in zip(made, found, strict=True):
            if masks is None:
                if func in _CONSTANTS and constant:
                    self._constant.add(id(tensor))
                continue
            self._of[id(tensor)] = masks
            if tensor is given[0]:
                self._changed(tensor, masks)
            if self._mixed is None and self._rows_in(tensor) and bool((masks[0] & masks[1]).any()):
                self._mixed = getattr(func, "__name__", str(func))

    def _changed(self, tensor: Tensor, masks: Masks) -> None:
        """Update the masks of all tensors that share memory with a tensor that was changed in place."""
        where, both = storage_of(tensor), [bool(mask.any()) for mask in masks]
        for other in self._seen.values() if where is not None else ():
            if other is not tensor and storage_of(other) == where:
                self._of[id(other)] = _masks(other, *both)

    def judge(self, losses: Tensor) -> None:
        """Set `joins`, depending on whether the losses `[b]` descend from their own examples alone."""
        if id(losses) in self._of:
            mine, others = self._of[id(losses)]
            own = self._own(losses)
            apart = not bool((mine & ~own).any() or (others & own).any())
            self._mixed = None if apart else self._mixed or "the loss"
        self.joins = self._mixed or self._told_of
        self.joins = self.joins if torch.equal(self._random, torch.get_rng_state()) else RANDOM

    def _rows_in(self, tensor: Tensor) -> bool:
        """Whether a tensor has rows for the examples; False for two examples, as two divides other dimensions."""
        if self.size == 2:
            return False
        return tensor.is_nested or any(length and length % self.size == 0 for length in tensor.shape)

    # masks of the results of a function

    def _masks(
        self, func: Any, args: Any, kwargs: Any, known: list[Tensor], made: list[Tensor]
    ) -> Sequence[Masks | None]:
        """Masks of the tensors that a function made; None for a tensor that does not depend on the batch."""
        for way in (self._by_rule, self._tried):
            try:
                found = way(func, args, kwargs, made)
            except FAILS:
                continue
            if found is not None:
                return found
        given = [self._of[id(value)] for value in known]
        mine, others = (any(bool(masks[which].any()) for masks in given) for which in (0, 1))
        return [_masks(tensor, mine, others) for tensor in made]

    def _by_rule(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> list[Masks | None] | None:
        rule = _RULES.get(getattr(func, "__name__", "").strip("_"))
        if rule is None:
            return None
        mine, others = (rule(self._getter(which), func, args, kwargs, made) for which in (0, 1))
        if mine is None or others is None:
            return None
        return [(_fitting(a, tensor), _fitting(b, tensor)) for a, b, tensor in zip(mine, others, made, strict=True)]

    def _getter(self, which: int) -> Callable[[Tensor], Tensor]:
        def mask(tensor: Tensor) -> Tensor:
            masks = self._of.get(id(tensor))
            return masks[which] if masks is not None else _masks(tensor, False, False)[0]

        return mask

    def _tried(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> list[Masks | None]:
        """Run a function on made-up numbers; see which results change with the marked example, and with the others."""
        known = [value for value in _tensors((args, kwargs)) if id(value) in self._of]
        if sum(value.numel() for value in known) > _MOST_NUMBERS:
            raise ValueError("too many numbers")
        changed: list[list[Tensor]] = [[], []]
        for draw in (0, 1):
            numbers = {id(value): [self._made_up(value, draw, again) for again in (0, 1)] for value in known}
            first = self._run(func, args, kwargs, {key: pair[0] for key, pair in numbers.items()})
            for which in (0, 1):
                other = {}
                for value in known:
                    one, another = numbers[id(value)]
                    other[id(value)] = torch.where(self._of[id(value)][which], another, one)
                again = self._run(func, args, kwargs, other)
                if [value.shape for value in (*first, *again)] != 2 * [value.shape for value in made]:
                    raise ValueError("another shape")
                changed[which] += [~_equal(*pair) for pair in zip(first, again, strict=True)]
        masks = [[a | b for a, b in zip(c[: len(made)], c[len(made) :], strict=True)] for c in changed]
        return [self._filled(func, known, tensor, *pair) for tensor, *pair in zip(made, *masks, strict=True)]

    def _filled(self, func: Any, known: list[Tensor], made: Tensor, mine: Tensor, others: Tensor) -> Masks | None:
        """Return the masks `mine` and `others`, or None if they are empty.

        Where nothing changed, they take the masks of the arguments if the shapes fit, as it may be a threshold.
        """
        if func not in _CONSTANTS and made.shape == _broadcast(known):
            nothing = ~(mine | others)
            mine, others = (
                found | (nothing & reduce(torch.logical_or, (self._of[id(value)][which] for value in known)))
                for which, found in enumerate((mine, others))
            )
        return (_small(mine), _small(others)) if bool(mine.any()) or bool(others.any()) else None

    def _run(self, func: Any, args: Any, kwargs: Any, numbers: dict[int, Tensor]) -> list[Tensor]:
        """Run a function on other numbers and return its results; tensors that it changes in place are copies."""
        in_place = getattr(func, "__name__", "").endswith("_")

        def given(value: Tensor) -> Tensor:
            found = numbers.get(id(value))
            return found if found is not None else value.detach().clone() if in_place else value

        args, kwargs = _replaced(args, given), _replaced(kwargs, given)
        found = func(*args, **kwargs)
        return [value.clone() for value in _tensors(args[:1] if found is None else found)]

    def _made_up(self, value: Tensor, draw: int, again: int) -> Tensor:
        """Make up numbers for a tensor.

        Floats have one sign or both, depending on `draw`. Integers are entries of the tensor, 0 or 1. Booleans are all
        the same.
        """
        shape = list(value.shape)
        if value.dtype == torch.bool:
            return torch.full(shape, bool(draw ^ again), device=value.device)
        if value.is_floating_point() or value.is_complex():
            kind = value.dtype.to_real() if value.is_complex() else value.dtype
            drawn = torch.rand(shape, generator=self._numbers) * 0.8 + 0.1
            if draw:  # numbers of many sizes, because a threshold may be anywhere
                drawn = (drawn - 0.5) * 10 ** (6 * torch.rand(shape, generator=self._numbers) - 2)
            return drawn.to(value.device, kind).to(value.dtype)
        entries = torch.cat([value.flatten(), value.new_tensor([0, 1])])
        at = torch.randint(len(entries), shape, generator=self._numbers).to(value.device)
        return entries[at]


def storage_of(tensor: Tensor) -> int | None:
    """Address of the memory of a tensor; None if it is not known, as under vmap."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    try:
        return tensor.untyped_storage().data_ptr()
    except NotImplementedError:
        return None


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


def _replaced(values: Any, new: Callable[[Tensor], Tensor]) -> Any:
    """Return dicts, tuples and lists of tensors, or a tensor, with ``new(tensor)`` in the place of every tensor."""
    if isinstance(values, Tensor):
        return new(values)
    if isinstance(values, dict):
        return {key: _replaced(value, new) for key, value in values.items()}
    return type(values)(_replaced(value, new) for value in values) if type(values) in (tuple, list) else values


def _broadcast(values: list[Tensor]) -> torch.Size | None:
    try:
        return torch.broadcast_shapes(*(value.shape for value in values))
    except RuntimeError:
        return None


def _equal(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | ((one != one) & (other != other))


def _masks(tensor: Tensor, mine: bool, others: bool) -> Masks:
    """Make masks that are the same for all numbers of a tensor."""
    shape = [1] * tensor.dim()
    return torch.full(shape, mine, device=tensor.device), torch.full(shape, others, device=tensor.device)


def _fitting(mask: Tensor, tensor: Tensor) -> Tensor:
    """Return the mask if it has as many dimensions as the tensor, otherwise one with a single value for all."""
    return mask if mask.dim() == tensor.dim() else mask.any().view([1] * tensor.dim())


def _small(mask: Tensor) -> Tensor:
    """Cut a mask to length 1 along dimensions where all its values are the same."""
    for dim, stride in enumerate(mask.stride()):
        if stride == 0:
            mask = mask.narrow(dim, 0, 1)
    for dim, length in enumerate(mask.shape):
        if length != 1:
            any_of = mask.any(dim, keepdim=True)
            mask = any_of if torch.equal(any_of, mask.all(dim, keepdim=True)) else mask
    return mask


# rules for common functions, by name: each returns the masks of the results, or None if the function has to be run

Getter = Callable[[Tensor], Tensor]
Found = list[Tensor] | None


def _alike(get: Getter, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Found:
    """Rule for functions that work number by number; a loss among them may then reduce the result."""
    found = reduce(torch.logical_or, map(get, _tensors((args, kwargs))))
    return [found if found.dim() == tensor.dim() else found.any() for tensor in made]


def _itself(get: Getter, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Found:
    return [get(args[0])]


def _over_last(count: Callable[[Any, Any], int]) -> Callable[..., Found]:
    """Make the rule for functions of a tensor that read its last dimensions; other arguments must not be masked."""

    def rule(get: Getter, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Found:
        first, *others = args
        dims = list(range(first.dim()))[first.dim() - count(args, kwargs) :]
        return None if _any(get, (others, kwargs)) else [_read(get(first), dims)]

    return rule


def _any(get: Getter, values: Any) -> bool:
    return any(bool(get(value).any()) for value in _tensors(values))


def _read(mask: Tensor, dims: list[int]) -> Tensor:
    return mask.any(dims, keepdim=True) if dims else mask


def _by_row(dims: int | None) -> Callable[..., Found]:
    """Make the rule for functions whose first dimension is the batch, if the tensor has `dims` dimensions."""

    def rule(get: Getter, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Found:
        first, *others = args
        if (dims is not None and first.dim() != dims) or _any(get, (others, kwargs)):
            return None
        return [_read(get(first), list(range(1, first.dim())))]

    return rule


def _embedded(get: Getter, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Found:
    return None if _any(get, (args[1:], kwargs)) else [get(args[0]).unsqueeze(-1)]


def _normalised(get: Getter, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Found:
    """Rule for BatchNorm."""
    training = kwargs.get("training", args[5] if len(args) > 5 else False)
    return None if training else _alike(get, func, args[:1], {}, made)


def _attended(get: Getter, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Found:
    return [reduce(torch.logical_or, (_read(get(value), [-2, -1]) for value in _tensors((args, kwargs))))]


def _product(get: Getter, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Found:
    left, right = args
    if left.dim() < 2 or right.dim() < 2:
        return None
    return [_read(get(left), [-1]) | _read(get(right), [-2])]


def _added_product(get: Getter, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Found:
    return None if _any(get, args[:1]) else _product(get, func, args[1:], kwargs, made)


def _classified(get: Getter, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Found:
    """Rule for losses over classes, which are along the second dimension."""
    output, target = args[:2]
    if output.dim() < 2 or _any(get, (args[2:], kwargs)):
        return None
    found = get(output).any(1) | (get(target).any(1) if target.dim() == output.dim() else get(target))
    return [found if made[0].dim() else found.any()]


def _reduced(get: Getter, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Found:
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if isinstance(dims, Tensor):
        return _alike(get, func, args, kwargs, made)
    listed = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
    if not isinstance(listed, tuple | list):
        return [get(args[0]).any()] * len(made) if made[0].dim() == 0 else None
    kept = made[0].dim() == args[0].dim()
    return [get(args[0]).any(list(listed), keepdim=kept)] * len(made)


def _along(get: Getter, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Found:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return [_read(get(args[0]), [dim])] if isinstance(dim, int) else None


def _moved(get: Getter, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Found:
    """Rule for functions that move numbers: the function moves the masks in the same way."""
    first, *others = args
    if _any(get, (others, kwargs)) or any(value.is_nested or value.is_sparse for value in _tensors(args)):
        return None
    for form in (get, _but_last(get), lambda value: get(value).expand(value.shape).clone()):
        try:
            masks = _replaced(first, lambda value: form(value).expand(value.shape))  # noqa: B023  # called at once
            return [_small(found) for found in _tensors(func(masks, *others, **kwargs))]
        except RuntimeError:  # a view of a mask that is not contiguous
            continue
    return None


def _but_last(get: Getter) -> Getter:
    return lambda value: get(value).expand(*value.shape[:-1], get(value).shape[-1]).contiguous()


_BY_NAME: dict[str, Callable[..., Found]] = {
    """add radd iadd sub rsub isub subtract mul rmul imul multiply div rdiv truediv rtruediv itruediv divide true_divide
    floordiv floor_divide mod remainder fmod pow rpow neg abs exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square
    reciprocal sin cos tan tanh atan sigmoid logsigmoid logit erf relu relu6 gelu silu elu selu celu leaky_relu hardtanh
    hardswish hardsigmoid mish softplus softsign tanhshrink threshold clamp clamp_min clamp_max clip where eq ne lt le
    gt ge logical_and logical_or logical_not logical_xor and or xor invert isnan isinf isfinite sign floor ceil round
    maximum minimum lerp addcmul addcdiv masked_fill nan_to_num dropout copy fill mse_loss l1_loss smooth_l1_loss
    huber_loss binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss soft_margin_loss
    kl_div""": _alike,
    "to type type_as float double half bfloat16 long int bool detach clone contiguous to_dense": _itself,
    "linear": _over_last(lambda args, kwargs: 1),
    "layer_norm rms_norm": _over_last(lambda args, kwargs: len(kwargs.get("normalized_shape") or args[1])),
    "conv1d conv_transpose1d": _by_row(3),
    "conv2d conv_transpose2d": _by_row(4),
    "conv3d conv_transpose3d": _by_row(5),
    "group_norm": _by_row(None),
    "embedding": _embedded,
    "batch_norm": _normalised,
    "scaled_dot_product_attention": _attended,
    "matmul mm bmm": _product,
    "addmm": _added_product,
    "cross_entropy nll_loss": _classified,
    "sum mean amax amin any all max min var std prod logsumexp argmax argmin count_nonzero": _reduced,
    "softmax log_softmax": _along,
    """view reshape flatten unflatten transpose permute unsqueeze squeeze expand getitem split chunk unbind select
    narrow cat concat stack repeat movedim swapaxes t get iter""": _moved,
}
_RULES = {name: rule for names, rule in _BY_NAME.items() for name in names.split()}
_CONSTANTS = {
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in (
        "zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones",
        "new_full", "new_empty", "expand", "expand_as", "broadcast_to", "repeat", "tile", "view", "reshape", "flatten",
        "unsqueeze", "squeeze", "transpose", "permute", "clone", "contiguous", "detach", "to", "type", "type_as",
        "double", "float", "half", "bfloat16", "long", "int", "bool",
    )
    if hasattr(owner, name)
}  # fmt: skip
"""Functions that make rows that are all the same, if the rows of their arguments are all the same."""
