"""What users pass to `featurize` and `score`, checked: batches of tensors, and indices in any form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash
from torch import Tensor

from ggda_ext.storage.content import bytes_of


def check_batch(batch: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """A batch as a tuple of tensors of one length."""
    tensors = tuple(batch)
    if not tensors or not all(isinstance(tensor, Tensor) and tensor.dim() for tensor in tensors):
        raise TypeError("batch must hold tensors with examples along dim 0, as for trak.TRAKer.")
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1:
        raise ValueError(f"batch holds tensors of different lengths: {lengths}.")
    return tensors


def point_hashes(batch: tuple[Tensor, ...]) -> np.ndarray:
    """A hash of the content of every point of a batch `[b]`, never 0."""
    columns = [np.frombuffer(bytes_of(tensor), np.uint8).reshape(len(tensor), -1) for tensor in batch]
    rows = np.concatenate(columns, 1) if len(columns) > 1 else columns[0]
    found = np.fromiter((xxhash.xxh3_64_intdigest(row) for row in rows), np.uint64, len(rows))
    return np.maximum(found, np.uint64(1))


def given_indices(inds: Any, num_samples: int | None, start: int, size: int, n: int, of: str) -> np.ndarray:
    """The indices `[b]` of a batch, from `inds` or the next `num_samples`.

    Args:
        inds: indices in any form, or None.
        num_samples: how many from `start` on, or None.
        start: where `num_samples` counts from.
        size: points in the batch.
        n: points there are.
        of: what the points are, in words.
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
    if len(np.unique(indices)) < len(indices):
        raise ValueError(f"{name} holds some of the {of} twice: give every one once.")
    return indices.astype(np.int64)
