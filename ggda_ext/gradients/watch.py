"""What a model does with a batch while it runs: which functions it calls, and what they may do to rows and gradients.

The rows that a layer sees are told apart by their place. A function that may move rows to other places (an index along
the batch, a sort, a roll) or reads them together (a count, a sum or the largest of the batch: an expert that is full,
the hardest examples), one that makes something for each place in the batch (0, 1, 2, …, which a model may compare with
13), a number that Python is told, or a hook that may change gradients on the way back, can make a strategy wrong:
always, for some batch sizes, or for rare examples. So the functions are watched, and such batches are looked at
closely. Only calls from Python are seen; the functions of PyTorch call others that do not move rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

_LOOKED_AT = 100_000  # nodes of a graph


class Watch(TorchFunctionMode):
    """Lets functions run, and keeps their names.

    Args:
        size: examples of the batch.

    Attributes:
        moves: the name of a function that may have moved rows of the batch or read them together, or None.
        hooks: the name of a function that may have put a hook on a gradient, or None.
        asks: whether the model asks if something requires a gradient, and may do otherwise if not.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self._called: list[Hashable] = []
        self._told: list[Hashable] = []
        self.moves: str | None = None
        self.hooks: str | None = None
        self.asks = False

    @cached_property
    def called(self) -> int:
        """The same for runs that call the same functions in the same order; asked for when a run is over."""
        return hash(tuple(self._called))

    @cached_property
    def told(self) -> int:
        """The same for runs in which Python was told the same numbers, too."""
        return hash((*self._called, *self._told)) if self._told else self.called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._called.append(func)
        if func not in _LOOKED_AT_CLOSELY:
            return func(*args, **kwargs)
        if self.size > 1 and self.moves is None:
            may_move = _MOVERS.get(func)
            if may_move is not None and may_move(self.size, *args, **kwargs):
                self.moves = getattr(func, "__name__", str(func))
        found = func(*args, **kwargs)
        if func in _TELLERS:
            (self._called if isinstance(found, bool) else self._told).append(str(found))
        elif func in _HOOKS:
            self.hooks = "register_hook"
        elif func in _ASKS:
            self.asks = True
        return found


RANDOM = "random numbers"


class Descent(Watch):
    """Watches what descends from the examples: with a row for each, or made of several of them together.

    A number made of a whole batch may be 0 unless an example is rare, so that no small batch shows what it does. Where
    it meets rows, they are mixed, whatever function made it. So it is with rows that do not descend from the examples
    and are no constants: they are made for the places of the batch. Rows are told by their number, which should
    therefore divide no other dimension.

    Args:
        size: examples of the batch.
        batch: its tensors.

    Attributes:
        joins: the name of a function in which rows met something made of several examples, or None; `RANDOM` if
            numbers were drawn, which may make another loss of the same examples.
        placed: whether rows met others that were made for their places.
    """

    def __init__(self, size: int, batch: Sequence[Tensor]) -> None:
        super().__init__(size)
        self.joins: str | None = None
        self.placed = False
        self._has_rows = WeakIdKeyDictionary()  # of tensors that descend from the batch
        self._constant = WeakIdKeyDictionary()
        for tensor in batch:
            self._has_rows[tensor] = True
        self._random = torch.get_rng_state()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        if self.joins is None:
            with torch._C.DisableTorchFunction():
                self._descended(func, _tensors((args, kwargs)), _tensors(args[:1] if found is None else found))
        return found

    def _descended(self, func: Any, given: list[Tensor], made: list[Tensor]) -> None:
        """Look what a function made, or (where it gave nothing) what it changed."""
        rows = [self._has_rows[value] for value in given if value in self._has_rows]
        others = [value for value in given if value not in self._has_rows and self._rows_in(value)]
        if not rows:
            if func in _CONSTANTS and all(value in self._constant for value in others):
                self._constant.update((tensor, True) for tensor in made)
            return
        if any(rows) and not all(value in self._constant for value in others):
            self.placed = True
        for tensor in made:
            self._has_rows[tensor] = self._rows_in(tensor)
            if not all(rows) and (any(rows) or self._has_rows[tensor]):
                self.joins = getattr(func, "__name__", str(func))

    def _rows_in(self, tensor: Tensor) -> bool:
        return tensor.is_nested or any(length and length % self.size == 0 for length in tensor.shape)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if not torch.equal(self._random, torch.get_rng_state()):
            self.joins = RANDOM


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


