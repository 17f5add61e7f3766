"""TRAK's reweighting terms Q, averaged over checkpoints: Q̄_i = (1/M) Σ_m Q_{m,i}, in passes forward only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.checkpoints import load_state
from ggda_ext.model import left_as_it_was
from ggda_ext.storage.files import DamagedFile, create_array, open_array
from ggda_ext.storage.folder import clear_errors

_MEAN = np.dtype([("mean", np.float32), ("check", np.uint32)])


class PointMeans:
    """Numbers of all points `[n]` on disk, NaN where not known; each stands with a checksum of its own.

    Args:
        folder: the store.
        n: number of points.
        reset: whether to begin anew.
    """

    def __init__(self, folder: Path, n: int, reset: bool) -> None:
        path = folder / "out_to_loss_mean.mmap"
        kept: np.ndarray | None = None
        if not reset:
            try:
                kept = open_array(path, "r+")
            except (FileNotFoundError, DamagedFile):
                kept = None  # they are computed again
        usable = kept is not None and kept.shape == (n,) and kept.dtype == _MEAN
        with clear_errors(folder, path.name):
            self._kept = kept if kept is not None and usable else create_array(path, (n,), _MEAN)

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        found = np.asarray(self._kept[indices])
        intact = found["check"] == _checks(indices, found["mean"])
        return np.where(intact, found["mean"], np.float32(np.nan))

    def __setitem__(self, indices: np.ndarray, values: np.ndarray) -> None:
        entries = np.empty(len(indices), _MEAN)
        entries["mean"] = values
        entries["check"] = _checks(indices, entries["mean"])
        self._kept[indices] = entries


def _checks(indices: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A checksum for every number and its place, never 0 for a place that was not written."""
    mixed = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64) << np.uint64(32)
    mixed = (mixed + indices.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    return ((mixed >> np.uint64(32)) | np.uint64(1)).astype(np.uint32)


class MeanWeights:
    """Q̄ of training points, kept in the store if there are several checkpoints.

    Args:
        model: the model, left as it was.
        gradient_computer: TRAK's, which knows Q at the model's current parameters.
        checkpoints: all of them, as state dicts or paths; None for the current parameters only.
        folder: the store.
        n: number of training points.
        reset: whether to begin anew.
    """

    def __init__(
        self,
        model: nn.Module,
        gradient_computer: Any,
        checkpoints: Sequence[Any] | None,
        folder: Path,
        n: int,
        reset: bool,
    ) -> None:
        self.model, self.gradient_computer = model, gradient_computer
        self.checkpoints = [] if checkpoints is None or len(checkpoints) == 1 else checkpoints
        self.means = PointMeans(folder, n, reset) if self.checkpoints else None

    def __call__(self, batch: tuple[Tensor, ...], indices: np.ndarray) -> Tensor:
        """Q̄ `[b]` of the points `indices` in a batch."""
        if self.means is None:
            weights = self._at_current_parameters(batch)
        else:
            weights = torch.from_numpy(self.means[indices])
            if bool(weights.isnan().any()):
                weights = torch.zeros(len(indices))
                with left_as_it_was(self.model):
                    for checkpoint in self.checkpoints:
                        load_state(self.model, checkpoint)
                        weights += self._at_current_parameters(batch).cpu() / len(self.checkpoints)
                self.means[indices] = weights.numpy()
        if not bool(weights.isfinite().all()):
            bad = indices[(~weights.isfinite()).cpu().numpy()]
            raise ValueError(
                f"the weight Q of {len(bad)} points is not finite, first {bad[:5].tolist()}: look for NaN or infinite "
                "inputs there."
            )
        return weights.to(batch[0].device)

    def _at_current_parameters(self, batch: tuple[Tensor, ...]) -> Tensor:
        with torch.no_grad():
            return self.gradient_computer.compute_loss_grad(batch).detach().reshape(-1).float()
