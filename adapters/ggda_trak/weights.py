"""TRAK's reweighting terms Q, averaged over checkpoints: Q̄_i = (1/M) Σ_m Q_{m,i}, in passes forward only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.attribution import load_state, parameters_restored
from ggda_trak.store import open_means


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
        self.means = open_means(folder, n, reset) if self.checkpoints else None

    def __call__(self, batch: tuple[Tensor, ...], indices: np.ndarray) -> Tensor:
        """Q̄ `[b]` of the points `indices` in a batch."""
        if self.means is None:
            weights = self._at_current_parameters(batch)
        else:
            weights = torch.from_numpy(self.means[indices])
            if bool(weights.isnan().any()):
                weights = torch.zeros(len(indices))
                with parameters_restored(self.model):
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
