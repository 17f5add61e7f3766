"""Newton steps of many refits at once, each by conjugate gradients.

The conjugate gradients are preconditioned with the groups' own curvature at d = 0. All products with Φ are matrix
products shared by a block of subsets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ggda_ext.counterfactual.refit import Refit

MOST_STEPS = 60
_INNER = 20
_FORCING = 1e-2  # how far conjugate gradients reduce the squared residual in one Newton step
_ARMIJO = 1e-4
_HALVINGS = 30
_ROUNDINGS = 16  # times the rounding of one number that sums are trusted to


@dataclass(frozen=True)
class Penalty:
    """The penalty of a refit, which bounds its answer; symbols as in `ggda_ext.counterfactual.refit`.

    Attributes:
        ridge: R `[r, r]`.
        decay: λ.
        zero: o `[r]`, the place where parameters are zero, for a refit whose d = 0 is where the training started; None
            for a refit that starts at the model itself.
    """

    ridge: Tensor
    decay: float = 0.0
    zero: Tensor | None = None


class Subsets:
    """Subsets that are solved together, at their current d `[s, r]`."""

    def __init__(self, problem: Refit, weights: Tensor, penalty: Penalty, first: Tensor | None = None) -> None:
        self.problem, self.weights, self.penalty = problem, weights, penalty
        bounds = penalty.ridge + penalty.decay * torch.eye(problem.r).to(penalty.ridge)
        self.pull = problem.pull - problem.missing(weights) + problem.drift(weights, bounds)
        self.harder = torch.ones_like(weights[:, :1])
        if penalty.zero is not None:
            self.harder = 1 / problem.steps(weights)[:, None]
            self.pull = (penalty.decay * penalty.zero).expand(len(weights), -1)
        self.share = problem.weights_of_points(weights)
        self.d = torch.zeros(len(weights), problem.r, dtype=torch.float64, device=weights.device)
        self.columns = problem.outputs[:, :, None].expand(-1, -1, len(weights)).contiguous()
        if first is not None and bool(first.any()):
            self.d += first
            self.columns = self.columns + self._forth(first)  # not in place: one subset shares the problem's outputs
        self.factors: Tensor | None = None
        self.objective = self._objective(self.columns, self.d)
        self.size, self.slack, self.noise = self._sizes()

    def _sizes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean size of the losses, and what rounding of outputs does to the objective and to a fall `[s]`.

        A fall is ½ gᵀH⁻¹g, so an error of the outputs counts there by its square, times the curvature of the losses.
        """
        sums = torch.zeros(3, len(self.d), dtype=torch.float64, device=self.d.device)
        eps = torch.finfo(self.problem.dtype).eps
        for low, high, loss in self.problem.chunks(1):
            columns = self.columns[low:high, :, :1]  # at first all subsets have the same outputs
            state = loss.state(columns)
            slopes, bends = loss.slope(state) * columns, loss.bend(state, columns) * columns
            points = torch.stack([loss.value(columns)[:, 0], slopes[:, :, 0].sum(1), bends[:, :, 0].sum(1)])
            sums += points.abs() @ self.share[low:high]
        size, slack, noise = sums
        return size, _ROUNDINGS * eps * (size + slack), _ROUNDINGS * eps**2 * noise

    @property
    def done_below(self) -> Tensor:
        """The fall of the objective in a step `[s]` below which a subset is solved."""
        return self.problem.tolerance * (self.size + self.objective.abs()) + self.noise

    def only(self, rows: Tensor) -> Subsets:
        """Return the same state for some of the subsets."""
        other = object.__new__(Subsets)
        other.problem, other.penalty = self.problem, self.penalty
        other.pull, other.harder = self.pull[rows], self.harder[rows]
        other.weights, other.d, other.objective = self.weights[rows], self.d[rows], self.objective[rows]
        other.size, other.slack, other.noise = self.size[rows], self.slack[rows], self.noise[rows]
        other.share, other.columns = self.share[:, rows], self.columns[:, :, rows]
        factors = self.factors
        other.factors = factors if factors is None or len(factors) == 1 else factors[rows]
        return other

    def refresh(self) -> None:
        """Compute the preconditioner again, from the curvature at the present d."""
        matrix = torch.zeros(len(self.d), self.problem.r, self.problem.r, dtype=torch.float64, device=self.d.device)
        for low, high, loss in self.problem.chunks(1):
            for j in range(len(self.d)):
                roots = loss.root(loss.state(self.columns[low:high, :, j : j + 1]))
                rows = torch.bmm(roots * self.share[low:high, j, None, None].sqrt(), self.problem.tangents(low, high))
                matrix[j] += (rows.flatten(0, 1).T @ rows.flatten(0, 1)).double()
        self.factors = self._factored(matrix)

    def _factored(self, matrix: Tensor) -> Tensor:
        """Return Cholesky factors of curvatures `[s, r, r]` plus the penalty, and a little more against rounding.

        They only precondition, so what is added against rounding does not move the optimum.
        """
        floor = 1e-7 if self.problem.dtype == torch.float32 else 1e-12
        scale = matrix.diagonal(dim1=1, dim2=2).mean(1)
        ridge = self.penalty.ridge
        found = matrix + (ridge if self.penalty.zero is None else ridge * self.harder[:, :, None])
        found.diagonal(dim1=1, dim2=2).add_(1e-30 + self.penalty.decay)
        while True:
            found.diagonal(dim1=1, dim2=2).add_((floor * scale)[:, None])
            factors, failed = torch.linalg.cholesky_ex(found)
            if not bool(failed.any()):
                return factors
            if floor > 1:
                raise singular(int((failed > 0).sum()))
            floor *= 10

    def _penalised(self, rows: Tensor) -> Tensor:
        """Return the penalty's curvature times rows `[s, r]`."""
        return (rows @ self.penalty.ridge) * self.harder + self.penalty.decay * rows

    def gradient(self) -> Tensor:
        """Return the gradient of the objective at d `[s, r]`."""
        total = torch.zeros_like(self.d)
        for low, high, loss in self.problem.chunks(len(self.d)):
            slope = loss.slope(loss.state(self.columns[low:high])).mul_(self.share[low:high, None])
            total += self._back(slope, low, high)
        return total - self.pull + self._penalised(self.d)

    def step(self) -> Tensor:
        """Take one Newton step with a line search, and return how much the objective falls to first order `[s]`.

        It is 0 for a subset that the radius stops.
        """
        if self.factors is None:
            self.factors = self._factored(self.problem.curvature(self.weights))
        gradient = self.gradient()
        move = self._newton(gradient)
        columns = self._forth(move)
        slope = (gradient * move).sum(1)
        length = self._within(columns)
        bounded = length < 1
        slack = self.slack + _ROUNDINGS * torch.finfo(self.problem.dtype).eps * self.objective.abs()
        for _ in range(_HALVINGS):
            d = self.d + length[:, None] * move
            moved = torch.addcmul(self.columns, columns, length.to(columns)[None, None])
            objective = self._objective(moved, d)
            short = ~(objective <= self.objective + _ARMIJO * length * slope + slack)
            if not bool(short.any()):
                break
            length = torch.where(short, length / 2, length)
        self.d, self.columns, self.objective = d, moved, objective
        return torch.where(bounded, 0.0, -slope * length)

    def _within(self, columns: Tensor) -> Tensor:
        """Return the longest step `[s]`, up to 1, along columns that keeps the outputs within the loss's radius."""
        radius, ones = self.problem.radius, torch.ones_like(self.objective)
        if radius == float("inf"):
            return ones
        a, b, c = (torch.zeros_like(ones) for _ in range(3))
        for low, high, _ in self.problem.chunks(len(self.d)):
            move, so_far = columns[low:high], self.columns[low:high] - self.problem.outputs[low:high, :, None]
            for total, left, right in ((a, move, move), (b, move, so_far), (c, so_far, so_far)):
                total += (left * right).sum((0, 1)).double()
        c -= radius**2 * len(self.columns)
        root = (b.square() - a * c).clamp_min(0).sqrt()
        return torch.minimum(ones, ((root - b) / a.clamp_min(1e-300)).clamp_min(0))

    def _newton(self, gradient: Tensor) -> Tensor:
        """Return −H⁻¹ g by preconditioned conjugate gradients, where H is the curvature at d."""
        states = self._states()
        move, residual = torch.zeros_like(gradient), -gradient
        pre = self._preconditioned(residual)
        direction = pre.clone()
        size = (residual * pre).sum(1)
        goal = _FORCING * size
        for first in [True] + [False] * (_INNER - 1):
            bent = self._bend(states, direction)
            curvature = (direction * bent).sum(1)
            going = (size > goal) & (curvature > 0)
            if first and bool(((size > 0) & (curvature <= 0)).any()):
                raise singular(int(((size > 0) & (curvature <= 0)).sum()))
            length = torch.where(going, size / curvature.clamp_min(1e-300), 0.0)
            move += length[:, None] * direction
            residual -= length[:, None] * bent
            pre = self._preconditioned(residual)
            before, size = size, torch.where(going, (residual * pre).sum(1), size)
            if bool((~going | (size <= goal)).all()):
                break
            direction = pre + torch.where(going, size / before.clamp_min(1e-300), 0.0)[:, None] * direction
        return move

    def _states(self) -> Tensor:
        found = torch.empty_like(self.columns)
        for low, high, loss in self.problem.chunks(len(self.d)):
            found[low:high] = loss.state(self.columns[low:high])
        return found

    def _bend(self, states: Tensor, directions: Tensor) -> Tensor:
        """Return H times directions `[s, r]`."""
        total = self._penalised(directions)
        moves = directions.T.to(self.problem.dtype).contiguous()
        for low, high, loss in self.problem.chunks(len(directions)):
            forth = self.problem.flat[low * self.problem.c : high * self.problem.c] @ moves
            bent = loss.bend(states[low:high], forth.view(high - low, self.problem.c, -1))
            total += self._back(bent.mul_(self.share[low:high, None]), low, high)
        return total

    def _forth(self, directions: Tensor) -> Tensor:
        """Return Φ times directions `[s, r]`, as columns `[n, c, s]`."""
        moves = directions.T.to(self.problem.dtype).contiguous()
        return (self.problem.flat @ moves).view(self.problem.n, self.problem.c, -1)

    def _back(self, columns: Tensor, low: int, high: int) -> Tensor:
        """Return Φᵀ times columns `[b, c, s]` of the points from low to high, as rows `[s, r]`."""
        flat = self.problem.flat[low * self.problem.c : high * self.problem.c]
        return (columns.reshape(len(flat), -1).T @ flat).double()

    def _preconditioned(self, rows: Tensor) -> Tensor:
        assert self.factors is not None
        if len(self.factors) == 1:
            return torch.cholesky_solve(rows.T, self.factors[0]).T
        return torch.cholesky_solve(rows[:, :, None], self.factors)[:, :, 0]

    def _objective(self, columns: Tensor, d: Tensor) -> Tensor:
        total = torch.zeros(len(d), dtype=torch.float64, device=d.device)
        for low, high, loss in self.problem.chunks(len(d)):
            total += (loss.value(columns[low:high]) * self.share[low:high]).double().sum(0)
        return total - (d * self.pull).sum(1) + (self._penalised(d) * d).sum(1) / 2


class SingularRefit(ValueError):
    """Raised if a small problem has no optimum."""


def singular(count: int) -> SingularRefit:
    """Return the error for small problems without an optimum; `count` is the number of subsets."""
    return SingularRefit(
        f"a refit has no optimum, or none within {MOST_STEPS} steps, for {count} subsets: the small problem is "
        "singular, because nothing bounds the outputs in some direction. Pass a larger ridge, or the weight_decay of "
        "the training."
    )
