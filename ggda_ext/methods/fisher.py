"""Influence with the empirical Fisher 1/n Σ ∇ℓ_i ∇ℓ_iᵀ in place of the Hessian; any loss, no second derivatives.

On average it equals the Hessian if the model has learned the distribution of its labels. For other models it may be far
from the Hessian. Therefore its scores only rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggda_ext.methods.influence import Influence
from ggda_ext.results.method import Unit


@dataclass(frozen=True)
class Fisher(Influence):
    """The method `Influence` with the empirical Fisher as its curvature."""

    curvature: str = "fisher"

    name: ClassVar[str] = "fisher"
    unit: ClassVar[Unit] = "rank"
