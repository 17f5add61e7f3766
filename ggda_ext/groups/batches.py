"""Index batches that hold whole groups back to back, or pieces of one group, with the segment of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Sampler


@dataclass(frozen=True)
class GroupBatch:
    """Training indices of one batch, group after group.

    Attributes:
        indices: training indices `[b]`.
        ids: group id of every segment `[s]`.
        starts: where each segment starts, and where the last one ends `[s + 1]`.
        complete: False if the (only) group of this batch goes on in the next one.
    """

    indices: np.ndarray
    ids: np.ndarray
    starts: np.ndarray
    complete: bool

    def __len__(self) -> int:
        return len(self.indices)


def group_batches(
    order: np.ndarray,
    offsets: np.ndarray,
    batch_size: int,
    most_groups: int | None = None,
    within: tuple[int, int] | None = None,
) -> Iterator[GroupBatch]:
    """The batches of `Groups.batches`.

    Args:
        order: training indices, group after group.
        offsets: where each group starts in `order`, and where the last one ends `[k + 1]`.
        batch_size, most_groups, within: as there.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: pass at least 1.")
    before = 0
    if within is not None:
        low, high = within
        before = int(np.searchsorted(offsets, low, "right")) - 1
        after = int(np.searchsorted(offsets, high, "left")) if low < high else before
        offsets = offsets[before : after + 1].clip(low, high)
    first, last = 0, len(offsets) - 1
    while first < last:
        start = int(offsets[first])
        end = int(np.searchsorted(offsets, start + batch_size, side="right")) - 1
        end = min(end, first + (most_groups or last))
        if end > first:
            indices, ids = order[start : int(offsets[end])], np.arange(before + first, before + end)
            yield GroupBatch(indices, ids, offsets[first : end + 1] - start, True)
            first = end
            continue
        stop = int(offsets[first + 1])
        for piece in range(start, stop, batch_size):
            indices = order[piece : min(piece + batch_size, stop)]
            starts = np.array([0, len(indices)])
            yield GroupBatch(indices, np.array([before + first]), starts, piece + batch_size >= stop)
        first += 1


class GroupBatchSampler(Sampler[list[int]]):
    """Index batches of groups, as a DataLoader's `batch_sampler`."""

    def __init__(self, batches: Callable[[int], Iterator[GroupBatch]], batch_size: int) -> None:
        self._batches, self.batch_size = batches, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.indices.tolist() for batch in self._batches(self.batch_size))

    def __len__(self) -> int:
        return sum(1 for _ in self._batches(self.batch_size))
