"""Retraining score: test accuracy after removing the most important points; lower is better.

As in the paper's figures: every grouping at the largest fraction, its best grouping and single points at all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.experiments.bench import BEST, Bench, Cell
from benchmarks.experiments.groupings import NONE
from benchmarks.experiments.removal import write_rows
from benchmarks.scales import PAPER_METHODS

NAME = "retraining"


def run(bench: Bench) -> None:
    """Write the rows that are not there yet."""
    write_rows(bench, NAME, _cells(bench), bench.size.removed, largest_first=True)


def _cells(bench: Bench) -> Iterator[tuple[Cell, Sequence[float]]]:
    fractions = bench.size.removed
    largest = (max(fractions),)
    sizes = bench.size.removed_sizes
    for cell in bench.cells():
        if sizes is not None and cell.group_size not in sizes:
            continue
        curve = cell.method in PAPER_METHODS and cell.grouping_seed == 0 and cell.grouping in (BEST, NONE)
        yield cell, fractions if curve else largest
        if cell.method in PAPER_METHODS and cell.grouping == BEST and cell.grouping_seed == 0:
            yield cell.mean, largest
