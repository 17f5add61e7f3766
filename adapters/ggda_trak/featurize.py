"""Featurize one checkpoint: compute the gradients of points, project them, sum them by group, and write the sums.

    numerators   Σ_{i∈G} Q̄_i φ_i     fisher_rows  Σ_{i∈G} φ_i  (batched)     fisher  Σ_i φ_i φ_iᵀ  (exact)

The points of a group may come in any number of batches, and from any number of ranks. Every batch has a fixed cost,
which for small models is most of the cost, so points wait until there are enough of them. Rows that are expensive to
project one by one are collected, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ggda_ext import GroupGradients, Groups
from ggda_ext.curvature.fisher import Damping, EmpiricalFisher
from ggda_ext.sharing import alone
from ggda_ext.storage.folder import StoreMismatch
from ggda_trak.batches import Batch, WaitingPoints, part_of, point_hashes
from ggda_trak.projection import Projection
from ggda_trak.ranks import own_share, points_before
from ggda_trak.store import GroupStore
from ggda_trak.task_gradients import TaskGradients

LEAST_POINTS, LEAST_NUMBERS = 1024, 2**24
"""Between writes there are `LEAST_POINTS` points; for small models, up to eight times as many, until their gradients
have `LEAST_NUMBERS` numbers. Time does not decide, so that the sums depend neither on time nor on kills."""
ROWS_PER_DIMENSION = 32
"""Points between writes per dimension of the projection, if every projector call draws the whole matrix anew."""


def points_between_writes(parameters: int) -> int:
    """Number of points between writes, which a kill may cost. It is larger if gradients are fast to compute."""
    return LEAST_POINTS * min(max(1, LEAST_NUMBERS // (LEAST_POINTS * parameters)), 8)


class GroupSums:
    """Adds batches of points to the group sums of a checkpoint.

    Args:
        store: the store that the sums are written to; it knows the groups and the kind of Fisher.
        gradients: the gradients of the task's outputs f_i, and their projection.
        model_id: selects the projection matrix.
        weights: a function that returns Q̄ `[b]` for a batch, its indices, and the number of points to run at once.

    Attributes:
        before: mask of the points that were already in the sums of any rank at the start `[n]`.
        now: mask of the points that were given since then `[n]`.
    """

    def __init__(
        self,
        store: GroupStore,
        gradients: TaskGradients,
        model_id: int,
        weights: Callable[[Batch, np.ndarray, int], Tensor],
    ) -> None:
        self.store, self.groups, self.model_id, self.projection = store, store.groups, model_id, gradients.projection
        self.before, self.now = points_before(store), np.zeros(store.groups.n, dtype=bool)
        self._gradients, self._mean_weights = gradients, weights
        self._points = WaitingPoints(self.projection.space.model)
        self._budget = gradients.options.memory_budget // 2  # for rows that wait for their projection
        self._waiting = _Rows(self.projection, len(store.sums), self._budget, len(self.groups))
        self._fisher: Tensor | None = None
        self._forget()

    def _positions_left(self, batch: Batch, indices: np.ndarray) -> np.ndarray:
        """Positions of the batch's points that are not in the sums; error for a point given twice or changed."""
        twice = indices[self.now[indices]]
        if len(twice):
            raise ValueError(
                f"inds holds {len(twice)} points that are featurized already, first {twice[:5].tolist()}: give every "
                "point once per checkpoint."
            )
        done = self.before[indices]
        if done.any():
            hashes, known = point_hashes(batch), np.asarray(self.store.hashes)[indices]
            other = indices[done & (known != hashes) & (known != 0)]  # 0: a point of another rank
            if len(other):
                save_dir = str(self.store.folder.parent)
                raise StoreMismatch(
                    f"save_dir={save_dir!r} was made with other data than now at {len(other)} points of this "
                    f"batch, first {other[:5].tolist()}: pass what it was made with, or another save_dir."
                )
        return np.flatnonzero(~done)

    def add_share(self, batch: Batch, indices: np.ndarray) -> bool:
        """Add this rank's share of those points of a batch that were not done before.

        Returns:
            Whether all waiting points are in the store now.
        """
        mine = own_share(self._positions_left(batch, indices))
        written = len(mine) > 0 and self.add(part_of(batch, mine), indices[mine])
        self.now[indices] = True
        return written

    def add(self, batch: Batch, indices: np.ndarray) -> bool:
        """Add points to the sums of their groups, now or with later points. On an error, no waiting point is added.

        Args:
            batch: the points.
            indices: training indices of the points `[b]`.

        Returns:
            Whether all waiting points are in the store now.
        """
        if not self._indices:
            self._gradients.of(batch).plan(None)  # raises an error now for a model that cannot be handled
        if any(tensor.is_floating_point() and not tensor.sum().isfinite() for tensor in batch):
            self._weights(batch, indices)  # raises an error before other points wait together with them
        self._indices.append(indices)
        self.now[indices] = True
        due = self._due()
        with self._all_or_none():
            if not self._points.are_like(batch):
                self._take_points()
            self._points.add(batch, indices, keep=not due)
            if due or self._points.are_enough(self.projection.space.size):
                self._take_points()
        held = sum(rows.nbytes for _, rows in self._projected)
        if due or held > self._budget:
            self.commit()
        return not self._indices

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """If an error occurs, treat all points that are not in the store as not done."""
        try:
            yield
        except BaseException:
            self.now[np.concatenate(self._indices)] = False
            self._forget()
            raise

    def _take_points(self) -> None:
        """Compute the gradients of the waiting points. This rank does so alone, as other ranks have other points."""
        with alone(), self._points.taken() as (batch, indices):
            if len(indices):
                self._hashes.append(point_hashes(batch))
            inside = np.flatnonzero(self.groups.labels[indices] >= 0)
            if not len(inside):
                return
            if len(inside) < len(indices):
                batch, indices = tuple(tensor[inside] for tensor in batch), indices[inside]
            add = self._add_points if self.store.kind == "exact" else self._add_groups
            add(self._gradients.of(batch), batch, self.groups.labels[indices], self._weights(batch, indices))

    def _weights(self, batch: Batch, indices: np.ndarray) -> Tensor:
        """Q̄ `[b]` of the points of a batch, in pieces of the size that their gradients will be computed in."""
        return self._mean_weights(batch, indices, self._gradients.of(batch).on(batch).batch_size)

    def _add_groups(self, gradients: GroupGradients, batch: Batch, labels: np.ndarray, weights: Tensor) -> None:
        ids, local = np.unique(labels, return_inverse=True)
        groups = Groups.with_labels(local, len(ids), [self.groups.name(j) for j in ids])
        given = gradients.on(batch, groups)
        of_batch = torch.stack([weights, torch.ones_like(weights)][: len(self.store.sums)])
        if not self.projection.collects:
            for at, rows in self.projection.blocks(given, self.model_id, of_batch):
                self._projected.append((ids[at.numpy()], rows))
            return
        for at, rows in given.blocks(self._waiting.capacity, of_batch):
            self._add_rows(ids[at.numpy()], rows)

    def _add_rows(self, ids: np.ndarray, rows: Tensor) -> None:
        if not self._waiting.fits(ids):
            self._project()
        self._waiting.add(ids, rows)

    def _add_points(self, gradients: GroupGradients, batch: Batch, labels: np.ndarray, weights: Tensor) -> None:
        for at, rows in self.projection.blocks(gradients.on(batch), self.model_id):
            self._projected.append((labels[at.numpy()], (rows * weights[at].to(rows)[:, None])[:, None]))
            product = rows.T @ rows
            self._fisher = product if self._fisher is None else self._fisher + product

    def _project(self) -> None:
        ids, rows = self._waiting.take()
        if len(ids):
            self._projected.append((ids, self.projection(rows, self.model_id)))

    def _due(self) -> bool:
        if (self.before | self.now | (self.groups.labels < 0)).all():
            return True
        points = max(points_between_writes(self.projection.space.size), self.groups.n // 100)
        if self.projection.collects:
            points = max(points, ROWS_PER_DIMENSION * self.projection.dim)
        return sum(map(len, self._indices)) >= points

    def commit(self) -> None:
        """Compute and project the gradients of all waiting points, and add everything to the store."""
        if not self._indices:
            return
        with self._all_or_none():
            self._take_points()
            self._project()
        every = [ids for ids, _ in self._projected]
        ids = np.unique(np.concatenate(every)) if every else np.empty(0, np.int64)
        total = torch.zeros(len(ids), len(self.store.sums), self.projection.dim)
        for some, rows in self._projected:
            total.index_add_(0, torch.from_numpy(np.searchsorted(ids, some)), rows.float().cpu())
        sums = dict(zip(self.store.sums, total.transpose(0, 1).numpy(), strict=True))
        fisher = None if self._fisher is None else self._fisher.cpu().numpy()
        self.store.add(np.concatenate(self._indices), ids, sums, fisher, np.concatenate(self._hashes))
        self._forget()

    def _forget(self) -> None:
        self._indices: list[np.ndarray] = []
        self._hashes: list[np.ndarray] = []
        self._projected: list[tuple[np.ndarray, Tensor]] = []
        self._fisher = None
        self._points.forget()
        self._waiting.take()


class _Rows:
    """Gradient rows `[w, p]` by group, added up until they are taken. The first row allocates the memory for all."""

    def __init__(self, projection: Projection, weightings: int, memory_budget: int, most: int) -> None:
        self._shape = (weightings, projection.space.size)
        row = weightings * projection.space.size * projection.space.dtype.itemsize
        self.capacity = int(min(max(1, memory_budget // row), most))
        self._slots: dict[int, int] = {}
        self._rows: Tensor | None = None

    def fits(self, ids: np.ndarray) -> bool:
        new = sum(1 for j in ids.tolist() if j not in self._slots)
        return len(self._slots) + new <= self.capacity

    def add(self, ids: np.ndarray, rows: Tensor) -> None:
        if self._rows is None:
            self._rows = rows.new_empty(self.capacity, *self._shape)
        for j, row in zip(ids.tolist(), rows, strict=True):
            if j in self._slots:
                self._rows[self._slots[j]] += row
            else:
                self._slots[j] = len(self._slots)
                self._rows[self._slots[j]] = row

    def take(self) -> tuple[np.ndarray, Tensor]:
        ids = np.fromiter(self._slots, np.int64, len(self._slots))
        rows = torch.empty(0, *self._shape) if self._rows is None else self._rows[: len(ids)]
        self._slots = {}
        return ids, rows


def group_features(
    store: GroupStore, score_computer: Any, device: Any, damping: Damping, lambda_reg: float
) -> tuple[Tensor, float]:
    """Features of the groups `[k, p]` of a finished store, and the relative ridge in their Fisher.

    Args:
        store: the store that holds the sums.
        score_computer: TRAK's score computer, which multiplies with the inverse.
        device: the device to compute on.
        damping: relative ridge.
        lambda_reg: TRAK's own ridge, on top of the relative ridge.
    """
    # numerators are loss gradients, except for the sign
    numerators = torch.as_tensor(np.array(store.sums["numerators"]), device=device)
    if store.fisher is not None:
        matrix = torch.as_tensor(np.array(store.fisher), device=device)
        fisher = EmpiricalFisher.of_matrix(matrix, int(store.groups.sizes.sum()))
        damping = 0.0 if damping == "auto" else damping
    else:
        of_fisher = store.sums.get("fisher_rows", store.sums["numerators"])
        sums = torch.as_tensor(np.array(of_fisher), device=device)
        fisher = EmpiricalFisher(sums.shape[1], sums.device).add_groups(store.kind, sums, store.groups.sizes)
    damped, ridge = fisher.damped(damping, lambda_reg)
    return score_computer.get_x_xtx_inv(numerators, damped), ridge
