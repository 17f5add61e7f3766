"""k-means that stays fast up to a quarter as many clusters as points.

There are three steps. First, centres are drawn in rounds, with probability proportional to the squared distance to the
nearest centre drawn before (k-means++ in rounds). Then a few rounds move centres from where they save least to where
they save most. Last, Lloyd's algorithm runs (scikit-learn's for few clusters). Nearest centres come from SciPy's k-d
tree in few dimensions and from matrix products otherwise. Gradients are heavy-tailed (most near zero, a few huge), so
the start matters: on MNIST gradients, Lloyd from random points ends at 1.2 to 45 times the inertia of k-means++.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from scipy.spatial import cKDTree
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from ggda_ext.model import full_precision

TREE_DIMENSIONS = 15  # above this, a k-d tree visits most leaves; scikit-learn uses the same limit
MANY_CLUSTERS = 500  # up to this, scikit-learn's Lloyd iteration is faster than building and searching a tree
RELOCATION_ROUNDS = 5
CHEAP = 2.0  # costs up to this many times the cost at which moves stop paying are computed exactly
ROUNDING = 1e-10  # numbers that differ by less than this fraction count as equal
_PRODUCTS = 2**23  # number of inner products of points and centres in memory at a time


def kmeans(points: np.ndarray, k: int, rng: np.random.Generator, max_iter: int, tol: float) -> np.ndarray:
    """Return the cluster of every point `[n]`, from `points [n, d]`; there may be a few clusters fewer than `k`.

    Stop when the squared shift of all centres is at most `tol` times the mean variance of the features (scikit-learn's
    rule). With many clusters, also stop when an iteration lowers the inertia by less than the fraction `tol`.
    """
    if k == 1 or k == len(points):
        return np.arange(len(points)) % k
    centres = _seed(points, k, rng)
    if len(centres) > 1:
        centres = _relocate(points, centres)
    if k > MANY_CLUSTERS:
        labels = _lloyd(points, centres, max_iter, tol)
    else:
        lloyd = KMeans(len(centres), init=centres, n_init=1, max_iter=max_iter, tol=tol, random_state=0)
        with warnings.catch_warnings():  # the caller fills empty clusters
            warnings.simplefilter("ignore", ConvergenceWarning)
            labels = lloyd.fit(points).labels_
    return numbered(labels)


def numbered(labels: np.ndarray) -> np.ndarray:
    """Return the same clusters `[n]`, numbered in the order of their first points, without gaps."""
    first = np.full(int(labels.max()) + 1, len(labels))
    first[labels[::-1]] = np.arange(len(labels))[::-1]  # the last write wins, so the first point stays
    return np.argsort(np.argsort(first, kind="stable"))[labels]


def ranks(values: np.ndarray, scale: float = 0.0) -> np.ndarray:
    """Return the rank of every value `[n]`; values that differ only by rounding errors share a rank.

    Rounding errors are relative to the values or to `scale`, whichever is larger. A stable sort by rank gives the same
    order on any processor and in any coordinates.
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    apart = np.diff(ordered, prepend=ordered[:1]) > ROUNDING * np.maximum(np.abs(ordered), scale)
    found = np.empty(len(values), np.int64)
    found[order] = np.cumsum(apart)
    return found


def inertia(points: np.ndarray, labels: np.ndarray) -> float:
    """Return the sum of squared distances of `points [n, d]` to the mean of their cluster."""
    centres, _ = means(points, labels, int(labels.max()) + 1)
    return float(_squared_norms(points - centres[labels]).sum(dtype=np.float64))


