"""What to know before scores are trusted: groups for which a first-order estimate is known to fail, and groups whose
scores do not add up.

Checked with what is at hand: sizes, labels, and for methods with a curvature the gradients of a few hundred points.

An additive score has one number per group. Without a half of the groups the share of class c in the rest moves by about

    shift_c = √(Σ_G (n_Gc − n_G s_c)²) / n,     n_Gc points of class c in G, s_c = n_c / n

and a loss rises whichever way it moves: by the square of the sum, which no sum of scores can follow. Random groups have
√(s_c (1 − s_c) / n). Measured on halves: with up to 7 times that (random groups; k-means of inputs on HELOC, of pixels
on 4,000 images of MNIST) additive influence has an LDS of .71 to .79, and the best additive score fitted to retrainings
.5 to .9. From 9 times on (Grad-K-Means on HELOC with ANN-S and on 4,000 images) influence has .47 to .51, with changes
3 to 25 times too small; there, and with k-means on 60,000 images, the best additive score has −.3 to .35. The limit was
chosen on these cases.
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
"""A first-order estimate keeps the curvature of the full data. Without a share s of the points (or of the Fisher's
trace) about that share of the curvature is gone, so the parameters move further by 1 / (1 − s): a quarter at one fifth.
The property itself may change by more, or, near its best value, by less."""
WHOLE_CLASS = 0.9
"""Without nearly all of a class the model never predicts it: not a small step from the trained parameters."""
SEVERAL = "Scores of large groups, or of groups that are alike, do not add up: ask WhatIf about several at once."
SHIFTED = 8.0
"""Times the shift of random groups from which on scores are not to be added up."""
FEWEST_GROUPS = 3
_MOST_GROUPS = 10_000  # beyond, nobody removes several by hand, and counting classes would cost
_MOST_CLASSES = 1000  # labels below it are classes as they are, without sorting them
_MOST_CELLS = 2**22  # of a table of groups and classes that is counted into, instead of sorting
_LOOKED_AT = 512  # points whose gradients tell the shares of the curvature


def cautions(provider: GroupGradients, *, curvature: bool) -> tuple[dict[Hashable, tuple[str, ...]], list[str]]:
    """By name of a group, why its score is to be taken with care; and notes on what several groups do together.

    Args:
        provider: the training side.
        curvature: whether to look at gradients as well.
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
    """Points by group and class, where labels are at hand and a group has more than one point."""
    groups = provider.groups
    if groups.is_by_rule or groups.sizes.max() < 2:
        return None
    targets = labels_of(provider.data.tensors)  # nothing is read for it
    return None if targets is None or len(targets) != groups.n else ClassCounts.of(groups, targets.numpy())


def _curvature_share(provider: GroupGradients) -> np.ndarray:
    """The share of every group in Σ |∇ℓ_i|² `[k]`, from some of the points."""
    groups = provider.groups
    some = np.random.default_rng(0).integers(0, groups.n, _LOOKED_AT)
    some = np.unique(some[groups.labels_of(some) >= 0])
    points = provider.on(SomePoints(provider.data, some), Groups.singletons(len(some)))
    norms = points.squared_norms().double().cpu().numpy()
    share = np.bincount(groups.labels_of(some), norms, len(groups))
    return share / max(float(share.sum()), 1e-300)


def labels_of(held: Any) -> Tensor | None:
    """Class labels in a batch, or in the tensors of all data: its targets, if they are whole numbers, one per point."""
    if isinstance(held, Mapping):
        held = next((held[key] for key in LABEL_KEYS if key in held), None)
    else:
        held = held[-1] if isinstance(held, tuple | list) and len(held) > 1 else None
    whole = isinstance(held, Tensor) and held.dim() == 1 and not held.is_floating_point()
    return held.cpu() if whole else None


@dataclass(frozen=True)
class ClassCounts:
    """How many points of each class are in each group, cell by cell where there are any.

    Attributes:
        ids: group id of each cell.
        classes: class of each cell.
        counts: points of each cell.
        k: number of groups.
    """

    ids: np.ndarray
    classes: np.ndarray
    counts: np.ndarray
    k: int

    @classmethod
    def of(cls, groups: Groups, labels: Any) -> ClassCounts:
        """Counted once; points in no group and points with a negative label are in no cell."""
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
        if low < 0 or int(groups.sizes.sum()) < groups.n:
            pairs = pairs[(groups.labels >= 0) & (classes >= 0)]
        if len(groups) * held <= max(_MOST_CELLS, groups.n):
            table = np.bincount(pairs)
            found = np.flatnonzero(table)
            counts = table[found]
        else:
            found, counts = np.unique(pairs, return_counts=True)
        return cls(found // held, found % held, counts, len(groups))

    def largest_share(self) -> np.ndarray:
        """Largest share of a class that each group holds `[k]`; classes of one point do not count."""
        sizes = np.bincount(self.classes, self.counts)
        share = np.zeros(self.k)
        if np.count_nonzero(sizes) > 1:
            own = sizes[self.classes]
            np.maximum.at(share, self.ids, np.where(own > 1, self.counts / own, 0.0))
        return share

    def shift(self) -> tuple[float, float]:
        """How far the share of a class moves without half of the groups, at most, and how far with random groups.

        >>> shift, expected = ClassCounts.of(Groups([0, 0, 1, 1]), [0, 0, 1, 1]).shift()  # a class each
        >>> round(shift, 3), expected
        (0.354, 0.25)
        """
        counts, n = self.counts.astype(float), float(self.counts.sum())
        sizes, shares = np.bincount(self.ids, counts, self.k), np.bincount(self.classes, counts) / n
        squares, crossed = (np.bincount(self.classes, counts * other) for other in (counts, sizes[self.ids]))
        moved = squares - 2 * shares * crossed + shares**2 * (sizes**2).sum()  # Σ_G (n_Gc − n_G s_c)²
        worst = int(np.argmax(moved))
        expected = np.sqrt(shares[worst] * (1 - shares[worst]) / n)
        return float(np.sqrt(max(moved[worst], 0.0)) / n), float(expected)


def class_share(groups: Groups, targets: Any) -> np.ndarray:
    """Largest share of a class that each group holds `[k]`; classes of one point do not count."""
    if len(targets) != groups.n:
        raise ValueError(f"targets has {len(targets)} labels for {groups.n} training points: pass one per point.")
    return ClassCounts.of(groups, targets).largest_share()


def why_not_additive(groups: GroupsLike, labels: Any) -> str | None:
    """A sentence on why scores of these groups should not be added up; None if there is no reason.

    Args:
        groups: a `Groups` or anything it accepts.
        labels: the class of every training point `[n]`; for a regression there is nothing to say.
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
