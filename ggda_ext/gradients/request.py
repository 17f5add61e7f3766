"""What every strategy is given: a model at its current parameters, a loss, data, groups and limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ggda_ext.data import DataLike, IndexedData, to_device
from ggda_ext.distributed import my_share, share_of_stream
from ggda_ext.gradients.captured import CapturedLayers
from ggda_ext.gradients.hooks import Layer, Observer
from ggda_ext.gradients.parameters import ParameterSpace
from ggda_ext.groups.partition import GroupBatch, Groups
from ggda_ext.losses import ExampleLoss, as_example_loss
from ggda_ext.model_state import full_precision, sums_on
from ggda_ext.progress import progress

CACHED_BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True, init=False)
class PointGradients:
    """The gradients of single test points as directions, given by what they are gradients of.

    A provider that knows the points, not only their gradients `[m, p]`, can score them without forming those.

    Args:
        loss_fn: as in `GroupGradients`: ``loss_fn(output, target)`` of any reduction, or an `ExampleLoss`.
        data: the test points, as `GroupGradients` takes training points.
        batch_size: most points to run at once; by default those of a DataLoader, else as many as fit.
    """

    loss: ExampleLoss
    data: IndexedData
    batch_size: int | None

    def __init__(self, loss_fn: Any, data: DataLike, batch_size: int | None = None) -> None:
        object.__setattr__(self, "loss", as_example_loss(loss_fn))
        loaded = data.batch_size if isinstance(data, DataLoader) else None
        object.__setattr__(self, "batch_size", batch_size or loaded)
        object.__setattr__(self, "data", data if isinstance(data, IndexedData) else IndexedData(data, "the test data"))

    @property
    def n(self) -> int:
        if self.data.n is None:
            raise TypeError(f"{self.data.name} has no length: pass test points with a known number.")
        return self.data.n


@dataclass(frozen=True)
class Request:
    """One question to a strategy. Batches come on the model's device."""

    space: ParameterSpace
    loss: ExampleLoss
    data: IndexedData
    groups: Groups
    captured: CapturedLayers
    batch_size: int
    memory_budget: int
    show_progress: bool | None = False
    title: str = "ggda"
    within: tuple[int, int] = (0, 0)
    """This rank's share of ``groups.order`` for `grouped_batches`."""
    weights: Tensor | None = None
    """Weightings of the points `[w, n]`: rows are then sums of w_i ∇ℓ_i, one for each weighting `[b, w, p]`."""

    @property
    def layers(self) -> list[Layer]:
        """The layers that `observe` tells about."""
        return self.captured.layers

    def observe(self, batch: Any, observer: Observer) -> None:
        """Run a batch forward and backward under an observer."""
        self.captured.run(batch, observer)

    @cached_property
    def loss_module(self) -> nn.Module:
        """The per-example loss as a module around the model, for functional calls with other parameters."""
        return LossModule(self.space.model, self.loss)

    def weights_of(self, groups: GroupBatch) -> Tensor | None:
        """The weightings of the points of a batch `[w, b]`; None if points are not weighted."""
        if self.weights is None:
            return None
        at = torch.from_numpy(groups.indices.astype(np.int64)).to(self.weights.device)
        return self.weights[:, at].to(self.space.device, self.space.dtype)

    @property
    def rows_in_budget(self) -> int:
        """How many rows of length p fit into the memory budget, for consumers that want large blocks."""
        return self._rows_in(self.memory_budget)

    @property
    def rows_near_cache(self) -> int:
        """How many rows to form at a time when they are used at once: large temporaries page-fault."""
        return self._rows_in(min(CACHED_BLOCK_BYTES, self.memory_budget))

    def _rows_in(self, size: int) -> int:
        weightings = 1 if self.weights is None else len(self.weights)
        return int(min(max(1, size // (weightings * self.space.size * self.space.dtype.itemsize)), 1024))

    def empty_scores(self, m: int) -> Tensor:
        """Zeros `[m, k]` to add scores to, in double precision: a group may have a billion points."""
        return torch.zeros(m, len(self.groups), dtype=torch.float64, device=sums_on(self.space.device))

    def natural_batches(self) -> Iterator[tuple[Tensor, Any]]:
        """This rank's share of all points, in the order of the data set: `(their group ids, batch)`."""
        for indices, batch in self._bar(self._in_order(), len(my_share(self._points)), lambda item: len(item[0])):
            if indices[-1] >= self.groups.n:
                raise ValueError(
                    f"groups was built for {self.groups.n} training points, but {self.data.name} gives more: "
                    "build it with one label per point."
                )
            labels = torch.from_numpy(self.groups.labels_of(indices).astype(np.int64))
            yield labels.to(self.space.device), to_device(batch, self.space.device)

    @property
    def _points(self) -> int:
        return int(self.groups.sizes.sum())

    @property
    def _complete(self) -> bool:
        return self._points == self.groups.n

    def _in_order(self) -> Iterator[tuple[np.ndarray, Any]]:
        if self._complete and self.data.is_stream:
            yield from share_of_stream(self._counted())
            return
        if self._complete:
            yield from self.data.my_share(self.batch_size)
            return
        inside = np.flatnonzero(self.groups.labels >= 0)[my_share(self._points)]
        runs = [inside[low : low + self.batch_size] for low in range(0, len(inside), self.batch_size)]
        yield from zip(runs, self.data.batches(runs), strict=True)

    def _counted(self) -> Iterator[tuple[np.ndarray, Any]]:
        """The batches of a stream, which must not end before the groups do."""
        seen = 0
        for indices, batch in self.data.sequential(self.batch_size):
            seen += len(indices)
            yield indices, batch
        if seen < self.groups.n:
            raise ValueError(
                f"groups was built for {self.groups.n} training points, but {self.data.name} gives only "
                f"{seen}: build it with one label per point."
            )

    def grouped_batches(
        self, most_groups: int | None = None, most_points: int | None = None
    ) -> Iterator[tuple[GroupBatch, Any]]:
        """Batches of the points `within` that hold groups back to back, with their segments."""
        size = min(self.batch_size, most_points or self.batch_size)
        batches = self.data.batches(group.indices for group in self.groups.batches(size, most_groups, self.within))
        pairs = zip(self.groups.batches(size, most_groups, self.within), batches, strict=True)
        low, high = self.within
        for groups, batch in self._bar(pairs, high - low, lambda item: len(item[0])):
            yield groups, to_device(batch, self.space.device)

    def scores_of(self, blocks: Iterable[tuple[Tensor, Tensor]], directions: Tensor) -> Tensor:
        """Inner products of directions `[m, p]` with streamed rows `[m, k]`."""
        scores = self.empty_scores(len(directions))
        for ids, rows in blocks:
            with full_precision(rows.device):
                scores[:, ids.to(scores.device)] = (directions @ rows.T).to(scores)
        return scores

    def _bar(self, items: Iterator[Any], total: int, size: Any) -> Iterator[Any]:
        with progress(int(total), self.title, self.show_progress) as bar:
            for item in items:
                yield item
                bar.update(size(item))


class LossModule(nn.Module):
    """Per-example losses of a batch, with the model as the submodule `model`."""

    def __init__(self, model: nn.Module, loss: ExampleLoss) -> None:
        super().__init__()
        self.training = model.training
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> Tensor:
        return self.loss.each(self.model, batch)


def merge_pieces(pieces: Iterator[tuple[Tensor, Tensor, bool]], max_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of at most `max_rows` finished rows from `(ids, rows, whether the group is complete)`.

    The pieces of a group are added up in double precision.
    """
    ids: list[Tensor] = []
    rows: list[Tensor] = []
    begun: Tensor | None = None
    for piece_ids, piece_rows, complete in pieces:
        if begun is not None or not complete:
            wide = piece_rows.to(sums_on(piece_rows.device), torch.float64)
            begun = wide if begun is None else begun.add_(wide)
        if not complete:
            continue
        if begun is not None:
            piece_rows, begun = begun.to(piece_rows), None
        if rows and sum(map(len, rows)) + len(piece_rows) > max_rows:
            yield _joined(ids), _joined(rows)
            ids, rows = [], []
        ids.append(piece_ids)
        rows.append(piece_rows)
    if rows:
        yield _joined(ids), _joined(rows)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)  # cat copies even a single part
