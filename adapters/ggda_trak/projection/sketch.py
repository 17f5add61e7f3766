"""A projection by CountSketch: the same estimator as TRAK's matrices, with other numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trak.projectors import AbstractProjector
from trak.utils import vectorize

from ggda_ext.gradients.sketch import count_sketch, draw_sketch


class SketchProjector(AbstractProjector):
    """CountSketch: every coordinate is added, with a random sign, to one random place of the projection.

    This needs one addition per coordinate instead of `proj_dim` multiplications. The result is scaled by √proj_dim, so
    that projected gradients have the same lengths as with TRAK's matrices of standard normal entries.

    Args:
        grad_dim: number of parameters.
        proj_dim: length of a projected gradient.
        seed: seed of the places and signs; every model id has its own.
        proj_type: ignored; accepted because TRAK's projectors take it.
        device: the device of the gradients.
    """

    def __init__(
        self, grad_dim: int, proj_dim: int, seed: int = 0, proj_type: Any = "sketch", device: Any = "cpu", **_: Any
    ) -> None:
        super().__init__(grad_dim, proj_dim, seed, "sketch", device)
        self._model_id: int | None = None

    def project(self, grads: dict[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """Project gradients `[b, grad_dim]` to `[b, proj_dim]`."""
        rows = vectorize(grads, device=self.device) if isinstance(grads, dict) else grads
        self._draw(model_id)
        return count_sketch(rows, self._places, self._signs, self.proj_dim)

    def _draw(self, model_id: int) -> None:
        if model_id == self._model_id:
            return
        generator = torch.Generator().manual_seed(self.seed + 10**6 * model_id)
        places, signs = draw_sketch(self.grad_dim, self.proj_dim, generator)
        self._places, self._signs = places.to(self.device), signs.to(self.device) * self.proj_dim**0.5
        self._model_id = model_id

    def free_memory(self) -> None:
        """Delete places and signs; they are drawn again when they are needed."""
        self._model_id = None
        self._places = self._signs = torch.empty(0)
