"""Group labels from anything users may have: numbers, strings, pandas columns, or lists of indices.

Each of these becomes one label per point: the id 0 … k-1 of its group, or -1 for a point in no group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from numbers import Real
from typing import Any, Literal, NoReturn, TypeGuard

import numpy as np
from torch import Tensor

LEFT_OUT = -1
Rest = Literal["error", "drop", "group"]
Rule = Callable[[np.ndarray], np.ndarray]
"""A function that returns the group ids of some training indices."""
_RULE_STEP = 2**20


def first_few(indices: np.ndarray) -> str:
    """Return the first five indices as text, for an error message."""
    return ", ".join(map(str, indices[:5].tolist())) + (", …" if len(indices) > 5 else "")


def read_labels(groups: Any, n: int | None) -> tuple[np.ndarray, tuple[Hashable, ...] | None]:
    """Return labels `[n]` from any input that `Groups` accepts, and the group names in it (None if it has none)."""
    if isinstance(groups, Mapping):
        return labels_of_lists(list(groups.values()), n), _named(groups)
    if is_list_of_lists(groups):
        return labels_of_lists(groups, n), None
    return labels_of_values(groups)


def check_labels(
    labels: np.ndarray,
    known: tuple[Hashable, ...] | None,
    n: int | None,
    names: Sequence[Hashable] | None,
    rest: Rest,
    *,
    may_leave_out: bool,
) -> tuple[np.ndarray, int, tuple[Hashable, ...] | None]:
    """Check labels, treat points in no group as `rest` says, and return labels, number of groups and group names.

    Args:
        labels: group id of every point `[n]`.
        known: names that came with the labels.
        n: number of training points, if known.
        names: names that the user passed; they replace `known`.
        rest: ``"error"``, ``"drop"`` or ``"group"``.
        may_leave_out: whether points in no group were accepted in an earlier check; then ``"error"`` allows them.
    """
    if rest not in ("error", "drop", "group"):
        raise ValueError(f"rest={rest!r} is not one of 'error', 'drop', 'group'.")
    if n is not None and len(labels) != n:
        raise ValueError(
            f"groups has labels for {len(labels)} points, but the training set has {n}: "
            "pass one label per training point, in the order of the data set"
            + ("." if n < 100 or len(labels) > 9 else "; if they name columns of a table, pass it too: frame=df.")
        )
    if len(labels) == 0:
        raise ValueError("groups is empty: pass at least one training point.")
    left_out = np.flatnonzero(labels < 0)
    if len(left_out) and rest == "error" and not may_leave_out:
        raise ValueError(
            f"groups is not a partition: {len(left_out)} of {len(labels)} points are in no "
            f"group, first {first_few(left_out)}. Put them in a group, or pass Groups(labels, rest='drop') to "
            "leave them out, or rest='group' to make them one group."
        )
    k = int(labels.max()) + 1
    if len(left_out) and rest == "group":
        if names is None and "rest" in (known or ()):
            raise ValueError(
                "rest='group' makes a group called 'rest', and a group is called 'rest' already: rename it, or pass "
                f"names= with a name for each of {k + 1} groups."
            )
        labels[left_out] = k
        known = (*(known or range(k)), "rest")
        k += 1
    if k == 0:
        raise ValueError("groups has no group: every point is marked as in no group.")
    return labels, k, known if names is None else _checked_names(names, k)


def _checked_names(names: Sequence[Hashable], k: int) -> tuple[Hashable, ...]:
    """Return the names as a tuple; raise an error unless there is one name for each of k groups and all differ."""
    if isinstance(names, str | Mapping | Set):
        raise TypeError(f"names is a {type(names).__name__}: pass a list with a name for each of {k} groups, in order.")
    if len(names) != k:
        raise ValueError(f"names has {len(names)} entries for {k} groups.")
    known = _named(_listed(_as_numpy(names)) if hasattr(names, "dtype") else names)
    if len(set(known)) < k:
        twice = next(name for at, name in enumerate(known) if name in known[:at])
        raise ValueError(f"names holds {twice!r} twice: give every group a name of its own.")
    return known


def refuse_empty(sizes: np.ndarray) -> NoReturn:
    """Raise the error for empty groups, given the sizes `[k]` of all groups."""
    empty = np.flatnonzero(sizes == 0)
    raise ValueError(
        f"{len(empty)} of {len(sizes)} groups are empty, first {first_few(empty)}: "
        "remove them, every group needs at least one training point."
    )


def sizes_by_rule(n: int, k: int, rule: Rule) -> np.ndarray:
    """Return the number of points in every group `[k]`. The rule labels about a million points at a time."""
    sizes = np.zeros(k, np.int64)
    for low in range(0, n, _RULE_STEP):
        labels = np.asarray(rule(np.arange(low, min(low + _RULE_STEP, n))))
        if labels.min() < 0 or labels.max() >= k:
            wrong = low + int(np.flatnonzero((labels < 0) | (labels >= k))[0])
            raise ValueError(f"rule gives point {wrong} the group id {labels[wrong - low]}: give 0 to {k - 1}.")
        sizes += np.bincount(labels, minlength=k)
    if not sizes.all():
        refuse_empty(sizes)
    return sizes


def is_list_of_lists(groups: Any) -> TypeGuard[Sequence[Any]]:
    """Whether groups are given as lists of members and not as one label per point."""
    if isinstance(groups, str | bytes) or not isinstance(groups, Sequence) or not groups:
        return False
    first = groups[0]
    if isinstance(first, Tensor | np.ndarray):
        return first.ndim > 0
    return isinstance(first, Iterable) and not isinstance(first, str | bytes)


def labels_of_lists(lists: Sequence[Any], n: int | None) -> np.ndarray:
    """Return labels `[n]` from the member indices of every group."""
    if not len(lists):
        raise ValueError("groups is empty: pass at least one group of training points.")
    if any(hasattr(indices, "get_indexer") for indices in lists):
        raise TypeError(
            "groups holds a pandas Index, which names rows by the index of the table and not by position: pass the "
            "column, df['clinic'], or df.groupby('clinic').indices."
        )
    members = [_as_numpy(sorted(indices) if isinstance(indices, Set) else indices) for indices in lists]
    alone = next((indices for indices in members if indices.ndim != 1), None)
    if alone is not None:
        got = repr(alone.item()) if alone.ndim == 0 else f"an array of shape {list(alone.shape)}"
        raise TypeError(f"groups as index lists must hold one list of indices per group, not {got}.")
    sizes = np.array([len(indices) for indices in members])
    if not sizes.all():
        refuse_empty(sizes)
    joined = np.concatenate(members) if members else np.empty(0, np.int64)
    if joined.ndim != 1 or joined.dtype.kind not in "iu":
        instead = "np.flatnonzero(mask) for a mask" if joined.dtype.kind == "b" else "pandas.Series(pairs) for pairs"
        raise TypeError(f"groups as index lists must hold whole numbers, not {joined.dtype}: pass {instead}.")
    n = int(joined.max()) + 1 if n is None else n
    outside = joined[(joined < 0) | (joined >= n)]
    if len(outside):
        raise ValueError(
            f"groups is not a partition: {len(outside)} indices are outside 0 … {n - 1}, first {first_few(outside)}."
        )
    doubled = np.flatnonzero(np.bincount(joined, minlength=n) > 1)
    if len(doubled):
        raise ValueError(
            f"groups is not a partition: {len(doubled)} points stand in a group more than once, "
            f"first {first_few(doubled)}. Every point may be in one group only."
        )
    labels = np.full(n, LEFT_OUT, np.int64)
    labels[joined] = np.repeat(np.arange(len(lists)), sizes)
    return labels


def labels_of_values(values: Any) -> tuple[np.ndarray, tuple[Hashable, ...] | None]:
    """Return labels and names from one value per point; names are None if the values are plain ids 0 … k-1."""
    _refuse_what_is_no_list(values)
    dtype: Any = getattr(values, "dtype", None)
    if hasattr(dtype, "categories") and hasattr(dtype, "ordered"):  # pandas categories have an order, which is kept
        return _labels_of_categories(getattr(values, "cat", values).codes, dtype.categories)
    array = _as_numpy(values)
    if array.ndim != 1:
        got = f"{values!r}, which is one value" if array.ndim == 0 else f"of shape {tuple(array.shape)}"
        raise ValueError(
            f"groups as labels must be one-dimensional, not {got}: pass one label per training point, e.g. "
            "df['clinic']."
        )
    if array.dtype.kind == "f":
        absent = np.isnan(array)
        beyond = np.flatnonzero(np.abs(array) >= 2.0**63)
        if len(beyond):
            raise ValueError(
                f"groups holds {array[beyond[0]]} at point {beyond[0]}: pass a whole number for each point, or NaN or "
                "None for a point in no group."
            )
        if not np.array_equal(array[~absent], np.round(array[~absent])):
            raise TypeError("groups holds fractional numbers: bin them first, e.g. grouping.by_column(values, bins=4).")
        array = np.where(absent, LEFT_OUT, array).astype(np.int64)
    if array.dtype.kind in "iu":
        return _labels_of_integers(array)
    if array.dtype.kind == "b":
        labels, names = _labels_of_integers(array.astype(np.int8))
        return labels, tuple(bool(name) for name in names or (False, True)[: int(labels.max()) + 1])
    return _labels_of_objects(_listed(array))


def _listed(array: np.ndarray) -> list[Any]:
    """Return an array as a list of Python objects; dates and lengths of time stay what they are."""
    if array.dtype.kind in "mM":
        array = array.astype(f"{array.dtype.kind}8[us]")  # from nanoseconds, tolist() would give plain integers
    return array.tolist()


def _refuse_what_is_no_list(values: Any) -> None:
    """Raise an error for values without an order, values that can be read only once, and functions."""
    if isinstance(values, Set):
        raise TypeError("groups is a set, which has no order: pass one label per training point, e.g. df['clinic'].")
    if isinstance(values, Iterator):
        raise TypeError(f"groups is a {type(values).__name__}: pass list(groups), which can be read more than once.")
    if callable(values) and not hasattr(values, "__len__"):
        raise TypeError(
            f"groups is a {type(values).__name__}: pass one label per training point, or Groups.by_rule(n, k, rule)."
        )


def _labels_of_integers(array: np.ndarray) -> tuple[np.ndarray, tuple[int, ...] | None]:
    absent = array < 0
    inside = array[~absent] if absent.any() else array
    if len(inside) == 0:
        return np.full(len(array), LEFT_OUT, np.int64), None
    if int(inside.max()) <= 4 * len(array) + 1_000_000:  # dense: count instead of sorting
        present = np.bincount(inside) > 0
        ids = np.flatnonzero(present)
        found = (np.cumsum(present, dtype=np.int32) - 1)[inside]
    else:
        ids, found = np.unique(inside, return_inverse=True)
    labels = found
    if len(inside) < len(array):
        labels = np.full(len(array), LEFT_OUT, found.dtype)
        labels[~absent] = found
    plain = ids[0] == 0 and ids[-1] == len(ids) - 1
    return labels, None if plain else tuple(ids.tolist())


def _labels_of_categories(codes: Any, categories: Any) -> tuple[np.ndarray, tuple[Hashable, ...]]:
    """Return labels in the order of the categories; categories without points are left out."""
    labels, used = _labels_of_integers(np.asarray(codes))
    every = _listed(_as_numpy(categories))
    return labels, _named([every[at] for at in used or range(int(labels.max(initial=-1)) + 1)])


def _labels_of_objects(values: list[Any]) -> tuple[np.ndarray, tuple[Hashable, ...]]:
    seen: dict[Hashable, int] = {}
    try:
        labels = np.fromiter((seen.setdefault(value, len(seen)) for value in values), np.int64, len(values))
    except TypeError as error:
        raise TypeError(f"groups holds labels that cannot be compared: {error}.") from error
    absent = {value for value in seen if is_missing(value) or (isinstance(value, Real) and value < 0)}
    names = [value for value in seen if value not in absent]
    with suppress(TypeError):  # labels of mixed types keep the order in which they appear
        names.sort()  # type: ignore[call-arg]
    new_id = np.full(len(seen) + 1, LEFT_OUT, np.int64)
    new_id[[seen[name] for name in names]] = np.arange(len(names))
    return new_id[labels], _named(names)


def is_missing(value: Any) -> bool:
    """Whether a value of a column is missing: None, NaN, NaT or pandas' NA."""
    return value is None or str(value) in ("NaT", "<NA>") or value != value


def _named(labels: Iterable[Any]) -> tuple[Hashable, ...]:
    """Return the labels as group names; pandas periods and intervals become text, such as ``2024-03`` or ``(0, 5]``."""
    return tuple(_name(label) for label in labels)


def _name(label: Any) -> Hashable:
    if isinstance(label, tuple):
        return tuple(_name(part) for part in label)
    return str(label) if type(label).__name__ in ("Period", "Interval") else label


def _as_numpy(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    if hasattr(values, "ngroups"):
        raise TypeError(f"groups is a {type(values).__name__}: pass one label per training point, e.g. df['clinic'].")
    if isinstance(values, list | tuple) and any(isinstance(value, str) for value in values):
        return np.array([*values, None], dtype=object)[:-1]  # else numbers in the list would become text
    return np.asarray(values)  # of a pandas, polars or Arrow column, missing values become None or NaN
