"""Data larger than memory: ten million points that are never stored, the cost of `save_dir`, and estimated times."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks import models
from benchmarks.speed.core import LOSS, training_pass
from benchmarks.speed.memory import peak_bytes
from benchmarks.speed.timing import Row, best_times
from ggda_ext import GroupGradients, Groups, attribute, properties
from ggda_ext.data import IndexedData
from ggda_ext.estimation import estimate
from ggda_ext.methods import MethodName

FEATURES, BATCH = 23, 16_384
NETWORKS: dict[str, Callable[[], nn.Module]] = {"LR": models.logistic_regression, "ANN-S": models.ann_s}
SAVED: tuple[MethodName, ...] = ("influence", "tracin")
NOTE = "made data of HELOC's shape, generated batch by batch"


class MadeStream(IterableDataset):
    """`n` points that exist only while their batch is used. The seed of a batch is the index of its first point."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for low in range(0, self.n, BATCH):
            generator = torch.Generator().manual_seed(low)
            size = min(BATCH, self.n - low)
            yield torch.randn(size, FEATURES, generator=generator), torch.randint(0, 2, (size,), generator=generator)


def stream(n: int) -> DataLoader:
    """Return a stream of `n` points in batches."""
    return DataLoader(MadeStream(n), batch_size=None)


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield all rows: throughput and memory on a stream, the cost of `save_dir`, and estimates."""
    n = 1_000_000 if quick else 10_000_000
    for name in NETWORKS:
        yield from throughput(name, n)
        yield from memory(name, n)
    yield from saving(quick)
    yield from estimates(quick)


def scored(name: str, n: int, k: int) -> Callable[[], Tensor]:
    """Return a function that scores one property on a stream of `n` points, in `k` groups given by a rule."""
    torch.manual_seed(0)
    model, groups = NETWORKS[name](), Groups.by_rule(n, k, lambda indices: indices % k)
    goal = properties.mean_loss(next(iter(MadeStream(100))), LOSS)
    return lambda: attribute(model, LOSS, stream(n), groups, goal, method="tracin")


def throughput(name: str, n: int) -> Iterator[Row]:
    """Yield rows with the time of a whole call in multiples of a plain training pass over the same stream."""
    cases: dict[str, Callable[[], Any]] = {
        "pass": lambda: training_pass(NETWORKS[name](), IndexedData(stream(n)), BATCH)
    }
    for k in (1_000, 1_000_000):
        cases[f"k={k}"] = scored(name, n, min(k, n))
    times = best_times(cases, repeats=3)
    for k in (1_000, 1_000_000):
        seconds = times[f"k={k}"]
        ratio = seconds / times["pass"]
        yield Row("scaling", name, f"{n:,} points, {k:,} groups", n // k, seconds, "training pass", ratio, "passes",
                  1.5, f"{NOTE}, {n / seconds / 1e6:.2f} million points/s")  # fmt: skip


def memory(name: str, n: int) -> Iterator[Row]:
    """Yield rows with the peak memory of `n` points as a multiple of that of half the points, with as many groups.

    Memory that grows with n would give a ratio near 2.
    """
    for k in (1_000, n // 10):
        peaks = {points: [peak_bytes(scored(name, points, k)) for _ in range(2)] for points in (n // 2, n)}
        if None in peaks[n]:
            return
        few, many = (min(peak for peak in found if peak is not None) for found in peaks.values())  # the peak varies
        note = f"{many / 2**20:.1f} MB beyond the model, {4 * k / 2**20:.1f} MB of it the scores of {k:,} groups"
        yield Row("scaling", name, f"peak memory, {n:,} points", n // k, 0.0, f"{n // 2:,} points", many / max(few, 1),
                  "times", 1.2, note)  # fmt: skip


def saving(quick: bool) -> Iterator[Row]:
    """Yield rows that compare a call with and without `save_dir`, for groups whose points are spread over the data."""
    for name, n, method in product(NETWORKS, (100_000, 500_000 if quick else 2_000_000), SAVED):
        torch.manual_seed(0)
        model, data = NETWORKS[name](), models.tabular(n, FEATURES, 2)
        groups = Groups(np.random.default_rng(0).integers(0, 1_000, n))
        goal = properties.mean_loss((data[0][:100], data[1][:100]), LOSS)
        run = partial(attribute, model, LOSS, data, groups, goal, method=method)
        with tempfile.TemporaryDirectory() as folder:
            new = (Path(folder) / str(number) for number in count())
            cases: dict[str, Callable[[], Any]] = {
                "plain": run,
                "saved": lambda: run(save_dir=next(new)),  # noqa: B023  # called before the next turn
            }
            times = best_times(cases, repeats=25 if n == 100_000 else 3)
        ratio = times["saved"] / times["plain"]
        yield Row("scaling", name, f"with save_dir, {method}", n // 1_000, times["saved"], "without", ratio, "times",
                  1.15, f"{n:,} points in memory, random groups")  # fmt: skip


def estimates(quick: bool) -> Iterator[Row]:
    """Yield rows that compare estimated and measured time: the larger one divided by the smaller one."""
    n = 1_000_000 if quick else 4_000_000
    torch.manual_seed(0)
    cases = {
        "LR": (models.logistic_regression(), models.tabular(n, FEATURES, 2), 10, 1),
        "ANN-S": (models.ann_s(), models.tabular(n // 2, FEATURES, 2), 1_000, 1),
        "ANN-L": (models.ann_l(), models.tabular(n // 100, 784, 10), 64, 100),
        "ResNet-18, width 16": (models.resnet18(16), models.images(512 if quick else 2_048), 16, 1),
    }
    for name, (model, data, size, m) in cases.items():
        provider = GroupGradients(model, LOSS, data, np.arange(len(data[0])) // size)
        provider.plan(m)
        found = estimate(provider, m=m, clock=time.process_time)
        directions = torch.randn(m, provider.p)
        start = time.process_time()
        provider.scores(directions)
        seconds = time.process_time() - start
        ratio = found.seconds / seconds
        yield Row("scaling", name, f"estimated, {m} propert{'y' if m == 1 else 'ies'}", size, seconds,
                  f"{found.seconds:.3f} s estimated", max(ratio, 1 / ratio), "times", 2.0,
                  f"{found.strategy}, n = {found.points:,}, timed on {found.timed_points:,} points")  # fmt: skip
