"""Compares dattri and ggda_dattri on the same work: LiSSA, TracIn, TRAK's cache, and peak memory.

The speed-up of LiSSA is split into steps. dattri runs with training batches of 500, as in its own benchmark. LiSSA's
depth is reduced for both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ggda_dattri
import numpy as np
import torch
from dattri import algorithm as upstream
from dattri.task import AttributionTask
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import models
from benchmarks.speed.memory import peak_bytes
from benchmarks.speed.timing import Row, best_times
from ggda_ext import Groups
from ggda_ext.properties import mean_loss

TESTS, GROUP_SIZE, TRAIN_BATCH = 100, 64, 500


@dataclass(frozen=True)
class Work:
    """ANN-L with made data of MNIST's shape, as dattri tasks with a loss per batch and with a loss per example."""

    model: nn.Module
    train: TensorDataset
    test: TensorDataset

    @classmethod
    def make(cls, n: int) -> Work:
        torch.manual_seed(0)
        sets = (TensorDataset(*models.tabular(count, 784, 10, seed)) for seed, count in enumerate((n, TESTS)))
        return cls(models.ann_l().eval(), *sets)

    @property
    def n(self) -> int:
        return len(self.train)

    def groups(self, size: int = GROUP_SIZE) -> Groups:
        return Groups(np.arange(self.n) // size)

    def batched(self) -> AttributionTask:
        return AttributionTask(models.loss_of(self.model), self.model, self.model.state_dict())

    def unbatched(self) -> AttributionTask:
        return AttributionTask(models.loss_of_one(self.model), self.model, self.model.state_dict())

    def probability(self, parameters: dict[str, Tensor], data: Any) -> Tensor:
        return torch.exp(-models.loss_of_one(self.model)(parameters, data))

    def train_loader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=TRAIN_BATCH)

    def test_loader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=TESTS)

    def full_loader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.n)


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield rows of LiSSA, TracIn and TRAK on ANN-L; there are fewer points with `quick`."""
    work = Work.make(1_000 if quick else 5_000)
    for part in (_lissa(work, depth=1 if quick else 3), _tracin(work), _trak(work)):
        yield from (replace(row, goal=None) if quick else row for row in part)  # the goals are set for 5,000 points


def _lissa(work: Work, depth: int) -> Iterator[Row]:
    options: dict[str, Any] = {"recursion_depth": depth, "batch_size": 10}
    property = mean_loss(work.test.tensors, cross_entropy)

    def ours(**extra: Any) -> Any:
        grouped: dict[str, Any] = {"groups": work.groups(), "show_progress": False} | extra
        attributor = ggda_dattri.IFAttributorLiSSA(work.batched(), **options, **grouped)
        attributor.cache(work.full_loader())
        return attributor

    old = upstream.IFAttributorLiSSA(work.batched(), **options)
    old.cache(work.full_loader())
    inside = _Clock()
    old.generate_train_rep = inside.timing(old.generate_train_rep)
    memory: dict[str, int | None] = {}
    cases = {
        "dattri": lambda: torch.no_grad()(old.attribute)(work.train_loader(), work.test_loader()),
        "one solve": lambda: ours(curvature="upstream").attribute(work.train_loader(), work.test_loader()),
        "tests": lambda: ours().attribute(work.train_loader(), work.test_loader()),
        "property": lambda: ours().attribute(work.train_loader(), property=property),
        "tests, size 4": lambda: ours(groups=work.groups(4)).attribute(work.train_loader(), work.test_loader()),
    }
    times = _measured(cases, memory, once=("dattri", "one solve"))
    groups_alone = best_times({"groups": lambda: _group_scores(ours(), work)}, 3)["groups"]
    times["grouping"] = times["dattri"] - inside.seconds + groups_alone
    note = f"n = {work.n:,}, depth {depth}, LiSSA batch 10, {TESTS} tests"
    steps = (
        ("LiSSA, dattri", "dattri", None, 1),
        ("LiSSA, + grouping", "grouping", None, GROUP_SIZE),
        ("LiSSA, + one solve for all groups", "one solve", None, GROUP_SIZE),
        ("LiSSA, + batched solve", "tests", 8.0, GROUP_SIZE),
        ("LiSSA, + mean test loss as property", "property", 100.0, GROUP_SIZE),
    )
    for title, name, goal, size in steps:
        how = "; dattri's time with its per-point gradients replaced by group gradients" if name == "grouping" else ""
        yield _row(title, size, times[name], times["dattri"], goal, note + how)
    yield from _memory("LiSSA", memory, {"tests": GROUP_SIZE, "tests, size 4": 4}, note)


def _tracin(work: Work) -> Iterator[Row]:
    for title, projection in (("projected to 512", {"proj_dim": 512}), ("not projected", {"proj_type": "identity"})):
        kwargs = {"proj_type": "normal"} | projection

        def attribute(package: Any, kwargs: dict[str, Any], **extra: Any) -> Tensor:
            attributor = package.TracInAttributor(work.unbatched(), torch.ones(1), False, dict(kwargs), **extra)
            return attributor.attribute(work.train_loader(), work.test_loader())

        memory: dict[str, int | None] = {}
        cases: dict[str, Callable[[], Any]] = {
            "dattri": partial(attribute, upstream, kwargs),
            "tests": partial(attribute, ggda_dattri, kwargs, groups=work.groups()),
        }
        times = _measured(cases, memory, once=("dattri",))
        note = f"n = {work.n:,}, {TESTS} tests, {title}"
        yield _row(f"TracIn, {title}", GROUP_SIZE, times["tests"], times["dattri"], 30.0, note)
        yield from _memory(f"TracIn, {title}", memory, {"tests": GROUP_SIZE}, note)


def _trak(work: Work) -> Iterator[Row]:
    def cache(package: Any, **extra: Any) -> None:
        kwargs = {"proj_dim": 512, "proj_type": "normal"}
        package.TRAKAttributor(work.unbatched(), work.probability, kwargs, regularization=1e-6, **extra).cache(
            work.train_loader()
        )

    memory: dict[str, int | None] = {}
    cases = {
        "dattri": lambda: cache(upstream),
        "tests": lambda: cache(ggda_dattri, groups=work.groups()),
        "tests, size 4": lambda: cache(ggda_dattri, groups=work.groups(4)),
        "exact": lambda: cache(ggda_dattri, groups=work.groups(), fisher="exact"),
    }
    times = _measured(cases, memory, once=("dattri", "exact", "tests, size 4"))
    note = f"n = {work.n:,}, proj_dim 512"
    yield _row("TRAK cache, batched Fisher", GROUP_SIZE, times["tests"], times["dattri"], 10.0, note)
    yield _row("TRAK cache, exact Fisher", GROUP_SIZE, times["exact"], times["dattri"], None, note)
    yield from _memory("TRAK cache", memory, {"tests": GROUP_SIZE, "tests, size 4": 4}, note)


def _row(case: str, size: int, seconds: float, against: float, goal: float | None, note: str) -> Row:
    return Row("dattri", "ANN-L", case, size, seconds, "dattri", against / seconds, "x faster", goal, note)


def _memory(title: str, memory: dict[str, int | None], sizes: dict[str, int], note: str) -> Iterator[Row]:
    """Yield rows with the peak memory of the grouped runs as a share of dattri's."""
    theirs = memory["dattri"]
    for name, size in sizes.items():
        ours = memory[name]
        if ours is not None and theirs:
            megabytes = f"{ours / 2**20:.0f} MB beyond model and data, dattri {theirs / 2**20:.0f} MB; {note}"
            yield Row(
                "dattri", "ANN-L", f"{title}: peak memory", size, 0.0, "dattri", ours / theirs, "times", 0.33, megabytes
            )


def _group_scores(attributor: Any, work: Work) -> None:
    """Run the part of the training side that remains with groups: scores of all groups, one vector per test point."""
    checkpoint = attributor._checkpoint(0)
    data, groups = attributor._train_data(work.train_loader())
    provider = checkpoint.groups(data, groups)
    provider.scores(torch.ones(TESTS, provider.p))


def _measured(
    cases: dict[str, Callable[[], Any]], memory: dict[str, int | None], once: tuple[str, ...]
) -> dict[str, float]:
    """Return the CPU seconds of every case, and write its peak memory to `memory`.

    Cases in `once` run once for both; the others run once more for memory.
    """

    def remember(name: str) -> None:
        memory[name] = peak_bytes(cases[name])

    timed = {name: (lambda name=name: remember(name)) if name in once else run for name, run in cases.items()}
    times = best_times(timed, 3, slow=dict.fromkeys(once, 1))
    for name in cases.keys() - set(once):
        remember(name)
    return times


class _Clock:
    """Sums up the CPU seconds spent inside a function."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return timed
