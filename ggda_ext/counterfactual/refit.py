"""The small problem of a refit: the training loss of the kept groups, in a few parameter directions.

With outputs f_i + Φ_i d and weights w of the groups, the refit is

    min_d  Σ_i w_i ℓ_i(f_i + Φ_i d) / Σ_i w_i  −  ⟨ḡ, d⟩  +  1/2 dᵀ Λ d

where ḡ, the gradient of all training points at d = 0, makes d = 0 the answer if nothing changes (with weight decay
and at the optimum it is the decay's own pull), and the penalty Λ `[r, r]` is the weight decay and a ridge that keeps
the answer where the linearisation holds. Without weight decay a linear model has next to no Λ: there a refit stops
where outputs have moved by the loss's radius, because with a class left out nothing else bounds them.

Where the sums are over a part of the points only, the gradients of the groups at d = 0 are still those of all points:
⟨Σ_G w_G e_G / Σ_i w_i, d⟩ is added, with e_G what the part lacks of them. What is left to chance is how they change.

A training that stopped early has another reason to be where it is: what its points did not teach is as it was at the
start. There gradients tell little, those of points that are learned are nearly zero, and nothing above would forget
them. So, if the start and its outputs f⁰ are known, the training is done again from there, with a ridge R that pulls
back to it, the harder the fewer points (and so steps) there are,

    d_S = argmin_d  Σ_i w_i ℓ_i(f⁰_i + Φ_i d) / Σ_i w_i  +  n/2n_S dᵀ R d  +  λ/2 |d − o|²

with the weight decay λ towards parameters of zero, o, and the answer is d_S − d_all: nothing, if nothing changes. Φ may
be that of an early checkpoint: at the end of a training features know the groups that are to be left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ggda_ext.counterfactual.convex import ConvexLoss
from ggda_ext.counterfactual.newton import MOST_STEPS, Penalty, Subsets, singular

_REFRESH = 12  # steps after which the preconditioner is that of the present curvature, for subsets far from d = 0
_CHUNK_BYTES = 4 * 2**20  # columns of all subsets worked on at once, so that they stay near the cache


class Refit:
    """Refits of one linearised model.

    Args:
        outputs: columns of the training outputs at d = 0 `[n, c]`, points group after group.
        tangents: Φ in those columns `[n, c, r]`, likewise.
        loss: the training loss of these points.
        starts: where every group starts, and where the last one ends `[k + 1]`; later points are in no group and stay.
        point_weights: of every point in the training loss `[n]`.
        most_bytes: memory for one block of subsets, and for the groups' curvature.
        missing: e, for the groups and for the points in none `[k + 1, r]`; None if these are all points.

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
        self._everything = torch.ones(1, self.k + 1, dtype=torch.float64, device=tangents.device)
        self._missing = missing
        self._begin()

    def missing(self, weights: Tensor) -> Tensor:
        """What the mean gradients of subsets lack of those of all their points `[s, r]`."""
        if self._missing is None:
            return torch.zeros(len(weights), self.r, dtype=torch.float64, device=weights.device)
        return weights @ self._missing / (weights @ self.masses)[:, None]

    def _begin(self) -> None:
        """What is known at d = 0: the gradient ḡ of all points, and the groups' curvature."""
        self.pull = torch.zeros(self.r, dtype=torch.float64, device=self.flat.device)
        self.pull = Subsets(self, self._everything, Penalty(self.pull.new_zeros(self.r, self.r))).gradient()[0]
        self._curvature = self._group_curvature(torch.zeros_like(self.pull))

    def settle(self, penalty: Penalty) -> Tensor:
        """Begin anew at the optimum of all points, with a start; where it was `[r]`."""
        found = self._solved(self._everything, penalty, torch.zeros_like(self.pull)[None])[0]
        self.outputs = self.outputs + (self.flat @ found.to(self.flat)).view(self.n, self.c)
        self._begin()
        return found

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
        if penalty.zero is not None:
            everything = self._solved(self._everything, penalty, everything)
            self._curvature = self._group_curvature(everything[0])  # answers are nearer to it than to the start
        for rows in changed.split(self._at_once()):
            found[rows] = self._solved(weights[rows], penalty, everything) - everything
        return found

    def _at_once(self) -> int:
        return int(max(1, min(64, self.most_bytes // (4 * self.n * self.c * self.flat.element_size()))))

    def _solved(self, weights: Tensor, penalty: Penalty, first: Tensor) -> Tensor:
        """The optima `[s, r]` themselves, from a first guess `[1, r]`."""
        answers = torch.zeros(len(weights), self.r, dtype=torch.float64, device=weights.device)
        going = torch.arange(len(weights), device=weights.device)
        subsets = Subsets(self, weights, penalty, first)
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
        """Near its answer, of every subset `[s, r, r]`, or of all points `[1, r, r]`."""
        if self._curvature.shape[0] == 1:
            return self._curvature.double() / self.masses.sum()
        flat = weights.to(self._curvature) @ self._curvature.flatten(1)
        return flat.double().view(-1, self.r, self.r) / (weights @ self.masses)[:, None, None]

    def steps(self, weights: Tensor) -> Tensor:
        """Steps of a training `[s]`, as a share of those on all points: a point that counts twice is seen once."""
        return weights.clamp(max=1) @ self.masses / self.masses.sum()

    def _group_curvature(self, d: Tensor) -> Tensor:
        """Σ_{i∈G} Φᵀ A Φ of every group at d `[k + 1, r, r]`; only their sum `[1, r, r]` if they are too many."""
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
