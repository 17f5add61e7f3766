"""EK-FAC influence: the Gauss–Newton matrix of each layer, solved in closed form for any number of test points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ggda_ext.curvature.damping import SHARE, Training, of_recipe, told_by_points
from ggda_ext.curvature.kronecker import Kronecker
from ggda_ext.curvature.sampled import sample_of
from ggda_ext.gradients import GroupGradients
from ggda_ext.gradients.errors import Unproven
from ggda_ext.methods.method import Method, Preconditioned
from ggda_ext.results.method import Unit
from ggda_ext.words import check_counts, check_not_negative

_PASSES = 2.5
"""Number of passes over the sample, for outputs, bases and diagonals together."""


@dataclass(frozen=True)
class EKFAC(Method):
    """Influence with the curvature of each layer in its Kronecker eigenbasis; curvature between layers is left out.

    Attributes:
        damping: λ in (H + λ)⁻¹; by default it comes from the recipe, or without one from the curvature.
        recipe: how the model was trained: a `ggda_ext.training.Recipe` or `TrainingSteps`.
        points: largest number of training points for the curvature.
        seed: seed of the random points and cotangents.
    """

    damping: float | None = None
    recipe: Training | None = None
    points: int = 8192
    seed: int = 0

    name: ClassVar[str] = "ekfac"
    unit: ClassVar[Unit] = "property"

    def __post_init__(self) -> None:
        check_not_negative(damping=self.damping)
        if self.damping is not None and self.recipe is not None:
            raise ValueError("damping and recipe are both given: pass one of them.")
        check_counts(points=self.points)

    def precondition(self, provider: GroupGradients, directions: Tensor) -> Preconditioned:
        """Return 1/n (H + λ)⁻¹ `directions [m, p]`."""
        sample, total = sample_of(provider, self.points, self.seed)
        try:
            curvature = Kronecker(provider, sample, self.seed)
        except Unproven as error:
            raise ValueError(
                f"method='ekfac' cannot be used here: {error}. Use method='influence', or parameters= without it."
            ) from error
        source, damping = "the call", self.damping
        if damping is None and self.recipe is not None:
            source, own = of_recipe(provider, sample, total, self.recipe)
            damping = float(own.mean())
        elif damping is None:
            source, damping = "the curvature's own scale", SHARE * told_by_points(provider.p, total) * curvature.scale()
        points = sample.n or 0
        note = ("The curvature is that of the empirical Fisher: what the loss is of the outputs is not known.",)
        return Preconditioned(
            curvature.solve(directions, damping) / total,
            {"damping": damping, "damping from": source, "points for the curvature": points},
            _PASSES * points / total,
            note if curvature.empirical else (),
        )
