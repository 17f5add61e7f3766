"""The damping of the curvature: it comes from how the model was trained if this is known, else from the curvature.

A training of T steps with learning rates η_t stops before it reaches the optimum in flat directions. For gradient
descent on a quadratic loss the result is close to the solution with damping λ = 1 / Σ η_t. Momentum β makes every step
1 / (1 − β) times as long. Adam divides the step of parameter j by √v_j, the root mean square of its batch gradients, so
each parameter has its own

    λ_j = 10 √v_j / Σ η_t,     v_j = 1/B · mean_i (∂ℓ_i/∂θ_j)² + (mean_i ∂ℓ_i/∂θ_j)²

for batches of B points. Weight decay is added to λ. Without a recipe λ is a share of the curvature's own scale
tr H² / tr H, the mean of the eigenvalues weighted by their size. It is smaller if n points determine p < n parameters:

    λ = 0.05 · min(1, p / n) · tr H² / tr H

(A + λ I) x = v is solved for many vectors at once in the block Krylov space of all vectors: span{v, A v, A² v, …}. One
product with A for all vectors adds a block of directions Q to the space. The directions are kept orthonormal, so that A
becomes a small matrix T = Q A Qᵀ in the space:

    x = Qᵀ (T + λ I)⁻¹ Q v

For one vector these are the steps of conjugate gradients; with several vectors each one also uses the directions of the
others. The space does not depend on λ, so λ can be chosen after the spectrum of T is known. The eigenvalues of T show
negative curvature, which conjugate gradients would not notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ggda_ext.curvature.sampled import PASSES_OF_ROWS, SampledCurvature
from ggda_ext.data import IndexedData, SomePoints
from ggda_ext.gradients import GroupGradients
from ggda_ext.groups.partition import Groups
from ggda_ext.model import product, sums_on

if TYPE_CHECKING:
    from ggda_ext.training import Recipe

SHARE = 0.05
"""The value of λ · tr H / tr H² without a recipe, for p ≥ n; chosen, like `ADAM`, on digits, breast cancer and
synthetic data."""
ADAM = 10.0
"""Factor by which Adam's damping is larger than √v_j / Σ η_t with the v_j of the trained model, because gradients were
larger during the training."""
_PROBES = 4  # random vectors that estimate the scale of the curvature
_MOMENT_POINTS = 256  # points whose gradients give Adam's second moments
_MOMENT_NUMBERS = 2**31  # most numbers in these gradients: a large model uses fewer points, but at least 8
_LEAST = 1e-6  # share of the largest curvature; a matrix with less is treated as singular
_ABOVE_NEGATIVE = 1.5  # damping is this many times the most negative curvature
_SPACE_BYTES = 2**30  # memory for the directions of the space; four blocks are always allowed


@dataclass(frozen=True)
class TrainingSteps:
    """The steps of a model's training, from which the damping is computed.

    Attributes:
        learning_rates: learning rate of every step, or their sum.
        optimizer: ``"sgd"`` or ``"adam"`` (also for AdamW).
        momentum: momentum of SGD.
        weight_decay: the L2 penalty λ in λ/2 |θ|².
        batch_size: points per step; Adam's steps depend on it.
    """

    learning_rates: float | Sequence[float]
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 1

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "adam"):
            raise ValueError(f"optimizer={self.optimizer!r} is not one of 'sgd', 'adam'.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: pass a number from 0 to below 1.")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay}: pass 0 or more.")
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: pass at least 1.")
        rates = np.atleast_1d(np.asarray(self.learning_rates, float))
        strange = rates[~(np.isfinite(rates) & (rates >= 0))]
        if len(strange):
            raise ValueError(f"learning_rates holds {strange[0]:g}: pass finite numbers from 0 on.")
        if not self.distance > 0:
            raise ValueError("learning_rates add up to 0: pass those of every step, or their sum.")

    @property
    def distance(self) -> float:
        """Sum of the learning rates Σ η_t, divided by 1 − momentum."""
        return float(np.sum(self.learning_rates)) / (1 - self.momentum)

    @classmethod
    def of(cls, recipe: Training, n: int) -> TrainingSteps:
        """Return the steps of a recipe on `n` points; `TrainingSteps` are returned unchanged."""
        if isinstance(recipe, TrainingSteps):
            return recipe
        from ggda_ext.training import Recipe  # imported here, as most scores do not need it

        if not isinstance(recipe, Recipe):
            raise TypeError(
                f"recipe is a {type(recipe).__name__}: pass a ggda_ext.training.Recipe, or TrainingSteps(rates)."
            )
        rates, _ = recipe.rates(recipe.steps(n))
        return cls(float(rates.sum()), "adam", 0.0, recipe.weight_decay, recipe.batch_size)


Training: TypeAlias = "Recipe | TrainingSteps"


@dataclass(frozen=True)
class Solution:
    """The result of a solve.

    Attributes:
        rows: solutions `[m, p]`.
        damping: λ.
        residual: the largest |v − (A + λ) x| / |v| over all vectors.
        steps: number of products with A, each for all vectors.
        lowest: the smallest eigenvalue of A in the space.
    """

    rows: Tensor
    damping: float
    residual: float
    steps: int
    lowest: float


@dataclass(frozen=True)
class Damped:
    """A curvature with its damping, written as (A + λ I) y = w with a single number λ: A = S H S with S diagonal.

    Attributes:
        curvature: H.
        least: λ, unless negative curvature makes it larger.
        source: text that says where λ comes from.
        fixed: whether the user gave λ, so that it must not be raised.
        scale: the diagonal of S `[p]`, or None for the identity.
        mean: the mean damping of a parameter that λ = 1 stands for.
        passes: the cost of finding the damping, in passes.
    """

    curvature: SampledCurvature
    least: float
    source: str
    fixed: bool = False
    scale: Tensor | None = None
    mean: float = 1.0
    passes: float = 0.0

    def product(self, vectors: Tensor, *, elsewhere: bool = False) -> Tensor:
        """Return A times `vectors [m, p]`; with `elsewhere`, A is taken on points outside the curvature's sample."""
        scaled = self.scaled(vectors)
        return self.scaled(self.curvature.elsewhere(scaled) if elsewhere else self.curvature @ scaled)

    def scaled(self, vectors: Tensor) -> Tensor:
        """Return S times vectors; this turns right-hand sides for H into sides for A, and solutions for A back."""
        return vectors if self.scale is None else vectors * self.scale.to(vectors)

    def solve(self, vectors: Tensor, *, max_steps: int, tolerance: float) -> Solution:
        """Return (A + λ)⁻¹ v for all `vectors [m, p]`, solved in one space.

        Args:
            vectors: right-hand sides.
            max_steps: largest number of products.
            tolerance: the solve is done when every residual, relative to its vector, is this small.
        """
        lengths = vectors.norm(dim=1, keepdim=True)
        space = _Space(vectors / lengths.clamp_min(torch.finfo(vectors.dtype).tiny))
        most = min(max_steps, max(4, _SPACE_BYTES // max(vectors.nbytes, 1)))
        inside, chosen, residual, values = space.sides, 0.0, 0.0, space.sides.new_zeros(1)
        while len(space.newest) and len(space.blocks) < most:
            space.extend(self.product(space.newest))
            values, turn = torch.linalg.eigh(space.matrix)
            chosen = self._choose(values)
            inside = turn @ ((turn.T @ space.sides) / (values + chosen)[:, None])
            residual = space.residual(inside)
            if residual <= tolerance:
                break
        return Solution(space.lift(inside) * lengths, chosen, residual, len(space.blocks), float(values[0]))

    def _choose(self, values: Tensor) -> float:
        """Return a λ that leaves no negative curvature, given the eigenvalues of A in rising order."""
        lowest, top = float(values[0]), float(values.abs().max())
        if self.least + lowest > _LEAST * top and self.least + top > 0:
            return self.least
        enough = max(-_ABOVE_NEGATIVE * lowest, self.least, 1e-3 * top)
        if not self.fixed:
            if not enough > 0:
                raise ValueError("the curvature is zero along the property's gradient: use method='tracin'.")
            return enough
        kind = self.curvature.kind
        better = "" if kind != "hessian" else ", or curvature='gauss-newton', which has no negative curvature"
        raise ValueError(
            f"the {kind} curvature has the eigenvalue {lowest:.3g}, so with damping={self.least:g} it cannot be solved "
            f"with: pass a larger damping (try {enough:.2g}), or leave it out{better}."
        )

    def reported(self, chosen: float) -> float:
        """Return the mean damping of a parameter, for this λ."""
        return chosen * self.mean

    def notes(self, found: Solution, tolerance: float) -> tuple[str, ...]:
        """Return notes if a solve had to raise the damping, or ended with a residual above the tolerance."""
        notes: list[str] = []
        if found.damping > self.least:
            notes.append(
                f"The {self.curvature.kind} curvature has the eigenvalue {found.lowest * self.mean:.3g}: damping was "
                f"raised from {self.reported(self.least):.3g} to {self.reported(found.damping):.3g}."
            )
        if not found.residual <= tolerance:
            notes.append(
                f"A solve with the curvature ended with a residual above tolerance={tolerance:g}, which "
                "method.settings has: pass a method with more steps, as Influence(steps=…), or a larger damping."
            )
        return tuple(notes)


def damped(curvature: SampledCurvature, damping: float | None, recipe: Training | None) -> Damped:
    """Return the curvature with a damping: the given one, one from the recipe, or a share of the curvature's scale."""
    if damping is not None and recipe is not None:
        raise ValueError("damping and recipe are both given: pass one of them.")
    if damping is not None:
        return Damped(curvature, damping, "the call", fixed=True)
    if recipe is None:
        cost = _PROBES * 2.0 * curvature.points / curvature.total
        share = SHARE * told_by_points(curvature.provider.p, curvature.total)
        return Damped(curvature, share * scale_of(curvature), "the curvature's own scale", passes=cost)
    source, own = of_recipe(curvature.provider, curvature.sample, curvature.total, recipe)
    if own.dim() == 0:
        return Damped(curvature, float(own), source)
    cost = PASSES_OF_ROWS * min(_MOMENT_POINTS, curvature.points) / curvature.total
    return Damped(curvature, 1.0, source, False, own.rsqrt(), float(own.mean()), cost)


def of_recipe(provider: GroupGradients, sample: IndexedData, total: int, recipe: Training) -> tuple[str, Tensor]:
    """Return a text that says where the damping comes from, and the damping: one number, or one per parameter `[p]`."""
    steps = TrainingSteps.of(recipe, total)
    if steps.optimizer == "sgd":
        return "the learning rates of SGD", torch.tensor(1 / steps.distance + steps.weight_decay, dtype=torch.float64)
    moments = _second_moments(provider, sample, steps.batch_size)
    from ggda_ext.training.recipe import EPS

    own = ADAM * (moments.sqrt() + EPS) / steps.distance + steps.weight_decay
    return "the learning rates and gradients of Adam", own


def told_by_points(parameters: int, points: int) -> float:
    """Return min(1, p / n): with fewer parameters per point, the curvature needs less damping."""
    return min(1.0, parameters / points)


def scale_of(curvature: SampledCurvature) -> float:
    """Return tr H² / tr H, estimated with random vectors; it is the same for every property."""
    space = curvature.provider.space
    generator = torch.Generator().manual_seed(curvature.seed)
    signs = torch.randint(0, 2, (_PROBES, space.size), generator=generator) * 2 - 1
    vectors = signs.to(space.device, torch.promote_types(space.dtype, torch.float32))
    products = (curvature @ vectors).double()
    trace = float((products * vectors).sum())
    return float(products.square().sum()) / trace if trace > 0 else float(products.norm(dim=1).max())


def _second_moments(provider: GroupGradients, sample: IndexedData, batch_size: int) -> Tensor:
    """Return E (batch gradient)² of every parameter `[p]`, computed from the gradients of some points."""
    n = sample.n or 0
    count = min(_MOMENT_POINTS, n, max(8, _MOMENT_NUMBERS // provider.p))
    some = SomePoints(sample, np.linspace(0, n - 1, count).astype(np.int64))
    points = provider.on(some, Groups.singletons(len(some.positions)))
    squares, total = (torch.zeros(provider.p, dtype=torch.float64) for _ in range(2))
    for _, block in points.all_blocks():
        rows = block.to(torch.promote_types(block.dtype, torch.float32))
        squares += rows.square().sum(0).double().cpu()
        total += rows.sum(0).double().cpu()
    seen = len(some.positions)
    return (squares / seen / batch_size + (total / seen).square()).to(provider.space.device)


class _Space:
    """An orthonormal basis that grows block by block, and the matrix A in this basis.

    Attributes:
        newest: the block that has not been multiplied with A yet `[r, p]`.
        matrix: T `[d, d]`, A in the basis of all other blocks.
        sides: the right-hand sides in the basis `[d, m]`.
    """

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors
        self.blocks: list[Tensor] = []
        self.newest = _orthonormal(vectors, 1.0)
        self.matrix = vectors.new_zeros(0, 0, dtype=torch.float64, device=sums_on(vectors.device))
        self.sides = self.matrix.new_zeros(0, len(vectors))
        self.outside = vectors.new_zeros(0, vectors.shape[1])

    def extend(self, products: Tensor) -> None:
        """Add the products of A with the newest block; the part of them outside the space gives the next block."""
        self.blocks.append(self.newest)
        size, wide = len(self.newest), len(self.matrix) + len(self.newest)
        columns = torch.cat([self._inner(block, products) for block in self.blocks])
        grown = self.matrix.new_zeros(wide, wide)
        grown[: wide - size, : wide - size] = self.matrix
        grown[:, wide - size :] = columns
        grown[wide - size :, :] = columns.T
        grown[wide - size :, wide - size :] = (columns[wide - size :] + columns[wide - size :].T) / 2
        self.matrix = grown
        self.sides = torch.cat([self.sides, self._inner(self.newest, self.vectors)])
        outside = products.clone()
        for _ in range(2):  # once leaves rounding errors, twice is enough
            for block in self.blocks:
                outside -= product(product(outside, block.T), block)
        self.outside = outside
        self.newest = _orthonormal(outside, float(products.norm(dim=1).max()))

    def residual(self, inside: Tensor) -> float:
        """Return the largest residual of solutions `[d, m]` in the basis; only the newest products leave the space."""
        last = inside[-len(self.blocks[-1]) :]
        gram = self._inner(self.outside, self.outside)
        return float((last * (gram @ last)).sum(0).clamp_min(0).sqrt().max())

    def lift(self, inside: Tensor) -> Tensor:
        """Return the vectors `[m, p]` with coordinates `[d, m]` in the basis."""
        rows, at = torch.zeros_like(self.vectors), 0
        for block in self.blocks:
            rows += product(inside[at : at + len(block)].T.to(block), block)
            at += len(block)
        return rows

    def _inner(self, a: Tensor, b: Tensor) -> Tensor:
        return product(a, b.T).to(self.matrix)


def _orthonormal(rows: Tensor, size: float) -> Tensor:
    """Return an orthonormal basis `[r, p]` of rows `[m, p]`; leave out rounding errors, relative to `size`."""
    found, least = rows, (100 * torch.finfo(rows.dtype).eps * size) ** 2
    for _ in range(2):  # the second round removes rounding errors of the first
        values, turn = torch.linalg.eigh(found.double() @ found.double().T)
        kept = values > least
        found = product((turn[:, kept] / values[kept].sqrt()).T.to(rows), found)
        least = 0.25
    return found
