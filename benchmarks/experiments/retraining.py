"""Retraining score: test accuracy after removing the most important points; lower is better.

As in the paper's figures: every grouping at the largest fraction, its best grouping and single points at all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.experiments.bench import Bench, Cell
from benchmarks.experiments.removal import write_rows
from benchmarks.names import PAPER_METHODS, SINGLE_POINTS
from benchmarks.sizes import RemovalScale

NAME = "retraining"


def run(bench: Bench) -> None:
    """Write the rows that are not there yet."""
    size = bench.size.removal
    if size is not None:
        write_rows(bench, NAME, _cells(bench, size), size.removed, size.seeds, largest_first=True)


def _cells(bench: Bench, size: RemovalScale) -> Iterator[tuple[Cell, Sequence[float]]]:
    largest = (max(size.removed),)
    for cell in bench.cells(size.cells):
        single = cell.method in PAPER_METHODS and cell.grouping == SINGLE_POINTS
        yield cell, size.removed if single or cell.is_compared else largest
        if cell.is_compared:
            yield cell.mean, largest
