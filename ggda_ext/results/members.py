"""The members' own scores, to see whether one point carries its group: shares, swarms and violins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ggda_ext.results.drawing import Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ggda_ext.results.attribution import Attribution

_SWARM = 200
"""Groups with more members than this are drawn as violins."""


def members_of(result: Attribution, member_scores: Any = None) -> np.ndarray:
    """Return the scores of the training points `[m, n]`: `member_scores` if given, else those of the result."""
    found = result.member_scores if member_scores is None else member_scores
    if found is None:
        raise ValueError(
            "the result does not hold the scores of the training points: pass member_scores=, e.g. those of "
            "attribute(…, groups=None, …), where every point is a group of its own."
        )
    array = np.asarray(found.detach().cpu().double() if hasattr(found, "detach") else found, dtype=float)
    array = array[None] if array.ndim == 1 else array
    shape = (len(result.properties), result.groups.n)
    if array.shape != shape:
        raise ValueError(f"member_scores has shape {list(array.shape)}: pass {list(shape)}, a column for each point.")
    return array


@dataclass(frozen=True)
class Carried:
    """How few members make up a group's score. Only members whose own score has the group's sign are summed.

    Attributes:
        largest: share of that sum that the largest member has.
        half: number of members that together carry half of that sum.
        same_way: fraction of all members whose score has the group's sign.
        order: positions of the members, those that carry most first.
    """

    largest: float
    half: int
    same_way: float
    order: np.ndarray


def carried(scores: np.ndarray) -> Carried:
    """Return which members carry a group, from the members' scores.

    >>> found = carried(np.array([6.0, 3.0, -1.0, 1.0]))
    >>> found.largest, found.half, found.same_way, found.order.tolist()
    (0.6, 1, 0.75, [0, 1, 3, 2])
    """
    finite = np.nan_to_num(scores)
    pulls = finite * (np.sign(finite.sum()) or 1.0)
    order = np.argsort(-pulls, kind="stable")
    along = np.maximum(pulls[order], 0)
    total = float(along.sum())
    if not total > 0:
        return Carried(0.0, 0, 0.0, order)
    half = int(np.searchsorted(np.cumsum(along), total / 2)) + 1
    return Carried(float(along[0]) / total, half, float((pulls > 0).mean()), order)


def draw_members(ax: Axes, row: int, scores: np.ndarray, style: Style) -> None:
    """Draw one group as a swarm, or as a violin with its five largest members, and a line at the mean."""
    scores = scores[np.isfinite(scores)]
    if not len(scores):
        return
    ax.plot([float(scores.mean())] * 2, [row - 0.4, row + 0.4], color="black", lw=1.6, zorder=4)
    if len(scores) > _SWARM and float(np.ptp(scores)) > 0:
        body = ax.violinplot([scores], [row], orientation="horizontal", widths=0.8, showextrema=False)["bodies"][0]  # type: ignore[index]
        body.set(facecolor=style.colour, edgecolor="black", alpha=0.8, hatch=style.hatch, linewidth=0.6)
        scores = scores[np.argsort(-np.abs(scores))[:5]]
    heights = row + _swarm(scores)
    ax.scatter(scores, heights, s=16, marker=style.marker, color=style.colour, edgecolor="black", lw=0.5, zorder=3)


def _swarm(scores: np.ndarray) -> np.ndarray:
    """Return heights from −0.35 to 0.35 that keep points with nearly the same score apart."""
    bins = np.floor((scores - scores.min()) / (float(np.ptp(scores)) / 40 or 1.0)).astype(int)
    heights = np.zeros(len(scores))
    most = max(int(np.bincount(bins).max()), 8)
    for one in np.unique(bins):
        at = np.flatnonzero(bins == one)
        steps = np.arange(len(at))
        heights[at] = np.where(steps % 2, 1, -1) * ((steps + 1) // 2) * 0.7 / most
    return heights
