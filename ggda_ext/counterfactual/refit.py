"""The small problem of a refit: the training loss of the kept groups, in a few parameter directions.

With outputs f_i + Φ_i d and weights w of the groups, the refit is

    min_d  Σ_i w_i ℓ_i(f_i + Φ_i d) / Σ_i w_i  −  ⟨ḡ, d⟩  +  1/2 dᵀ Λ d

where ḡ is the gradient of all training points at d = 0. It makes d = 0 the answer if nothing changes (with weight decay
and at the optimum, ḡ is the pull of the decay). The penalty Λ `[r, r]` is the weight decay plus a ridge that keeps the
answer where the linearisation holds. Without weight decay, a linear model has next to no Λ. Its refit stops when
outputs have moved by the loss's radius, because nothing else bounds them if a class is left out.

A model that is linear in its parameters, and not at its optimum, is off by H⁻¹ e in first order, where e is its
gradient with the decay and H the curvature with the penalty. Every refit is taken to be off by the same: H_S H⁻¹ e
takes the place of e in ḡ. Otherwise e, however small, would drive a refit along parameters that only the removed groups
use.

If the sums are over a part of the points only, the gradients of the groups at d = 0 are still those of all points:
⟨Σ_G w_G e_G / Σ_i w_i, d⟩ is added, where e_G is the gradient of all points of a group minus the gradient of its part.
Only how the gradients change with d is left to chance.

A training that stopped early is where it is for another reason: everything that its points did not teach is as it was
at the start. There gradients tell little: the gradients of learned points are nearly zero, and nothing above would
forget these points. So, if the start and its outputs f⁰ are known, the refit repeats the training from there. A ridge R
pulls back to the start, the harder the fewer points (and so steps) there are,

    d_S = argmin_d  Σ_i w_i ℓ_i(f⁰_i + Φ_i d) / Σ_i w_i  +  n/2n_S dᵀ R d  +  λ/2 |d − o|²

where the weight decay λ pulls towards o, the place where parameters are zero. The answer is d_S − d_all, which is zero
if nothing changes. Φ may come from an early checkpoint, because at the end of a training the features already know the
groups that are to be left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ggda_ext.counterfactual.convex import ConvexLoss
from ggda_ext.counterfactual.newton import MOST_STEPS, Penalty, Subsets, singular

_REFRESH = 12  # steps after which the preconditioner is computed again at the present d, for subsets far from d = 0
_CHUNK_BYTES = 4 * 2**20  # size of the columns of all subsets worked on at once, so that they fit the cache


class Refit:
    """Refits of one linearised model.

    Args:
        outputs: columns of the training outputs at d = 0 `[n, c]`, points sorted by group.
        tangents: Φ in those columns `[n, c, r]`, in the same order.
        loss: the training loss of these points.
        starts: where every group starts, and where the last one ends `[k + 1]`; later points are in no group and stay.
        point_weights: weight of every point in the training loss `[n]`.
        most_bytes: memory for one block of subsets, and for the groups' curvature.
        missing: e of every group, and of the points in no group `[k + 1, r]`; None if the refit looks at all points.

    Attributes:
        radius: how far outputs may move, as a root mean square over points; infinite at first.
        excess: e, the gradient of all points with the weight decay at d = 0 `[r]`; None leaves it in ḡ.
        tolerance: relative fall of the objective in the last step; the fall that remains after it is far less.
    """

    def __init__(
        self,
        outputs: Tensor,
        tangents: Tensor,
        loss: ConvexLoss,
        starts: np.ndarray,
        point_weights: Tensor,
        most_bytes: int = 2**29,
        missing: Tensor | None = None,
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
        self.tolerance = 1e-6 if self.dtype == torch.float32 else 1e-17
        self._everything = torch.ones(1, self.k + 1, dtype=torch.float64, device=tangents.device)
        self._missing = missing
        self.excess: Tensor | None = None
        self._begin()

    def missing(self, weights: Tensor) -> Tensor:
        """Mean gradients of subsets over all their points, minus those over the points looked at `[s, r]`."""
        if self._missing is None:
            return torch.zeros(len(weights), self.r, dtype=torch.float64, device=weights.device)
        return weights @ self._missing / (weights @ self.masses)[:, None]

    def drift(self, weights: Tensor, penalty: Tensor) -> Tensor | float:
        """H_S H⁻¹ e − e of subsets `[s, r]`, for the penalty's curvature `[r, r]`."""
        if self.excess is None:
            return 0.0
        off = self._to_optimum(penalty)
        return self.curvature(weights) @ off + penalty @ off - self.excess

    def left_to_learn(self, penalty: Tensor) -> float:
        """By how much the mean loss would fall on the way to the optimum of all points, to second order."""
        assert self.excess is not None
        return float(self.excess @ self._to_optimum(penalty)) / 2

    def _to_optimum(self, penalty: Tensor) -> Tensor:
        """H⁻¹ e `[r]`, for the penalty's curvature `[r, r]`."""
        whole = self.curvature(self._everything)[0] + penalty
        whole.diagonal().mul_(1 + 1e-12).add_(1e-30)  # without any penalty it may be singular
        return torch.linalg.solve(whole, self.excess)

    def _begin(self) -> None:
        """Compute the gradient ḡ of all points and the groups' curvature at d = 0."""
        self.pull = torch.zeros(self.r, dtype=torch.float64, device=self.flat.device)
        self.pull = Subsets(self, self._everything, Penalty(self.pull.new_zeros(self.r, self.r))).gradient()[0]
        self._curvature = self._group_curvature(torch.zeros_like(self.pull))

    def settle(self, penalty: Penalty) -> Tensor:
        """Move d = 0 to the optimum of all points, and return its place `[r]`; the penalty must have a `zero`."""
        found = self._solved(self._everything, penalty, torch.zeros_like(self.pull)[None])[0]
        self.outputs = self.outputs + (self.flat @ found.to(self.flat)).view(self.n, self.c)
        self._begin()
        return found

    @torch.inference_mode(False)
    def solve(self, weights: Tensor, penalty: Penalty) -> Tensor:
        """Return the answers d `[s, r]` for weights of groups `[s, k]`; exactly zero if all points weigh the same."""
        weights = weights.to(self.flat.device, torch.float64)
        stay = torch.ones(len(weights), 1, dtype=torch.float64, device=weights.device)
        weights = torch.cat([weights, stay], 1)
        found = torch.zeros(len(weights), self.r, dtype=torch.float64, device=weights.device)
        whole = weights if self.masses[-1] > 0 else weights[:, :-1]  # the last column counts if it has points
        changed = (whole != whole[:, :1]).any(1).nonzero()[:, 0]
        if not len(changed):
            return found
        everything = torch.zeros_like(found[:1])
        if penalty.zero is not None:
            everything = self._solved(self._everything, penalty, everything)
            self._curvature = self._group_curvature(everything[0])  # answers are nearer to this optimum than to d = 0
        for rows in changed.split(self._at_once()):
            found[rows] = self._solved(weights[rows], penalty, everything) - everything
        return found

    def _at_once(self) -> int:
        each = max(4 * self.n * self.c * self.flat.element_size(), 3 * 8 * self.r**2)  # columns; curvature and factors
        return int(max(1, min(64, self.most_bytes // each)))

    def _solved(self, weights: Tensor, penalty: Penalty, first: Tensor) -> Tensor:
        """Return the optima `[s, r]`, found from a first guess `[1, r]`."""
        answers = torch.zeros(len(weights), self.r, dtype=torch.float64, device=weights.device)
        going = torch.arange(len(weights), device=weights.device)
        subsets = Subsets(self, weights, penalty, first)
        for step in range(MOST_STEPS):
            if step and step % _REFRESH == 0:
                subsets.refresh()
            fall = subsets.step()
            answers[going] = subsets.d
            if not bool(torch.isfinite(subsets.objective).all()):
                raise ValueError(
                    "the training loss of a refit is NaN or infinite: look at the targets, and at how loss_fn takes "
                    "outputs that are a little larger."
                )
            open_ = fall > subsets.done_below
            if not bool(open_.any()):
                return answers
            if not bool(open_.all()):
                going, subsets = going[open_], subsets.only(open_)
        raise singular(len(going))

    def curvature(self, weights: Tensor) -> Tensor:
        """Curvature of every subset near its answer `[s, r, r]`; of all points `[1, r, r]` if groups are too many."""
        if self._curvature.shape[0] == 1:
            return self._curvature.double() / self.masses.sum()
        flat = weights.to(self._curvature) @ self._curvature.flatten(1)
        return flat.double().view(-1, self.r, self.r) / (weights @ self.masses)[:, None, None]

    def steps(self, weights: Tensor) -> Tensor:
        """Training steps on every subset `[s]`, as a share of the steps on all points; weights above 1 count as 1."""
        return weights.clamp(max=1) @ self.masses / self.masses.sum()

    def _group_curvature(self, d: Tensor) -> Tensor:
        """Σ_{i∈G} Φᵀ A Φ of every group at d `[k + 1, r, r]`; only the sum `[1, r, r]` if there are too many groups."""
        apart = (self.k + 1) * self.r**2 * self.flat.element_size() <= self.most_bytes
        found = self.flat.new_zeros(self.k + 1 if apart else 1, self.r, self.r)
        for low, high, loss in self.chunks(1):
            moved = self.outputs[low:high] + self.tangents(low, high) @ d.to(self.flat)
            state = loss.state(moved[:, :, None])
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
        """Yield ranges of points that are worked on together, as low, high and their loss."""
        row = self.c * max(subsets, self.r) * self.flat.element_size()
        step = max(1, _CHUNK_BYTES // row)
        for low in range(0, self.n, step):
            high = min(low + step, self.n)
            yield low, high, self.loss.take(slice(low, high))

    def weights_of_points(self, weights: Tensor) -> Tensor:
        """Share of every point in the mean loss of every subset `[n, s]`."""
        share = (weights / (weights @ self.masses)[:, None]).T.to(self.dtype)
        return share[self._labels] * self.point_weights[:, None]
