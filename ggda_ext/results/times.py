"""Group names (dates, periods, years or plain numbers) as points in time, for plots over time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np


def as_times(names: Sequence[Any], count: int, argument: str = "") -> np.ndarray:
    """Return times `[k]` as datetime64, or as numbers if all names are numbers.

    Args:
        names: dates, timestamps, periods, texts such as ``2024-03``, ``2024Q1`` or ``2024-03-01``, or numbers.
        count: the required number of names.
        argument: the argument that error messages mention; if empty, they mention the names of the groups.
    """
    if len(names) != count:
        raise ValueError(f"{argument} has {len(names)} entries for {count} groups: pass one for each.")
    if all(isinstance(name, int | float | np.integer | np.floating) and not isinstance(name, bool) for name in names):
        return np.asarray(names, dtype=float)
    found = []
    for name in names:
        try:
            found.append(np.datetime64(_iso(name)).astype("datetime64[s]"))
        except (ValueError, TypeError):
            raise ValueError(
                f"{argument or 'the name of a group'} holds {name!r}, which is no date: group by date, e.g. "
                "grouping.by_column(dates, freq='M'), or pass dates= with one for each group."
            ) from None
    return np.array(found)


def _iso(name: Any) -> Any:
    """Return a text that NumPy reads as a date, or a datetime64."""
    start = getattr(name, "start_time", name)  # a pandas Period has a start_time
    start = start.isoformat() if hasattr(start, "isoformat") else start
    if isinstance(start, np.datetime64):
        return start
    text = str(start).strip().partition("/")[0].replace(" ", "T")  # a week is written 2024-01-01/2024-01-07
    quarter = re.fullmatch(r"(\d{4})-?Q([1-4])", text)
    if quarter:
        return f"{quarter[1]}-{3 * int(quarter[2]) - 2:02d}"
    if not text[:4].isdigit():
        raise ValueError(text)
    return text[:19] if len(text) > 19 else text
