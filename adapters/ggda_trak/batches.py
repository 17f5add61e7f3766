"""Check the batches and indices that users pass to `featurize` and `score`, and keep batches until they are run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.model import SavedState, left_as_it_was
from ggda_ext.storage.hashing import bytes_of
from ggda_trak.hashes import row_hashes

Batch = tuple[Tensor, ...]
ENOUGH_NUMBERS, ENOUGH_BYTES = 2**24, 2**24
"""Waiting points are run once their gradients have this many numbers, or the points themselves this many bytes."""


def check_batch(batch: Iterable[Tensor]) -> Batch:
    """Return a batch as a tuple of tensors; raise an error if their lengths differ."""
    tensors = tuple(batch)
    if not tensors or not all(isinstance(tensor, Tensor) and tensor.dim() for tensor in tensors):
        raise TypeError("batch must hold tensors with examples along dim 0, as for trak.TRAKer.")
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1:
        raise ValueError(f"batch holds tensors of different lengths: {lengths}.")
    return tensors


def point_hashes(batch: Batch) -> np.ndarray:
    """Hashes of the content of the points of a batch `[b]`; none is 0."""
    columns = [np.frombuffer(bytes_of(tensor), np.uint8).reshape(len(tensor), -1) for tensor in batch]
    return np.maximum(row_hashes(np.concatenate(columns, 1) if len(columns) > 1 else columns[0]), np.uint64(1))


def given_indices(inds: Any, num_samples: int | None, start: int, size: int, n: int, of: str) -> np.ndarray:
    """Return the indices `[b]` of a batch: `inds`, or the next `num_samples`. Raise an error if they are wrong.

    Args:
        inds: indices in any form, or None.
        num_samples: number of indices from `start` on, or None.
        start: first index if `num_samples` is given.
        size: number of points in the batch.
        n: number of all points.
        of: what the points are, for error messages.
    """
    if (inds is None) == (num_samples is None):
        raise ValueError("pass exactly one of inds and num_samples.")
    if inds is None:
        name, indices = f"num_samples={num_samples}", np.arange(start, start + int(num_samples or 0))
    else:
        name, indices = "inds", np.asarray(inds.cpu() if isinstance(inds, Tensor) else inds).reshape(-1)
    if indices.dtype.kind not in "iu":
        raise TypeError(f"inds holds {indices.dtype}: pass whole numbers, the indices of the batch's {of}.")
    if len(indices) != size:
        raise ValueError(f"{name} stands for {len(indices)} {of}, but the batch has {size}.")
    outside = indices[(indices < 0) | (indices >= n)]
    if len(outside):
        raise ValueError(f"{name} reaches outside the {n} {of}: {outside[:5].tolist()}.")
    indices = indices.astype(np.int64)
    if len(set(indices.tolist())) < len(indices):  # np.unique sorts, which is slower for a batch
        raise ValueError(f"{name} holds some of the {of} twice: give every one once.")
    return indices


class WaitingPoints:
    """Batches of points that wait to be run as one batch, with the parameters the model had when they were added.

    Args:
        model: the model that the points will be run through.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.forget()

    def forget(self) -> None:
        """Drop all waiting points."""
        self._batches: list[Batch] = []
        self._indices: list[np.ndarray] = []
        self._state: SavedState | None = None

    def are_like(self, batch: Batch) -> bool:
        """Whether a batch can be run together with the waiting points: same shapes, types and model parameters."""
        if not self._batches:
            return True
        first = self._batches[0]
        same = len(first) == len(batch) and all(
            a.shape[1:] == b.shape[1:] and a.dtype == b.dtype and a.device == b.device
            for a, b in zip(first, batch, strict=True)
        )
        return same and not self._changed

    def add(self, batch: Batch, indices: np.ndarray, keep: bool) -> None:
        """Add a batch. With `keep`, copy it, because the user may write the next batch to the same memory."""
        if keep and self._state is None:
            self._state = SavedState(self._model)
        self._batches.append(tuple(tensor.detach().clone() for tensor in batch) if keep else batch)
        self._indices.append(indices)

    def are_enough(self, parameters: int) -> bool:
        """Whether there are enough waiting points to run them now."""
        numbers = sum(map(len, self._indices)) * parameters
        size = sum(tensor.nbytes for batch in self._batches for tensor in batch)
        return numbers >= ENOUGH_NUMBERS or size >= ENOUGH_BYTES

    @contextmanager
    def taken(self) -> Iterator[tuple[Batch, np.ndarray]]:
        """Take all waiting points and their indices. In this context the model is as it was when they were added."""
        batches, indices, state, changed = self._batches, self._indices, self._state, self._changed
        self.forget()
        if not batches:
            yield (), np.empty(0, np.int64)
            return
        with left_as_it_was(self._model) if changed else nullcontext():
            if changed and state is not None:
                state.restore()
            if len(batches) == 1:
                yield batches[0], indices[0]
            else:
                yield tuple(map(torch.cat, zip(*batches, strict=True))), np.concatenate(indices)

    @property
    def _changed(self) -> bool:
        """Whether the model's parameters or buffers have changed since the first waiting points were added."""
        return self._state is not None and bool(self._state.changed())


def part_of(batch: Batch, positions: np.ndarray) -> Batch:
    """Some of the points of a batch."""
    if len(positions) == len(batch[0]):
        return batch
    return tuple(tensor[torch.from_numpy(positions)] for tensor in batch)
