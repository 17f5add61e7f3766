"""Batches of tensors in tuples, lists and dicts: counted, cut, picked from, moved; and the tensors they are rows of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from ggda_ext.tables import aligned, index_of, is_table, tensor_of, why_no_data


def parts_of(held: Any) -> Sequence[Any]:
    """The values of a dict, the entries of a tuple or list; anything else is its own only part."""
    if isinstance(held, Mapping):
        return list(held.values())
    return held if isinstance(held, tuple | list) else [held]


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """The batch with every tensor changed by `function`; what is no tensor stays as it is."""
    if isinstance(batch, Tensor):
        return function(batch)
    if type(batch) is tuple:  # nearly always, and for every batch
        return tuple([map_tensors(function, value) for value in batch])
    if isinstance(batch, Mapping | tuple | list):
        return _rebuilt(batch, lambda value: map_tensors(function, value))
    return batch


def _rebuilt(held: Any, function: Callable[[Any], Any]) -> Any:
    """A container of the same kind, with every value changed."""
    if isinstance(held, Mapping):  # also a tokenizer's BatchEncoding, as a plain dict
        return {key: function(value) for key, value in held.items()}
    values = [function(value) for value in held]
    return type(held)(*values) if hasattr(held, "_fields") else type(held)(values)


def take(batch: Any, count: int) -> Any:
    """The first `count` examples of a batch."""
    return map_tensors(lambda tensor: tensor[:count], batch)


def pick(batch: Any, positions: Sequence[int]) -> Any:
    """Some examples of a batch, as a batch."""
    return _picked(batch, list(positions), batch_length(batch))


def _picked(batch: Any, positions: list[int], size: int) -> Any:
    if isinstance(batch, Tensor):
        if not batch.dim() or len(batch) != size:
            return batch
        if batch.layout != torch.strided:  # sparse rows cannot be indexed by a list
            return batch.index_select(0, torch.tensor(positions, device=batch.device))
        return batch[positions]
    if not isinstance(batch, Mapping | tuple | list):
        return batch
    if not isinstance(batch, Mapping) and not hasattr(batch, "_fields") and len(batch) == size:
        told = any(isinstance(value, Tensor | Mapping | tuple | list) for value in batch)
        if not told or _one_each(batch, size):
            return type(batch)(batch[at] for at in positions)  # strings, numbers, sequences: one for each example
    return _rebuilt(batch, lambda value: _picked(value, positions, size))


def as_batch_of_one(example: Any) -> Any:
    """One example, without a batch dimension, as a batch."""
    return map_tensors(lambda tensor: tensor.unsqueeze(0), example)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on `device`, and fit for autograd if it was made in inference mode."""
    with torch.inference_mode(False):
        return map_tensors(lambda tensor: fit_for(tensor, device), batch)


