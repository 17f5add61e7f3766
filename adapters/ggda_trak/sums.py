"""Sums over groups of one checkpoint: gradients in, projected, and added to the store together with their points.

    numerators   Σ_{i∈G} Q̄_i φ_i     fisher_rows  Σ_{i∈G} φ_i  (batched)     fisher  Σ_i φ_i φ_iᵀ  (exact)

A group may come in any number of batches, and from any number of ranks. Rows that are expensive to project one by one
are collected before.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ggda_ext import GroupGradients, Groups
from ggda_ext.distributed import world_size
from ggda_trak.factored import FactoredProjector
from ggda_trak.projection import Projection
from ggda_trak.ranks import is_to_reset
from ggda_trak.rows import point_rows
from ggda_trak.store import GroupStore

LEAST_POINTS = 1024  # between writes, which come after so many points that the sums do not depend on time or kills
ROWS_PER_DIMENSION = 32  # points per dimension of the projection, where every call draws the whole matrix anew


class GroupSums:
    """Adds batches of points to the group sums of a checkpoint.

    Args:
        store: where the sums end up.
        groups: the groups of all training points.
        fisher: ``"exact"``, ``"batched"`` or ``"paper"``.
        projection: projects rows.
        model_id: chooses the projection matrix.
        memory_budget: bytes for rows that wait for their projection.
    """

    def __init__(
        self, store: GroupStore, groups: Groups, fisher: str, projection: Projection, model_id: int, memory_budget: int
    ) -> None:
        self.store, self.groups, self.fisher = store, groups, fisher
        self.projection, self.model_id, self.memory_budget = projection, model_id, memory_budget
        own: np.ndarray = np.asarray(store.points) == 1
        reset, self.before = (False, own) if world_size() == 1 else is_to_reset(own)
        if reset:
            store.clear()
        self.now = np.zeros(groups.n, dtype=bool)
        self.names = ("fisher_rows", "numerators") if fisher == "batched" else ("numerators",)
        self._fisher: Tensor | None = None
        self._waiting = _Rows(_rows_in(memory_budget, projection, len(self.names) * len(groups)), projection)
        self._forget()

    def add(
        self,
        gradients: GroupGradients,
        batch: tuple[Tensor, ...],
        indices: np.ndarray,
        weights: Tensor,
        hashes: np.ndarray,
    ) -> None:
        """Add points to the sums of their groups, all of them or (on an error) none.

        Args:
            gradients: of the task's outputs w_i f_i, for batches ``(*batch, w)``.
            batch: the points.
            indices: their training indices `[b]`.
            weights: their Q̄ `[b]`.
            hashes: of their content `[b]`.
        """
        try:
            inside = np.flatnonzero(self.groups.labels[indices] >= 0)
            if len(inside) < len(indices):
                batch, weights = tuple(tensor[inside] for tensor in batch), weights[inside]
            if len(inside):
                self._add(gradients, batch, self.groups.labels[indices[inside]], weights)
        except BaseException:
            self.now[np.concatenate([*self._indices, indices])] = False
            self._forget()
            raise
        self._indices.append(indices)
        self._hashes.append(hashes)
        self.now[indices] = True
        if self._due():
            self.commit()

    def _add(self, gradients: GroupGradients, batch: tuple[Tensor, ...], labels: np.ndarray, weights: Tensor) -> None:
        ones = torch.ones_like(weights)
        projector = self.projection.projector
        if self.fisher == "exact":
            self._add_points(gradients.on((*batch, ones)), labels, weights)
            return
        ids, local = np.unique(labels, return_inverse=True)
        groups = Groups(local, names=[self.groups.name(j) for j in ids])
        weightings = {name: weights if name == "numerators" else ones for name in self.names}
        if isinstance(projector, FactoredProjector) and projector.captures(gradients):
            stacked = torch.stack(list(weightings.values()))
            for at, projected in projector.blocks(gradients.on((*batch, ones), groups), stacked, self.model_id):
                for name, rows in zip(weightings, projected / self.projection.scale, strict=True):
                    self._projected[name].append((ids[at.numpy()], rows))
            return
        for name, given in weightings.items():
            for at, rows in gradients.on((*batch, given), groups).blocks(self._waiting.capacity):
                self._add_rows(name, ids[at.numpy()], rows)

    def _add_rows(self, name: str, ids: np.ndarray, rows: Tensor) -> None:
        if not self.projection.collects:
            self._projected[name].append((ids, self.projection(rows, self.model_id)))
            return
        keys = ids + len(self.groups) * self.names.index(name)
        if not self._waiting.fits(keys):
            self._project()
        self._waiting.add(keys, rows)

    def _add_points(self, gradients: GroupGradients, labels: np.ndarray, weights: Tensor) -> None:
        for at, projected in point_rows(gradients, self.projection, self.model_id):
            rows = projected * weights[at].to(projected)[:, None]
            self._projected["numerators"].append((labels[at.numpy()], rows))
            product = projected.T @ projected
            self._fisher = product if self._fisher is None else self._fisher + product

    def _project(self) -> None:
        keys, rows = self._waiting.take()
        if not len(keys):
            return
        projected = self.projection(rows, self.model_id)
        for number, name in enumerate(self.names):
            mine = np.flatnonzero(keys // len(self.groups) == number)
            self._projected[name].append((keys[mine] % len(self.groups), projected[torch.from_numpy(mine)]))

    def _due(self) -> bool:
        if (self.before | self.now | (self.groups.labels < 0)).all():
            return True
        held = sum(rows.nbytes for parts in self._projected.values() for _, rows in parts)
        points = max(
            LEAST_POINTS, self.groups.n // 100, self.projection.collects * ROWS_PER_DIMENSION * self.projection.dim
        )
        return held > self.memory_budget or sum(map(len, self._indices)) >= points

    def commit(self) -> None:
        """Project what waits, and add everything to the store."""
        if not self._indices:
            return
        self._project()
        every = [ids for parts in self._projected.values() for ids, _ in parts]
        ids = np.unique(np.concatenate(every)) if every else np.empty(0, np.int64)
        sums = {name: self._summed(parts, ids) for name, parts in self._projected.items()}
        fisher = None if self._fisher is None else self._fisher.cpu().numpy()
        self.store.add(np.concatenate(self._indices), ids, sums, fisher, np.concatenate(self._hashes))
        self._forget()

    def _summed(self, parts: list[tuple[np.ndarray, Tensor]], ids: np.ndarray) -> np.ndarray:
        total = torch.zeros(len(ids), self.projection.dim)
        for some, rows in parts:
            total.index_add_(0, torch.from_numpy(np.searchsorted(ids, some)), rows.float().cpu())
        return total.numpy()

    def _forget(self) -> None:
        self._indices: list[np.ndarray] = []
        self._hashes: list[np.ndarray] = []
        self._projected: dict[str, list[tuple[np.ndarray, Tensor]]] = {name: [] for name in self.names}
        self._fisher = None
        self._waiting.take()


class _Rows:
    """Rows of gradients by key, added up until they are taken. The first row allocates the memory for all."""

    def __init__(self, capacity: int, projection: Projection) -> None:
        self.capacity, self._space = capacity, projection.space
        self._slots: dict[int, int] = {}
        self._rows: Tensor | None = None

    def fits(self, keys: np.ndarray) -> bool:
        new = sum(1 for key in keys.tolist() if key not in self._slots)
        return len(self._slots) + new <= self.capacity

    def add(self, keys: np.ndarray, rows: Tensor) -> None:
        if self._rows is None:
            self._rows = rows.new_empty(self.capacity, self._space.size)
        for key, row in zip(keys.tolist(), rows, strict=True):
            if key in self._slots:
                self._rows[self._slots[key]] += row
            else:
                self._slots[key] = len(self._slots)
                self._rows[self._slots[key]] = row

    def take(self) -> tuple[np.ndarray, Tensor]:
        keys = np.fromiter(self._slots, np.int64, len(self._slots))
        rows = torch.empty(0, self._space.size) if self._rows is None else self._rows[: len(keys)]
        self._slots = {}
        return keys, rows


def _rows_in(budget: int, projection: Projection, most: int) -> int:
    row = projection.space.size * torch.empty(0, dtype=projection.space.dtype).element_size()
    return int(min(max(1, budget // row), most))
