"""dattri's random projections of group-summed gradients, in as few calls as fit into memory.

dattri's projector generates its matrix anew on every call, which costs more than projecting a hundred rows, so
rows are gathered, from the test side and the training side, before they are projected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from dattri.func.projection import random_project
from torch import Tensor

from ggda_dattri.checkpoint import Checkpoint
from ggda_dattri.grouping import Grouped
from ggda_ext.sharing import in_order, together

Blocks = Iterable[tuple[Tensor, Tensor]]
"""Streamed `(ids [b], rows [b, p])` of this rank."""

PROJECTION_BUDGET = 128 * 2**20
"""Bytes of the rows projected in one call."""


class GroupedProjection(Grouped):
    """Mixin before a dattri attributor that projects gradients."""

    projector_kwargs: Any
    _shared_kwargs: dict[str, Any]
    """dattri's defaults, which its constructor updates in place, for all instances; with groups they are put back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        before = dict(self._shared_kwargs)
        super().__init__(*args, **kwargs)
        if self.groups is not None and self.projector_kwargs is self._shared_kwargs:
            self.projector_kwargs = dict(self.projector_kwargs)
            self._shared_kwargs.clear()
            self._shared_kwargs.update(before)

    @property
    def _projects(self) -> bool:
        """Whether gradients are projected at all."""
        return self.projector_kwargs is not None and self.projector_kwargs.get("proj_type") != "identity"

    def _project(self, checkpoint: Checkpoint, *sides: Blocks) -> list[Tensor]:
        """Projected rows `[number of ids, proj_dim]` of every side, in the order of their ids, from all ranks."""
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in sides]
        with together():
            for side, ids, rows in self._projected_blocks(checkpoint, *sides):
                found[side].append((ids, rows))
        return [in_order(blocks) for blocks in found]

    def _projected_blocks(self, checkpoint: Checkpoint, *sides: Blocks) -> Iterator[tuple[int, Tensor, Tensor]]:
        """`(side, ids, projected rows)`, with as many rows gathered for a call as the budget allows."""
        space = checkpoint.space
        most = max(1, PROJECTION_BUDGET // (space.size * space.dtype.itemsize))
        gathered: Tensor | None = None
        waiting: list[tuple[int, Tensor]] = []
        filled = 0
        for side, blocks in enumerate(sides):
            for ids, rows in blocks:
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
