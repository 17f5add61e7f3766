"""Points that are read once and then kept in memory: the first points of a stream, or points that are used again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ggda_ext.data.indexed import IndexedData, SomePoints, pick, tensors_in

_REMEMBERED = 2**28
"""Maximum number of bytes of points that are kept in memory."""


def first_points(data: IndexedData, count: int) -> IndexedData:
    """Return the first `count` points of a stream, for any batch size of its loader; fewer if the stream is shorter."""
    kept: list[Any] = []
    for indices, batch in data.sequential(count):
        kept += [pick(batch, [at]) for at in range(len(indices))]
        if len(kept) >= count:
            break
    return _Examples(kept[:count], data.name)


class _Examples(IndexedData):
    """A data set of examples in memory, each stored as a batch of one."""

    def __init__(self, examples: list[Any], name: str) -> None:
        self.examples, self.name, self.n = examples, name, len(examples)

    def batches(self, index_batches: Iterable[Sequence[int] | np.ndarray]) -> Iterator[Any]:
        """Yield one batch for every sequence of indices, in the order of the sequences."""
        for indices in index_batches:
            yield _joined([self.examples[int(at)] for at in indices])


def _joined(parts: Sequence[Any]) -> Any:
    """Join batches into one batch, in their order."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts)) if first.dim() else first
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple | list) and any(isinstance(value, Tensor | Mapping | tuple | list) for value in first):
        return type(first)(_joined(values) for values in zip(*parts, strict=True))
    return [value for part in parts for value in part] if isinstance(first, tuple | list) else first


class RememberedPoints(SomePoints):
    """Some points of a data set that is not in memory. Every batch is read once and kept, up to `_REMEMBERED` bytes."""

    def __init__(self, data: IndexedData, positions: np.ndarray) -> None:
        super().__init__(data, positions)
        self._left, self._known = _REMEMBERED, dict[bytes, Any]()

    def batches(self, index_batches: Iterable[Sequence[int] | np.ndarray]) -> Iterator[Any]:
        """Yield one batch for every sequence of indices, in the order of the sequences."""
        for indices in index_batches:
            key = np.asarray(indices, np.int64).tobytes()
            if key in self._known:
                yield self._known[key]
                continue
            (batch,) = super().batches([indices])
            size = sum(tensor.nbytes for tensor in tensors_in(batch))
            if size <= self._left:
                self._left -= size
                self._known[key] = batch
            yield batch
