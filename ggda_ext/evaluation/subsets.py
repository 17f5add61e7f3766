"""Random choices of groups to keep, and their points."""

from __future__ import annotations

import numpy as np

from ggda_ext.groups.partition import Groups, GroupsLike
from ggda_ext.words import check_required_counts

_DRAWS = 50  # number of choices drawn for each choice that is taken, if all should keep about the same number of points


def random_subsets(
    groups: GroupsLike, count: int, *, fraction: float = 0.5, equal_points: bool = False, seed: int = 0
) -> np.ndarray:
    """Draw random choices of groups for `group_lds`: which groups each subset keeps `[count, k]`, as booleans.

    Args:
        groups: a `Groups` or anything it accepts.
        count: number of subsets.
        fraction: share of the groups that a subset keeps.
        equal_points: whether all subsets keep about the same number of points. Then many different choices are drawn,
            and the ones nearest to `fraction` of the points are taken; fewer than `count` if there are no more.
            Otherwise, halves of uneven groups differ in size. With a fixed number of epochs they then differ in
            training steps, which alone may explain their losses.
        seed: random seed of the choice.
    """
    check_required_counts(count=count)
    groups = Groups.of(groups)
    k = len(groups)
    size = round(fraction * k)
    if not 0 < size < k:
        raise ValueError(f"fraction={fraction} of {k} groups keeps {size} of them: some must stay and some must go.")
    draw = np.random.default_rng(seed)
    kept = np.zeros((_DRAWS * count if equal_points else count, k), bool)
    for row in kept:
        row[draw.choice(k, size, replace=False)] = True
    if not equal_points:
        return kept
    kept = kept[np.sort(np.unique(kept, axis=0, return_index=True)[1])]
    off = np.abs(kept @ groups.sizes - fraction * groups.sizes.sum())
    return kept[np.sort(np.argsort(off, kind="stable")[:count])]


def points_of(groups: GroupsLike, kept: np.ndarray) -> list[np.ndarray]:
    """Return the training indices of every choice of groups `[s, k]`; points in no group always stay."""
    groups = Groups.of(groups)
    in_no_group, chosen = groups.labels < 0, np.asarray(kept, bool)
    if chosen.ndim != 2 or chosen.shape[1] != len(groups):
        raise ValueError(f"kept has shape {list(chosen.shape)}: pass [subsets, {len(groups)}], a column per group.")
    return [np.flatnonzero(in_no_group | choice[groups.labels]) for choice in chosen]
