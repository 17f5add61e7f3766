"""Noisy-label detection: are the mislabelled points in the groups of least importance?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ggda_ext.evaluation.importance import Aggregation, aggregated
from ggda_ext.groups.partition import Groups, GroupsLike


@dataclass(frozen=True)
class Detection:
    """How early mislabelled points are found if points are checked in order of importance, the lowest first.

    Attributes:
        auc: the AUC of the paper, the area under `found` against `checked`: 0.5 for a random order, and at best one
            minus half the noisy fraction.
        roc_auc: the ordinary ROC AUC: 0.5 for a random order, at best 1.
        checked: fractions of the points that are checked, from 0 to 1, at the boundaries of groups.
        found: fractions of the mislabelled points that are found by then. Within a group, mislabelled points are
            expected to be spread evenly.
    """

    auc: float
    roc_auc: float
    checked: np.ndarray
    found: np.ndarray


def noisy_label_detection(
    importance: Any, groups: GroupsLike, is_noisy: Any, *, aggregation: Aggregation = "sum"
) -> Detection:
    """Measure how well low importance finds wrong labels.

    Args:
        importance: importance of every group `[k]`.
        groups: a `Groups` or anything it accepts. Points in no group are not checked.
        is_noisy: for every training point, whether its label is wrong `[n]`.
        aggregation: rank groups by their importance (``"sum"``), or by their importance divided by their size
            (``"mean"``).

    >>> found = noisy_label_detection([-1.0, 2.0], [0, 0, 1, 1], [True, True, False, False])
    >>> found.auc, found.roc_auc
    (0.75, 1.0)
    """
    groups = Groups.of(groups)
    values = aggregated(importance, groups, aggregation)
    noisy = np.asarray(is_noisy, dtype=bool)
    if noisy.shape != (groups.n,):
        raise ValueError(f"is_noisy has shape {list(noisy.shape)}: pass one entry for each of {groups.n} points.")
    inside = groups.labels >= 0
    points, noisy = values[groups.labels[inside]], noisy[inside]
    if noisy.all() or not noisy.any():
        raise ValueError(f"is_noisy marks {noisy.sum()} of {len(noisy)} points: both kinds are needed.")
    levels, level = np.unique(points, return_inverse=True)  # groups of equal importance are checked together
    checked = np.concatenate([[0], np.cumsum(np.bincount(level, minlength=len(levels)))]) / len(points)
    found = np.concatenate([[0], np.cumsum(np.bincount(level, noisy, len(levels)))]) / noisy.sum()
    area = float(np.sum(np.diff(checked) * (found[1:] + found[:-1]) / 2))
    from sklearn.metrics import roc_auc_score  # takes seconds to import

    return Detection(area, float(roc_auc_score(noisy, -points)), checked, found)
