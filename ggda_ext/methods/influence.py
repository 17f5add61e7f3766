"""Influence functions: how the property would change if the model had been trained without the group.

With L = 1/n Σ ℓ_i the mean training loss, H its curvature and λ its damping, removing group G moves the parameters by
1/n (H + λ)⁻¹ Σ_{i∈G} ∇ℓ_i, so the property is predicted to rise by

    τ_G = 1/n ⟨(H + λ)⁻¹ ∇g, Σ_{i∈G} ∇ℓ_i⟩

All other points keep their weight 1/n, as in a training that stops early after the same number of epochs. If the loss
is instead a penalised mean over the n − |G| points that are left, the parameters also move by − |G|/n (H + λ)⁻¹ ḡ, with
ḡ the mean gradient. In measurements this term makes the prediction better for models at their optimum under a strong
penalty, and for other models as often worse (docs/limitations.md).

There is one solve for all components of the property, on a sample of the training data (`ggda_ext.curvature.damping`),
then one pass over all training data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ggda_ext.curvature.damping import Damped, Solution, Training, damped
from ggda_ext.curvature.sampled import SampledCurvature, checked_kind
from ggda_ext.gradients import GroupGradients
from ggda_ext.methods.method import Method, Preconditioned
from ggda_ext.results.method import Setting, Unit
from ggda_ext.words import check_counts, check_not_negative


@dataclass(frozen=True)
class Influence(Method):
    """Influence by a damped solve with the curvature.

    Attributes:
        curvature: ``"gauss-newton"``, ``"hessian"``, or ``"fisher"`` for the empirical Fisher; ``"auto"`` is
            Gauss–Newton, or the Fisher if there is no Gauss–Newton matrix, as for a model that returns its own loss.
        damping: λ in (H + λ)⁻¹; by default it comes from the recipe, or without one from the curvature (see
            `ggda_ext.curvature.damping`).
        recipe: how the model was trained: a `ggda_ext.training.Recipe` or `TrainingSteps`.
        points: largest number of training points for the curvature. If ``"auto"`` chooses the Fisher, it also takes no
            more points than have gradients that fit into 1 GiB, or 128 if that is more.
        steps: largest number of products in the solve.
        tolerance: the solve is done when the residual, relative to the right-hand side, is this small.
        seed: seed of the random points.
    """

    curvature: str = "auto"
    damping: float | None = None
    recipe: Training | None = None
    points: int = 4096
    steps: int = 50
    tolerance: float = 1e-3
    seed: int = 0

    name: ClassVar[str] = "influence"
    unit: ClassVar[Unit] = "property"

    def __post_init__(self) -> None:
        checked_kind(self.curvature)
        check_not_negative(damping=self.damping)
        check_counts(points=self.points, steps=self.steps)
        if not self.tolerance > 0:
            raise ValueError(f"tolerance={self.tolerance}: pass a positive number.")

    def precondition(self, provider: GroupGradients, directions: Tensor) -> Preconditioned:
        """Return 1/n (H + λ)⁻¹ `directions [m, p]`."""
        curvature = SampledCurvature(provider, self.curvature, self.points, self.seed)
        dtype = torch.promote_types(directions.dtype, torch.float32)
        problem = damped(curvature, self.damping, self.recipe)
        wanted = problem.scaled(directions.to(dtype))
        found = problem.solve(wanted, max_steps=self.steps, tolerance=self.tolerance)
        rows = problem.scaled(found.rows) / curvature.total
        error = 0.0 if curvature.whole else _error_elsewhere(problem, found, wanted)
        passes = curvature.passes(found.steps, len(directions)) + problem.passes
        return Preconditioned(
            rows.to(directions.dtype),
            self._settings(curvature, problem, found, error),
            passes,
            (*((curvature.note,) if curvature.note else ()), *problem.notes(found, self.tolerance)),
        )

    def _settings(
        self, curvature: SampledCurvature, problem: Damped, found: Solution, error: float
    ) -> dict[str, Setting]:
        settings: dict[str, Setting] = {
            "curvature": curvature.kind,
            "damping": problem.reported(found.damping),
            "damping from": problem.source,
            "steps": found.steps,
            "residual": found.residual,
            "points for the curvature": curvature.points,
        }
        return settings | ({} if curvature.whole else {"error from taking some points": error})


def _error_elsewhere(problem: Damped, found: Solution, wanted: Tensor) -> float:
    """Return the largest relative change of vᵀx, for solutions x of sides v, if other points give the curvature."""
    again = problem.product(found.rows, elsewhere=True) + found.damping * found.rows
    left = ((wanted - again) * found.rows).sum(1).abs() / (wanted * found.rows).sum(1).abs().clamp_min(1e-30)
    return float(left.max())
