"""Long work in jobs, a block of groups each: what is finished is saved and never done again.

Where blocks begin and end depends on the groups, the batch size and the size of the question alone. A block is the
work of one rank, so its numbers do not depend on the number of ranks, on a kill, or on what was finished before.
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
    """Runs of group ids with about `points` points each, and at most `most_groups` groups."""
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
    """How many points are in a run of groups."""
    return int(groups.offsets[some[1]] - groups.offsets[some[0]])


def points_per_block(provider: GroupGradients, batch_size: int) -> int:
    """How many points make a block: enough that saving costs little, few enough that a kill costs little."""
    return max(BATCHES_PER_BLOCK * batch_size, -(-int(provider.groups.offsets[-1]) // MOST_BLOCKS))


def part_of(provider: GroupGradients, groups: Range, strategy: str) -> GroupGradients:
    """The provider of some groups alone, with the strategy chosen for all."""
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
    """Let an error about a part name groups and points as the user knows them."""
    try:
        yield
    except NonFinite as error:
        raise NonFinite([groups[0] + j for j in error.ids], provider.groups, error.what) from None


def go_on_without(provider: GroupGradients, error: ValueError) -> None:
    """After jobs that failed on what the chosen strategy was not proven for: let all ranks know, to choose another.

    Raises:
        ValueError: the error itself, if it is another one, or the strategy was asked for by name.
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
    """One array to be made: its name in the store, its shape, and the points it takes."""

    name: str
    shape: tuple[int, ...]
    points: int
    make: Callable[[], Tensor]
    shared: bool = False
    """Whether all ranks make it together, each its share."""


def finish(
    store: Arrays | None, jobs: Sequence[Job], dtype: torch.dtype, title: str, show_progress: bool | None
) -> Tensor | None:
    """Make and save all jobs that are not finished, one per rank at a time; rank 0 writes.

    Args:
        store: on rank 0 the store or a part of it, on others None.
        jobs: all jobs, the same on every rank.
        dtype: of the arrays; bfloat16, which NumPy does not know, is saved as float32.
        title: of the progress bar.
        show_progress: whether to show it; None, once it takes `PATIENCE` seconds.

    Returns:
        The array of the only job, if it was made now; None otherwise.
    """
    missing = set(once(lambda: [job.name for job in jobs if store is None or job.name not in store]))
    todo = [job for job in jobs if job.name in missing]
    total, made = sum(job.points for job in jobs), list[Tensor]()
    done = total - sum(job.points for job in todo)
    rounds = ((range(sum(job.points for job in now)), now) for now in _rounds(todo))
    for _, now in with_progress(rounds, total, title, show_progress, done):
        made = _made(now, torch.float32 if dtype == torch.bfloat16 else dtype)
        with together():
            if store is not None:
                for job, values in zip(now, made, strict=True):
                    store.save(job.name, values.numpy())
    return made[0] if made and len(jobs) == 1 else None


def _rounds(todo: list[Job]) -> Iterator[list[Job]]:
    """Jobs that are done at the same time: one per rank, or one by all."""
    while todo:
        count = 1 if todo[0].shared else world_size()
        yield todo[:count]
        todo = todo[count:]


def _made(jobs: list[Job], dtype: torch.dtype) -> list[Tensor]:
    """The arrays of one round, on the CPU of every rank."""
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
    """A store on rank 0, None on other ranks; what goes wrong on opening it is raised on all of them."""
    found: AbstractContextManager[Store | None] = nullcontext()
    with together():
        if rank() == 0:
            with alone():
                found = Store(folder, fingerprint())
    return found
