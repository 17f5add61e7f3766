"""The table of the comparison and its verdict, made from rows; there is one row per task, method and question."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.names import DEFAULT_MODE, EXACT_MODE, ONE_PROPERTY, TEST_POINTS

Row = Mapping[str, Any]
HEADLINE_SIZE = 64
GROUP_SIZES = (1, 64, 1024)
"""Mean sizes of the groups; sizes larger than half of the training points are left out."""
OWN_CODE = "own code"
"""Shown instead of a number if both sides run the code of the toolkit."""
_SHOWN = 5
"""Largest number of slow measurements that are named; the page has all of them."""


def heading() -> str:
    """Return the first line of the table."""
    sizes = " / ".join(f"{size:,}" for size in GROUP_SIZES)
    one, tests = (f"{question}: {sizes}" for question in (ONE_PROPERTY, TEST_POINTS))
    return f"{'toolkit':7} {'method':25} {'original: points':>16} {'seconds':>9}   {one:>24}   {tests:>24}"


def line(rows: Sequence[Row]) -> str:
    """Return the line of a method: points and seconds of the original for the property, and the speed-ups of groups."""
    first = rows[0]
    left = f"{first['toolkit']:7} {first['method']:25}"
    if failed := [row for row in rows if row["status"] == "failed"]:
        return f"{left} {failed[0]['reason']}"
    points = f"{first['original_points']:,} of {first['train_points']:,}"
    both = "   ".join(f"{_speed_ups(row):>24}" for row in rows)
    agreements = [cell["agreement"] for cell in first["cells"] if cell["agreement"] is not None]
    exact = chosen(first["cells"], EXACT_MODE) if any(c["mode"] == DEFAULT_MODE for c in first["cells"]) else []
    note = f"  exact {times(exact[0]['speed_up'])}" if exact else ""
    note += f", agreement {min(agreements):.2f}" if agreements else ""
    return f"{left} {points:>16} {first['original_seconds']:9.2f}   {both}{note}"


def _speed_ups(row: Row) -> str:
    cells = {cell["group_size"]: cell for cell in chosen(row["cells"])}
    missing = dict.fromkeys(row["own_code"], OWN_CODE)
    return " / ".join(
        times(cells[size]["speed_up"]) if size in cells else missing.get(size, "–") for size in GROUP_SIZES
    )


def chosen(cells: Iterable[Row], mode: str | None = None) -> list[Row]:
    """Return the cells of a mode; without a mode, the cells of the drop-in's default mode, which may be exact."""
    cells = list(cells)
    if mode is not None:
        return [cell for cell in cells if cell["mode"] == mode]
    default = {cell["group_size"] for cell in cells if cell["mode"] == DEFAULT_MODE}
    return [cell for cell in cells if cell["mode"] == DEFAULT_MODE or cell["group_size"] not in default]


def times(value: float) -> str:
    """Return a speed-up as text: one decimal place if it is below 10, else none."""
    return f"{value:.1f}×" if value < 9.95 else f"{value:,.0f}×"


def source(row: Row) -> str:
    """Return the line above the rows of a task: the data set, the model, and where the data came from."""
    mark = " (stand-in)" if row["stand_in"] else ""
    return f"{row['data']}{mark} · {row['model']} · {row['train_points']:,} training points · source: {row['source']}"


def headline(rows: Iterable[Row]) -> list[Row]:
    """Return the cells that the headline is about, merged with their rows: one property, groups of 64, default mode."""
    return [
        {**row, **cell}
        for row in rows
        if row["status"] == "measured" and row["question"] == ONE_PROPERTY
        for cell in chosen(row["cells"])
        if cell["group_size"] == HEADLINE_SIZE
    ]


def slower(rows: Iterable[Row]) -> list[Row]:
    """Return the cells of all questions, sizes and modes in which the group version is slower: speed-up below 0.95."""
    measured = [row for row in rows if row["status"] == "measured"]
    return [{**row, **cell} for row in measured for cell in row["cells"] if cell["speed_up"] < 0.95]


def verdict(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a line or two that sum up the comparison, then the lines of `problems`."""
    every = list(rows)
    cells = headline(every)
    found = [cell["speed_up"] for cell in cells]
    if found:
        first = median(cell["speed_up_first"] for cell in cells)
        yield (
            f"median speed-up {times(median(found))} for one property and groups of {HEADLINE_SIZE} "
            f"({times(min(found))} to {times(max(found))}, {len(found)} methods and tasks), {times(first)} on a first "
            "call, in CPU time"
        )
    late = slower(every)
    count = sum(len(row["cells"]) for row in every if row["status"] == "measured")
    yield (
        f"slower than the original: {len(late)} of {count} measurements"
        if late
        else (f"none of {count} measurements is slower than the original")
    )
    yield from problems(every)


def problems(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a line for every failure, and for the slowest measurements among those slower than the original."""
    every = list(rows)
    for row in every:
        if row["status"] == "failed":
            yield f"failed: {row['data']} {row['model']}, {row['toolkit']} {row['method']}: {row['reason']}"
    late = sorted(slower(every), key=lambda cell: cell["speed_up"])
    for cell in late[:_SHOWN]:
        yield (
            f"slower: {cell['data']} {cell['model']}, {cell['toolkit']} {cell['method']}, {cell['question']}, "
            f"groups of {cell['group_size']}, {cell['mode']} mode: {cell['speed_up']:.2f}×"
        )
    if len(late) > _SHOWN:
        yield f"slower: {len(late) - _SHOWN} more, see the tables of the page"


def passed(rows: Iterable[Row]) -> bool:
    """Whether everything could be measured. Speed does not count, because it depends on how busy the machine is."""
    return all(row["status"] == "measured" for row in rows)
