"""Work in shares: what a pass uses so that it need not know how many ranks there are, or which one it is.

Under ``torchrun`` every rank runs the same script on the same model, data and groups. Each takes its share of the
points, groups or jobs, and ends with the whole result, the same bits on all of them; an error on one is raised on all.
So what shares work has to be called by every rank. In one process a share is everything, and nothing is sent. The
bar over the points of a pass is shown by the first rank.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm.auto import tqdm

from ggda_ext import distributed as messages

T = TypeVar("T")
S = TypeVar("S", bound=Sized)
Same = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

PATIENCE = 5.0
"""Seconds after which a bar appears that was neither asked for nor turned off."""

_working_alone = ContextVar("working_alone", default=False)


def world_size() -> int:
    """Number of ranks that share the work: 1 without a process group, and inside of `alone`."""
    if _working_alone.get() or not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size()


def rank() -> int:
    """Number of this rank among those that share the work."""
    return dist.get_rank() if world_size() > 1 else 0


@contextmanager
def alone() -> Iterator[None]:
    """In here a rank works for itself: nothing is shared, nothing is exchanged, no rank waits for another."""
    before = _working_alone.set(True)
    try:
        yield
    finally:
        _working_alone.reset(before)


@contextmanager
def together(same: Same | None = None) -> Iterator[None]:
    """Around our share of the work, in which ranks do not talk: if one of them fails, all of them raise.

    Args:
        same: what has to be equal on all ranks before the work starts, by name, or a function that gives it; an error
            names what is not.
    """
    if world_size() == 1:
        yield
        return
    if same:
        messages.check_same(same() if callable(same) else same)
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    messages.raise_everywhere(failure)


def my_share(count: int) -> range:
    """Which of `count` pieces of work are ours: neighbours, and as many as others have, up to one."""
    of = world_size()
    return range(count) if of == 1 else range(count * rank() // of, count * (rank() + 1) // of)


def share_of_stream(items: Iterable[T]) -> Iterator[T]:
    """Our items of a sequence of unknown length, one in as many as there are ranks; each rank reads all of it."""
    mine, of = rank(), world_size()
    return (item for number, item in enumerate(items) if number % of == mine)


def in_shares(count: int, work: Callable[[list[int]], Tensor], called: str = "jobs") -> Tensor:
    """The results `[count, …]` of jobs 0 … count - 1, from ``work(jobs) -> [jobs, …]``; each rank does some of them."""
    if world_size() == 1:
        return work(list(range(count)))
    with together({f"the number of {called}": count}):
        mine = list(range(rank(), count, world_size()))
        with alone():
            done = [(torch.tensor(mine), work(mine))] if mine else []
    return in_order(done)


@contextmanager
def adding_up(*totals: Tensor, same: Same | None = None) -> Iterator[None]:
    """Around work that adds our share to `totals`, in place: at its end they hold the sum of all shares.

    Args:
        *totals: what is added to; zero before.
        same: as in `together`.
    """
    with together(same):
        yield
    if world_size() > 1:
        for total in totals:
            messages.all_reduce_sum(total)


def add_up(part: Tensor | None) -> Tensor:
    """The sum of all parts; None where our share was empty, so that not even the shape is known."""
    if world_size() > 1:
        kinds = [kind for kind in messages.gather_objects(None if part is None else (part.shape, part.dtype)) if kind]
        if kinds:
            widest = max((dtype for _, dtype in kinds), key=lambda dtype: dtype.itemsize)
            empty = torch.zeros(kinds[0][0], dtype=widest, device=messages.message_device())
            return messages.all_reduce_sum(empty if part is None else part.to(widest))
    if part is None:
        raise ValueError("there is nothing to add up: no rank had a part of the work.")
    return part


def in_order(blocks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """All rows `[k, …]` in the order of their ids, from our blocks `(ids [b], rows [b, …])` and those of others."""
    with together():
        found = list(blocks)
        ids = torch.cat([some for some, _ in found]).cpu() if found else None
        rows = torch.cat([rows for _, rows in found]) if found else None
    ids, rows = gathered(ids), gathered(rows)
    return rows if bool((ids[1:] > ids[:-1]).all()) else rows[ids.argsort().to(rows.device)]


def gathered(rows: Tensor | None) -> Tensor:
    """The rows `[n_r, …]` of all ranks, one rank after the other `[Σ n_r, …]`; None on a rank that has none."""
    if world_size() > 1:
        return messages.gather_rows(rows)
    assert rows is not None
    return rows


def anywhere(flag: bool) -> bool:
    """Whether it holds on any rank."""
    return any(of_all(flag))


def of_all(value: T) -> list[T]:
    """What every rank has."""
    return messages.gather_objects(value) if world_size() > 1 else [value]


def once(work: Callable[[], T]) -> T:
    """``work()``, done by one rank and given to all: for what is random, or quicker done once."""
    if world_size() == 1:
        return work()
    result: T | None = None
    with together():
        if rank() == 0:
            with alone():
                result = work()
    return messages.broadcast_object(result)


def agreed(work: Callable[[], Tensor]) -> Tensor:
    """``work()``, done by every rank, with the numbers of the first: the last bits may differ."""
    with together():
        found = work()
    return messages.broadcast(found) if world_size() > 1 else found


def checksum(tensors: Iterable[Tensor]) -> str:
    """A short text that differs for other tensors, for `same`."""
    found = 0
    for tensor in tensors:
        values = tensor.detach().double()
        found = zlib.crc32(torch.stack([values.sum(), values.square().sum()]).cpu().numpy().data, found)
    return f"{found:08x}"


# the bar over a pass


class ProgressBar(tqdm):  # type: ignore[misc, unused-ignore]
    """A bar that shares nothing with other processes.

    tqdm's own lock is shared with forked processes, and every bar takes it: one that is killed at that moment would
    keep all others waiting forever. Nor is there a thread that watches over bars and may hold the lock during a fork.
    """

    _lock = threading.RLock()
    monitor_interval = 0


def progress(total: int, title: str, show: bool | None, *, initial: int = 0) -> ProgressBar:
    """A progress bar over points, on the first rank.

    Args:
        total: points.
        title: what is done.
        show: True at once, False never, None after `PATIENCE` seconds.
        initial: points that are done already.
    """
    return ProgressBar(
        total=total, initial=initial, desc=title, unit="point", disable=show is False or rank() > 0,
        delay=0 if show else PATIENCE,
    )  # fmt: skip


def with_progress(
    pairs: Iterator[tuple[S, T]], total: int, title: str, show: bool | None, done: int = 0
) -> Iterator[tuple[S, T]]:
    """Pairs of some points and their batch, with a bar over points: one not asked for is made when it is to be seen."""
    start = perf_counter()
    if show is False:
        yield from pairs
        return
    if show is None:
        for points, batch in pairs:
            yield points, batch
            done += len(points)
            if perf_counter() - start > PATIENCE:
                break
        else:
            return
    with progress(total, title, True, initial=done) as bar:
        for points, batch in pairs:
            yield points, batch
            bar.update(len(points))
