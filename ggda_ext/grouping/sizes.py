"""Control of group sizes: clusters up to a maximum size, clusters of equal size, or an exact number of clusters.

A cluster is cut in two, across the direction in which it spreads most, at the point that gives each side its size.
"""

from __future__ import annotations

import heapq

import numpy as np
from scipy.spatial import cKDTree

from ggda_ext.grouping.kmeans import means, ranks

MOST_TRADES = 30_000  # pairs of clusters that trade points; this takes about three seconds


def cut_to_count(points: np.ndarray, labels: np.ndarray, k: int) -> np.ndarray:
    """Cut fewer clusters into `k` non-empty ones: the widest clusters first, then the largest sets of equal points."""
    count = int(labels.max()) + 1
    if count >= k:
        return labels
    centres, sizes = means(points, labels, count)
    spread = np.bincount(labels, ((points - centres[labels]) ** 2).sum(1), minlength=count)
    rounding = 1e-12 * sizes * float((points**2).sum(1).max())
    spread[spread <= rounding] = 0
    pieces = np.ones(count, np.int64)
    heap = [(-spread[c], -sizes[c], c) for c in range(count) if sizes[c] > 1]
    heapq.heapify(heap)
    for _ in range(k - count):
        _, _, c = heapq.heappop(heap)
        pieces[c] += 1
        if pieces[c] < sizes[c]:
            heapq.heappush(heap, (-spread[c] / pieces[c], -sizes[c] / pieces[c], c))
    return _cut(points, labels, pieces)


def cut_to_size(points: np.ndarray, labels: np.ndarray, max_size: int) -> np.ndarray:
    """Cut clusters with more than `max_size` points into the smallest number of equal parts that fit."""
    return _cut(points, labels, -(-np.bincount(labels) // max_size))


def equal_sizes(points: np.ndarray, k: int) -> np.ndarray:
    """Return `k` clusters whose sizes differ by at most one: cut repeatedly, then let neighbours trade points."""
    labels = _cut(points, np.zeros(len(points), np.int64), np.array([k]))
    return _trade(points, labels, k) if k > 1 else labels


def _cut(points: np.ndarray, labels: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    """Cut cluster c into `pieces[c]` parts whose sizes differ by at most one; the first part keeps the id."""
    new, free = labels.copy(), len(pieces)
    order = np.argsort(labels, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(labels, minlength=len(pieces)))])
    for c in np.flatnonzero(pieces > 1):
        parts = [(order[starts[c] : starts[c + 1]], int(pieces[c]))]
        first = True
        while parts:
            members, count = parts.pop()
            if count > 1:
                left_count = count // 2
                left = len(members) * left_count // count
                sorted_members = members[_sorted(_along_spread(points[members]))]
                parts += [(sorted_members[left:], count - left_count), (sorted_members[:left], left_count)]
            elif first:
                first = False
            else:
                new[members], free = free, free + 1
    return new


def _along_spread(points: np.ndarray) -> np.ndarray:
    """Return the position of every point `[m]` along the direction of largest variance (three power iterations)."""
    offsets = points - points.mean(0)
    direction = offsets[ranks(np.einsum("ij,ij->i", offsets, offsets)).argmax()]
    for _ in range(3):
        direction = (offsets @ direction) @ offsets
        length = float(np.linalg.norm(direction))
        if length == 0:
            break
        direction = direction / length
    return offsets @ direction


def _sorted(positions: np.ndarray) -> np.ndarray:
    """Return the order of `positions [m]` along a line; equal positions keep their order."""
    return np.argsort(ranks(positions, float(np.abs(positions).max())), kind="stable")


def _trade(points: np.ndarray, labels: np.ndarray, k: int) -> np.ndarray:
    """Let pairs of near clusters redistribute their points: each point to the nearer centre, with sizes unchanged."""
    labels = labels.copy()
    members = np.split(np.argsort(labels, kind="stable"), np.cumsum(np.bincount(labels, minlength=k))[:-1])
    centres, _ = means(points, labels, k)
    neighbours = min(k - 1, 16, max(2, MOST_TRADES // k))
    for rank in range(1, neighbours + 1):
        near = cKDTree(centres).query(centres, [rank + 1])[1][:, 0]
        for a, b in enumerate(near):
            if a == b:
                continue
            both = np.concatenate([members[a], members[b]])
            ranked = both[_sorted(points[both] @ (centres[b] - centres[a]))]
            members[a], members[b] = ranked[: len(members[a])], ranked[len(members[a]) :]
            centres[a], centres[b] = points[members[a]].mean(0), points[members[b]].mean(0)
    for group, indices in enumerate(members):
        labels[indices] = group
    return labels
