"""What a model does with a batch while it runs: which functions it calls, and what they may do to rows and gradients.

The rows that a layer sees are told apart by their place. A function that may move rows to other places (an index along
the batch, a sort, a roll), a number that Python is told, or a hook that may change gradients on the way back, can make
a strategy wrong: always, for some batch sizes, or for rare examples. So the functions are watched, and such batches are
looked at closely. Only calls from Python are seen; the functions of PyTorch call others that do not move rows. What
reads the rows of a batch together, a look at what descends from them finds (`ggda_ext.gradients.descent`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

_LOOKED_AT = 100_000  # nodes of a graph


class Watch(TorchFunctionMode):
    """Lets functions run, and keeps their names.

    Args:
        size: examples of the batch.

    Attributes:
        moves: the name of a function that may have moved rows of the batch, or None.
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
        if func in TELLERS:
            (self._called if isinstance(found, bool) else self._told).append(str(found))
        elif func in _HOOKS:
            self.hooks = "register_hook"
        elif func in _ASKS:
            self.asks = True
        return found


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


def _row_dim(size: int, values: Any) -> int | None:
    """Along which dimension a tensor may have the examples of a batch: the first if it can, or one of their number."""
    if not isinstance(values, Tensor) or values.is_nested or not values.dim():
        return None
    if len(values) and len(values) % size == 0:
        return 0
    return next((dim for dim, length in enumerate(values.shape) if length == size), None)


def _by_index(size: int, values: Tensor, index: Any, *_: Any) -> bool:
    dim = _row_dim(size, values)
    if dim is None:
        return False
    parts = index if isinstance(index, tuple) else (index,)
    if dim and not any(part is None or part is Ellipsis for part in parts):
        own = parts[dim] if len(parts) > dim else slice(None)
        return not isinstance(own, slice) or own.indices(values.shape[dim]) != (0, values.shape[dim], 1)
    first = parts[0] if parts else Ellipsis
    if isinstance(first, slice) and not dim:
        return first.indices(len(values)) != (0, len(values), 1)
    if dim or first is None or first is Ellipsis:
        many = any(isinstance(part, Tensor | list) for part in parts[1:])
        return many and first is not Ellipsis
    if isinstance(first, Tensor) and first.numel() == len(values):
        return not _in_place(first, parts[1:])
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
        rows, dim = _row_dim(size, values), named.get("dim", args[place] if len(args) > place else default)
        return rows is not None and (not isinstance(dim, int) or dim % values.dim() == rows)

    return moves


def _flipped(size: int, values: Any, *dims: Any, **named: Any) -> bool:
    given = named.get("dims", dims[0] if len(dims) == 1 else dims)
    return _rolled(size, values, 0, given)


def _rolled(size: int, values: Any, shifts: Any = 0, dims: Any = None) -> bool:
    rows, listed = _row_dim(size, values), [dims] if isinstance(dims, int) else list(dims or ())
    return rows is not None and (not listed or any(dim % values.dim() == rows for dim in listed))


def _joined(size: int, tensors: Any, dim: int = 0, **named: Any) -> bool:
    parts = [part for part in tensors if part.dim() > 1 or part.numel()]
    if len(parts) < 2:
        return False
    dim = named.get("dim", dim) % parts[0].dim()
    whole = sum(part.shape[dim] for part in parts) % size == 0
    return whole and (dim == 0 or all(_row_dim(size, part) != 0 for part in parts))


def _stacked(size: int, tensors: Any, dim: int = 0, **named: Any) -> bool:
    return len(tensors) % size == 0 and all(_row_dim(size, part) != 0 for part in tensors)


def _always(size: int, values: Any = None, *_: Any, **__: Any) -> bool:
    return _row_dim(size, values) is not None


_MOVERS: dict[Any, Callable[..., bool]] = {
    Tensor.__getitem__: _by_index,
    Tensor.__setitem__: _by_index,
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.vstack), _joined),
    torch.stack: _stacked,
    **dict.fromkeys((Tensor.numpy, Tensor.__array__), lambda size, *_, **__: True),
}
_BY_NAME: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("index_select", "gather", "index_add", "index_copy", "index_fill", "scatter", "scatter_add",
                     "scatter_reduce", "take_along_dim"), _along(0)),
    "take_along_dim": _along(1),
    "sort": _along(0, -1),
    "flip": _flipped,
    "roll": _rolled,
    **dict.fromkeys(("take", "masked_select", "index_put", "masked_scatter", "unique", "unique_consecutive", "flipud"),
                    _always),
}  # fmt: skip
for _name, _check in _BY_NAME.items():
    for _owner, _own in ((torch, _name), (nn.functional, _name), (Tensor, _name), (Tensor, f"{_name}_")):
        if hasattr(_owner, _own):
            _MOVERS[getattr(_owner, _own)] = _check
TELLERS = {
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__contains__, Tensor.item,
    Tensor.tolist, Tensor.equal, torch.equal, Tensor.allclose, torch.allclose, torch.is_nonzero,
}  # fmt: skip
_GETTERS: dict[str, Any] = {name: getattr(Tensor, name).__get__ for name in ("grad_fn", "requires_grad")}
_HOOKS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, _GETTERS["grad_fn"]}
_ASKS = {_GETTERS["requires_grad"], torch.is_grad_enabled}
_LOOKED_AT_CLOSELY = {*_MOVERS, *TELLERS, *_HOOKS, *_ASKS}