def hidden_hooks(model: nn.Module, parameters: Sequence[nn.Parameter]) -> str | None:
    """A hook on gradients that the model or its parameters were given, or None."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return f"a hook on the gradients of module {name!r}"
    hooked = any(parameter._backward_hooks for parameter in parameters)
    return "a hook on the gradient of a parameter" if hooked else None


def altered_gradients(losses: Tensor, watch: Watch) -> str | None:
    """What makes gradients of losses other than derivatives: a hook, or a `Function`; None if nothing does.

    Args:
        losses: computed with gradients.
        watch: what was called for it.
    """
    if watch.hooks is not None:
        return "a hook on a gradient"
    seen: set[Any] = set()
    todo: list[Any] = [losses.grad_fn]
    while todo and len(seen) < _LOOKED_AT:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, BackwardCFunction) and not _of_torch(node):
            return f"the autograd function {type(node).__name__.removesuffix('Backward')}"
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
    return None


def _of_torch(node: BackwardCFunction) -> bool:
    """Whether an autograd function is PyTorch's own, such as that of a checkpoint."""
    return getattr(type(node), "_forward_cls", type(node)).__module__.split(".")[0] == "torch"


def _batched(size: int, values: Any) -> bool:
    """Whether a tensor may have the examples of a batch along its first dimension."""
    if not isinstance(values, Tensor) or not values.dim():
        return False
    rows = values.shape[0]
    return rows > 0 and rows % size == 0


def _by_index(size: int, values: Tensor, index: Any, *_: Any) -> bool:
    if not _batched(size, values):
        return False
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, slice):
        return first.indices(len(values)) != (0, len(values), 1)
    if first is None or first is Ellipsis:
        many = isinstance(index, tuple) and any(isinstance(part, Tensor | list) for part in index[1:])
        return many and first is None
    if isinstance(first, Tensor) and first.numel() == len(values):
        return not _in_place(first, index[1:] if isinstance(index, tuple) else ())
    return True  # a number, a list, a mask


def _in_place(rows: Tensor, others: tuple[Any, ...]) -> bool:
    """Whether rows `[b, 1, …]` are 0, 1, … b − 1, and stay the first dimension beside the other indices.

    Transformers makes masks so: ``mask[rows [b, 1, 1, 1], columns [1, 1, 1, l]]``.
    """
    if rows.dtype == torch.bool or rows.shape[0] != rows.numel() or max(map(_depth, others), default=0) > rows.dim():
        return False
    return torch.equal(rows.flatten().long(), torch.arange(rows.shape[0], device=rows.device))


def _depth(index: Any) -> int:
    """How many dimensions an index brings along."""
    if isinstance(index, Tensor):
        return 1 if index.dtype == torch.bool else index.dim()
    return 1 + max(map(_depth, index), default=0) if isinstance(index, list | tuple) else 0


def _along(place: int, default: int | None = None) -> Callable[..., bool]:
    """For functions of a tensor and a dimension, the argument at a place or called `dim`."""

    def moves(size: int, values: Any, *args: Any, **named: Any) -> bool:
        dim = named.get("dim", args[place] if len(args) > place else default)
        return _batched(size, values) and (not isinstance(dim, int) or dim % values.dim() == 0)

    return moves


def _flipped(size: int, values: Any, *dims: Any, **named: Any) -> bool:
    given = named.get("dims", dims[0] if len(dims) == 1 else dims)
    return _rolled(size, values, 0, given)


def _rolled(size: int, values: Any, shifts: Any = 0, dims: Any = None) -> bool:
    listed = [dims] if isinstance(dims, int) else list(dims or ())
    return _batched(size, values) and (not listed or any(dim % values.dim() == 0 for dim in listed))


def _joined(size: int, tensors: Any, dim: int = 0, **named: Any) -> bool:
    parts = [part for part in tensors if part.dim()]
    return len(parts) > 1 and named.get("dim", dim) == 0 and sum(map(len, parts)) % size == 0


def _stacked(size: int, tensors: Any, dim: int = 0, **named: Any) -> bool:
    return named.get("dim", dim) == 0 and len(tensors) % size == 0


