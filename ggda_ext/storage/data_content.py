"""Descriptions of data sets as short texts with a hash: of all points if they are in memory, else of some points.

Tensors are read whole. Of a lazy data set (files, a stream) `POINTS` points are read; if it has a length, also the
arrays and lists with one entry per point in its attributes. Changes elsewhere cannot be seen; the text says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from ggda_ext.data import IndexedData, SelectedRows, take

POINTS = 256
_ROWS = 2**16

Hash = Callable[[Any], str]


def describe_data(data: IndexedData, hash_of: Hash) -> tuple[str, bool]:
    """Return a text that differs for other data, and whether all points were read.

    Args:
        data: the data set.
        hash_of: a function that hashes a value by its content.
    """
    inner = getattr(data, "data", None)
    if isinstance(inner, IndexedData):  # a selection or a weighting of another data set
        rest = {name: value for name, value in vars(data).items() if name not in ("data", "name")}
        text, whole = describe_data(inner, hash_of)
        return f"{data.n} of {text} {hash_of(rest)[:16]}", whole
    collate = None if data._loader is None else hash_of(data._loader.collate_fn)
    tensors = data._tensors if data._tensors is not None else _tensors_behind(data._source)
    if tensors is not None:
        found = hash_of([_read(tensors), data._order, collate])
        return f"{data.n} points {found[:16]}", True
    if data.is_stream:
        some, whole = _first(data)
        found = hash_of([some, collate])
        return f"a stream, {'all of its' if whole else f'its first {POINTS}'} points {found[:16]}", whole
    assert data.n is not None
    at = some_points(data.n)
    batch = next(iter(data.batches([at])))
    found = hash_of([batch, data._order, collate, *_held(data._source, data.n)])
    whole = len(at) == data.n
    return f"{data.n} points{'' if whole else f', {len(at)} of them looked at,'} {found[:16]}", whole


def is_sampled(described: str) -> bool:
    """Whether a text of `describe_data` says that only some points were read."""
    return "of them looked at" in described or f"its first {POINTS} points" in described


def _first(data: IndexedData) -> tuple[list[Any], bool]:
    """The first `POINTS` points of a stream, in its own batches, and whether the stream has fewer points than that."""
    found: list[Any] = []
    for indices, batch in data.sequential(POINTS):
        found.append(take(batch, POINTS - int(indices[0])))
        if indices[-1] + 1 >= POINTS:
            return found, False
    return found, True


def some_points(n: int) -> np.ndarray:
    """The points that are read: all if there are at most `POINTS`, else the first, the last and random others."""
    if n <= POINTS:
        return np.arange(n)
    drawn = np.random.default_rng(n).choice(n - 2, POINTS - 2, replace=False) + 1
    return np.sort(np.concatenate([[0, n - 1], drawn]))


def _tensors_behind(source: Any) -> Any:
    """The tensors of a data set whose batches the user's own collate function makes; None if it holds no tensors."""
    if type(source) is TensorDataset:
        return source.tensors
    if type(source) is Subset:
        inner = _tensors_behind(source.dataset)
        return None if inner is None else SelectedRows(inner, np.asarray(source.indices))
    return None


def _read(tensors: Any) -> Any:
    """Return tensors unchanged, but of `SelectedRows` only the selected rows, in runs of `_ROWS` rows."""
    if not isinstance(tensors, SelectedRows):
        return tensors
    inner, positions = tensors.tensors, tensors.positions
    while isinstance(inner, SelectedRows):
        inner, positions = inner.tensors, inner.positions[positions]
    values = list(inner.values()) if isinstance(inner, Mapping) else [inner] if isinstance(inner, Tensor) else inner
    return [value[positions[low : low + _ROWS]] for value in values for low in range(0, len(positions), _ROWS)]


def _held(source: Any, n: int) -> list[Any]:
    """Arrays and lists with one entry per point in the attributes of a data set, or of the data sets inside it."""
    if isinstance(source, Subset):
        return [np.asarray(source.indices), *_held(source.dataset, _length(source.dataset))]
    if isinstance(source, ConcatDataset):
        return [part for inner in source.datasets for part in _held(inner, _length(inner))]
    found = []
    for _, value in sorted(getattr(source, "__dict__", {}).items()):
        arrays = isinstance(value, Tensor | np.ndarray) and value.ndim > 0
        if (arrays or isinstance(value, list | tuple)) and len(value) == n and (arrays or _are_plain(value[0])):
            found.append(value)
    return found


def _are_plain(entry: Any) -> bool:
    """Whether the first entry of a list is a number, a text, bytes, an array, or a tuple or list of these."""
    if isinstance(entry, tuple | list):
        return all(map(_are_plain, entry))
    return isinstance(entry, int | float | str | bytes | Tensor | np.ndarray)


def _length(source: Any) -> int:
    return len(source) if hasattr(source, "__len__") else -1
