"""Can scores of these groups be added up? How far the classes of what is kept move when groups are left out.

An additive score has one number per group. Without a half of the groups the share of class c in the rest moves by about

    shift_c = √(Σ_G (n_Gc − n_G s_c)²) / n,     n_Gc points of class c in G, s_c = n_c / n

and a loss rises whichever way it moves: by the square of the sum, which no sum of scores can follow. Random groups have
√(s_c (1 − s_c) / n). Measured on halves: with up to 7 times that (random groups; k-means of inputs on HELOC, of pixels
on 4,000 images of MNIST) additive influence has an LDS of .71 to .79, and the best additive score fitted to retrainings
.5 to .9; from 9 times on (Grad-K-Means on HELOC with ANN-S and on 4,000 images) influence has .47 to .51 with changes 3 to 25
times too small; there, and with k-means on 60,000 images, the best additive score has −.3 to .35. The limit was chosen
on these cases.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ggda_ext.groups.partition import Groups, GroupsLike

SHIFTED = 8.0
"""Times the shift of random groups from which on scores are not to be added up."""
FEWEST_GROUPS = 3


def class_shift(groups: GroupsLike, labels: Any) -> tuple[float, float]:
    """How far the share of a class moves without half of the groups, at most, and how far with random groups.

    Args:
        groups: a `Groups` or anything it accepts.
        labels: the class of every training point `[n]`.

    >>> class_shift([0, 0, 1, 1], [0, 0, 1, 1])  # a class each
    (0.35355339059327373, 0.25)
    """
    groups = Groups.of(groups)
    classes = np.unique(np.asarray(labels), return_inverse=True)[1].reshape(-1)
    if len(classes) != groups.n:
        raise ValueError(f"labels has {len(classes)} entries for {groups.n} training points: pass one for each.")
    inside = groups.labels >= 0
    counts = np.zeros((len(groups), int(classes.max()) + 1))
    np.add.at(counts, (groups.labels[inside], classes[inside]), 1)
    n = counts.sum()
    shares = counts.sum(0) / n
    shift = np.sqrt(((counts - counts.sum(1, keepdims=True) * shares) ** 2).sum(0)) / n
    expected = np.sqrt(shares * (1 - shares) / n)
    worst = int(np.argmax(shift))
    return float(shift[worst]), float(expected[worst])


def why_not_additive(groups: GroupsLike, labels: Any) -> str | None:
    """A sentence on why scores of these groups should not be added up; None if nothing speaks against it.

    Args:
        groups: a `Groups` or anything it accepts.
        labels: the class of every training point `[n]`; for a regression there is nothing to say.
    """
    found = np.asarray(labels)
    groups = Groups.of(groups)
    if len(groups) < FEWEST_GROUPS or found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        return None
    shift, expected = class_shift(groups, found)
    if not shift > SHIFTED * expected:
        return None
    return (
        f"Without half of these groups the share of a class moves by about {shift:.3f}, {shift / expected:.0f} times "
        "as much as with random groups: what several of them do together is not the sum of their scores. Ask "
        "ggda_ext.WhatIf."
    )
