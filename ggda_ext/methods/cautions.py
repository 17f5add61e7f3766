"""What to know before a group's score is trusted: groups for which a first-order estimate is known to fail.

Checked with what is at hand: sizes, labels, and for methods with a curvature the gradients of a few hundred points.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from ggda_ext.data import IndexedData, SomePoints
from ggda_ext.gradients import GroupGradients
from ggda_ext.groups.balance import why_not_additive
from ggda_ext.groups.partition import Groups
from ggda_ext.losses import LABEL_KEYS

LARGE = 0.2
"""A first-order estimate keeps the curvature of the full data. Without a share s of the points (or of the Fisher's
trace) about that share of the curvature is gone, so the effect is larger by 1 / (1 − s): a quarter at one fifth."""
WHOLE_CLASS = 0.9
"""Without nearly all of a class the model never predicts it: not a small step from the trained parameters."""
SEVERAL = "Scores of large groups, or of groups that are alike, do not add up: ask WhatIf about several at once."
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
        found[int(j)].append(f"holds {groups.sizes[j] / groups.n:.0%} of all points: the real effect is larger")
    targets = None if groups.is_by_rule else labels_of(data)
    if targets is not None and len(targets) == groups.n and _may_hold_a_class(groups, targets):
        for j in np.flatnonzero(class_share(groups, targets) >= WHOLE_CLASS):
            found[int(j)].append("holds nearly a whole class: not a small change")
    if curvature and not data.is_stream and groups.sizes.max() > LARGE / 10 * groups.n:
        share = _curvature_share(provider)
        for j in np.flatnonzero((share > LARGE) & ~large):
            found[int(j)].append(f"has {share[j]:.0%} of the curvature: the real effect is larger")
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
    counts = targets.unique(return_counts=True)[1]
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
