"""Estimates of the time and memory of a pass, for any number of points, groups, properties and ranks.

A short calibration run times the same strategy on a few batches. The time of a whole pass is then

    seconds = fixed + n · seconds per point / ranks + bytes that each rank sends / bandwidth

The ranks send each other only the scores `[m, k]`, by a ring all-reduce: 2 · (ranks - 1) / ranks · m · k numbers per
rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ggda_ext.data import SomePoints, first_points
from ggda_ext.gradients import GroupGradients, Plan
from ggda_ext.gradients.provider import check_provider
from ggda_ext.groups.partition import Groups
from ggda_ext.sharing import alone
from ggda_ext.words import WORDS, check_counts, without

ETHERNET = 1.25e9  # bytes per second, 10 Gbit/s
_NATURAL = ("directional", "forward", "ghost")


@dataclass(frozen=True)
class Estimate:
    """Estimated time and memory of one pass over the training data.

    Attributes:
        strategy: how the gradients are computed.
        points, parameters, groups, properties, ranks: the sizes that the estimate is for: n, p, k, m and the number of
            ranks.
        fixed_seconds: time of the checks before the first batch.
        seconds_per_point: time that one rank needs for one point.
        sent_bytes: bytes that each rank sends to add up the scores.
        send_seconds: time that each rank needs to send them.
        working_bytes: memory for the activations of one batch and for the directions, on each rank.
        score_bytes: memory for the scores `[m, k]`, on each rank and in `save_dir`.
        group_bytes: memory for the group of every point, on each rank.
        timed_points: number of points in the longest calibration run.
    """

    strategy: str
    points: int
    parameters: int
    groups: int
    properties: int
    ranks: int
    fixed_seconds: float
    seconds_per_point: float
    sent_bytes: float
    send_seconds: float
    working_bytes: int
    score_bytes: int
    group_bytes: int
    timed_points: int

    @property
    def seconds(self) -> float:
        """Time of the whole pass, in seconds."""
        return self.fixed_seconds + self.points * self.seconds_per_point / self.ranks + self.send_seconds

    @property
    def memory_bytes(self) -> int:
        """Memory that each rank needs in addition to the model and the data."""
        return self.working_bytes + self.score_bytes + self.group_bytes

    def explain(self) -> str:
        """A few readable lines: the sizes, the time, the memory, and how much is sent and stored."""
        ranks = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        sent = f", {_bytes(self.sent_bytes)} sent by each in {_time(self.send_seconds)}" if self.ranks > 1 else ""
        return (
            f"m={self.properties:,} properties x k={self.groups:,} groups of n={self.points:,} points, "
            f"p={self.parameters:,} parameters, by {self.strategy}{ranks}:\n"
            f"  time    {_time(self.seconds)} ({self.seconds_per_point * 1e6:.3g} µs per point, timed on "
            f"{self.timed_points:,} points{sent})\n"
            f"  memory  {_bytes(self.memory_bytes)} per rank beyond model and data ({_bytes(self.working_bytes)} to "
            f"work, {_bytes(self.score_bytes)} scores, {_bytes(self.group_bytes)} group ids)\n"
            f"  disk    {_bytes(2 * self.score_bytes)} with save_dir"
        )


@without(**dict.fromkeys(WORDS, "an estimate is of a provider's pass; pass it to GroupGradients, or to attribute"))
def estimate(
    provider: GroupGradients,
    n: int | None = None,
    k: int | None = None,
    m: int = 1,
    *,
    p: int | None = None,
    ranks: int = 1,
    bandwidth: float = ETHERNET,
    calibration_seconds: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Estimate:
    """Estimate the time and memory of one pass of `provider`, by timing a few of its batches.

    The estimate assumes that every point, rank and parameter costs the same: a model with another `p` is of the same
    kind, and every rank runs on a machine like this one. It does not include the gradient of the property itself.

    Args:
        provider: model, loss, data and groups; any data of the right kind can be used.
        n: number of training points; by default the provider's.
        k: number of groups; by default the provider's.
        m: number of properties, or of components of one property.
        p: number of parameters; by default the provider's.
        ranks: number of processes that share the points.
        bandwidth: bytes per second between ranks.
        calibration_seconds: approximate time of the calibration run.
        clock: a function that returns the time in seconds; `time.process_time` measures CPU time.
    """
    check_provider(provider)
    check_counts(n=n, k=k, m=m, p=p, ranks=ranks)
    n, k, p = n or int(provider.groups.sizes.sum()), k or len(provider.groups), p or provider.p
    if k > n:
        raise ValueError(f"k={k} groups of n={n} points: a group has at least one point.")
    itemsize = provider.space.dtype.itemsize
    held = max(1, min(m, provider.memory_budget // (provider.p * itemsize)))
    with alone():
        plan = provider.on(provider.data, _alike(provider.groups.n, n / k)).plan(held)
        fixed, per_point, timed = _calibrated(provider, plan, n / k, held, calibration_seconds, clock)
    scale = p / provider.p * (-(-m // held))
    sent = 2 * (ranks - 1) / ranks * m * k * itemsize
    return Estimate(
        strategy=plan.strategy, points=n, parameters=p, groups=k, properties=m, ranks=ranks,
        fixed_seconds=fixed, seconds_per_point=per_point * scale,
        sent_bytes=sent, send_seconds=sent / bandwidth,
        working_bytes=int(plan.facts.working_bytes + held * p * itemsize), score_bytes=m * k * itemsize,
        group_bytes=n * (4 if max(n, k) < 2**31 else 8) * (1 if plan.strategy in _NATURAL else 2), timed_points=timed,
    )  # fmt: skip


def _calibrated(
    provider: GroupGradients, plan: Plan, group_size: float, m: int, budget: float, clock: Callable[[], float]
) -> tuple[float, float, int]:
    """Time runs of growing length; return fixed seconds, seconds per point and number of points of the longest run."""
    directions = torch.randn(m, provider.p, generator=torch.Generator().manual_seed(0)).to(
        provider.space.device, provider.space.dtype
    )
    order = np.arange(provider.groups.n) if plan.strategy in _NATURAL else provider.groups.order
    points, least = min(2 * plan.facts.batch_size, len(order)), 0.0
    measured: list[tuple[int, float]] = []
    while not measured or (points < len(order) and least < budget):
        points = points if not measured else min(2 * points, len(order))
        whole = provider.data
        data = first_points(whole, points) if whole.is_stream else SomePoints(whole, order[:points])
        part = provider.on(data, _alike(points, group_size))
        part.strategy, part.show_progress = plan.strategy, False
        times = []
        for _ in range(2 if least < budget / 4 else 1):
            start = clock()
            part.scores(directions)
            times.append(clock() - start)
        least = min(times)
        measured.append((points, least))
    (few, short), (many, long) = measured[max(0, len(measured) - 3)], measured[-1]
    per_point = (long - short) / (many - few) if many > few and long > short else long / many
    return max(0.0, long - many * per_point), per_point, many


def _alike(n: int, group_size: float) -> Groups:
    """Groups of about `group_size` consecutive points each."""
    return Groups((np.arange(n) / group_size).astype(np.int64))


def _time(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} seconds"


def _bytes(count: float) -> str:
    for size, unit in ((2**40, "TB"), (2**30, "GB"), (2**20, "MB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 2**10:.0f} kB"