def means(points: np.ndarray, labels: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean `[k, d]` (zero for an empty cluster) and the size `[k]` of every cluster."""
    sizes = np.bincount(labels, minlength=k)
    sums = np.empty((k, points.shape[1]))
    for column in range(points.shape[1]):
        sums[:, column] = np.bincount(labels, points[:, column], minlength=k)
    return (sums / np.maximum(sizes, 1)[:, None]).astype(points.dtype, copy=False), sizes


def _seed(points: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `k` of the points without replacement, in rounds, by squared distance to the points drawn before.

    The first point is drawn by its distance to the mean. Later rounds ignore the mean, and may draw a point there.
    """
    distances = _squared_norms(points - points.mean(0))
    rounding = (64 * np.finfo(points.dtype).eps) ** 2 * float(_squared_norms(points).max())
    chosen = np.empty(0, np.int64)
    while len(chosen) < k:
        distances[distances <= rounding] = 0
        size = min(k - len(chosen), max(1, 3 * len(chosen)), int((distances > 0).sum()))
        if size == 0:
            break  # fewer distinct points than clusters
        with np.errstate(divide="ignore"):
            race = rng.exponential(size=len(points)) / distances
        new = np.sort(np.argpartition(race, size - 1)[:size])
        if len(chosen) + size < k:
            to_new = _nearest(points[new], points, 1)[0][:, 0] ** 2
            distances = np.minimum(distances, to_new) if len(chosen) else to_new
        chosen = np.concatenate([chosen, new])
    return points[chosen] if len(chosen) else points[:1]


def _relocate(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Run Lloyd steps that also move the centres that cost least to remove into the clusters that gain most by a split.

    Every step renumbers the clusters, so of two clusters with the same cost the first is moved. Costs are equal, for
    example, for two clusters of one point each that are each other's nearest neighbours.
    """
    k, best, lowest, stale = len(centres), centres, np.inf, 0
    for _ in range(RELOCATION_ROUNDS):
        labels = numbered(_nearest(centres, points, 1)[1][:, 0])
        centres, sizes = means(points, labels, k)
        offsets = points - centres[labels]
        spread = _squared_norms(offsets)
        total = float(spread.sum())
        stale = stale + 1 if total > 0.99 * lowest else 0
        if total < lowest:
            best, lowest = centres.copy(), total
        if stale == 2:
            break
        gain, halves = _best_splits(points, labels, centres, sizes, offsets, spread)
        cost = _cost_of_loss(points, labels, centres, sizes, gain)
        by_gain, by_cost = np.argsort(ranks(-gain), kind="stable"), np.argsort(ranks(cost), kind="stable")
        pays = gain[by_gain] > (1 + ROUNDING) * cost[by_cost]
        moves = int(pays.argmin())  # both are sorted, so this is the first move that does not pay
        removed, split = by_cost[:moves], by_gain[:moves]
        split = split[~np.isin(split, removed)]
        if len(split) == 0:
            break
        centres[split], centres[removed[: len(split)]] = halves[0][split], halves[1][split]
    return best


def _best_splits(
    points: np.ndarray,
    labels: np.ndarray,
    centres: np.ndarray,
    sizes: np.ndarray,
    offsets: np.ndarray,
    spread: np.ndarray,
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Return the inertia saved `[k]` by a cut of each cluster across the line to its farthest point, and both means."""
    k = len(centres)
    last = np.maximum(np.cumsum(sizes) - 1, 0)
    towards = points[np.lexsort((ranks(spread), labels))[last]] - centres
    along = np.einsum("ij,ij->i", offsets, towards[labels])
    reach = _squared_norms(towards)[labels]
    gain, first, second = np.zeros(k), centres.copy(), centres.copy()
    for cut in (1e-6, 0.5 + 1e-6):  # just beyond the mean, or half way to the farthest point: no points on the cut
        far = along > cut * reach
        b, far_sizes = means(points[far], labels[far], k)
        near_sizes = sizes - far_sizes
        a = (centres * sizes[:, None] - b * far_sizes[:, None]) / np.maximum(near_sizes, 1)[:, None]
        saved = near_sizes * far_sizes / np.maximum(sizes, 1) * _squared_norms(a - b)
        better = saved > gain
        gain[better], first[better], second[better] = saved[better], a[better], b[better]
    return gain, (first, second)


def _cost_of_loss(
    points: np.ndarray, labels: np.ndarray, centres: np.ndarray, sizes: np.ndarray, gain: np.ndarray
) -> np.ndarray:
    """Return the inertia added `[k]` if each centre is removed; for high costs an upper bound, which saves searches."""
    used = np.flatnonzero(sizes)
    if len(used) == 1:
        return np.where(sizes > 0, np.finfo(np.float64).max, 0.0)
    cost = np.zeros(len(centres))
    cost[used] = sizes[used] * _nearest(centres[used], centres[used], 2)[0][:, 1] ** 2  # all points to one other centre
    balance = np.minimum(np.sort(gain)[::-1], np.sort(cost)).max()  # moves with a higher cost do not pay
    cheap = cost <= CHEAP * balance
    moved = np.flatnonzero(cheap[labels])
    if len(moved):
        distances, nearest = _nearest(centres[used], points[moved], 2)
        own = _squared_norms(points[moved] - centres[labels[moved]])
        other = np.where(used[nearest[:, 0]] == labels[moved], distances[:, 1], distances[:, 0])
        cost[cheap] = np.bincount(labels[moved], other**2 - own, minlength=len(centres))[cheap]
    return cost


def _lloyd(points: np.ndarray, centres: np.ndarray, max_iter: int, tol: float) -> np.ndarray:
    shift_allowed, previous = tol * float(points.var(0).mean()), np.inf
    for _ in range(max_iter):
        distances, nearest = _nearest(centres, points, 1)
        labels, total = nearest[:, 0], float((distances**2).sum())
        moved, sizes = means(points, labels, len(centres))
        moved[sizes == 0] = centres[sizes == 0]
        shift, centres = float(((moved - centres) ** 2).sum()), moved
        if shift <= shift_allowed or previous - total < tol * total:
            break
        previous = total
    return labels


def _nearest(centres: np.ndarray, points: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return distances and indices `[n, count]` of the centres nearest to each point."""
    if points.shape[1] <= TREE_DIMENSIONS:
        return cKDTree(centres).query(points, np.arange(1, count + 1))
    rows = torch.from_numpy(centres)
    half_squares = 0.5 * (rows * rows).sum(1)
    parts = torch.from_numpy(points).split(max(1, _PRODUCTS // len(rows)))
    with full_precision(rows):
        halves = (torch.addmm(half_squares, part, rows.T, alpha=-1) for part in parts)
        closest = [half.topk(count, largest=False).indices for half in halves]
    nearest = torch.cat(closest).numpy()
    squares = [_squared_norms(points - centres[nearest[:, place]]) for place in range(count)]
    return np.sqrt(np.stack(squares, 1)), nearest


def _squared_norms(rows: np.ndarray) -> np.ndarray:
    return np.einsum("ij,ij->i", rows, rows)
