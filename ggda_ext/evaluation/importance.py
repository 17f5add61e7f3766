"""Importance of groups, and the order in which to remove them."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from torch import Tensor

from ggda_ext.groups.partition import Groups, GroupsLike

Aggregation = Literal["sum", "mean"]


def aggregated(importance: Any, groups: GroupsLike, aggregation: Aggregation = "sum") -> np.ndarray:
    """Return importance of groups `[k]`, unchanged (``"sum"`` over the members) or divided by size (``"mean"``)."""
    if aggregation not in ("sum", "mean"):
        raise ValueError(f"aggregation={aggregation!r} is not one of 'sum', 'mean'.")
    groups = Groups.of(groups)
    values = checked_importance(importance, groups)
    return values if aggregation == "sum" else values / groups.sizes


def removal_order(
    importance: Any, groups: GroupsLike, fraction: float = 1.0, *, largest_first: bool = True, seed: int = 0
) -> np.ndarray:
    """Return the training points to remove: whole groups in order of importance, and random points of the last group.

    With the same seed, the points of a smaller fraction are the first points of a larger one.

    Args:
        importance: importance of every group `[k]`.
        groups: a `Groups` or anything it accepts. Points in no group stay.
        fraction: share of the training set to remove.
        largest_first: whether to begin with the most important group.
        seed: random seed of the order within groups, and of the order of groups of equal importance.

    >>> removal_order([0.5, 2.0], [0, 0, 1, 1], 0.5).tolist()
    [2, 3]
    """
    groups = Groups.of(groups)
    values = checked_importance(importance, groups)
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction={fraction}: pass a number from 0 to 1.")
    draw = np.random.default_rng(seed)
    ties = draw.permutation(len(groups))
    position = np.empty(len(groups), np.int64)
    position[np.lexsort((ties, -values if largest_first else values))] = np.arange(len(groups))
    points = draw.permutation(groups.order)
    points = points[np.argsort(position[groups.labels[points]], kind="stable")]
    return points[: round(fraction * groups.n)]


def checked_importance(importance: Any, groups: Groups) -> np.ndarray:
    values = checked_numbers(importance, "importance")
    if values.shape != (len(groups),):
        raise ValueError(
            f"importance has shape {list(values.shape)}: pass one number for each of {len(groups)} groups."
        )
    return values


def checked_numbers(values: Any, name: str) -> np.ndarray:
    """Return values as float64; raise an error if some are NaN or infinite."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    array = np.asarray(values, dtype=float)
    if not np.isfinite(array).all():
        bad = np.flatnonzero(~np.isfinite(array).reshape(-1))
        raise ValueError(f"{name} holds {len(bad)} NaN or infinite numbers, first at {bad[:5].tolist()}.")
    return array
