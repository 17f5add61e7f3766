"""Compares ggda_trak with TRAK on the same work: the whole loop, from the constructor to the scores of 100 targets.

TRAK and the drop-in get the same featurize batch size, the same projection dimension and float32 (TRAK's default,
float16, is 26 times slower on a CPU). The points of a group are spread over the data set. `groups.batch_sampler` puts
them into one batch, as the README advises; "cut" uses plain batches in the order of the data set instead.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ggda_trak
import torch
import trak

from benchmarks import models
from benchmarks.check.trak import user_loop
from benchmarks.speed.memory import peak_bytes
from benchmarks.speed.timing import Row, best_times

TARGETS, DIMENSION = 100, 512
SIZES = (4, 16, 64, 256)
GOALS = {"official projector": 8.0, "SketchProjector": 30.0, "FactoredProjector": 40.0}


class Work:
    """ANN-L with made data of MNIST's shape and one checkpoint."""

    def __init__(self, n: int, batch: int) -> None:
        torch.manual_seed(0)
        self.n, self.batch, self.model = n, batch, models.ann_l().eval()
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.data, self.targets = models.tabular(n, 784, 10), models.tabular(TARGETS, 784, 10, seed=1)

    def projector(self, case: str) -> Any:
        if case.startswith("Sketch"):
            return ggda_trak.SketchProjector(self.parameters, DIMENSION)
        return ggda_trak.FactoredProjector(self.model, DIMENSION) if case.startswith("Factored") else None

    def run(self, toolkit: Any, **options: Any) -> int:
        """Run the loop that a user writes, and return the bytes of the checkpoint's store."""
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            user_loop(toolkit, self.model, self.data, self.targets, self.batch, folder, proj_dim=DIMENSION, **options)
            return sum(path.stat().st_size for path in Path(folder, "0").iterdir())

    def grouped(self, case: str, size: int) -> int:
        """Run the loop of the drop-in with groups of one size, and return the bytes of the checkpoint's store."""
        groups = models.scattered(self.n, size)
        batches = None if case.endswith("cut") else groups.batch_sampler(self.batch)
        return self.run(ggda_trak, batches=batches, groups=groups, projector=self.projector(case))


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield rows with speed-ups over TRAK, and with memory and store by group size."""
    n = 2_000 if quick else 5_000
    for batch in (1_000,) if quick else (1_000, 100):
        yield from _times(Work(n, batch), quick)
    yield from _memory(Work(n, 1_000))


def _times(work: Work, quick: bool) -> Iterator[Row]:
    upstream = "TRAK"
    cases: dict[str, Any] = {upstream: lambda: work.run(trak)}
    kinds = [(case, size) for size in ((64,) if quick or work.batch < 1000 else SIZES) for case in GOALS]
    kinds.append(("official projector, cut", 64))
    for case, size in kinds:
        cases[f"{case} {size}"] = partial(work.grouped, case, size)
    times = best_times(cases, repeats=3, slow={upstream: 1 if work.batch < 1000 else 2})
    for case, size in kinds:
        seconds = times[f"{case} {size}"]
        goal = GOALS.get(case) if size == 64 and not quick else None
        note = f"n={work.n:,}, proj_dim {DIMENSION}, featurize batch {work.batch:,}, {TARGETS} targets"
        yield Row("trak", "ANN-L", case, size, seconds, upstream, times[upstream] / seconds, "x faster", goal, note)


def _memory(work: Work) -> Iterator[Row]:
    """Yield rows with the peak memory of the loop, beyond the memory before, and the bytes of the checkpoint store."""
    runs: dict[int, Callable[[], int]] = {1: lambda: work.run(trak)}
    runs |= {size: partial(work.grouped, "official projector", size) for size in (16, 64, 256)}
    base = 0
    for size, run in runs.items():
        stored: list[int] = []
        peak = peak_bytes(lambda run=run, stored=stored: stored.append(run()))  # type: ignore[misc]
        if peak is None:
            return
        base = base or peak
        note = f"peak {peak / 2**20:.0f} MB, store {stored[0] / 2**20:.1f} MB, n={work.n:,}, k={work.n // size:,}"
        case = "memory, TRAK" if size == 1 else "memory, official projector"
        extra = {"peak_bytes": peak, "store_bytes": stored[0]}
        yield Row("trak", "ANN-L", case, size, 0.0, "TRAK", base / max(peak, 1), "x smaller", None, note, extra)
