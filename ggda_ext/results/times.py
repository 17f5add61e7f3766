"""Group names (dates, periods, years or plain numbers) as points in time, for plots over time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

_DATE = re.compile(
    r"\d{4}(-?Q(?P<quarter>[1-4])|\d{4}|"
    r"-\d\d(-\d\d(T\d\d(:\d\d(:\d\d)?)?(?P<ignored>(\.\d+)?(Z|[+-]\d\d:?\d\d)?))?)?)?",
    re.ASCII,
)
"""Texts that are dates: 2024Q1, 20240301, 2024, 2024-03, 2024-03-01, 2024-03-01T12:00:00.5+01:00."""


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
            if np.isnat(found[-1]):
                raise ValueError(name)
        except (ValueError, TypeError):
            raise ValueError(
                f"{argument or 'the name of a group'} holds {name!r}, which is no date, nor text for one from 1500 to "
                "2200 such as 2024, 2024-03 or 2024-03-01: group by date, e.g. grouping.by_column(dates, freq='M'), or "
                "pass dates= with one for each group."
            ) from None
    return np.array(found)


def _iso(name: Any) -> Any:
    """Return a text that NumPy reads as a date, or a datetime64; raise an error for text that need not be a date."""
    start = getattr(name, "start_time", name)  # a pandas Period has a start_time
    if isinstance(start, np.datetime64):
        return start
    if hasattr(start, "isoformat"):
        return start.isoformat()[:19]
    text = str(start).strip().partition("/")[0].replace(" ", "T")  # a week is written 2024-01-01/2024-01-07
    date = _DATE.fullmatch(text)
    if date is None or not 1500 <= int(text[:4]) <= 2200:
        raise ValueError(text)
    if date["quarter"]:
        return f"{text[:4]}-{3 * int(date['quarter']) - 2:02d}"
    if len(text) == 8 and text.isdigit():
        return f"{text[:4]}-{text[4:6]}-{text[6:]}"
    return text.removesuffix(date["ignored"] or "")
