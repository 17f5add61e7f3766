"""TracIn at the current parameters: P = I, the effect of one step of gradient descent on the group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ggda_ext.gradients import GroupGradients
from ggda_ext.methods.method import Method, Preconditioned
from ggda_ext.results.method import Unit


@dataclass(frozen=True)
class TracIn(Method):
    """Inner products of gradients; no curvature, no settings, one pass."""

    name: ClassVar[str] = "tracin"
    unit: ClassVar[Unit] = "rank"
    needs_rows: ClassVar[bool] = False

    def precondition(self, provider: GroupGradients, directions: Tensor) -> Preconditioned:
        """Return the directions unchanged."""
        return Preconditioned(directions)
