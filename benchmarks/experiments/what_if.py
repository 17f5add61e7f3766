"""Counterfactuals against real retraining: what-if, warm starts and additive scores beside two trivial predictors.

Protocols, never mixed: models on *halves* of the groups, on 80 % of them, each with about the same number of points,
and without one group at a time. A method counts for what it has beyond the trivial rows: the number of points kept,
and how far the classes of the kept points are from those of all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.experiments.bench import Bench, Cell
from benchmarks.experiments.lds import ceiling
from benchmarks.experiments.retrainings import Retrainings, Wanted
from benchmarks.experiments.subject import Timed, timed
from benchmarks.names import CG, CLASS_BALANCE, GRAD_K_MEANS, KEPT_POINTS, RANDOM, WARM_START, WHAT_IF
from benchmarks.tasks import LOSS
from ggda_ext import Groups, WhatIf
from ggda_ext.evaluation import additive_ceiling, leave_group_out_correlation, points_of, random_subsets
from ggda_ext.training import train_many

NAME = "what-if"
PROTOCOLS = {"halves": 0.5, "keep 80 %": 0.8}
LEAVE_ONE_OUT = "leave one out"
METHODS = (WHAT_IF, WARM_START, CG, KEPT_POINTS, CLASS_BALANCE)
SUBSET_SEED = 200
RETRAINED = 8
"""Retrainings that calibrate what-if; its values are compared on the others."""
FEWEST_GROUPS, MOST_GROUPS = 6, 130
WARM_EPOCHS, SLOWER = 3, 10.0  # of a warm start, with a tenth of the learning rate


@dataclass(frozen=True)
class Setting:
    """A grouping with a protocol: the models that predictions are compared with."""

    cell: Cell
    protocol: str

    @property
    def name(self) -> str:
        return f"{self.cell.grouping}/{self.cell.group_size}/{self.cell.grouping_seed}/{self.protocol}"


def run(bench: Bench) -> None:
    """Write the rows that are not there yet."""
    if not bench.size.lds_subsets:
        return
    with Retrainings(bench.task, bench.folder.path / "retrainings") as retrainings:
        for setting in _settings(bench):
            missing = [m for m in METHODS if not bench.folder.done(bench.key(NAME, setting.name, m))]
            if not missing:
                continue
            groups = bench.groups(setting.cell)
            kept = _kept(bench, groups, setting)
            models = [_with_seeds(bench, points) for points in points_of(groups, kept)]
            for _ in retrainings.train(model for row in models for model in row):
                pass
            losses = np.array([[retrainings[model].loss for model in row] for row in models])
            for method in missing:
                bench.folder.append(_row(bench, setting, method, groups, kept, losses))


def _settings(bench: Bench) -> Iterator[Setting]:
    size, n = bench.size, len(bench.task.data.train[0])
    for grouping in (RANDOM, GRAD_K_MEANS):
        for group_size in size.retrained_sizes or size.group_sizes:
            k = n / group_size
            if grouping not in (size.retrained_groupings or size.groupings) or not FEWEST_GROUPS <= k <= MOST_GROUPS:
                continue
            for seed in range(size.lds_grouping_seeds):
                cell = Cell(WHAT_IF, grouping, group_size, seed)
                yield from (Setting(cell, protocol) for protocol in PROTOCOLS)
                if k <= size.left_out_groups:
                    yield Setting(cell, LEAVE_ONE_OUT)


def _kept(bench: Bench, groups: Groups, setting: Setting) -> np.ndarray:
    if setting.protocol == LEAVE_ONE_OUT:
        return ~np.eye(len(groups), dtype=bool)
    return random_subsets(
        groups, bench.size.lds_subsets, fraction=PROTOCOLS[setting.protocol], equal_points=True,
        seed=SUBSET_SEED + setting.cell.grouping_seed,
    )  # fmt: skip


def _with_seeds(bench: Bench, points: np.ndarray) -> list[Wanted]:
    """Models of other seeds than the one that is explained."""
    return [Wanted(points, 1 + seed) for seed in range(bench.size.lds_seeds)]


def _row(
    bench: Bench, setting: Setting, method: str, groups: Groups, kept: np.ndarray, losses: np.ndarray
) -> dict[str, Any]:
    real = losses.mean(1)
    predicted, seconds, after = _predicted(bench, setting, method, groups, kept, losses)
    fields = {"predicted": predicted.tolist(), "real": real.tolist(), **_agreement(predicted, real)}
    if after is not None and len(real) - RETRAINED >= 3:
        rest = _agreement(after[RETRAINED:], real[RETRAINED:])
        fields |= {f"calibrated_{name}": value for name, value in rest.items()}
    if len(kept) >= 15:
        fields["additive_ceiling"] = additive_ceiling(kept, real).value
    return {
        **bench.common(NAME),
        **vars(replace(setting.cell, method=method)),
        **fields,
        "protocol": setting.protocol,
        "groups": len(groups),
        "key": bench.key(NAME, setting.name, method),
        "subsets": len(kept),
        "cpu_seconds": seconds,
        "ceiling": ceiling(losses),
    }


def _agreement(predicted: np.ndarray, real: np.ndarray) -> dict[str, Any]:
    """Rank correlation with its interval, linear correlation, and the slope of real on predicted values."""
    if np.ptp(predicted) == 0:
        return {"mean": None, "interval": None, "pearson": None, "slope": None}
    ranks = leave_group_out_correlation(predicted, real, kind="spearman")
    return {
        "mean": ranks.value,
        "interval": list(ranks.interval),
        "pearson": leave_group_out_correlation(predicted, real, resamples=1).value,
        "slope": float(np.polyfit(predicted, real, 1)[0]),
    }


def _predicted(
    bench: Bench, setting: Setting, method: str, groups: Groups, kept: np.ndarray, losses: np.ndarray
) -> tuple[np.ndarray, float, np.ndarray | None]:
    """Predicted losses `[s]`, CPU seconds, and for what-if the predictions after calibration."""
    subject = bench.subject
    match method:
        case "What-if":
            return _what_if(bench, groups, kept, losses)
        case "Warm start":
            found: Timed[np.ndarray] = timed(_warm_started, bench, points_of(groups, kept))
            return found.value, found.seconds, None
        case "Kept points":
            return -(kept @ groups.sizes).astype(float), 0.0, None
        case "Class balance":
            labels = subject.train[1].cpu().numpy()
            classes = bench.task.data.classes
            shares = np.array([_class_shares(labels[points], classes) for points in points_of(groups, kept)])
            return np.abs(shares - _class_shares(labels, classes)).sum(1), 0.0, None
    attribution = bench.attribution(replace(setting.cell, method=method))
    return -kept.astype(float) @ attribution.importance, sum(attribution.seconds.values()), None


def _what_if(
    bench: Bench, groups: Groups, kept: np.ndarray, losses: np.ndarray
) -> tuple[np.ndarray, float, np.ndarray | None]:
    subject, measure = bench.subject, bench.subject.property
    asked = timed(WhatIf, subject.model, LOSS, subject.train, groups, recipe=bench.task.recipe)
    what_if = asked.value
    before = timed(what_if.subsets, kept, measure)
    after = None
    if len(kept) - RETRAINED >= 3:
        what_if.verify(lambda subsets: losses[:RETRAINED], measure, kept[:RETRAINED])
        after = what_if.subsets(kept, measure).numpy()
    return before.value.numpy(), asked.seconds + before.seconds, after


def _warm_started(bench: Bench, subsets: list[np.ndarray]) -> np.ndarray:
    """Test losses of the model itself, trained on for a few epochs on what is kept."""
    recipe = bench.task.recipe
    recipe = replace(
        recipe, epochs=WARM_EPOCHS, learning_rate=recipe.learning_rate / SLOWER, schedule="constant"
    )  # fmt: skip
    model = bench.subject.model
    x, y = bench.task.data.test
    models = train_many(
        lambda: copy.deepcopy(model), LOSS, bench.task.data.train, recipe, seeds=[0] * len(subsets), subsets=subsets
    )
    return np.array([float(LOSS(outputs, y)) for outputs in models.outputs(x)])


def _class_shares(labels: np.ndarray, classes: int) -> np.ndarray:
    return np.bincount(labels, minlength=classes) / len(labels)