def fit_for(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`, without a graph; itself if it is so already."""
    if tensor.is_inference():
        tensor = tensor.clone()
    if tensor.requires_grad:  # of inputs nobody asks for a gradient
        tensor = tensor.detach()
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def tensors_in(batch: Any) -> list[Tensor]:
    """All tensors of a batch."""
    found: list[Tensor] = []
    map_tensors(found.append, batch)
    return found


def batch_length(batch: Any) -> int:
    """Number of examples in a batch: the length of its first tensor, or of a list with a tensor for each example."""
    if isinstance(batch, tuple) and batch and isinstance(batch[0], Tensor) and batch[0].dim():
        return batch[0].shape[0]  # nearly always
    parts = parts_of(batch)
    for part in parts:
        lengths = [tensor.shape[0] for tensor in tensors_in(part) if tensor.dim()]
        if lengths:
            plain = (other.shape[0] for other in parts if isinstance(other, Tensor) and other.dim())
            return next((size for size in plain if _one_each(part, size)), lengths[0])
    raise TypeError(
        f"a batch of type {type(batch).__name__} holds no tensor with a batch dimension that can be found: let the "
        "data, or its collate_fn, give tuples, named tuples, dicts or tensors (dataclasses.asdict makes a dict)."
    )


def _one_each(part: Any, size: int) -> bool:
    """Whether a part of a batch is a list that holds one tensor for each of its examples, of any length."""
    if not isinstance(part, tuple | list) or len(part) != size or not all(isinstance(one, Tensor) for one in part):
        return False
    return any(not one.dim() or one.shape[0] != size for one in part)


def as_tensors(source: Any, name: str) -> Any:
    """The tensors behind `source` with examples along dim 0, or None if it is not made of tensors."""
    if isinstance(source, Tensor):
        return source
    if type(source) is TensorDataset:
        return source.tensors
    if type(source) is Subset:
        inner = as_tensors(source.dataset, name)
        return None if inner is None else SelectedRows(inner, _from_the_front(source, name))
    if isinstance(source, Dataset) or not isinstance(source, Mapping | tuple | list):
        return tensor_of(source, name) if isinstance(source, np.ndarray) or is_table(source) else None
    arrays = parts_of(source)
    if not arrays:
        return None
    if not all(isinstance(array, Tensor | np.ndarray) or is_table(array) for array in arrays):
        raise TypeError(why_no_data(source, arrays, name))
    scalar = next((j for j, array in enumerate(arrays) if not array.ndim), None)
    if scalar is not None:
        raise ValueError(f"part {scalar} of {name} is a single number: pass an entry for each example.")
    lengths = [len(array) for array in arrays]
    if len(set(lengths)) > 1:
        raise ValueError(f"{name} holds tensors of different lengths: {lengths}.")
    tensors = arrays if holds_tensors(source) else _converted(arrays, name)
    return dict(zip(source, tensors, strict=True)) if isinstance(source, Mapping) else tuple(tensors)


def _converted(arrays: Sequence[Any], name: str) -> list[Tensor]:
    """Arrays and tables as tensors; tables with their rows in the order of the first one."""
    index, first = index_of(arrays), f"the first table of {name}"
    named = [(f"part {j} of {name}", array) for j, array in enumerate(arrays)]
    return [tensor_of(aligned(array, index, part, first), part) for part, array in named]


def holds_tensors(source: Any) -> bool:
    """Whether data is made of tensors alone: nothing to convert, and no rows to match."""
    return all(isinstance(part, Tensor) for part in parts_of(source))


def _from_the_front(subset: Subset, name: str) -> np.ndarray:
    """The indices of a Subset, where −1 is the last point."""
    n, indices = len(subset.dataset), np.asarray(subset.indices, dtype=np.int64)  # type: ignore[arg-type]
    outside = indices[(indices < -n) | (indices >= n)]
    if len(outside):
        raise IndexError(f"{name} is a Subset with index {outside[0]} of a data set of {n} points.")
    return np.where(indices < 0, indices + n, indices)


class SelectedRows:
    """Some rows of tensors, as `Subset` selects them, without copying them."""

    def __init__(self, tensors: Any, positions: np.ndarray) -> None:
        self.tensors, self.positions = tensors, positions

    def __len__(self) -> int:
        return len(self.positions)


def rows_at(tensors: Any, indices: np.ndarray | range) -> Any:
    """Some rows of tensors, as a batch; rows that follow one another as a view."""
    if isinstance(tensors, SelectedRows):
        return rows_at(tensors.tensors, tensors.positions[np.asarray(indices)])
    if isinstance(indices, range):
        is_run = len(indices) > 0 and indices.step == 1
    else:
        could_be = len(indices) > 0 and indices[-1] - indices[0] == len(indices) - 1
        is_run = could_be and bool((np.diff(indices) == 1).all())
    if is_run:
        low, high = int(indices[0]), int(indices[-1]) + 1
        return map_tensors(lambda tensor: tensor[low:high], tensors)
    at = torch.from_numpy(np.array(indices, dtype=np.int64))
    return map_tensors(lambda tensor: tensor[at.to(tensor.device)], tensors)
