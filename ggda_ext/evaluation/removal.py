"""Retraining score and pruning: how a model changes as groups are removed in the order of their importance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ggda_ext.evaluation.importance import Aggregation, aggregated, removal_order
from ggda_ext.groups.partition import Groups, GroupsLike
from ggda_ext.results.verifying import Retrain, retrained, standard_error


@dataclass(frozen=True)
class RemovalCurve:
    """Values of models retrained without part of the data.

    Attributes:
        fractions: fractions of the training points that were really removed, in whole points `[f]`.
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
        fractions: shares of the training points to remove. Points in no group stay, so that a share above that of the
            points in groups raises an error.
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


def listed_fractions(fractions: Any) -> list[float]:
    """Return the fractions as a list; raise an error for a single number, and for none."""
    if not isinstance(fractions, Iterable):
        raise TypeError(f"fractions={fractions!r}: pass a list of them, e.g. [0.1, 0.2].")
    listed = list(fractions)
    if not listed:
        raise ValueError("fractions is empty: pass at least one, e.g. [0.1].")
    return listed


def _curve(
    importance: Any, groups: GroupsLike, retrain: Retrain, fractions: Sequence[float], aggregation: Aggregation,
    seed: int, *, largest_first: bool,
) -> RemovalCurve:  # fmt: skip
    fractions, groups = listed_fractions(fractions), Groups.of(groups)
    values = aggregated(importance, groups, aggregation)
    removed = [removal_order(values, groups, f, largest_first=largest_first, seed=seed) for f in fractions]
    for fraction, gone in zip(fractions, removed, strict=True):
        if len(gone) < round(fraction * groups.n):
            raise ValueError(
                f"fractions holds {fraction}, and the groups hold {len(gone):,} of {groups.n:,} training points: pass "
                f"at most {len(gone) / groups.n}, because points in no group are not removed."
            )
    counts = np.array([len(gone) for gone in removed])
    kept = {len(gone): np.setdiff1d(np.arange(groups.n), gone, assume_unique=True) for gone in removed}
    found = retrained(retrain, list(kept.values()))  # once for all fractions that remove the same number of points
    return RemovalCurve(counts / groups.n, found[[list(kept).index(count) for count in counts]])
