"""Retraining score: test accuracy after removing the most important points; lower is better.

As in the paper's figures: every grouping at the largest fraction, its best grouping and single points at all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.experiments.bench import Bench, Cell
from benchmarks.experiments.removal import write_rows
from benchmarks.names import GRAD_K_MEANS, PAPER_METHODS, SINGLE_POINTS

NAME = "retraining"


def run(bench: Bench) -> None:
    """Write the rows that are not there yet."""
    write_rows(bench, NAME, _cells(bench), bench.size.removed, largest_first=True)


def _cells(bench: Bench) -> Iterator[tuple[Cell, Sequence[float]]]:
    fractions = bench.size.removed
    largest = (max(fractions),)
    for cell in bench.cells():
        first = cell.method in PAPER_METHODS and cell.grouping_seed == 0
        yield cell, fractions if first and cell.grouping in (GRAD_K_MEANS, SINGLE_POINTS) else largest
        if first and cell.grouping == GRAD_K_MEANS:
            yield cell.mean, largest
