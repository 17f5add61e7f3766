"""The table of the check and its verdict, made from rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]
STATUSES = ("equal", "differs", "failed", "skipped")


def heading() -> str:
    """Return the first line of the table."""
    return (
        f"{'toolkit':7} {'method':25} {'points':>7} {'groups':>6} {'status':8} {'error':>8}  "
        f"{'original MB':>11} {'groups MB':>9}"
    )


def line(row: Row) -> str:
    """Return the line of one row; a row that failed or was skipped shows the reason."""
    left = (
        f"{row['toolkit']:7} {row['method']:25} {row['train_points']:7,d} {row.get('groups', ''):>6} {row['status']:8}"
    )
    if row["status"] in ("failed", "skipped"):
        return f"{left} {row['reason']}"
    memory = f"{_megabytes(row['peak_original']):>11} {_megabytes(row['peak_groups']):>9}"
    return f"{left} {row['error']:8.1e}  {memory}"


def source(row: Row) -> str:
    """Return the line above the rows of a task: the data set, the model, and where the data came from."""
    mark = " (stand-in)" if row["stand_in"] else ""
    return f"{row['data']}{mark} · {row['model']} · {row['test_points']} test points · source: {row['source']}"


def verdict(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a line that sums up the check, and a line for every row that is not equal."""
    every = list(rows)
    count = Counter(row["status"] for row in every)
    rest = ", ".join(f"{count[status]} {status}" for status in STATUSES[1:] if count[status])
    yield f"equal to the originals on {count['equal']} of {len(every)} checks" + (f"; {rest}" if rest else "")
    yield from problems(every)


def problems(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a line for every check that is not equal, with the reason."""
    for row in sorted(rows, key=lambda row: STATUSES.index(row["status"])):
        if row["status"] != "equal":
            why = row.get("reason") or f"error {row['error']:.1e}, allowed {row['tolerance']:.0e}"
            yield f"{row['status']}: {row['data']} {row['model']}, {row['toolkit']} {row['method']}: {why}"


def passed(rows: Iterable[Row]) -> bool:
    """Whether every check that is not skipped is equal, and at least one check is equal."""
    statuses = [row["status"] for row in rows]
    return "equal" in statuses and all(status in ("equal", "skipped") for status in statuses)


def _megabytes(count: int | None) -> str:
    return "n/a" if count is None else f"{count / 2**20:,.0f}"
