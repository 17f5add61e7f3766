"""Fidelity against real retraining: group LDS, and the correlation with leaving out one group at a time.

The first takes models trained on random halves of the groups; the second, for few groups, one model without each. Its
rises of the test loss are an attribution method of their own, and get rows as well. Noise of training puts a ceiling
on both: `ceiling` is what perfect scores of one set of seeds would reach with another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from benchmarks.experiments.bench import Bench, Cell
from benchmarks.experiments.retrainings import Retrainings, Wanted
from benchmarks.names import LEAVE_GROUP_OUT, SINGLE_POINTS
from ggda_ext import Groups
from ggda_ext.evaluation import Correlation, group_lds, leave_group_out_correlation, points_of, random_subsets

NAME = "lds"
SUBSET_SEED = 100


def run(bench: Bench) -> None:
    """Write the rows that are not there yet."""
    size = bench.size
    if not size.lds_subsets:
        return
    all_methods = bench.cells(methods=size.methods)  # they share the retrained models
    cells = [cell for cell in all_methods if cell.grouping_seed < size.lds_grouping_seeds]
    cells += [replace(cell, method=LEAVE_GROUP_OUT) for cell in _one_per_grouping(cells) if _leaves_out(bench, cell)]
    cells.sort(key=_grouping)  # stable: methods stay in their order
    open_cells = [cell for cell in cells if not bench.folder.done(bench.key(NAME, cell))]
    with Retrainings(bench.task, bench.folder.path / "retrainings") as retrainings:
        by_grouping = [(key, list(some)) for key, some in groupby(open_cells, key=_grouping)]
        wanted = [models for _, some in by_grouping for models in _models(bench, bench.groups(some[0]), some[0])]
        training = retrainings.train(model for models in wanted for model in models)
        for _, some in by_grouping:
            groups = bench.groups(some[0])
            needed = [model for models in _models(bench, groups, some[0]) for model in models]
            while not all(model in retrainings for model in needed):
                next(training)
            for cell in some:
                bench.folder.append(_row(bench, cell, groups, retrainings))


def _grouping(cell: Cell) -> tuple[str, int, int]:
    return cell.grouping, cell.group_size, cell.grouping_seed


def _one_per_grouping(cells: list[Cell]) -> Iterator[Cell]:
    yield from {_grouping(cell): cell for cell in cells}.values()


def _leaves_out(bench: Bench, cell: Cell) -> bool:
    return cell.grouping != SINGLE_POINTS and len(bench.groups(cell)) <= bench.size.left_out_groups


def _kept(bench: Bench, groups: Groups, cell: Cell) -> np.ndarray:
    return random_subsets(groups, bench.size.lds_subsets, seed=SUBSET_SEED + cell.grouping_seed)


def _halves(bench: Bench, groups: Groups, cell: Cell) -> list[list[Wanted]]:
    return [_with_seeds(bench, points) for points in points_of(groups, _kept(bench, groups, cell))]


def _left_out(bench: Bench, groups: Groups) -> list[list[Wanted]]:
    """Models on all points, then models without each group."""
    everything = np.arange(groups.n)
    return [_with_seeds(bench, everything), *(_with_seeds(bench, np.setdiff1d(everything, group)) for group in groups)]


def _with_seeds(bench: Bench, points: np.ndarray) -> list[Wanted]:
    return [Wanted(points, seed) for seed in range(bench.size.lds_seeds)]


def _models(bench: Bench, groups: Groups, cell: Cell) -> list[list[Wanted]]:
    return _halves(bench, groups, cell) + (_left_out(bench, groups) if _leaves_out(bench, cell) else [])


def _losses(retrainings: Retrainings, models: list[list[Wanted]]) -> np.ndarray:
    """Mean test losses `[subsets, seeds]`."""
    return np.array([[retrainings[model].loss for model in row] for row in models])


def _row(bench: Bench, cell: Cell, groups: Groups, retrainings: Retrainings) -> dict[str, Any]:
    losses = _losses(retrainings, _halves(bench, groups, cell))
    rises = None
    if _leaves_out(bench, cell):
        without = _losses(retrainings, _left_out(bench, groups))
        rises = without[1:] - without[0]
    if cell.method == LEAVE_GROUP_OUT:
        assert rises is not None
        importance, about = rises.mean(1), {"groups": len(groups), "settings": f"{len(groups) + 1} trainings per seed"}
        described = {**vars(cell), **about}
    else:
        attribution = bench.attribution(cell)
        importance, described = attribution.importance, bench.about(cell, attribution, groups)
    found = group_lds(importance, _kept(bench, groups, cell), losses.mean(1))
    fields = {"values": [found.value], "mean": found.value, "interval": list(found.interval)}
    if rises is not None and cell.method != LEAVE_GROUP_OUT and len(groups) >= 3:
        left_out = leave_group_out_correlation(importance, rises.mean(1))
        ranks = leave_group_out_correlation(importance, rises.mean(1), kind="spearman")
        fields |= {"loo_mean": left_out.value, "loo_interval": list(left_out.interval), "loo_spearman": ranks.value}
    return {
        **bench.common(NAME),
        **described,
        **fields,
        "key": bench.key(NAME, cell),
        "subsets": len(losses),
        "ceiling": ceiling(losses),
        "model_seeds": list(range(bench.size.lds_seeds)),
    }


def ceiling(losses: np.ndarray) -> float | None:
    """How well the losses of some seeds `[subsets, seeds]` rank those of the others; None for one seed."""
    seeds = losses.shape[1]
    if seeds < 2:
        return None
    found: list[Correlation] = []
    for seed in range(seeds):
        others = np.delete(losses, seed, axis=1).mean(1)
        found.append(leave_group_out_correlation(others, losses[:, seed], kind="spearman", resamples=1))
    return float(np.mean([one.value for one in found]))