def _mixed(size: int, left: Any, right: Any, **_: Any) -> bool:
    """A product that adds up over the examples."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or not left.dim() or right.dim() < 2:
        return False
    inner = right.shape[-2]
    return inner % size == 0 and left.shape[-1] == inner > 0 and (right.dim() == 2 or len(right) % size > 0)


def _contracted(size: int, equation: Any, *tensors: Any, **_: Any) -> bool:
    """A product by name of dimensions, in which what may be the examples is not the first dimension of the result."""
    if not isinstance(equation, str) or "->" not in equation:
        return True
    names, result = equation.replace(" ", "").split("->")
    parts = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], tuple | list) else tensors
    pairs = zip(names.split(","), parts, strict=False)  # PyTorch refuses what does not fit
    return any(
        _batched(size, part) and not isinstance(part, nn.Parameter) and name[:1] != result[:1] for name, part in pairs
    )


def _over(place: int, default: int | None = None, *, whole: bool = False) -> Callable[..., bool]:
    """For functions that read a tensor along dimensions, the argument at a place or called `dim`.

    Args:
        place: of the argument.
        default: dimension, if none is given.
        whole: whether a function without a dimension counts, too, where its numbers are no indices or masks: not so for
            sums and means, which make up a loss and whose effect is seen in any batch.
    """

    def reads(size: int, values: Any, *args: Any, **named: Any) -> bool:
        if not _batched(size, values):
            return False
        dim = named.get("dim", named.get("axis", args[place] if len(args) > place else default))
        if dim is None or isinstance(dim, bool):
            return whole and values.is_floating_point()
        dims = (dim,) if isinstance(dim, int) else dim
        return isinstance(dims, tuple | list) and any(one % values.dim() == 0 for one in dims)

    return reads


def _always(size: int, values: Any = None, *_: Any, **__: Any) -> bool:
    return _batched(size, values)


_MOVERS: dict[Any, Callable[..., bool]] = {
    Tensor.__getitem__: _by_index,
    Tensor.__setitem__: _by_index,
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.vstack), _joined),
    torch.stack: _stacked,
    **dict.fromkeys(
        (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__), _mixed
    ),
    torch.einsum: _contracted,
    **dict.fromkeys((Tensor.numpy, Tensor.__array__), lambda size, *_, **__: True),
}
_BY_NAME: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("index_select", "gather", "index_add", "index_copy", "index_fill", "scatter", "scatter_add",
                     "scatter_reduce", "take_along_dim"), _along(0)),
    "take_along_dim": _along(1),
    "sort": _along(0, -1),
    "flip": _flipped,
    "roll": _rolled,
    **dict.fromkeys(("sum", "mean", "cumsum", "cumprod", "prod", "logcumsumexp", "logsumexp", "softmax", "log_softmax",
                     "argmax", "argmin", "count_nonzero", "any", "all"), _over(0)),
    **dict.fromkeys(("max", "min", "amax", "amin", "aminmax", "std", "var", "median", "nanmedian", "mode"),
                    _over(0, whole=True)),
    **dict.fromkeys(("cummax", "cummin", "argsort"), _over(0, -1)),
    **dict.fromkeys(("topk", "kthvalue"), _over(1, -1)),
    **dict.fromkeys(("norm", "quantile", "nanquantile"), _over(1, whole=True)),
    **dict.fromkeys(("take", "masked_select", "index_put", "masked_scatter", "unique", "unique_consecutive", "flipud"),
                    _always),
}  # fmt: skip
for _name, _check in _BY_NAME.items():
    for _owner, _own in ((torch, _name), (nn.functional, _name), (Tensor, _name), (Tensor, f"{_name}_")):
        if hasattr(_owner, _own):
            _MOVERS[getattr(_owner, _own)] = _check
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
"""Functions whose rows are all alike if those they are given are."""
_TELLERS = {
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__contains__, Tensor.item,
    Tensor.tolist, Tensor.equal, torch.equal, Tensor.allclose, torch.allclose, torch.is_nonzero,
}  # fmt: skip
_GETTERS: dict[str, Any] = {name: getattr(Tensor, name).__get__ for name in ("grad_fn", "requires_grad")}
_HOOKS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, _GETTERS["grad_fn"]}
_ASKS = {_GETTERS["requires_grad"], torch.is_grad_enabled}
_LOOKED_AT_CLOSELY = {*_MOVERS, *_TELLERS, *_HOOKS, *_ASKS}
