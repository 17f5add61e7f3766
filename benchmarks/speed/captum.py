"""Compares ggda_captum with Captum on the same work: a mean test loss, 100 test points, the last layer, memory.

Captum gets its best batch size for each mode (64 sample-wise, 16 in default mode, 2,048 for the last layer). For a mean
test loss Captum uses ``aggregate=True`` over the test set, which is its cheapest way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import captum.influence
import ggda_captum
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks import models
from benchmarks.check.captum import load, tracin_cp
from benchmarks.speed.memory import peak_bytes
from benchmarks.speed.timing import Row, best_times
from ggda_ext import Groups, properties

TESTS = 100
SIZE = 64
SIZES = (2, 4, 16, 64, 256, 1024)
BEST, DEFAULT = "Captum, sample-wise", "Captum, default mode"


class Work:
    """ANN-L with made data of MNIST's shape and one checkpoint."""

    def __init__(self, n: int) -> None:
        torch.manual_seed(0)
        self.n, self.model = n, models.ann_l()
        self.data, self.tests = TensorDataset(*models.tabular(n, 784, 10)), models.tabular(TESTS, 784, 10, seed=1)

    def tracin(self, toolkit: Any, batch_size: int, sample_wise: bool, **options: Any) -> Any:
        return tracin_cp(toolkit, self.model, self.data, batch_size, sample_wise, **options)

    def last_layer(self, toolkit: Any, **options: Any) -> Any:
        return toolkit.TracInCPFast(
            self.model, self.model.get_submodule("6"), self.data, [self.model.state_dict()], load,
            loss_fn=nn.CrossEntropyLoss(reduction="sum"), batch_size=2048, **options,
        )  # fmt: skip

    def groups(self, size: int) -> Groups:
        return models.scattered(self.n, size)


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield rows with speed-ups over Captum, and with memory by number of groups."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Captum warns about inputs that require no gradient
        work = Work(2_048 if quick else 10_240)
        yield from _all_layers(work)
        yield from _last_layer(work)
        yield from _memory(work)
        yield from _memory_of_one_batch(work)


def _all_layers(work: Work) -> Iterator[Row]:
    grouped = work.tracin(ggda_captum, SIZE, True, groups=work.groups(SIZE))
    best, default = work.tracin(captum.influence, 64, True), work.tracin(captum.influence, 16, False)
    mean = properties.mean_loss(work.tests, nn.CrossEntropyLoss())
    times = best_times(
        {
            "mean": lambda: grouped.influence(property=mean),
            f"mean, {BEST}": lambda: best.influence(work.tests, aggregate=True),
            f"mean, {DEFAULT}": lambda: default.influence(work.tests, aggregate=True),
            "tests": lambda: grouped.influence(work.tests),
            f"tests, {BEST}": lambda: best.influence(work.tests),
        },
        repeats=10,
        slow={f"mean, {BEST}": 3, f"mean, {DEFAULT}": 2, f"tests, {BEST}": 2},
    )
    note = f"n = {work.n:,}"
    yield _row("TracInCP, mean test loss", SIZE, times["mean"], BEST, times[f"mean, {BEST}"], 15, note)
    yield _row("TracInCP, mean test loss", SIZE, times["mean"], DEFAULT, times[f"mean, {DEFAULT}"], 50, note)
    yield _row(f"TracInCP, {TESTS} test points", SIZE, times["tests"], BEST, times[f"tests, {BEST}"], 15, note)


def _last_layer(work: Work) -> Iterator[Row]:
    plain = work.last_layer(captum.influence)
    calls: dict[str, Callable[[Any], Tensor]] = {
        f"{TESTS} test points": lambda influence: influence.influence(work.tests),
        "self influence": lambda influence: influence.self_influence(),
    }
    for what, call in calls.items():
        grouped = {size: work.last_layer(ggda_captum, groups=work.groups(size)) for size in SIZES}
        cases: dict[str, Callable[[], Any]] = {"Captum": lambda call=call: call(plain)}  # type: ignore[misc]
        cases |= {str(size): lambda call=call, it=it: call(it) for size, it in grouped.items()}  # type: ignore[misc]
        times = best_times(cases)
        for size in SIZES:
            yield _row(f"TracInCPFast, {what}", size, times[str(size)], "Captum", times["Captum"], 1, f"n = {work.n:,}")


def _memory(work: Work) -> Iterator[Row]:
    """Yield rows with the peak memory for many groups, as a multiple of the peak memory for few groups."""
    mean = properties.mean_loss(work.tests, nn.CrossEntropyLoss())
    for what, call in {
        "mean test loss": lambda influence: influence.influence(property=mean),
        "self influence": lambda influence: influence.self_influence(),
    }.items():
        peaks = {}
        for size in (1024, 4):
            influence = work.tracin(ggda_captum, 64, True, groups=work.groups(size))
            call(influence)  # a first call, so that memory which stays allocated is not counted
            peaks[size] = peak_bytes(lambda call=call, influence=influence: call(influence))  # type: ignore[misc]
        few, many = peaks[1024], peaks[4]
        if few and many:
            note = f"{many / 2**20:.0f} MB with {work.n // 4:,} groups, {few / 2**20:.0f} MB with {work.n // 1024}"
            yield Row(
                "captum", "ANN-L", f"TracInCP memory, {what}", 4, 0.0, "group size 1024", many / few, "times", 2.0, note
            )


def _memory_of_one_batch(work: Work) -> Iterator[Row]:
    """Yield a row with the peak memory for a few points in one batch, compared with that of Captum's default mode."""
    points = 256
    small = Work(points)
    plain = small.tracin(captum.influence, points, False)
    grouped = small.tracin(ggda_captum, points, False, groups=small.groups(16))
    theirs = peak_bytes(lambda: plain.influence(work.tests, aggregate=True))
    ours = peak_bytes(lambda: grouped.influence(work.tests, aggregate=True))
    if theirs and ours is not None:
        note = f"{ours / 2**20:.0f} MB and {theirs / 2**20:.0f} MB for {points} points in one batch"
        yield Row("captum", "ANN-L", "TracInCP memory, one batch", 16, 0.0, DEFAULT, ours / theirs, "times", 0.1, note)


def _row(case: str, size: int, seconds: float, against: str, theirs: float, goal: float, note: str) -> Row:
    return Row("captum", "ANN-L", case, size, seconds, against, theirs / seconds, "x faster", goal, note)
