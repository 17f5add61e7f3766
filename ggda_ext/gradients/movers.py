"""Functions that may move rows of a batch to other places: an index along the batch, a sort, a roll.

`MOVERS` maps each function to a check that says whether a call may move rows, given the number of examples and the
arguments of the call. Functions that read several rows together, or move rows depending on what they read, are found
without a list (`ggda_ext.gradients.proof.descent`). The functions listed here may leave a small batch unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def _row_dim(size: int, values: Any) -> int | None:
    """The dimension along which a tensor may hold the examples of a batch, or None.

    The first dimension if its length is a multiple of the number of examples, otherwise one with exactly that length.
    """
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
    """Whether the index `rows` `[b, 1, …]` is 0, 1, … b − 1, and stays the first dimension beside the other indices.

    Transformers makes masks in this way: ``mask[rows [b, 1, 1, 1], columns [1, 1, 1, l]]``.
    """
    if rows.dtype == torch.bool or rows.shape[0] != rows.numel() or max(map(_depth, others), default=0) > rows.dim():
        return False
    return torch.equal(rows.flatten().long(), torch.arange(rows.shape[0], device=rows.device))


def _depth(index: Any) -> int:
    """Number of dimensions of an index."""
    if isinstance(index, Tensor):
        return 1 if index.dtype == torch.bool else index.dim()
    return 1 + max(map(_depth, index), default=0) if isinstance(index, list | tuple) else 0


def _along(place: int, default: int | None = None) -> Callable[..., bool]:
    """Return the check for functions of a tensor and a dimension, which is the argument number `place` or `dim`."""

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


MOVERS: dict[Any, Callable[..., bool]] = {
    Tensor.__getitem__: _by_index,
    Tensor.__setitem__: _by_index,
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.vstack), _joined),
    torch.stack: _stacked,
    **dict.fromkeys((Tensor.numpy, Tensor.__array__), lambda size, *_, **__: True),
}
_BY_NAME: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("index_select", "gather", "index_add", "index_copy", "index_fill", "scatter", "scatter_add",
                     "scatter_reduce"), _along(0)),
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
            MOVERS[getattr(_owner, _own)] = _check
