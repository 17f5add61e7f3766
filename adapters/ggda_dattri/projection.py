"""dattri's random projections of gradients summed by group, in as few calls as memory allows.

dattri's projector generates its matrix anew on every call, which costs more than projecting a hundred rows. So rows of
the test side and of the training side are gathered before they are projected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from dattri.func.projection import random_project
from torch import Tensor

from ggda_dattri.checkpoint import Checkpoint
from ggda_dattri.grouping import Grouped
from ggda_ext.sharing import in_order, together

Blocks = Iterable[tuple[Tensor, Tensor]]
"""A stream of this rank's `(ids [b], rows [b, p])`."""

PROJECTION_BUDGET = 128 * 2**20
"""Bytes for the rows that are projected in one call."""


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

    def _project(self, checkpoint: Checkpoint, *sides: Blocks) -> list[Tensor]:
        """Projected rows `[number of ids, proj_dim]` of every side, from all ranks, in the order of their ids."""
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in sides]
        with together():
            for side, ids, rows in self._projected_blocks(checkpoint, *sides):
                found[side].append((ids, rows))
        return [in_order(blocks) for blocks in found]

    def _projected_blocks(self, checkpoint: Checkpoint, *sides: Blocks) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield `(side, ids, projected rows)`; each projector call gets as many rows as the budget allows."""
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
