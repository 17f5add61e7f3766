"""Read columns of a data set and make groups of them: by values of one or several columns, nested names, or bins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from ggda_ext.groups import Groups
from ggda_ext.groups.labels import is_list_of_lists


@dataclass(frozen=True)
class Binned:
    """Groups rows by bins of a column of numbers or dates.

    Attributes:
        column: name of the column. Dates may be text in ISO 8601 form, ``"2024-05-31"``.
        bins: number of bins with about equal counts, or the edges of the bins.
        freq: for dates, ``"Y"``, ``"M"``, ``"W"`` or ``"D"``.
    """

    column: str
    bins: int | Sequence[Any] | None = None
    freq: str | None = None


@dataclass(frozen=True)
class Nested:
    """Groups rows by the upper levels of nested names in a column: at depth 1, ``"web/forum/cars"`` becomes ``"web"``.

    Attributes:
        column: name of the column.
        depth: number of levels to keep.
        separator: the text between levels.
    """

    column: str
    depth: int = 1
    separator: str = "/"


Part = str | Binned | Nested


def check_rows(dataset: Any, name: str) -> None:
    """Raise an error for data without rows that can be indexed; the error says what to pass instead."""
    if isinstance(dataset, str | bytes | Path):
        raise TypeError(f"{name} is the text {str(dataset)!r}: load it first, and pass the rows as given to Trainer.")
    if isinstance(dataset, DataLoader):
        raise TypeError(f"{name} is a DataLoader: pass its data set, as it was given to Trainer.")
    if isinstance(dataset, Mapping):
        sets = ", ".join(map(repr, list(dataset)[:5]))
        raise TypeError(
            f"{name} is a {type(dataset).__name__} of {sets}: pass one of its sets, e.g. data['train']; columns as "
            "datasets.Dataset.from_dict(columns)."
        )
    if hasattr(dataset, "iloc"):
        raise TypeError(f"{name} is a table of pandas: pass its rows, datasets.Dataset.from_pandas(table).")
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
        raise TypeError(f"{name} is a {type(dataset).__name__}: pass the rows as given to Trainer.")
    streamed = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if streamed or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{name} is a {type(dataset).__name__}, which is streamed, so its rows have no index to be told apart by: "
            "pass a data set with rows, e.g. datasets.Dataset.from_generator(lambda: iter(stream)) or list(stream)."
        )
    if len(dataset) == 0:
        raise ValueError(f"{name} is empty: it holds no rows.")


def groups_of(dataset: Any, groups: Any) -> Groups:
    """Make groups of the rows of a data set.

    Args:
        dataset: the training data: a `datasets.Dataset`, a list of dicts, or any map-style data set of dicts.
        groups: the name of a column, with dots for a column inside another one; `Binned` or `Nested`; a list of these
            for the combinations of their values; or anything `Groups` takes: one label for each row, or lists of rows.
    """
    check_rows(dataset, "train_dataset")
    n = len(dataset)
    if isinstance(groups, str | Binned | Nested):
        return Groups(_objects(_values(dataset, groups)), n)
    if _are_parts(groups, dataset):
        columns = [_values(dataset, part) for part in groups]
        return Groups(_objects(list(zip(*columns, strict=True))), n)
    have = ", ".join(map(repr, column_names(dataset)[:20])) or "none"
    if groups is None or isinstance(groups, int | float) or (isinstance(groups, list | tuple) and not groups):
        raise ValueError(
            f"groups={groups!r} names no column: pass the name of one (the training data has {have}), or one label for "
            f"each of the {n} rows."
        )
    lists = isinstance(groups, Groups | Mapping) or is_list_of_lists(groups)
    if not lists and hasattr(groups, "__len__") and len(groups) != n:
        raise ValueError(
            f"groups has {len(groups)} labels for {n} rows of the training data: pass one label per row, in the order "
            f"of the data set given to Trainer, or names of its columns: {have}."
        )
    return Groups.of(groups, n)


def _are_parts(groups: Any, dataset: Any) -> bool:
    """Whether `groups` is a list of columns, not a list of labels."""
    listed = isinstance(groups, list | tuple) and len(groups) > 0
    if not listed or not all(isinstance(part, str | Binned | Nested) for part in groups):
        return False
    if any(not isinstance(part, str) for part in groups):
        return True
    names = set(column_names(dataset))
    inside = [part for part in groups if part.split(".")[0] in names]
    return len(inside) == len(groups) or (bool(inside) and len(groups) != len(dataset))


def _objects(values: list[Any]) -> Any:
    found: Any = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def _values(dataset: Any, part: Part) -> list[Any]:
    """The value of each row for a column, `Binned` or `Nested`."""
    column = part if isinstance(part, str) else part.column
    values = column_values(dataset, column)
    _check_plain(values, column)
    if isinstance(part, Nested):
        if part.depth < 1:
            raise ValueError(f"depth={part.depth} of Nested({part.column!r}): pass at least 1.")
        return [
            None if value is None else part.separator.join(str(value).split(part.separator)[: part.depth])
            for value in values
        ]
    if isinstance(part, Binned):
        from ggda_ext.grouping import by_column

        if part.bins is None and part.freq is None:
            raise ValueError(f"Binned({part.column!r}) says no bins: pass bins= for numbers, or freq= for dates.")
        empty = next((at for at, value in enumerate(values) if value is None or value != value), None)
        if empty is not None:
            raise ValueError(
                f"Binned({part.column!r}) needs a number or a date in every row, and row {empty} has {values[empty]!r}"
                ": fill it in, or leave the row out."
            )
        edges = part.bins if part.bins is None or isinstance(part.bins, int) else _dates(part.bins, part.column)
        bins = by_column(_dates(values, part.column), bins=edges, freq=part.freq)
        return [bins.name(int(label)) for label in bins.labels]
    return values


def _check_plain(values: list[Any], column: str) -> None:
    """Raise an error if a column holds lists, arrays or further columns."""
    held = next((value for value in values if isinstance(value, list | dict | np.ndarray)), None)
    if held is None:
        return
    instead = (
        f"name {f'{column}.{next(iter(held))}'!r}" if isinstance(held, dict) and held else "pass one label per row"
    )
    raise TypeError(f"groups names the column {column!r}, which holds a {type(held).__name__} in a row: {instead}.")


def _dates(values: Sequence[Any], column: str) -> Any:
    """Return the values as an array; convert them to dates if they are text."""
    if not all(isinstance(value, str) for value in values):
        return np.asarray(values)
    try:
        return np.asarray(values, dtype="datetime64[s]")
    except ValueError:
        wrong = next(value for value in values if not _is_date(value))
        raise ValueError(
            f"Binned({column!r}) is for numbers and dates, and the column holds the text {wrong!r}: write dates as "
            "'2024-05-31', or name the column itself to group by its values."
        ) from None


def _is_date(text: str) -> bool:
    try:
        np.datetime64(text, "s")
    except ValueError:
        return False
    return True


def column_names(dataset: Any) -> list[str]:
    """Names of the columns: the `column_names` of the data set, or the keys of its first row."""
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list):
        return names
    row = dataset[0] if len(dataset) else {}
    return [str(name) for name in row] if isinstance(row, Mapping) else []


def column_values(dataset: Any, name: str) -> list[Any]:
    """A column as a list of plain values."""
    first, *inner = name.split(".")
    names = column_names(dataset)
    if name in names:
        first, inner = name, []
    if first not in names:
        have = ", ".join(map(repr, names[:20])) or "none"
        raise ValueError(
            f"groups names the column {name!r}, which the training data does not have; its columns are {have}. If a "
            "map or a Trainer (remove_unused_columns) took it away, pass the data set as it was before, or labels, one "
            "for each row."
        )
    plain = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
    values = (
        list(plain[first])
        if hasattr(plain, "column_names")
        else [_of_row(plain[at], first, at) for at in range(len(plain))]
    )
    for key in inner:
        other = next((at for at, value in enumerate(values) if not isinstance(value, Mapping | None)), None)
        if other is not None:
            raise ValueError(
                f"groups names the column {name!r}, but {first!r} holds no columns of its own in row {other}."
            )
        keys = dict.fromkeys(one for value in values for one in value or ())
        if key not in keys:
            have = ", ".join(map(repr, keys)) or "no columns of its own"
            raise ValueError(f"groups names the column {name!r}, but {first!r} holds {have}.")
        values = [(value or {}).get(key) for value in values]
    return [value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value for value in values]


def _of_row(row: Mapping[str, Any], name: str, at: int) -> Any:
    if name not in row:
        raise ValueError(
            f"row {at} of the training data has no {name!r}, which the first row has: give it to every row."
        )
    return row[name]
