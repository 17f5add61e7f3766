"""Influence with the empirical Fisher 1/n Σ ∇ℓ_i ∇ℓ_iᵀ in place of the Hessian: for any loss, no second derivatives.

It equals the Hessian, on average, for a model that has learned the distribution of its labels, and may be far from it
for others; so its scores are ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggda_ext.methods.influence import Influence
from ggda_ext.results.method import Unit


@dataclass(frozen=True)
class Fisher(Influence):
    """As `Influence`, with the empirical Fisher as curvature."""

    curvature: str = "fisher"

    name: ClassVar[str] = "fisher"
    unit: ClassVar[Unit] = "rank"
