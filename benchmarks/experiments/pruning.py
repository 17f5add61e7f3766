"""Pruning: test accuracy after removing the least important points; higher is better.

As in the paper's tables: single points against large groups, at random (the paper's) and by its best grouping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.experiments.bench import Bench, Cell
from benchmarks.experiments.removal import write_rows
from benchmarks.names import GRAD_K_MEANS, RANDOM, SINGLE_POINTS
from benchmarks.sizes import RemovalScale

NAME = "pruning"
PRUNED = (RANDOM, GRAD_K_MEANS)
LARGE = 2  # how many of the largest group sizes are pruned with


def run(bench: Bench) -> None:
    """Write the rows that are not there yet."""
    size = bench.size.removal
    if size is not None:
        write_rows(bench, NAME, _cells(bench, size), size.pruned, size.seeds, largest_first=False)


def _cells(bench: Bench, size: RemovalScale) -> Iterator[tuple[Cell, Sequence[float]]]:
    groups = {name: sizes for name, sizes in size.cells.groups.items() if name in (SINGLE_POINTS, *PRUNED)}
    cells = list(bench.cells(replace(size.cells, groups=groups)))
    large = sorted({cell.group_size for cell in cells})[-LARGE:]
    for cell in cells:
        if cell.group_size not in (1, *large):
            continue
        yield cell, size.pruned
        if cell.is_compared:
            yield cell.mean, size.pruned
