"""Retraining score and pruning: how a model changes as groups are removed in the order of their importance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ggda_ext.evaluation.importance import Aggregation, aggregated, removal_order
from ggda_ext.groups.partition import Groups, GroupsLike
from ggda_ext.results.verifying import Retrain, standard_error


@dataclass(frozen=True)
class RemovalCurve:
    """Values of models retrained without part of the data.

    Attributes:
        fractions: removed fractions of the training points `[f]`.
        values: one value per fraction and seed `[f, s]`, test accuracy unless `retrain` measures something else.
    """

    fractions: np.ndarray
    values: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """Mean over seeds `[f]`."""
        return self.values.mean(1)

    @property
    def stderr(self) -> np.ndarray:
        """Standard error of the mean over seeds `[f]`; NaN for one seed."""
        return standard_error(self.values)


def retraining_score(
    importance: Any,
    groups: GroupsLike,
    retrain: Retrain,
    fractions: Sequence[float] = (0.01, 0.05, 0.1, 0.2),
    *,
    aggregation: Aggregation = "sum",
    seed: int = 0,
) -> RemovalCurve:
    """Remove the most important points, train again and return the accuracy; lower is better.

    Args:
        importance: importance of every group `[k]`.
        groups: a `Groups` or anything it accepts.
        retrain: a `Retrainer`, or any function with the same arguments and result.
        fractions: shares of the training points to remove.
        aggregation: rank groups by their importance (``"sum"``), or by their importance divided by their size
            (``"mean"``).
        seed: random seed of the choice among the members of the last group.
    """
    return _curve(importance, groups, retrain, fractions, aggregation, seed, largest_first=True)


def pruning_score(
    importance: Any,
    groups: GroupsLike,
    retrain: Retrain,
    fractions: Sequence[float] = (0.25, 0.5, 0.75),
    *,
    aggregation: Aggregation = "sum",
    seed: int = 0,
) -> RemovalCurve:
    """Remove the least important points, train again and return the accuracy; higher is better.

    The arguments are the same as in `retraining_score`.
    """
    return _curve(importance, groups, retrain, fractions, aggregation, seed, largest_first=False)


def _curve(
    importance: Any, groups: GroupsLike, retrain: Retrain, fractions: Sequence[float], aggregation: Aggregation,
    seed: int, *, largest_first: bool,
) -> RemovalCurve:  # fmt: skip
    if not isinstance(fractions, Iterable):
        raise TypeError(f"fractions={fractions!r}: pass a list of them, e.g. [0.1, 0.2].")
    groups = Groups.of(groups)
    values = aggregated(importance, groups, aggregation)
    removed = [removal_order(values, groups, f, largest_first=largest_first, seed=seed) for f in fractions]
    kept = [np.setdiff1d(np.arange(groups.n), gone, assume_unique=True) for gone in removed]
    return RemovalCurve(np.asarray(fractions, float), np.asarray(retrain(kept), float))
