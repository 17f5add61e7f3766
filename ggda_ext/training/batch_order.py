"""The training points that every model of a stack sees at every step: its own permutations of its own subset.

The models of a stack are sorted by falling number of steps. So the models that are still in training are always the
first ones, and models with the same schedule are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from ggda_ext.training.recipe import Recipe, order_generator, shuffled


@dataclass(frozen=True)
class StepBatch:
    """The batches of one step, one per model still in training.

    Attributes:
        indices: training indices `[models, b]`. If a model has fewer than b points, the rest is filled with n, which is
            one past the last index.
        counts: number of points of every model `[models]`, or a single number if all models have b points.
    """

    indices: Tensor
    counts: Tensor | int


class Walk:
    """The batches of neighbouring models with the same number of steps per epoch.

    Args:
        subsets: training indices of every model.
        seeds: seed of the batch order of every model.
        recipe: batch size and epochs.
        n: number of training points; as an index it marks a position without a point.

    Attributes:
        steps: number of steps of the whole training.
        rates: learning rate and beta1 of every step.
    """

    def __init__(self, subsets: Sequence[Tensor], seeds: Sequence[int], recipe: Recipe, n: int) -> None:
        self.subsets, self.generators = subsets, [order_generator(seed) for seed in seeds]
        self.batch_size, self.per_epoch = recipe.batch_size, recipe.steps_per_epoch(len(subsets[0]))
        self.steps = recipe.epochs * self.per_epoch
        self.rates = recipe.rates(self.steps)
        last = [len(subset) - (self.per_epoch - 1) * self.batch_size for subset in subsets]
        self.last_counts = last[0] if len(set(last)) == 1 else torch.tensor(last)
        self._order = torch.full((len(subsets), self.per_epoch * self.batch_size), n)
        self._batches = self._order.new_empty(self.per_epoch, len(subsets), self.batch_size)

    def __len__(self) -> int:
        return len(self.subsets)

    def batch(self, step: int) -> StepBatch:
        """Return the batches of one step; call it once for every step, in order."""
        at = step % self.per_epoch
        if at == 0:
            for row, subset, generator in zip(self._order, self.subsets, self.generators, strict=True):
                row[: len(subset)] = shuffled(subset, generator)
            self._batches.copy_(self._order.view(len(self), self.per_epoch, self.batch_size).transpose(0, 1))
        counts = self.last_counts if at == self.per_epoch - 1 else self.batch_size
        return StepBatch(self._batches[at], counts)


def walks(subsets: Sequence[Tensor], seeds: Sequence[int], recipe: Recipe, n: int) -> list[Walk]:
    """Return one walk for each run of neighbours with the same number of steps, the longest training first."""
    found = []
    steps = [recipe.steps(len(subset)) for subset in subsets]
    for _, run in groupby(range(len(subsets)), steps.__getitem__):
        members = list(run)
        found.append(Walk([subsets[j] for j in members], [seeds[j] for j in members], recipe, n))
    assert all(a.steps > b.steps for a, b in pairwise(found)), "sorted by falling step counts"
    return found


def batches(walking: Sequence[Walk]) -> Iterator[tuple[int, list[Walk], StepBatch]]:
    """Yield every step with the walks that are still in training and their joint batch."""
    for step in range(walking[0].steps):
        active = [walk for walk in walking if step < walk.steps]
        yield step, active, _joined([walk.batch(step) for walk in active])


def _joined(parts: list[StepBatch]) -> StepBatch:
    if len(parts) == 1:
        indices, counts = parts[0].indices, parts[0].counts
    else:
        indices = torch.cat([part.indices for part in parts])
        sizes = [
            torch.full((len(part.indices),), part.counts) if isinstance(part.counts, int) else part.counts
            for part in parts
        ]
        counts = torch.cat(sizes)
        first = int(counts[0])
        counts = first if bool((counts == first).all()) else counts
    return StepBatch(indices[:, :counts] if isinstance(counts, int) else indices, counts)


def by_falling_steps(subsets: Sequence[Tensor], recipe: Recipe) -> np.ndarray:
    """Return the positions of the models sorted by falling number of steps, as a stack needs them."""
    return np.argsort([-recipe.steps(len(subset)) for subset in subsets], kind="stable")
