"""Retraining score: test accuracy after removing the most important points; lower is better.

As in the paper's figures: every grouping at the largest fraction, its best grouping and single points at all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.experiments.bench import Bench, Cell
from benchmarks.experiments.removal import write_rows
from benchmarks.names import PAPER_METHODS, SINGLE_POINTS

NAME = "retraining"


def run(bench: Bench) -> None:
    """Write the rows that are not there yet."""
    write_rows(bench, NAME, _cells(bench), bench.size.removed, largest_first=True)


def _cells(bench: Bench) -> Iterator[tuple[Cell, Sequence[float]]]:
    fractions = bench.size.removed
    largest = (max(fractions),)
    for cell in bench.cells():
        single = cell.method in PAPER_METHODS and cell.grouping == SINGLE_POINTS
        yield cell, fractions if single or cell.is_compared else largest
        if cell.is_compared:
            yield cell.mean, largest
