"""Builders of random groups, and of groups from labels, a column, or the clusters of any estimator."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import tzinfo
from typing import Any

import numpy as np
from sklearn.base import clone
from torch import Tensor
from torch.utils.data import Dataset

from ggda_ext.grouping.features import input_features
from ggda_ext.groups.labels import Rest, is_missing
from ggda_ext.groups.partition import Groups
from ggda_ext.sharing import once

RandomState = int | np.random.Generator | np.random.RandomState | None


def random_groups(
    n: int, group_size: int | None = None, n_groups: int | None = None, *, random_state: RandomState = None
) -> Groups:
    """Put every point into a random group; sizes differ by at most one.

    Args:
        n: number of training points.
        group_size: maximum size of a group; there are ⌈n / group_size⌉ groups.
        n_groups: number of groups; pass this or `group_size`.
        random_state: a seed, or a NumPy generator. Global random states are neither read nor changed. Without a
            seed, rank 0 draws the groups for all ranks.

    >>> random_groups(10, 4, random_state=0).sizes.tolist()
    [4, 3, 3]
    """
    k = group_count(n, group_size, n_groups)

    def shuffled() -> np.ndarray:
        labels = np.arange(n) % k
        generator(random_state).shuffle(labels)
        return labels

    return Groups(shuffled() if isinstance(random_state, int | np.integer) else once(shuffled))


def by_label(labels: Any, n: int | None = None, *, rest: Rest = "error") -> Groups:
    """Build one group per class label, or per value of any other labels.

    Args:
        labels: one label per point (NumPy, torch, pandas, list), or a data set with ``.targets``.
        n: number of training points, to check the labels against.
        rest: what to do with points that have a missing or negative label, as in `Groups`.
    """
    found = getattr(labels, "targets", labels)
    if isinstance(found, Dataset):
        raise TypeError(f"labels is a {type(labels).__name__} without .targets: pass the labels, one for each point.")
    return Groups(found, n, rest=rest)


def by_column(
    column: Any,
    n: int | None = None,
    *,
    bins: int | Sequence[Any] | None = None,
    freq: str | None = None,
    rest: Rest = "error",
) -> Groups:
    """Build one group per value of a column (source, author, …), or per bin of a column of numbers or dates.

    Args:
        column: one value per point: a pandas or polars column, an array, a list.
        n: number of training points, to check the column against.
        bins: for numbers and dates, the number of bins with about equal counts, or the edges of the bins (each bin
            holds its lower edge, the last bin also its upper edge). Values outside the edges are in no group. In the
            names of the groups, edges have six digits.
        freq: for dates, one group per ``"Y"`` (year), ``"M"`` (month), ``"W"`` (week from Monday to Sunday) or ``"D"``
            (day). Dates with a time zone count by the local time there.
        rest: what to do with points in no group (missing values, values outside the edges), as in `Groups`.

    >>> by_column([1.5, 20.0, 3.0, 70.0], bins=[0, 10, 100]).names
    ('[0, 10)', '[10, 100]')
    """
    if bins is None and freq is None:
        return Groups(column, n, rest=rest)
    if bins is not None and freq is not None:
        raise ValueError("bins and freq both say how to bin the column: pass one of them.")
    if isinstance(column, str):
        raise TypeError(f"column={column!r} is a name: pass the column itself, df[{column!r}].")
    given = _array_of(column)
    values = _as_numbers(given)
    if freq is not None:
        labels, names = _by_period(values, freq)
    else:
        if values.ndim != 1 or values.dtype.kind not in "fiubM":
            raise TypeError(f"bins= needs one number or date per point, not {values.dtype} {list(values.shape)}.")
        labels, names = _by_bin(values, bins, _zone_of(given))
    present = np.unique(labels[labels >= 0])
    renumbered = np.where(labels >= 0, np.searchsorted(present, labels), -1)
    groups_names = [names[j] for j in present] + (["rest"] if rest == "group" and (labels < 0).any() else [])
    return Groups(renumbered, n, names=groups_names, rest=rest) if len(present) else Groups(renumbered, n, rest=rest)


def from_clusters(estimator: Any, data: Any = None, *, n: int | None = None, rest: Rest = "error") -> Groups:
    """Build groups from the clusters of any scikit-learn clusterer.

    Args:
        estimator: a clusterer. A clone of it is fitted, so the estimator itself does not change.
        data: what to cluster: features `[n, d]`, a DataFrame, or a data set or loader of tensors. None if the estimator
            is already fitted; then its ``labels_`` are used.
        n: number of training points, to check the clusters against.
        rest: what to do with points that the clusterer marks as noise (label −1), as in `Groups`.
    """
    if data is None:
        if not hasattr(estimator, "labels_"):
            raise ValueError(f"{type(estimator).__name__} is not fitted and data is None: pass the data to cluster.")
        return Groups(estimator.labels_, n, rest=rest)
    if isinstance(estimator, type):
        raise TypeError(f"estimator is the class {estimator.__name__}: pass an instance, {estimator.__name__}(…).")
    if not hasattr(estimator, "fit_predict"):
        raise TypeError(f"{type(estimator).__name__} has no fit_predict: pass a scikit-learn clusterer.")
    features = input_features(data)
    labels = once(lambda: clone(estimator, safe=False).fit_predict(features))
    return Groups(np.asarray(labels), len(features) if n is None else n, rest=rest)


def group_count(n: int, group_size: int | None, n_groups: int | None) -> int:
    """Return the number of groups k, from exactly one of `group_size` (k = ⌈n / group_size⌉) and `n_groups`."""
    if (group_size is None) == (n_groups is None):
        what = "neither" if group_size is None else "both"
        raise ValueError(f"{what} of group_size and n_groups were given: pass exactly one.")
    name, value = ("group_size", group_size) if n_groups is None else ("n_groups", n_groups)
    for called, number in (("n", n), (name, value)):
        if not isinstance(number, int | np.integer) or isinstance(number, bool):
            got = f"{called} is a {type(number).__name__}" if hasattr(number, "shape") else f"{called}={number!r}"
            raise TypeError(f"{got}: pass a whole number{', len(data)' * (called == 'n')}.")
        if number < 1:
            raise ValueError(f"{called}={number}: pass at least 1.")
    assert value is not None
    if value > n:
        raise ValueError(f"{name}={value} is more than the {n} training points there are.")
    return int(value) if n_groups is not None else -(-n // int(value))


def generator(random_state: RandomState) -> np.random.Generator:
    """Return a NumPy generator from a seed, a generator (returned unchanged), a RandomState, or None (new entropy)."""
    if isinstance(random_state, np.random.Generator):
        return random_state
    if isinstance(random_state, np.random.RandomState):
        return np.random.default_rng(random_state.randint(2**31, size=4))
    if random_state is not None and (not isinstance(random_state, int | np.integer) or random_state < 0):
        raise ValueError(f"random_state={random_state!r}: pass a whole number ≥ 0, a NumPy generator or None.")
    return np.random.default_rng(random_state)


def _array_of(column: Any) -> np.ndarray:
    if isinstance(column, Tensor):
        return column.detach().cpu().numpy()
    return np.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)


def _zone_of(values: np.ndarray) -> tzinfo | None:
    """Return the time zone of the first date that has one; None if there is none."""
    objects = values.flat if values.dtype.kind == "O" else ()
    return next((value.tzinfo for value in objects if getattr(value, "tzinfo", None)), None)


def _as_numbers(values: np.ndarray, zone: tzinfo | None = None) -> np.ndarray:
    """Turn Python objects (dates, or numbers with None) into an array that NumPy can compare; others stay.

    Dates with a time zone become local times: of `zone` if given, else of their own.
    """
    if values.dtype.kind != "O":
        return values
    present = [None if is_missing(value) else value for value in values.tolist()]
    dates = [hasattr(value, "isoformat") for value in present if value is not None]
    if dates and all(dates):
        return np.array(["NaT" if value is None else _local(value, zone) for value in present], "datetime64[us]")
    try:
        return np.array([np.nan if value is None else value for value in present], np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"bins= and freq= need numbers or dates: {error}. Pass pandas.to_datetime(column) for dates as text, "
            "column.dt.to_timestamp() for periods."
        ) from error


def _local(date: Any, zone: tzinfo | None) -> str:
    """Return a date as text without a time zone; a date that has one in the local time of `zone`, or of its own."""
    if getattr(date, "tzinfo", None):
        date = (date if zone is None else date.astimezone(zone)).replace(tzinfo=None)
    return date.isoformat()


def _by_period(values: np.ndarray, freq: str) -> tuple[np.ndarray, list[str]]:
    if freq not in ("Y", "M", "W", "D"):
        raise ValueError(f"freq={freq!r} is not one of 'Y', 'M', 'W', 'D'.")
    if values.dtype.kind != "M":
        raise TypeError(f"freq= needs a column of dates, not {values.dtype}: convert it with pandas.to_datetime.")
    periods = values.astype("datetime64[D]" if freq == "W" else f"datetime64[{freq}]")
    if freq == "W":  # the weeks of NumPy start on Thursdays, as 1970-01-01 was one
        periods = (periods + 3).astype("datetime64[W]").astype("datetime64[D]") - 3
    found = np.unique(periods[~np.isnat(periods)])
    labels = np.where(np.isnat(periods), -1, np.searchsorted(found, periods))
    return labels, [str(period) for period in found]


def _by_bin(values: np.ndarray, bins: Any, zone: tzinfo | None) -> tuple[np.ndarray, list[str]]:
    missing = np.isnat(values) if values.dtype.kind == "M" else np.isnan(values.astype(np.float64))
    if missing.all():
        return np.full(len(values), -1), []
    if isinstance(bins, int | np.integer):
        if bins < 1:
            raise ValueError(f"bins={bins}: pass at least 1, or the edges of the bins.")
        ordered = np.sort(values[~missing])
        starts = ordered[len(ordered) * np.arange(bins) // bins]
        edges = np.append(np.unique(starts), ordered[-1])  # equal values stay together, so there may be fewer bins
    else:
        edges = _as_numbers(_array_of(bins), zone)
        edges = edges.astype(values.dtype) if values.dtype.kind == "M" else edges
        if edges.ndim != 1 or len(edges) < 2 or not (edges[1:] > edges[:-1]).all():
            raise ValueError(f"bins={bins!r}: pass at least two edges in ascending order.")
    labels = np.searchsorted(edges, values, side="right") - 1
    labels[values == edges[-1]] = len(edges) - 2
    labels[missing | (values < edges[0]) | (values > edges[-1])] = -1
    if edges.dtype.kind == "M" and (edges.astype("datetime64[D]") == edges).all():
        edges = edges.astype("datetime64[D]")  # so that names show dates without midnight
    names = [f"{edge:.6g}" for edge in edges] if edges.dtype.kind == "f" else []
    if len(set(names)) < len(edges):
        names = list(map(str, edges))
    ends = [")"] * (len(edges) - 2) + ["]"]
    return labels, [f"[{low}, {high}{end}" for low, high, end in zip(names[:-1], names[1:], ends, strict=True)]
