"""Warnings about groups for which a first-order estimate is known to fail, and groups whose scores do not add up.

The checks use group sizes, labels that are in memory, and for methods with a curvature the gradients of a few hundred
points.

An additive score has one number per group. If half of the groups are removed, the share of class c in the rest moves by
about

    shift_c = √(Σ_G (n_Gc − n_G s_c)²) / n,     n_Gc points of class c in G, s_c = n_c / n

Points in no group always stay. If there are such points, with m points in groups, it is
√(Σ_G (n_Gc − n_G s_c)² + (Σ_G (n_Gc − n_G s_c))²) / (2 n − m).

A loss rises in both directions of this shift, with the square of the sum, and no sum of scores can follow a square. For
random groups the shift is √(s_c (1 − s_c) / n). Measurements on halves: up to 7 times this value (random groups;
k-means of inputs on HELOC, of pixels on 4,000 images of MNIST) additive influence has an LDS of .71 to .79, and the
best additive score fitted to retrainings has .5 to .9. From 9 times on (Grad-K-Means on HELOC with ANN-S and on 4,000
images) influence has .47 to .51, and its predicted changes are 3 to 25 times too small. There, and with k-means on
60,000 images, the best additive score has −.3 to .35. The limit `SHIFTED` was chosen on these cases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ggda_ext.data import SomePoints
from ggda_ext.gradients import GroupGradients
from ggda_ext.groups.partition import Groups, GroupsLike
from ggda_ext.losses import LABEL_KEYS

LARGE = 0.2
"""Share of the points (or of the Fisher's trace) above which a group gets a warning. A first-order estimate keeps the
curvature of the full data. Without a share s of the points about the share s of the curvature is gone, so the
parameters move 1 / (1 − s) times as far: a quarter further for s = 1/5. The property may change by more, or by less
near its best value."""
WHOLE_CLASS = 0.9
"""Share of a class from which on a group gets a warning. Without nearly all of a class the model never predicts this
class, which is not a small step from the trained parameters."""
SEVERAL = "Scores of large groups, or of groups that are alike, do not add up: ask WhatIf about several at once."
SHIFTED = 8.0
"""Scores should not be added up if the shift is more than this many times the shift of random groups."""
FEWEST_GROUPS = 3
_MOST_GROUPS = 10_000  # with more groups nobody removes several by hand, and counting classes is slow
_MOST_CLASSES = 1000  # labels below this number are used as classes without sorting
_MOST_CELLS = 2**22  # largest table of groups and classes that is filled by counting instead of sorting
_LOOKED_AT = 512  # points whose gradients give the shares of the curvature


def cautions(provider: GroupGradients, *, curvature: bool) -> tuple[dict[Hashable, tuple[str, ...]], list[str]]:
    """Return warnings about single groups, by their names, and notes about the removal of several groups at once.

    Args:
        provider: the provider of the training gradients.
        curvature: whether to check gradients as well.
    """
    groups, data = provider.groups, provider.data
    large = groups.sizes > LARGE * groups.n
    found: dict[int, list[str]] = defaultdict(list)
    for j in np.flatnonzero(large):
        found[int(j)].append(f"holds {groups.sizes[j] / groups.n:.0%} of all points: the real effect may be far off")
    table = _table_of(provider)
    if table is not None:
        for j in np.flatnonzero(table.largest_share() >= WHOLE_CLASS):
            found[int(j)].append("holds nearly a whole class: not a small change")
    if curvature and not data.is_stream and groups.sizes.max() > LARGE / 10 * groups.n:
        share = _curvature_share(provider)
        for j in np.flatnonzero((share > LARGE) & ~large):
            found[int(j)].append(f"has {share[j]:.0%} of the curvature: the real effect may be far off")
    why = None if table is None or len(groups) > _MOST_GROUPS else _why_not_additive(table)
    return {groups.name(j): tuple(found[j]) for j in sorted(found)}, [why] if why else [SEVERAL] if found else []


def _table_of(provider: GroupGradients) -> ClassCounts | None:
    """Count points by group and class; None if labels or groups are not in memory, or if all groups have one point."""
    groups = provider.groups
    if groups.is_by_rule or groups.sizes.max() < 2:
        return None
    targets = labels_of(provider.data.tensors)  # only tensors in memory; no data is read
    return None if targets is None or len(targets) != groups.n else ClassCounts.of(groups, targets.numpy())


def _curvature_share(provider: GroupGradients) -> np.ndarray:
    """Return the share of every group in Σ |∇ℓ_i|² over all points `[k]`, estimated on some of the points."""
    groups = provider.groups
    some = np.unique(np.random.default_rng(0).integers(0, groups.n, _LOOKED_AT))
    points = provider.on(SomePoints(provider.data, some), Groups.singletons(len(some)))
    norms = points.squared_norms().double().cpu().numpy()
    labels = groups.labels_of(some)
    return np.bincount(labels[labels >= 0], norms[labels >= 0], len(groups)) / max(float(norms.sum()), 1e-300)


def labels_of(held: Any) -> Tensor | None:
    """Return the targets of a batch or of all data if they are class labels (one whole number per point), else None."""
    if isinstance(held, Mapping):
        held = next((held[key] for key in LABEL_KEYS if key in held), None)
    else:
        held = held[-1] if isinstance(held, tuple | list) and len(held) > 1 else None
    whole = isinstance(held, Tensor) and held.dim() == 1 and not held.is_floating_point()
    return held.cpu() if whole else None


@dataclass(frozen=True)
class ClassCounts:
    """Number of points of each class in each group, as a list of cells (group, class) that hold points.

    Attributes:
        ids: group id of each cell.
        classes: class of each cell.
        counts: number of points in each cell.
        k: number of groups.
        sizes: number of points of each class, also of points in no group, which stay in training.
    """

    ids: np.ndarray
    classes: np.ndarray
    counts: np.ndarray
    k: int
    sizes: np.ndarray

    @classmethod
    def of(cls, groups: Groups, labels: Any) -> ClassCounts:
        """Count the points; a point in no group is in no cell, and one with a negative label is not counted at all."""
        labels = np.asarray(labels).reshape(-1)
        if len(labels) != groups.n:
            raise ValueError(f"labels has {len(labels)} entries for {groups.n} training points: pass one for each.")
        low, high = (labels.min(), labels.max()) if len(labels) and labels.dtype.kind in "iu" else (0, _MOST_CLASSES)
        held, classes = int(high) + 1, labels
        if not high < _MOST_CLASSES:
            known = Groups(labels, rest="drop")
            held, classes, low = len(known), known.labels, known.labels.min()
        pairs = np.multiply(groups.labels, held, dtype=np.int64)
        pairs += classes.astype(np.int64, copy=False)
        all_counted = low >= 0 and int(groups.sizes.sum()) == groups.n
        if not all_counted:
            pairs = pairs[(groups.labels >= 0) & (classes >= 0)]
        if len(groups) * held <= max(_MOST_CELLS, groups.n):
            table = np.bincount(pairs)
            found = np.flatnonzero(table)
            counts = table[found]
        else:
            found, counts = np.unique(pairs, return_counts=True)
        ids, class_of_cell = found // held, found % held
        if all_counted:  # adding up the cells is faster than counting the points again
            sizes = np.bincount(class_of_cell, counts, held).astype(np.int64)
        else:
            sizes = np.bincount(classes[classes >= 0].astype(np.int64, copy=False), minlength=held)
        return cls(ids, class_of_cell, counts, len(groups), sizes)

    def largest_share(self) -> np.ndarray:
        """Return for each group the largest share that it holds of any class `[k]`; ignore classes of one point."""
        share = np.zeros(self.k)
        if np.count_nonzero(self.sizes) > 1:
            own = self.sizes[self.classes]
            np.maximum.at(share, self.ids, np.where(own > 1, self.counts / own, 0.0))
        return share

    def shift(self) -> tuple[float, float]:
        """Return the largest shift of a class share without half of the groups, and the shift with random groups.

        >>> shift, expected = ClassCounts.of(Groups([0, 0, 1, 1]), [0, 0, 1, 1]).shift()  # a class each
        >>> round(shift, 3), expected
        (0.354, 0.25)
        """
        counts, n, grouped = self.counts.astype(float), float(self.sizes.sum()), float(self.counts.sum())
        sizes, shares = np.bincount(self.ids, counts, self.k), self.sizes / n
        inside, squares, crossed = (
            np.bincount(self.classes, counts * other, len(shares)) for other in (1.0, counts, sizes[self.ids])
        )
        moved = squares - 2 * shares * crossed + shares**2 * (sizes**2).sum()  # Σ_G (n_Gc − n_G s_c)²
        moved += (inside - shares * grouped) ** 2  # (Σ_G (n_Gc − n_G s_c))², 0 if all points are in groups
        worst = int(np.argmax(moved))
        expected = np.sqrt(shares[worst] * (1 - shares[worst]) / n)
        return float(np.sqrt(max(moved[worst], 0.0)) / (2 * n - grouped)), float(expected)


def class_share(groups: Groups, targets: Any) -> np.ndarray:
    """Return for each group the largest share that it holds of any class `[k]`; ignore classes of one point."""
    if len(targets) != groups.n:
        raise ValueError(f"targets has {len(targets)} labels for {groups.n} training points: pass one per point.")
    return ClassCounts.of(groups, targets).largest_share()


def why_not_additive(groups: GroupsLike, labels: Any) -> str | None:
    """Return a sentence that says why scores of these groups should not be added up; None if there is no reason.

    Args:
        groups: a `Groups` or anything it accepts.
        labels: the class of every training point `[n]`; if these are not whole numbers (regression), the result is
            None.
    """
    found = np.asarray(labels)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        return None
    return _why_not_additive(ClassCounts.of(Groups.of(groups), found))


def _why_not_additive(table: ClassCounts) -> str | None:
    if table.k < FEWEST_GROUPS or not len(table.counts):
        return None
    shift, expected = table.shift()
    if not shift > SHIFTED * expected:
        return None
    return (
        f"Without half of these groups the share of a class moves by about {shift:.3f}, {shift / expected:.0f} times "
        "as much as with random groups: what several of them do together is not the sum of their scores. Ask "
        "ggda_ext.WhatIf."
    )
