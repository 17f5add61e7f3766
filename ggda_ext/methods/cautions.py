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
from typing import Any

import numpy as np
from torch import Tensor

from ggda_ext.data import IndexedData, SomePoints
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
_MOST_CLASSES = 1000  # labels below it are classes as they are, without sorting them
_MOST_GROUPS = 10_000  # beyond, nobody removes several by hand, and counting classes would cost
_LOOKED_AT = 512  # points whose gradients tell the shares of the curvature


def cautions(provider: GroupGradients, *, curvature: bool) -> dict[Hashable, tuple[str, ...]]:
    """By name of a group, why its score is to be taken with care.

    Args:
        provider: the training side.
        curvature: whether to look at gradients as well.
    """
    groups, data = provider.groups, provider.data
    large = groups.sizes > LARGE * groups.n
    found: dict[int, list[str]] = defaultdict(list)
    for j in np.flatnonzero(large):
        found[int(j)].append(f"holds {groups.sizes[j] / groups.n:.0%} of all points: the real effect may be far off")
    targets = None if groups.is_by_rule else labels_of(data)
    if targets is not None and len(targets) == groups.n and _may_hold_a_class(groups, targets):
        for j in np.flatnonzero(class_share(groups, targets) >= WHOLE_CLASS):
            found[int(j)].append("holds nearly a whole class: not a small change")
    if curvature and not data.is_stream and groups.sizes.max() > LARGE / 10 * groups.n:
        share = _curvature_share(provider)
        for j in np.flatnonzero((share > LARGE) & ~large):
            found[int(j)].append(f"has {share[j]:.0%} of the curvature: the real effect may be far off")
    return {groups.name(j): tuple(found[j]) for j in sorted(found)}


def why_not_added(provider: GroupGradients, warned: Mapping[Hashable, tuple[str, ...]]) -> list[str]:
    """A note on what several groups do together, where the sum of their scores does not say it.

    Args:
        provider: the training side.
        warned: what `cautions` found.
    """
    groups = provider.groups
    targets = None if groups.is_by_rule or len(groups) > _MOST_GROUPS else labels_of(provider.data)
    known = targets is not None and len(targets) == groups.n
    why = why_not_additive(groups, targets.numpy()) if known else None  # type: ignore[union-attr]
    return [why] if why else [SEVERAL] if warned else []


def _curvature_share(provider: GroupGradients) -> np.ndarray:
    """The share of every group in Σ |∇ℓ_i|² `[k]`, from some of the points."""
    groups = provider.groups
    some = np.random.default_rng(0).integers(0, groups.n, _LOOKED_AT)
    some = np.unique(some[groups.labels_of(some) >= 0])
    points = provider.on(SomePoints(provider.data, some), Groups.singletons(len(some)))
    norms = points.squared_norms().double().cpu().numpy()
    share = np.bincount(groups.labels_of(some), norms, len(groups))
    return share / max(float(share.sum()), 1e-300)


def _may_hold_a_class(groups: Groups, targets: Tensor) -> bool:
    """Whether the largest group is as large as nearly all of the smallest class that has two points."""
    small = len(targets) > 0 and 0 <= int(targets.min()) <= int(targets.max()) < _MOST_CLASSES
    counts = targets.bincount() if small else targets.unique(return_counts=True)[1]
    several = counts[counts > 1]
    return len(several) > 0 and int(groups.sizes.max()) >= WHOLE_CLASS * int(several.min())


def labels_of(data: IndexedData) -> Tensor | None:
    """Class labels, if the data are tensors whose targets are whole numbers, one per point; nothing is read for it."""
    held: Any = data.tensors
    if isinstance(held, Mapping):
        held = next((held[key] for key in LABEL_KEYS if key in held), None)
    elif isinstance(held, tuple | list) and len(held) > 1:
        held = held[-1]
    else:
        held = None
    whole = isinstance(held, Tensor) and held.dim() == 1 and not held.is_floating_point()
    return held.cpu() if whole else None


def class_share(groups: Groups, targets: Any) -> np.ndarray:
    """Largest share of a class that each group holds `[k]`; classes of one point do not count."""
    classes = Groups(targets, rest="drop")
    if classes.n != groups.n:
        raise ValueError(f"targets has {classes.n} labels for {groups.n} training points: pass one per point.")
    inside = (groups.labels >= 0) & (classes.labels >= 0)
    pairs = groups.labels[inside].astype(np.int64) * len(classes) + classes.labels[inside]
    found, counts = np.unique(pairs, return_counts=True)
    sizes = classes.sizes[found % len(classes)]
    share = np.zeros(len(groups))
    if len(classes) > 1:
        np.maximum.at(share, found // len(classes), np.where(sizes > 1, counts / sizes, 0.0))
    return share


def class_shift(groups: GroupsLike, labels: Any) -> tuple[float, float]:
    """How far the share of a class moves without half of the groups, at most, and how far with random groups.

    Args:
        groups: a `Groups` or anything it accepts.
        labels: the class of every training point `[n]`.

    >>> shift, expected = class_shift([0, 0, 1, 1], [0, 0, 1, 1])  # a class each
    >>> round(shift, 3), expected
    (0.354, 0.25)
    """
    groups = Groups.of(groups)
    classes = np.asarray(labels).reshape(-1)
    if len(classes) and not (classes.dtype.kind in "iu" and 0 <= classes.min() <= classes.max() < _MOST_CLASSES):
        classes = np.unique(classes, return_inverse=True)[1].reshape(-1)
    if len(classes) != groups.n:
        raise ValueError(f"labels has {len(classes)} entries for {groups.n} training points: pass one for each.")
    inside = groups.labels >= 0
    held = int(classes.max()) + 1
    pairs = groups.labels[inside].astype(np.int64) * held + classes[inside]
    counts = np.bincount(pairs, minlength=len(groups) * held).reshape(len(groups), held).astype(float)
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
