"""`python -m benchmarks speed`: times every strategy and toolkit on the same work, in one process, and shows ratios."""

from __future__ import annotations

import importlib
import json
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.names import SPEED_PARTS
from benchmarks.speed.timing import Row
from ggda_ext.storage.files import replaced


def run(
    parts: Iterable[str] = SPEED_PARTS,
    quick: bool = False,
    threads: int = 1,
    path: Path | None = None,
    ranks: int | None = None,
) -> list[Row]:
    """Measure the parts, print each row of the table as soon as it is measured, and write JSON to `path`.

    With `ranks`, this many processes are compared with one process instead. If the run is stopped, the rows measured so
    far stay on disk.
    """
    torch.set_num_threads(threads)
    found: list[Row] = []
    print(header())
    for row in _rows(parts, quick, ranks):
        found.append(row)
        print(line(row), flush=True)
        if path is not None:
            write(found, path, threads, quick)
    goals = [row for row in found if row.reached is not None]
    print(f"\n{sum(bool(row.reached) for row in goals)} of {len(goals)} goals reached", end="")
    print(f"; written to {path}" if path is not None else "")
    return found


def header() -> str:
    """Return the first line of the table."""
    left = f"{'part':8} {'model':20} {'case':36} {'size':>5} {'CPU s':>8}"
    return f"{left}  {'ratio':>7} {'unit':9} {'goal':>6}      against"


def line(row: Row) -> str:
    """Return the line of one row of the table."""
    bound = "" if row.goal is None else f"{'≥' if row.unit == 'x faster' else '≤'}{row.goal:g}"
    mark = {None: "    ", True: " ok ", False: "MISS"}[row.reached]
    size = "" if row.group_size is None else str(row.group_size)
    return (
        f"{row.part:8} {row.model:20} {row.case:36} {size:>5} {row.seconds:8.3f}  {row.ratio:7.2f} {row.unit:9} "
        f"{bound:>6} {mark} {row.against} ({row.note})"
    )


def _rows(parts: Iterable[str], quick: bool, ranks: int | None) -> Iterator[Row]:
    if ranks is not None:
        yield from importlib.import_module("benchmarks.speed.ranks").rows(quick, ranks)
        return
    for part in parts:
        yield from importlib.import_module(f"benchmarks.speed.{part}").rows(quick)


def write(rows: list[Row], path: Path, threads: int, quick: bool) -> None:
    """Write rows as JSON, completely or not at all."""
    about = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": threads,
        "quick": quick,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path, sync=False) as file:
        file.write(json.dumps({"about": about, "rows": [row.as_dict() for row in rows]}, indent=1).encode())
