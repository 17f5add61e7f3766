"""Removing points and training again: rows for both the retraining score and pruning.

All models that the rows need are collected first, so that they are trained together and none of them twice; a row is
written as soon as its models are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.experiments.bench import Bench, Cell, summary
from benchmarks.experiments.retrainings import Retrainings, Wanted
from benchmarks.names import NO_REMOVAL, RANDOM_REMOVAL
from ggda_ext import Groups
from ggda_ext.evaluation import removal_order


@dataclass(frozen=True)
class PendingRow:
    """A row whose models are not yet trained: its fields, and a model for every seed."""

    fields: dict[str, Any]
    models: tuple[Wanted, ...]


def write_rows(
    bench: Bench,
    experiment: str,
    cells: Iterable[tuple[Cell, Sequence[float]]],
    fractions: Sequence[float],
    seeds: int,
    *,
    largest_first: bool,
) -> None:
    """Write the rows of an experiment that are not there yet.

    Args:
        bench: the task.
        experiment: ``"retraining"`` or ``"pruning"``.
        cells: with the fractions each is removed to.
        fractions: of the baselines.
        seeds: models retrained for every row.
        largest_first: whether the most important points go first, or the least.
    """
    rows = list(_baselines(bench, experiment, fractions, seeds))
    for cell, shares in cells:
        open_shares = [share for share in shares if not bench.folder.done(bench.key(experiment, cell, share))]
        if not open_shares:
            continue
        attribution, groups = bench.attribution(cell), bench.groups(cell)
        for share in open_shares:
            gone = removal_order(attribution.importance, groups, share, largest_first=largest_first)
            fields = bench.about(cell, attribution, groups) | {"fraction": share}
            kept = _without(groups.n, gone)
            models = tuple(Wanted(kept, seed) for seed in range(seeds))
            rows.append(PendingRow({"key": bench.key(experiment, cell, share)} | fields, models))
    _write_when_trained(bench, experiment, rows)


def _baselines(bench: Bench, experiment: str, fractions: Sequence[float], seeds: int) -> Iterable[PendingRow]:
    """No removal, and removal of random points, others for every seed."""
    n = len(bench.task.data.train[0])
    everyone, equal = Groups.singletons(n), np.zeros(n)
    for method, shares in ((NO_REMOVAL, (0.0,)), (RANDOM_REMOVAL, tuple(fractions))):
        for share in shares:
            key = bench.key(experiment, method, share)
            if bench.folder.done(key):
                continue
            models = tuple(
                Wanted(_without(n, removal_order(equal, everyone, share, seed=seed)), seed) for seed in range(seeds)
            )
            yield PendingRow({"key": key, "method": method, "fraction": share}, models)


def _write_when_trained(bench: Bench, experiment: str, rows: list[PendingRow]) -> None:
    with Retrainings(bench.task, bench.folder.path / "retrainings") as retrainings:
        waiting = rows
        for _ in retrainings.train(model for row in rows for model in row.models):
            waiting = _write_ready(bench, experiment, waiting, retrainings)
        _write_ready(bench, experiment, waiting, retrainings)


def _write_ready(bench: Bench, experiment: str, rows: list[PendingRow], retrainings: Retrainings) -> list[PendingRow]:
    """Write the rows whose models are trained; the others are returned."""
    waiting = []
    for row in rows:
        if not all(model in retrainings for model in row.models):
            waiting.append(row)
            continue
        values = [retrainings[model].accuracy for model in row.models]
        losses = [retrainings[model].loss for model in row.models]
        found = summary(values) | {"losses": losses, "model_seeds": [model.seed for model in row.models]}
        bench.folder.append(bench.common(experiment) | row.fields | found)
    return waiting


def _without(n: int, gone: np.ndarray) -> np.ndarray:
    """The training indices that stay."""
    stays = np.ones(n, bool)
    stays[gone] = False
    return np.flatnonzero(stays)
