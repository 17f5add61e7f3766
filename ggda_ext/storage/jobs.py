"""Long work, split into jobs of one block of groups each. Finished jobs are saved and never done again.

Where blocks begin and end depends only on the groups, the batch size and the size of the question. One rank makes a
whole block, so its numbers do not depend on the number of ranks, on a kill, or on the jobs that were finished before.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ggda_ext.data import SomePoints
from ggda_ext.gradients import GroupGradients
from ggda_ext.gradients.errors import NonFinite, Unproven
from ggda_ext.groups.partition import Groups
from ggda_ext.sharing import alone, gathered, of_all, once, rank, together, with_progress, world_size
from ggda_ext.storage.folder import Arrays, Store

BATCHES_PER_BLOCK = 32
MOST_BLOCKS = 128

Range = tuple[int, int]


def group_ranges(groups: Groups, points: int, most_groups: int) -> list[Range]:
    """Split the group ids into consecutive ranges of about `points` points and at most `most_groups` groups each."""
    offsets, k = groups.offsets, len(groups)
    ranges: list[Range] = []
    low = 0
    while low < k:
        high = int(np.searchsorted(offsets, offsets[low] + points, side="right")) - 1
        high = min(max(high, low + 1), low + most_groups, k)
        ranges.append((low, high))
        low = high
    return ranges


def points_in(groups: Groups, some: Range) -> int:
    """Number of points in a range of groups."""
    return int(groups.offsets[some[1]] - groups.offsets[some[0]])


def points_per_block(provider: GroupGradients, batch_size: int) -> int:
    """Number of points in a block: large enough to make saving cheap, small enough to lose little work by a kill."""
    return max(BATCHES_PER_BLOCK * batch_size, -(-int(provider.groups.offsets[-1]) // MOST_BLOCKS))


def part_of(provider: GroupGradients, groups: Range, strategy: str) -> GroupGradients:
    """The provider for a range of groups only, with the strategy that was chosen for all groups."""
    low, high = groups
    every = provider.groups
    if high - low == len(every):
        part = copy.copy(provider)
    else:
        members = np.sort(every.order[every.offsets[low] : every.offsets[high]])
        names = None if every.names is None else every.names[low:high]
        part = provider.on(SomePoints(provider.data, members), Groups(every.labels[members] - low, names=names))
    part.strategy, part.show_progress = strategy, False
    return part


@contextmanager
def whole_groups(provider: GroupGradients, groups: Range) -> Iterator[None]:
    """Context in which an error about a range of groups names the groups and points as the user knows them."""
    try:
        yield
    except NonFinite as error:
        raise NonFinite([groups[0] + j for j in error.ids], provider.groups, error.what) from None


def go_on_without(provider: GroupGradients, error: ValueError) -> None:
    """After an `Unproven` in a job, let all ranks stop using the layers and strategies that it names.

    Raises:
        ValueError: `error` itself, if it has another cause, or if the user named the strategy.
    """
    if provider.strategy != "auto":
        raise error
    cause = error.__cause__
    found = of_all((cause.why, cause.refused) if isinstance(cause, Unproven) else None)
    if not any(found):
        raise error
    for why, refused in filter(None, found):
        provider.do_without(why, refused)


@dataclass(frozen=True)
class Job:
    """One array to make: its name in the store, its shape, the number of points it takes, and the function to call."""

    name: str
    shape: tuple[int, ...]
    points: int
    make: Callable[[], Tensor]
    shared: bool = False
    """Whether all ranks make the array together, each rank its share."""


def finish(
    store: Arrays | None, jobs: Sequence[Job], dtype: torch.dtype, title: str, show_progress: bool | None
) -> Tensor | None:
    """Do all jobs that are not finished, one per rank at a time, and save their arrays; rank 0 writes.

    Args:
        store: the store or a part of it on rank 0, None on the other ranks.
        jobs: all jobs, the same on every rank.
        dtype: dtype of the arrays; NumPy has to know it.
        title: the title of the progress bar.
        show_progress: whether to show the progress bar; None shows it after `PATIENCE` seconds.

    Returns:
        The array, if there is only one job and it was done now; None otherwise.
    """
    missing = set(once(lambda: [job.name for job in jobs if store is None or job.name not in store]))
    todo = [job for job in jobs if job.name in missing]
    total, made = sum(job.points for job in jobs), list[Tensor]()
    done = total - sum(job.points for job in todo)
    rounds = ((range(sum(job.points for job in now)), now) for now in _rounds(todo))
    for _, now in with_progress(rounds, total, title, show_progress, done):
        made = _made(now, dtype)
        with together():
            if store is not None:
                for job, values in zip(now, made, strict=True):
                    store.save(job.name, values.numpy())
    return made[0] if made and len(jobs) == 1 else None


def _rounds(todo: list[Job]) -> Iterator[list[Job]]:
    """Yield lists of jobs that are done at the same time: one job per rank, or one job that all ranks share."""
    while todo:
        count = 1 if todo[0].shared else world_size()
        yield todo[:count]
        todo = todo[count:]


def _made(jobs: list[Job], dtype: torch.dtype) -> list[Tensor]:
    """Do the jobs of one round; return their arrays on the CPU, on every rank."""
    if jobs[0].shared:
        return [jobs[0].make().detach().to("cpu", dtype)]
    if world_size() == 1:
        return [job.make().detach().to("cpu", dtype) for job in jobs]
    mine = rank()
    flat: Tensor | None = None
    with together(), alone():
        if mine < len(jobs):
            flat = jobs[mine].make().detach().to(dtype).reshape(-1)
    parts = gathered(flat).cpu().split([math.prod(job.shape) for job in jobs])
    return [part.reshape(job.shape) for job, part in zip(jobs, parts, strict=True)]


def opened(folder: Path, fingerprint: Callable[[], Mapping[str, Any]]) -> AbstractContextManager[Store | None]:
    """The store on rank 0, None on the other ranks. If it cannot be opened, every rank raises the error."""
    found: AbstractContextManager[Store | None] = nullcontext()
    with together():
        if rank() == 0:
            with alone():
                found = Store(folder, fingerprint())
    return found
