"""Fidelity to real retraining: predicted test losses, compared with those of models that saw only some of the groups.

There are three protocols, which are never mixed: models on random *halves* of the groups, models that *keep 80 %* of
them, each with about the same number of points, and models that *leave one out*. The truth is the mean over models of
other seeds than the explained one. A method should be better than two trivial rows: the number of points kept, and how
far the classes of the kept points differ from those of all points. Two ceilings are reported too. `ceiling` is the LDS
that the same number of models of other seeds reaches. `additive_ceiling` is the LDS that the best additive score could
reach; this score is fitted to the retrainings themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np

from benchmarks.experiments.bench import Bench, Cell
from benchmarks.experiments.predictions import Prediction, Predictor, Truth, two_halves
from benchmarks.experiments.retrainings import Retrainings, Wanted
from benchmarks.names import HALVES, KEEP_80, LDS_METHODS, LEAVE_GROUP_OUT, LEAVE_ONE_OUT, SINGLE_POINTS, TRIVIAL
from benchmarks.sizes import LdsScale
from ggda_ext import Groups
from ggda_ext.evaluation import agreement, points_of, random_subsets

NAME = "lds"
SUBSET_SEED = 200
FRACTIONS = {HALVES: 0.5, KEEP_80: 0.8}
FEWEST_GROUPS = 6  # for protocols other than halves


def run(bench: Bench) -> None:
    """Compute and write the rows that the folder does not have yet."""
    size = bench.size.lds
    if size is None:
        return
    with Retrainings(bench.task, bench.folder.path / "retrainings") as retrainings:
        for cell in _groupings(bench, size):
            _write(bench, size, cell, retrainings)


def _groupings(bench: Bench, size: LdsScale) -> Iterator[Cell]:
    """Yield a cell without a method for every grouping that is drawn."""
    for grouping, group_size in bench.groupings(size.cells):
        yield from (Cell("", grouping, group_size, seed) for seed in size.cells.grouping_seeds)
    if SINGLE_POINTS in size.cells.groups:
        yield Cell("")


def _write(bench: Bench, size: LdsScale, cell: Cell, retrainings: Retrainings) -> None:
    """Write the rows of one grouping for each trio and protocol, then those of the method leave-group-out."""
    groups, protocols = bench.groups(cell), _protocols(bench, size, cell)

    @cache
    def truth(protocol: str) -> Truth:
        return _retrained(size, groups, cell, protocol, retrainings)

    @cache
    def predictor(trio: int) -> Predictor:
        return Predictor(bench, groups, cell, trio)

    methods = [
        method
        for method in (*(one for one in LDS_METHODS if one in size.cells.methods), *TRIVIAL)
        if bench.runs(method, cell.grouping, cell.group_size, size.cells)
    ]
    explaining = [method for method in methods if method not in TRIVIAL]
    wanted = [
        (trio, protocol, method)
        for trio in range(size.trios)
        for protocol in protocols
        for method in (explaining if trio else methods)
    ]
    if LEAVE_ONE_OUT in protocols:
        wanted += [(0, protocol, LEAVE_GROUP_OUT) for protocol in protocols if protocol != LEAVE_ONE_OUT]
    for trio, protocol, method in wanted:
        asked = replace(cell, method=method)
        key = bench.key(NAME, asked, protocol, *([f"trio {trio}"] if trio else []))
        if bench.folder.done(key):
            continue
        real = truth(protocol)
        if method == LEAVE_GROUP_OUT:
            rises = truth(LEAVE_ONE_OUT).losses.mean(1) - bench.subject.loss
            found = Prediction.additive(real.kept, rises, bench.subject.loss, f"{len(groups)} trainings")
        else:
            found = predictor(trio)(method, real)
        about = {**vars(asked), "protocol": protocol, "trio": trio, "groups": len(groups), "key": key}
        bench.folder.append(bench.common(NAME) | about | _fields(found, real))


def _protocols(bench: Bench, size: LdsScale, cell: Cell) -> list[str]:
    k = len(bench.groups(cell))
    few = k >= FEWEST_GROUPS and bench.is_refitted(size.cells, cell.group_size)
    found = [protocol for protocol in size.protocols if protocol == HALVES or few]
    return [protocol for protocol in found if protocol != LEAVE_ONE_OUT or k <= size.left_out_groups]


def _retrained(size: LdsScale, groups: Groups, cell: Cell, protocol: str, retrainings: Retrainings) -> Truth:
    """Train models on choices of groups and return the choices with the losses of the models."""
    if protocol == LEAVE_ONE_OUT:
        kept = ~np.eye(len(groups), dtype=bool)
    else:
        kept = random_subsets(
            groups, size.subsets, fraction=FRACTIONS[protocol], equal_points=True,
            seed=SUBSET_SEED + cell.grouping_seed,
        )  # fmt: skip
    models = [[Wanted(points, 1 + seed) for seed in range(size.seeds)] for points in points_of(groups, kept)]
    for _ in retrainings.train(model for row in models for model in row):
        pass
    return Truth(kept, np.array([[retrainings[model].loss for model in row] for row in models]))


def _fields(found: Prediction, truth: Truth) -> dict[str, Any]:
    """Return the fields of a row that say how well predictions follow the truth."""
    real = truth.losses.mean(1)
    fields = agreement_fields(found.values, real)
    if found.calibrated is not None:
        rest = agreement_fields(found.calibrated, real[two_halves(len(real))[1]])
        fields |= {f"calibrated_{name}": value for name, value in rest.items()}
    if truth.additive is not None:
        fields |= {"additive_ceiling": truth.additive.value, "additive_interval": list(truth.additive.interval)}
    return fields | {
        "values": [fields["mean"]],
        "predicted": found.values.tolist(),
        "real": real.tolist(),
        "seconds": found.seconds,
        "settings": found.settings,
        "subsets": len(real),
        "ceiling": ceiling(truth.losses),
        "model_seeds": list(range(1, 1 + truth.losses.shape[1])),
    }


def agreement_fields(predicted: np.ndarray, real: np.ndarray) -> dict[str, Any]:
    """Return the rank correlation (`mean`), Pearson's correlation, their intervals, and the slope.

    All are None if the predictions or the real values are all equal.
    """
    if np.ptp(predicted) == 0 or np.ptp(real) == 0:
        return dict.fromkeys(("mean", "interval", "pearson", "pearson_interval", "slope"))
    found = agreement(predicted, real)
    return {
        "mean": found.spearman.value,
        "interval": list(found.spearman.interval),
        "pearson": found.pearson.value,
        "pearson_interval": list(found.pearson.interval),
        "slope": found.slope,
    }


def ceiling(losses: np.ndarray) -> float | None:
    """Estimate how well as many models of other seeds would rank the mean of these losses `[subsets, seeds]`.

    The estimate is the mean agreement over all pairs of seeds, corrected with the formula of Spearman and Brown. It is
    None for one seed.
    """
    seeds = losses.shape[1]
    if seeds < 2:
        return None
    pairs = combinations(losses.T, 2)
    alike = float(np.mean([agreement(one, other, resamples=1).spearman.value for one, other in pairs]))
    return seeds * alike / (1 + (seeds - 1) * alike) if alike > 0 else alike
