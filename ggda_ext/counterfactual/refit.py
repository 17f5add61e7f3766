"""The small problem of a refit: the training loss of the kept groups, in a few parameter directions.

With outputs f_i + Φ_i d and weights w of the groups, the refit is

    min_d  Σ_i w_i ℓ_i(f_i + Φ_i d) / Σ_i w_i  −  ⟨ḡ, d⟩  +  1/2 dᵀ Λ d

where ḡ, the gradient of all training points at d = 0, makes d = 0 the answer if nothing changes (with weight decay
and at the optimum it is the decay's own pull), and the penalty Λ `[r, r]` is the weight decay and a ridge that keeps
the answer where the linearisation holds. Without weight decay a linear model has next to no Λ: there a refit stops
where outputs have moved by the loss's radius, because with a class left out nothing else bounds them.

A training that stopped early has another reason to be where it is: what its points did not teach is as it was at the
start. There gradients tell little, those of points that are learned are nearly zero, and nothing above would forget
them. So, if the start a is known, the ridge R pulls there, the harder the fewer points (and so steps) there are,

    d_S = argmin_d  Σ_i w_i ℓ_i(f_i + Φ_i d) / Σ_i w_i  +  n/2n_S (d − a)ᵀ R (d − a)  +  λ/2 |d − o|²

with the weight decay λ towards parameters of zero, o, and the answer is d_S − d_all: nothing, if nothing changes.

All this by Newton steps, each by conjugate gradients preconditioned with the groups' own curvature at d = 0, for many
subsets at once: all products with Φ are matrix products shared by a block of subsets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ggda_ext.counterfactual.convex import ConvexLoss

MOST_STEPS = 60
_REFRESH = 12  # steps after which the preconditioner is that of the present curvature, for subsets far from d = 0
_INNER = 20
_FORCING = 1e-2  # how far conjugate gradients reduce the squared residual in one Newton step
_ARMIJO = 1e-4
_HALVINGS = 30
_CHUNK_BYTES = 4 * 2**20  # columns of all subsets worked on at once, so that they stay near the cache


@dataclass(frozen=True)
class Penalty:
    """What keeps a refit from going anywhere.

    Attributes:
        ridge: R `[r, r]`.
        decay: λ.
        start: a `[r]`, where the training started; None if that is not known, and the ridge pulls to d = 0.
        zero: o `[r]`, where parameters would be zero; only with a start.
    """

    ridge: Tensor
    decay: float = 0.0
    start: Tensor | None = None
    zero: Tensor | None = None


class Refit:
    """Refits of one linearised model.

    Args:
        outputs: columns of the training outputs `[n, c]`, points group after group.
        tangents: Φ in those columns `[n, c, r]`, likewise.
        loss: the training loss of these points.
        starts: where every group starts, and where the last one ends `[k + 1]`; later points are in no group and stay.
        point_weights: of every point in the training loss `[n]`.
        most_bytes: memory for one block of subsets, and for the groups' curvature.

    Attributes:
        radius: how far outputs may move, in the mean square; unbounded at first.
    """

    def __init__(
        self,
        outputs: Tensor,
        tangents: Tensor,
        loss: ConvexLoss,
        starts: np.ndarray,
        point_weights: Tensor,
        most_bytes: int = 2**29,
    ) -> None:
        self.n, self.c, self.r = tangents.shape
        self.outputs, self.dtype = outputs.to(tangents.dtype), tangents.dtype
        self.flat = tangents.reshape(self.n * self.c, self.r)
        self.loss, self.k, self.most_bytes = loss.to(tangents.dtype), len(starts) - 1, most_bytes
        sizes = np.diff(np.append(starts, self.n))
        self._labels = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(tangents.device)
        self._bounds = np.append(starts, self.n)
        self.point_weights, self.radius = point_weights.to(tangents.dtype), float("inf")
        self.masses = torch.zeros(self.k + 1, dtype=torch.float64, device=tangents.device)
        self.masses.index_add_(0, self._labels, point_weights.double())
        ones = torch.ones(1, self.k + 1, dtype=torch.float64, device=tangents.device)
        nothing = Penalty(torch.zeros(self.r, self.r, dtype=torch.float64, device=tangents.device))
        self.pull = torch.zeros(self.r, dtype=torch.float64, device=tangents.device)
        self.pull = _Subsets(self, ones, nothing).gradient()[0]
        self._curvature = self._group_curvature()

    def solve(self, weights: Tensor, penalty: Penalty) -> Tensor:
        """The answers d `[s, r]` of weights of groups `[s, k]`; exactly zero where all groups weigh the same."""
        weights = weights.to(self.flat.device, torch.float64)
        stay = torch.ones(len(weights), 1, dtype=torch.float64, device=weights.device)
        weights = torch.cat([weights, stay], 1)
        found = torch.zeros(len(weights), self.r, dtype=torch.float64, device=weights.device)
        whole = weights if self.masses[-1] > 0 else weights[:, :-1]  # nothing is fixed by points in no group
        changed = (whole != whole[:, :1]).any(1).nonzero()[:, 0]
        if not len(changed):
            return found
        everything = torch.zeros_like(found[:1])
        if penalty.start is not None:
            everything = self._solved(torch.ones_like(weights[:1]), penalty, everything)
        for rows in changed.split(self._at_once()):
            found[rows] = self._solved(weights[rows], penalty, everything) - everything
        return found

    def _at_once(self) -> int:
        return int(max(1, min(64, self.most_bytes // (4 * self.n * self.c * self.flat.element_size()))))

    def _solved(self, weights: Tensor, penalty: Penalty, first: Tensor) -> Tensor:
        """The optima `[s, r]` themselves, from a first guess `[1, r]`."""
        answers = torch.zeros(len(weights), self.r, dtype=torch.float64, device=weights.device)
        going = torch.arange(len(weights), device=weights.device)
        subsets = _Subsets(self, weights, penalty, first)
        tolerance = 1e-6 if self.dtype == torch.float32 else 1e-17  # what is left after such a step is far less
        for step in range(MOST_STEPS):
            if step and step % _REFRESH == 0:
                subsets.refresh()
            fall = subsets.step()
            answers[going] = subsets.d
            open_ = fall > tolerance * (1 + subsets.objective.abs())
            if not bool(open_.any()):
                return answers
            if not bool(open_.all()):
                going, subsets = going[open_], subsets.only(open_)
        raise singular(len(going))

    def curvature(self, weights: Tensor) -> Tensor:
        """At d = 0, of every subset `[s, r, r]`, or of all points `[1, r, r]`."""
        if self._curvature.shape[0] == 1:
            return self._curvature.double() / self.masses.sum()
        flat = weights.to(self._curvature) @ self._curvature.flatten(1)
        return flat.double().view(-1, self.r, self.r) / (weights @ self.masses)[:, None, None]

    def steps(self, weights: Tensor) -> Tensor:
        """Steps of a training `[s]`, as a share of those on all points: a point that counts twice is seen once."""
        return weights.clamp(max=1) @ self.masses / self.masses.sum()

    def _group_curvature(self) -> Tensor:
        """Σ_{i∈G} Φᵀ A Φ of every group at d = 0 `[k + 1, r, r]`; only their sum `[1, r, r]` if they are too many."""
        apart = (self.k + 1) * self.r**2 * self.flat.element_size() <= self.most_bytes
        found = self.flat.new_zeros(self.k + 1 if apart else 1, self.r, self.r)
        for low, high, loss in self.chunks(1):
            state = loss.state(self.outputs[low:high, :, None])
            roots = loss.root(state) * self.point_weights[low:high, None, None].clamp_min(0).sqrt()
            rows = torch.bmm(roots, self.tangents(low, high))
            edges = np.unique(np.clip(self._bounds, low, high)) if apart else np.array([low, high])
            for start, end in pairwise(edges.tolist()):
                part = rows[start - low : end - low].flatten(0, 1)
                found[int(self._labels[start]) if apart else 0] += part.T @ part
        return found

    def tangents(self, low: int, high: int) -> Tensor:
        """Φ of some points `[b, c, r]`."""
        return self.flat[low * self.c : high * self.c].view(high - low, self.c, self.r)

    def chunks(self, subsets: int) -> Iterator[tuple[int, int, ConvexLoss]]:
        """Runs of points that are worked on together, with their losses."""
        row = self.c * max(subsets, self.r) * self.flat.element_size()
        step = max(1, _CHUNK_BYTES // row)
        for low in range(0, self.n, step):
            high = min(low + step, self.n)
            yield low, high, self.loss.take(slice(low, high))

    def weights_of_points(self, weights: Tensor) -> Tensor:
        """Share of every point in the mean loss of every subset `[n, s]`."""
        share = (weights / (weights @ self.masses)[:, None]).T.to(self.dtype)
        return share[self._labels] * self.point_weights[:, None]


class _Subsets:
    """Subsets that are solved together, at their current d `[s, r]`."""

    def __init__(self, problem: Refit, weights: Tensor, penalty: Penalty, first: Tensor | None = None) -> None:
        self.problem, self.weights, self.penalty = problem, weights, penalty
        self.pull, self.harder = problem.pull.expand(len(weights), -1), torch.ones_like(weights[:, :1])
        if penalty.start is not None and penalty.zero is not None:
            self.harder = 1 / problem.steps(weights)[:, None]
            self.pull = (penalty.start @ penalty.ridge) * self.harder + penalty.decay * penalty.zero
        self.share = problem.weights_of_points(weights)
        self.d = torch.zeros(len(weights), problem.r, dtype=torch.float64, device=weights.device)
        self.columns = problem.outputs[:, :, None].expand(-1, -1, len(weights)).contiguous()
        if first is not None and bool(first.any()):
            self.d += first
            self.columns = self.columns + self._forth(first)  # of one subset, columns are the problem's own
        self.factors: Tensor | None = None
        self.objective = self._objective(self.columns, self.d)

    def only(self, rows: Tensor) -> _Subsets:
        """The same for some of the subsets."""
        other = object.__new__(_Subsets)
        other.problem, other.penalty = self.problem, self.penalty
        other.pull, other.harder = self.pull[rows], self.harder[rows]
        other.weights, other.d, other.objective = self.weights[rows], self.d[rows], self.objective[rows]
        other.share, other.columns = self.share[:, rows], self.columns[:, :, rows]
        factors = self.factors
        other.factors = factors if factors is None or len(factors) == 1 else factors[rows]
        return other

    def refresh(self) -> None:
        """Precondition with the curvature at the present d."""
        matrix = torch.zeros(len(self.d), self.problem.r, self.problem.r, dtype=torch.float64, device=self.d.device)
        for low, high, loss in self.problem.chunks(1):
            for j in range(len(self.d)):
                roots = loss.root(loss.state(self.columns[low:high, :, j : j + 1]))
                rows = torch.bmm(roots * self.share[low:high, j, None, None].sqrt(), self.problem.tangents(low, high))
                matrix[j] += (rows.flatten(0, 1).T @ rows.flatten(0, 1)).double()
        self.factors = self._factored(matrix)

    def _factored(self, matrix: Tensor) -> Tensor:
        """Cholesky factors of curvatures `[s, r, r]` with the penalty, and a little more against rounding."""
        floor = 1e-7 if self.problem.dtype == torch.float32 else 1e-12
        scale = matrix.diagonal(dim1=1, dim2=2).mean(1)
        ridge = self.penalty.ridge
        found = matrix + (ridge if self.penalty.start is None else ridge * self.harder[:, :, None])
        found.diagonal(dim1=1, dim2=2).add_((floor * scale + 1e-30)[:, None] + self.penalty.decay)
        return torch.linalg.cholesky(found)

    def _penalised(self, rows: Tensor) -> Tensor:
        """The penalty's curvature times rows `[s, r]`."""
        return (rows @ self.penalty.ridge) * self.harder + self.penalty.decay * rows

    def gradient(self) -> Tensor:
        """Of the objective at d `[s, r]`."""
        total = torch.zeros_like(self.d)
        for low, high, loss in self.problem.chunks(len(self.d)):
            slope = loss.slope(loss.state(self.columns[low:high])).mul_(self.share[low:high, None])
            total += self._back(slope, low, high)
        return total - self.pull + self._penalised(self.d)

    def step(self) -> Tensor:
        """One Newton step with a line search; by how much the objective fell `[s]`."""
        if self.factors is None:
            self.factors = self._factored(self.problem.curvature(self.weights))
        gradient = self.gradient()
        move = self._newton(gradient)
        columns = self._forth(move)
        slope = (gradient * move).sum(1)
        length = self._within(columns)
        bounded = length < 1
        slack = (1e-6 if self.problem.dtype == torch.float32 else 1e-14) * (1 + self.objective.abs())
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
        """The longest step `[s]`, up to 1, along columns that leaves the outputs within the loss's radius."""
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
        """−H⁻¹ g by preconditioned conjugate gradients, H the curvature at d."""
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
        """H times directions `[s, r]`."""
        total = self._penalised(directions)
        moves = directions.T.to(self.problem.dtype).contiguous()
        for low, high, loss in self.problem.chunks(len(directions)):
            forth = self.problem.flat[low * self.problem.c : high * self.problem.c] @ moves
            bent = loss.bend(states[low:high], forth.view(high - low, self.problem.c, -1))
            total += self._back(bent.mul_(self.share[low:high, None]), low, high)
        return total

    def _forth(self, directions: Tensor) -> Tensor:
        """Φ times directions, `[n, c, s]`."""
        moves = directions.T.to(self.problem.dtype).contiguous()
        return (self.problem.flat @ moves).view(self.problem.n, self.problem.c, -1)

    def _back(self, columns: Tensor, low: int, high: int) -> Tensor:
        """Φᵀ times columns `[b, c, s]`, `[s, r]`."""
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
    """A small problem without an optimum."""


def singular(count: int) -> SingularRefit:
    """The error for a small problem without an optimum."""
    return SingularRefit(
        f"a refit has no optimum, or none within {MOST_STEPS} steps, for {count} subsets: the small problem is "
        "singular, because nothing bounds the outputs in some direction. Pass a larger ridge, or the weight_decay of "
        "the training."
    )
