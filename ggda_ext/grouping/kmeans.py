"""k-means that stays fast up to a quarter as many clusters as points.

Three steps: centres drawn in rounds with probability proportional to the squared distance to the nearest one so far
(k-means++ in rounds), a few rounds that move centres from where they save least to where they save most, then Lloyd's
algorithm (scikit-learn's for few clusters). Nearest centres come from SciPy's k-d tree in few dimensions and from
matrix products otherwise. Gradients are heavy-tailed (most near zero, a few huge), which is why the start matters: on
MNIST gradients Lloyd from random points ends at 1.2 to 45 times the inertia of k-means++.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from scipy.spatial import cKDTree
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

TREE_DIMENSIONS = 15  # above this a k-d tree visits most leaves; scikit-learn draws the line here too
MANY_CLUSTERS = 500  # up to this scikit-learn's Lloyd iteration beats building and walking a tree
RELOCATION_ROUNDS = 5
CHEAP = 2.0  # times the cost at which moving a centre no longer pays: costs up to there are computed exactly
ROUNDING = 1e-10  # numbers nearer to one another than this fraction count as equal
_PRODUCTS = 2**23  # inner products of points and centres held at a time


def kmeans(points: np.ndarray, k: int, rng: np.random.Generator, max_iter: int, tol: float) -> np.ndarray:
    """Cluster of every point `[n]`, from `points [n, d]`; now and then a few clusters fewer than `k`.

    Stops when the squared shift of all centres is at most `tol` times the mean variance of the features (scikit-learn's
    rule); many clusters also stop once an iteration lowers the inertia by less than the fraction `tol`.
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
        with warnings.catch_warnings():  # empty clusters are the caller's to fill
            warnings.simplefilter("ignore", ConvergenceWarning)
            labels = lloyd.fit(points).labels_
    return numbered(labels)


def numbered(labels: np.ndarray) -> np.ndarray:
    """The same clusters `[n]`, numbered by their first point, with no number left out."""
    first = np.full(int(labels.max()) + 1, len(labels))
    first[labels[::-1]] = np.arange(len(labels))[::-1]  # the last to be written stays
    return np.argsort(np.argsort(first, kind="stable"))[labels]


def ranks(values: np.ndarray, scale: float = 0.0) -> np.ndarray:
    """Rank of every value `[n]`; values that differ by rounding errors only, of themselves or of `scale`, share one.

    What is sorted by rank, and otherwise left in its order, is the same on any processor and in any coordinates.
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    apart = np.diff(ordered, prepend=ordered[:1]) > ROUNDING * np.maximum(np.abs(ordered), scale)
    found = np.empty(len(values), np.int64)
    found[order] = np.cumsum(apart)
    return found


def inertia(points: np.ndarray, labels: np.ndarray) -> float:
    """Sum of squared distances of `points [n, d]` to the mean of their cluster."""
    centres, _ = means(points, labels, int(labels.max()) + 1)
    return float(_squared_norms(points - centres[labels]).sum(dtype=np.float64))


def means(points: np.ndarray, labels: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean `[k, d]` (zero where empty) and size `[k]` of every cluster."""
    sizes = np.bincount(labels, minlength=k)
    sums = np.empty((k, points.shape[1]))
    for column in range(points.shape[1]):
        sums[:, column] = np.bincount(labels, points[:, column], minlength=k)
    return (sums / np.maximum(sizes, 1)[:, None]).astype(points.dtype, copy=False), sizes


def _seed(points: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """`k` of the points, drawn without replacement by squared distance to those drawn before, in rounds.

    The first is drawn by its distance to the mean, which is then forgotten: a point at the mean may be drawn later.
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
    """Lloyd steps that also move centres whose loss costs least into the clusters whose split gains most.

    Clusters are numbered anew in every step, so that of two with the same cost the first is moved: two clusters of one
    point each, for example, whose nearest neighbours are one another.
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
        moves = int(pays.argmin())  # both are sorted: the first that does not pay
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
    """Inertia saved `[k]` by cutting each cluster across the way to its farthest point, and both halves' means."""
    k = len(centres)
    last = np.maximum(np.cumsum(sizes) - 1, 0)
    towards = points[np.lexsort((ranks(spread), labels))[last]] - centres
    along = np.einsum("ij,ij->i", offsets, towards[labels])
    reach = _squared_norms(towards)[labels]
    gain, first, second = np.zeros(k), centres.copy(), centres.copy()
    for cut in (1e-6, 0.5 + 1e-6):  # at the mean, or half way to the farthest point, but not through points there
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
    """Inertia added `[k]` by the loss of each centre; an upper bound where that is much, which saves most searching."""
    used = np.flatnonzero(sizes)
    if len(used) == 1:
        return np.where(sizes > 0, np.finfo(np.float64).max, 0.0)
    cost = np.zeros(len(centres))
    cost[used] = sizes[used] * _nearest(centres[used], centres[used], 2)[0][:, 1] ** 2  # all points to one other centre
    balance = np.minimum(np.sort(gain)[::-1], np.sort(cost)).max()  # moves that cost more do not pay
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
    """Distances and indices `[n, count]` of the nearest centres."""
    if points.shape[1] <= TREE_DIMENSIONS:
        return cKDTree(centres).query(points, np.arange(1, count + 1))
    rows = torch.from_numpy(centres)
    half_squares = 0.5 * (rows * rows).sum(1)
    parts = torch.from_numpy(points).split(max(1, _PRODUCTS // len(rows)))
    closest = [torch.addmm(half_squares, part, rows.T, alpha=-1).topk(count, largest=False).indices for part in parts]
    nearest = torch.cat(closest).numpy()
    squares = [_squared_norms(points - centres[nearest[:, place]]) for place in range(count)]
    return np.sqrt(np.stack(squares, 1)), nearest


def _squared_norms(rows: np.ndarray) -> np.ndarray:
    return np.einsum("ij,ij->i", rows, rows)
