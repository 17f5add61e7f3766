"""dattri's random projections of gradients summed by group.

dattri's projector generates its matrix anew on every call, which costs more than projecting a hundred rows. So a matrix
that fits into memory is generated once for the test side and the training side. For other projectors, rows of both
sides are gathered before they are projected.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from dattri.func.projection import BasicProjector, random_project
from torch import Tensor

from ggda_dattri.checkpoint import Checkpoint
from ggda_dattri.grouping import Grouped
from ggda_ext import GroupGradients
from ggda_ext.sharing import in_order, together

Side = Iterable[tuple[Tensor, Tensor]] | GroupGradients
"""What is projected: this rank's `(ids [b], rows [b, p])` in dattri's layout, or the gradients of all groups."""

PROJECTION_BUDGET = 128 * 2**20
"""Bytes for a matrix that is kept, or for the rows that are projected in one call."""
_DENSE = ("normal", "rademacher")


class GroupedProjection(Grouped):
    """A mixin that stands before a dattri attributor that projects gradients."""

    projector_kwargs: Any
    _shared_kwargs: dict[str, Any]
    """dattri's defaults, which its constructor changes for all instances."""
    _first_kwargs: dict[str, Any]
    """The defaults as they were when dattri was imported. Instances with groups have them, and change none."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_shared_kwargs" in vars(cls):
            cls._first_kwargs = dict(cls._shared_kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("groups") is None:
            super().__init__(*args, **kwargs)
            return
        with _set_for_now(self._shared_kwargs, self._first_kwargs):
            super().__init__(*args, **kwargs)
            if self.projector_kwargs is self._shared_kwargs:
                self.projector_kwargs = dict(self.projector_kwargs)

    @property
    def _projects(self) -> bool:
        """Whether gradients are projected at all."""
        return self.projector_kwargs is not None and self.projector_kwargs.get("proj_type") != "identity"

    @property
    def _projected_with(self) -> dict[str, Any]:
        """What projected rows depend on beside the gradients; the order of `layer_name` is the order of the columns."""
        return {"projector": str(self.projector_kwargs), "layer_name": self.layer_name}

    def _project(self, checkpoint: Checkpoint, *sides: Side) -> list[Tensor]:
        """Projected rows `[number of ids, proj_dim]` of every side, from all ranks, in the order of their ids."""
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in sides]
        with together():
            for side, ids, rows in self._projected_blocks(checkpoint, *sides):
                found[side].append((ids, rows))
        return [in_order(blocks) for blocks in found]

    def _projected_blocks(self, checkpoint: Checkpoint, *sides: Side) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield `(side, ids, projected rows)`."""
        matrix = self._matrix(checkpoint)
        if matrix is None:
            yield from self._gathered(checkpoint, *sides)
            return
        scale = matrix.shape[1] ** 0.5
        for side, given in enumerate(sides):
            if isinstance(given, GroupGradients):
                blocks = given.blocks(checkpoint.max_rows, through=checkpoint.to_core(matrix.T).T)
            else:
                blocks = ((ids, rows @ matrix) for ids, rows in given)
            for ids, rows in blocks:
                yield side, ids, rows / scale

    def _matrix(self, checkpoint: Checkpoint) -> Tensor | None:
        """The matrix `[p, proj_dim]` of dattri's projector; None if there is none, or if it is large."""
        space, options = checkpoint.space, self.projector_kwargs or {}
        dim, kind = options.get("proj_dim"), options.get("proj_type", "normal")
        on_cpu = torch.device(options.get("device", "cpu")).type == space.device.type == "cpu"
        if not dim or not on_cpu or kind not in _DENSE or space.size * dim * space.dtype.itemsize > PROJECTION_BUDGET:
            return None
        project = random_project(torch.empty(1, space.size, dtype=space.dtype), 1, **options)
        projector: Any = inspect.getclosurevars(project).nonlocals.get("projector")
        if type(projector) is not BasicProjector:
            return None
        if projector.ensemble_id != checkpoint.index:
            projector.ensemble_id = checkpoint.index
            projector.get_generator_states()
            projector._gen_randomness_dense(projector.generator_states[0])
        if projector.num_blocks == 1:
            return projector.proj_matrix
        matrix = torch.empty(space.size, projector.proj_dim, dtype=space.dtype)
        for part, state in zip(matrix.split(projector.block_size, 1), projector.generator_states, strict=True):
            projector._gen_randomness_dense(state)
            part.copy_(projector.proj_matrix[:, : part.shape[1]])
        return matrix

    def _gathered(self, checkpoint: Checkpoint, *sides: Side) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield `(side, ids, projected rows)`; each projector call gets as many rows as the budget allows."""
        space = checkpoint.space
        most = max(1, PROJECTION_BUDGET // (space.size * space.dtype.itemsize))
        gathered: Tensor | None = None
        waiting: list[tuple[int, Tensor]] = []
        filled = 0
        for side, given in enumerate(sides):
            for ids, rows in checkpoint.blocks(given) if isinstance(given, GroupGradients) else given:
                if waiting and filled + len(rows) > most:
                    yield from self._call_projector(checkpoint, gathered, waiting)
                    waiting, filled = [], 0
                if gathered is None or len(rows) > len(gathered):
                    gathered = rows.new_empty(max(most, len(rows)), rows.shape[1])
                gathered[filled : filled + len(rows)] = rows
                filled += len(rows)
                waiting.append((side, ids))
        if waiting:
            yield from self._call_projector(checkpoint, gathered, waiting)

    def _call_projector(
        self, checkpoint: Checkpoint, gathered: Tensor | None, waiting: list[tuple[int, Tensor]]
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        assert gathered is not None
        sizes = [len(ids) for _, ids in waiting]
        rows = gathered[: sum(sizes)]
        if self._projects:
            rows = random_project(rows, len(rows), **self.projector_kwargs)(rows, ensemble_id=checkpoint.index)
        else:
            rows = rows.clone()
        for (side, ids), part in zip(waiting, rows.split(sizes), strict=True):
            yield side, ids, part


@contextmanager
def _set_for_now(shared: dict[str, Any], values: dict[str, Any]) -> Iterator[None]:
    """Context in which a dict holds other values; afterwards it holds its own again."""
    before = dict(shared)
    shared.clear()
    shared.update(values)
    try:
        yield
    finally:
        shared.clear()
        shared.update(before)
