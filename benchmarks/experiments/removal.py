"""Test accuracy after points are removed and the model is trained again, as in the paper. The points removed are

* the most important points for the *retraining score* (lower is better): every grouping at the largest fraction, the
  paper's best grouping and single points at all fractions;
* the least important points for *pruning* (higher is better): single points compared with large groups, which are
  random (as in the paper) or from the paper's best grouping.

All models that the rows need are collected first, so that they are trained together and no model is trained twice. A
row is written as soon as its models are trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.experiments.bench import Bench, Cell, summary
from benchmarks.experiments.retrainings import Retrainings, Wanted
from benchmarks.names import GRAD_K_MEANS, NO_REMOVAL, PAPER_METHODS, RANDOM, RANDOM_REMOVAL, SINGLE_POINTS
from benchmarks.sizes import RemovalScale
from ggda_ext import Groups
from ggda_ext.evaluation import removal_order

RETRAINING, PRUNING = "retraining", "pruning"
LARGE = 2  # number of group sizes for pruning, the largest ones


@dataclass(frozen=True)
class PendingRow:
    """A row whose models are not trained yet: its fields, and a model for every seed."""

    fields: dict[str, Any]
    models: tuple[Wanted, ...]


def run(bench: Bench, experiment: str) -> None:
    """Compute and write the rows of `RETRAINING` or `PRUNING` that the folder does not have yet."""
    size = bench.size.removal
    if size is None:
        return
    retrains = experiment == RETRAINING
    fractions, cells = (size.removed, _retrained) if retrains else (size.pruned, _pruned)
    rows = list(_baselines(bench, experiment, fractions, size.seeds))
    for cell, shares in cells(bench, size):
        open_shares = [share for share in shares if not bench.folder.done(bench.key(experiment, cell, share))]
        if not open_shares:
            continue
        attribution, groups = bench.attribution(cell), bench.groups(cell)
        for share in open_shares:
            gone = removal_order(attribution.importance, groups, share, largest_first=retrains)
            fields = bench.about(cell, attribution, groups) | {"fraction": share}
            kept = _without(groups.n, gone)
            models = tuple(Wanted(kept, seed) for seed in range(size.seeds))
            rows.append(PendingRow({"key": bench.key(experiment, cell, share)} | fields, models))
    _write_when_trained(bench, experiment, rows)


def _retrained(bench: Bench, size: RemovalScale) -> Iterator[tuple[Cell, Sequence[float]]]:
    """Yield the cells of the retraining score, each with the fractions of the points that are removed."""
    largest = (max(size.removed),)
    for cell in bench.cells(size.cells):
        single = cell.method in PAPER_METHODS and cell.grouping == SINGLE_POINTS
        yield cell, size.removed if single or cell.is_compared else largest
        if cell.is_compared:
            yield cell.mean, largest


def _pruned(bench: Bench, size: RemovalScale) -> Iterator[tuple[Cell, Sequence[float]]]:
    """Yield the cells of pruning, each with the fractions of the points that are removed."""
    known = (SINGLE_POINTS, RANDOM, GRAD_K_MEANS)
    groups = {name: sizes for name, sizes in size.cells.groups.items() if name in known}
    cells = list(bench.cells(replace(size.cells, groups=groups)))
    large = sorted({cell.group_size for cell in cells})[-LARGE:]
    for cell in cells:
        if cell.group_size in (1, *large):
            yield cell, size.pruned
            if cell.is_compared:
                yield cell.mean, size.pruned


def _baselines(bench: Bench, experiment: str, fractions: Sequence[float], seeds: int) -> Iterable[PendingRow]:
    """Yield the baselines: no removal, and removal of random points, which differ for every seed."""
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
    """Write the rows whose models are trained, and return the other rows."""
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
    """Return the training indices that stay."""
    stays = np.ones(n, bool)
    stays[gone] = False
    return np.flatnonzero(stays)
