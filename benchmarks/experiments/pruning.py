"""Pruning: test accuracy after removing the least important points; higher is better.

As in the paper's tables: single points against large groups, at random (the paper's) and by its best grouping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.experiments.bench import Bench, Cell
from benchmarks.experiments.removal import write_rows
from benchmarks.names import GRAD_K_MEANS, RANDOM

NAME = "pruning"
LARGE = 2  # how many of the largest group sizes are pruned with


def run(bench: Bench) -> None:
    """Write the rows that are not there yet."""
    write_rows(bench, NAME, _cells(bench), bench.size.pruned, largest_first=False)


def _cells(bench: Bench) -> Iterator[tuple[Cell, Sequence[float]]]:
    fractions = bench.size.pruned
    cells = list(bench.cells((RANDOM, GRAD_K_MEANS)))
    large = sorted({cell.group_size for cell in cells})[-LARGE:]
    for cell in cells:
        if cell.group_size not in (1, *large):
            continue
        yield cell, fractions
        if cell.is_compared:
            yield cell.mean, fractions
