"""Whitening: it gives features a comparable scale before they are clustered.

The paper whitens all inputs of k-means without saying how. Full whitening (``"pca"``) is the default, because its
distances do not depend on the coordinates. So gradients give the same clusters in the C dimensions that span them as in
the d dimensions of the layer. ``"scale"`` divides every feature by its standard deviation, as `scipy.cluster.vq.whiten`
does.

scikit-learn's ``PCA(whiten=True)`` cannot be used here, because it also enlarges directions that hold only rounding
errors. Gradients have such directions: they span fewer dimensions than they have. On gradients of rank 9 in 64
dimensions it gives 64 directions, and squared distances whose correlation with the true ones is 0.77.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Literal

import numpy as np

from ggda_ext.grouping.kmeans import TREE_DIMENSIONS
from ggda_ext.groups.labels import first_few

Whitening = Literal["pca", "scale"] | None

ROTATED_FEATURES = 1024  # rotating more features costs more than the few saved dimensions are worth
MOST_FEATURES = 8192
_CHUNK = 8192


def check_features(features: np.ndarray) -> np.ndarray:
    """Return `features [n, d]` as finite floating-point numbers: float32 if that is exact, else float64."""
    if features.dtype.kind not in "fiub":
        raise TypeError(f"the features are of type {features.dtype}: encode them as numbers first.")
    if features.ndim != 2 or 0 in features.shape:
        raise ValueError(f"the features have shape {features.shape}: pass at least one row and one column [n, d].")
    small = features.dtype.itemsize <= (4 if features.dtype.kind == "f" else 2)
    rows = features.astype(np.float32 if small else np.float64, copy=False)
    bad = np.flatnonzero(~np.isfinite(rows).all(1))
    if len(bad):
        raise ValueError(
            f"the features of {len(bad)} of {len(rows)} points hold NaN or infinity, first {first_few(bad)}."
        )
    return rows


def whitened(rows: np.ndarray, whiten: Whitening, own_units: bool) -> np.ndarray:
    """Return centred features `[n, r]` to cluster, from `rows [n, d]`; r ≤ d because constant directions are left out.

    With ``"pca"``, every direction has variance one; with ``"scale"``, every feature. With None, or after scaling, the
    rows are only rotated, which keeps all distances.

    Args:
        rows: finite features `[n, d]`.
        whiten: ``"pca"``, ``"scale"`` or None.
        own_units: whether every feature has its own unit. If so, a feature with small values is not a rounding error.
    """
    mean = rows.mean(0, dtype=np.float64)
    rounding = max(64 * float(np.finfo(rows.dtype).eps), 1e-6)  # relative; of standard deviations and of eigh below
    scale = np.sqrt(sum(np.square(part - mean).sum(0) for part in _parts(rows)) / len(rows))
    varies = scale > rounding * np.abs(mean)
    if not own_units:
        varies &= scale > rounding * scale.max()
    if whiten is not None and not varies.any():
        raise ValueError(
            f"all {len(rows)} points have the same features, which cannot be whitened: pass features that differ, "
            "or whiten=None."
        )
    scaled = whiten == "scale" or (whiten == "pca" and own_units)
    if scaled:
        axes = np.diag(1 / scale[varies])
        rows, mean = rows[:, varies], mean[varies]
    else:
        axes = np.eye(len(mean))
    if rows.shape[1] <= ROTATED_FEATURES or whiten == "pca":
        axes = axes @ _principal_axes(rows, mean, axes, whiten == "pca", rounding)
    few = axes.shape[1] <= TREE_DIMENSIONS  # then k-means uses float64, in which a rotation loses nothing
    points = np.empty((len(rows), axes.shape[1]), np.float64 if few else rows.dtype)
    for start, part in zip(range(0, len(rows), _CHUNK), _parts(rows), strict=True):
        points[start : start + _CHUNK] = (part - mean) @ axes
    return points if points.shape[1] else np.zeros((len(rows), 1), rows.dtype)


def _principal_axes(rows: np.ndarray, mean: np.ndarray, axes: np.ndarray, unit: bool, rounding: float) -> np.ndarray:
    """Return the directions `[d, r]` of (rows − mean)·axes that have variance; scaled to variance one if `unit`."""
    d = rows.shape[1]
    if d > MOST_FEATURES:
        raise ValueError(
            f"whiten='pca' needs a {d} × {d} matrix for {d} features: pass whiten='scale', or fewer features."
        )
    covariance = sum(((part - mean) @ axes).T @ ((part - mean) @ axes) for part in _parts(rows)) / len(rows)
    variances, directions = np.linalg.eigh(covariance)
    kept = variances > rounding**2 * max(float(variances.max()), np.finfo(np.float64).tiny)
    rank = int(kept.sum())
    if unit and 1 < rank >= len(rows) - 1:
        warnings.warn(
            f"whitening {len(rows)} points in {rank} dimensions makes all of them equally far apart, so k-means "
            "cannot tell them apart: pass whiten='scale', or fewer features than points.",
            stacklevel=8,
        )
    return directions[:, kept] / np.sqrt(variances[kept]) if unit else directions[:, kept]


def _parts(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows in double precision, a part at a time."""
    return (rows[start : start + _CHUNK].astype(np.float64) for start in range(0, len(rows), _CHUNK))


def content_order(rows: np.ndarray) -> np.ndarray:
    """Return an order of the points `[n]` that depends only on their features; equal rows stay in data order."""
    big_endian = np.ascontiguousarray(rows.astype(rows.dtype.newbyteorder(">")))
    as_bytes = big_endian.view(np.dtype((np.void, big_endian.shape[1] * big_endian.itemsize)))
    return np.argsort(as_bytes[:, 0], kind="stable")
