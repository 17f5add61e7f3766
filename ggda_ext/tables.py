"""Arrays and pandas tables as data and as groups, without importing pandas.

Columns are found by name. Rows of a frame and of a column are matched by their index, as pandas itself does it. A
column with the frame's index in another order is put back into the frame's order; a column with another index raises
an error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor

from ggda_ext.groups.labels import labels_of_values

_logger = logging.getLogger(__name__)


class Table(Protocol):
    """A pandas frame or column."""

    @property
    def iloc(self) -> Any: ...

    def to_numpy(self) -> np.ndarray: ...


Array: TypeAlias = Tensor | np.ndarray | Table


def is_table(value: Any) -> TypeGuard[Any]:
    """Whether a value is a pandas Series or DataFrame."""
    return hasattr(value, "to_numpy") and hasattr(value, "index") and hasattr(value, "iloc")


def group_column(frame: Any, groups: Any) -> Any:
    """The label of every training point, from one or several named columns of a frame.

    Args:
        frame: a pandas DataFrame with a row for each training point; None raises an error that asks for it.
        groups: the name of a column or of a level of the index, or a list of names: each combination of their values is
            a label then. Anything else raises an error.
    """
    names = [groups] if isinstance(groups, str) else groups
    by_name = isinstance(names, list | tuple) and len(names) > 0 and all(isinstance(name, str) for name in names)
    if frame is None:
        raise ValueError(
            f"groups={groups!r} is one value, not one label per training point: pass the labels, e.g. "
            f"df[{groups!r}], or the table as well, groups={groups!r}, frame=df."
        )
    if not hasattr(frame, "columns") or not hasattr(frame, "iloc"):
        raise TypeError(f"frame is a {type(frame).__name__}: pass the pandas DataFrame that groups names columns of.")
    if not by_name:
        raise TypeError(
            f"frame is given, but groups is a {type(groups).__name__} and not the name of a column, or a list of "
            "names: leave out frame, or pass names."
        )
    columns = [_named_column(frame, name) for name in names]
    if isinstance(groups, str):
        return columns[0]
    for column in columns:
        labels_of_values(column)  # raises an error for what cannot be labels, such as fractional numbers
    values: Any = np.empty(len(frame), dtype=object)
    values[:] = list(zip(*columns, strict=True))
    values[np.any([part.isna().to_numpy() for part in columns], axis=0)] = None
    column = columns[0].astype(object)  # a copy, with the index of the frame
    column[:] = values
    return column


def _named_column(frame: Any, name: str) -> Any:
    """A column of a frame, or a level of its index, as a Series."""
    if name in frame.columns:
        found = frame[name]
        if hasattr(found, "columns"):
            raise ValueError(
                f"groups names {name!r}, and frame has {found.shape[1]} columns of that name: rename them."
            )
        return found
    if name in frame.index.names:
        return frame.index.get_level_values(name).to_series(index=frame.index)
    have = ", ".join(map(repr, list(frame.columns)[:10]))
    raise ValueError(f"groups names {name!r}, which is no column of frame: it has {have}.")


def aligned(column: Any, index: Any, name: str, to: str) -> Any:
    """Put the rows of a pandas column in the order of an index; return anything else unchanged.

    Args:
        column: a Series or DataFrame, or anything else.
        index: the pandas index of the data that the column belongs to, or None.
        name: the name of the column in errors.
        to: the name in errors of the data that the column belongs to.
    """
    if index is None or not is_table(column) or column.index.equals(index):
        return column
    if len(column) == len(index) and index.is_unique and column.index.is_unique and index.isin(column.index).all():
        _logger.warning("%s has the rows of %s in another order: put into the same order by their index.", name, to)
        return column.loc[index]
    if len(column) > len(index) and index.isin(column.index).all():
        raise ValueError(
            f"{name} has {len(column)} rows, and {to} has {len(index)}: pass those of the same rows, e.g. "
            "df.loc[x.index, 'clinic'], or frame=df.loc[x.index]."
        )
    raise ValueError(
        f"{name} has another index than {to}, so its rows cannot be matched: take both from one table, or pass "
        f".to_numpy() of it if its {len(column)} rows are already in the order of {to}."
    )


def index_of(parts: Sequence[Any]) -> Any:
    """The index of the first pandas table among the parts of some data, or None."""
    return next((part.index for part in parts if is_table(part)), None)


def columns_of(parts: Sequence[Any]) -> tuple[Any, ...] | None:
    """The names of the columns of the first pandas DataFrame among the parts of some data, or None."""
    return next((tuple(part.columns) for part in parts if is_table(part) and hasattr(part, "columns")), None)


def check_columns(columns: tuple[Any, ...] | None, name: str, trained: tuple[Any, ...] | None) -> None:
    """Raise an error if a table has other columns than the training data: the model would confuse them.

    Tables with another number of columns are not checked.

    Args:
        columns: the names of the columns of the table, or None.
        name: the name of the table in errors.
        trained: the names of the columns of the training data, or None.
    """
    if columns is None or trained is None or columns == trained or len(columns) != len(trained):
        return
    if set(columns) == set(trained):
        raise ValueError(
            f"{name} has its columns in another order than the training data: take them in the same order, e.g. "
            f"test[{list(trained)}]."
        )
    here, there = next((a, b) for a, b in zip(columns, trained, strict=True) if a != b)
    raise ValueError(
        f"{name} has a column {here!r}, and the training data has {there!r} there: pass the same columns, or "
        ".to_numpy() of both if they are the same but for their names."
    )


def tensor_of(array: Any, name: str) -> Tensor:
    """Convert a tensor, NumPy array or pandas table of numbers to a tensor."""
    if isinstance(array, Tensor):
        return array
    if is_table(array):
        return torch.as_tensor(_numbers_of(array, name).copy())  # pandas may return read-only arrays
    if array.dtype.kind in "OSUmMV":
        raise TypeError(f"{name} is not made of numbers: it holds {array.dtype}. Encode it first.")
    _check_gaps(int(np.ma.count_masked(array)), name, "pass .filled(np.nan)")
    native = np.ma.getdata(array).astype(array.dtype.newbyteorder("="), copy=False)
    # a tensor is always writable, and has no negative strides
    usable = native.flags.writeable and all(step >= 0 and step % native.itemsize == 0 for step in native.strides)
    return torch.as_tensor(native if usable else native.copy())


def _check_gaps(missing: int, where: str, otherwise: str) -> None:
    """Raise an error if numbers are missing; `otherwise` says what to pass to a model that takes NaN."""
    if missing:
        raise ValueError(
            f"{where} has {missing} missing value{'s' * (missing > 1)}: fill or drop them; if the model takes NaN, "
            f"{otherwise}."
        )


def _numbers_of(table: Any, name: str) -> np.ndarray:
    """Convert a Series or DataFrame to an array of numbers; raise an error if a column has text or gaps."""
    parts = [(name, table)]
    if hasattr(table, "columns"):
        parts = [(f"column {column!r} of {name}", table.iloc[:, j]) for j, column in enumerate(table.columns)]
    for where, part in parts:
        if getattr(part.dtype, "kind", "O") not in "fiub":
            raise TypeError(f"{where} is not made of numbers but of {part.dtype}: encode it, or leave it out.")
        _check_gaps(int(part.isna().sum()), where, "pass .to_numpy()")
    found = np.asarray(table.to_numpy())
    if found.dtype.kind in "fiub":
        return found
    whole = all(part.dtype.kind in "iub" for _, part in parts)  # of pandas' own types, or of mixed types
    return found.astype(np.int64 if whole else np.float64)


def holds_doubles(parts: Sequence[Any]) -> bool:
    """Whether some parts of the data are NumPy arrays or tables of float64, which the user may not have chosen."""
    return any(
        part.dtype.newbyteorder("=") == np.float64
        if isinstance(part, np.ndarray)
        else is_table(part) and _table_holds_doubles(part)
        for part in parts
    )


def _table_holds_doubles(table: Any) -> bool:
    """Whether a table becomes float64 as one array: a column is float64, or floats stand beside bools or wide ints."""
    kinds = [table.dtype] if hasattr(table, "dtype") else list(table.dtypes)
    sizes = [(kind.kind, getattr(kind, "itemsize", 8)) for kind in kinds]
    wide = any(kind == "b" or (kind in "iu" and size > 2) for kind, size in sizes)
    return any(kind == "f" and (size == 8 or wide) for kind, size in sizes)


def why_no_data(source: Any, arrays: Sequence[Any], name: str) -> str:
    """The reason why a list, tuple or dict is not a data set, and what to pass instead."""
    if isinstance(source, list | tuple) and all(isinstance(part, Mapping) for part in arrays):
        return (
            f"{name} is a list of dicts: pass DataLoader(examples, batch_size=32, collate_fn=your_collate), which says "
            "how examples become a batch."
        )
    texts = next(
        (part for part in arrays if isinstance(part, list | tuple) and part and isinstance(part[0], str)), None
    )
    if texts is not None:
        return f"{name} holds texts, {texts[0]!r} …: encode them first, e.g. as numbers of tokens, and pass tensors."
    if isinstance(arrays[0], tuple) or (isinstance(arrays[0], list) and isinstance(source, list)):
        return (
            f"{name} is a list of examples: pass DataLoader(examples, batch_size=32), or the inputs and the targets as "
            "two tensors, (x, y)."
        )
    strange = next(array for array in arrays if not isinstance(array, Tensor | np.ndarray) and not is_table(array))
    if isinstance(strange, list):
        return f"{name} holds a list: pass it as a tensor, torch.tensor(numbers)."
    return (
        f"{name} is a {type(source).__name__} that does not hold tensors only, but a {type(strange).__name__}: pass a "
        "DataLoader, a Dataset, a tensor, a tuple of tensors or a dict of tensors."
    )


def tensors_of(arrays: Sequence[Any], name: str) -> list[Tensor]:
    """Convert arrays and tables to tensors; the rows of all tables are put in the order of the first table."""
    index, first = index_of(arrays), f"the first table of {name}"
    named = [(f"part {j} of {name}", array) for j, array in enumerate(arrays)]
    return [tensor_of(aligned(array, index, part, first), part) for part, array in named]
