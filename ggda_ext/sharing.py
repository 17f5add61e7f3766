"""Splitting work between ranks. With these functions, a pass need not know how many ranks there are, or its own rank.

Under ``torchrun`` every rank runs the same script on the same model, data and groups. Each rank takes its share of the
points, groups or jobs. At the end every rank has the whole result, with the same bits. An error on one rank is raised
on all ranks. Every rank therefore has to call the functions that share work. In a single process the share is all of
the work, and nothing is sent. Only the first rank shows the progress bar over the points of a pass.
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
"""Seconds after which a progress bar appears if the user neither asked for it nor turned it off."""

_working_alone = ContextVar("working_alone", default=False)


def world_size() -> int:
    """Number of ranks that share the work; 1 without a process group, and inside `alone`."""
    if _working_alone.get() or not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size()


def rank() -> int:
    """Number of this rank among the ranks that share the work; 0 if it works alone."""
    return dist.get_rank() if world_size() > 1 else 0


@contextmanager
def alone() -> Iterator[None]:
    """Let the rank work for itself in this context: it shares nothing, sends nothing and waits for no other rank."""
    before = _working_alone.set(True)
    try:
        yield
    finally:
        _working_alone.reset(before)


@contextmanager
def together(same: Same | None = None) -> Iterator[None]:
    """Context for this rank's share of the work: if one rank fails in it, all ranks raise an error at its end.

    The ranks must not send each other messages inside it.

    Args:
        same: values by name that have to be equal on all ranks before the work starts, or a function that returns them.
            If a value differs, the error names it.
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
    """The consecutive pieces of work, of `count`, that this rank does; ranks differ by at most one piece."""
    of = world_size()
    return range(count) if of == 1 else range(count * rank() // of, count * (rank() + 1) // of)


def share_of_stream(items: Iterable[T]) -> Iterator[T]:
    """This rank's items of a sequence of unknown length: with r ranks every r-th item. Each rank reads all items."""
    mine, of = rank(), world_size()
    return (item for number, item in enumerate(items) if number % of == mine)


def in_shares(count: int, work: Callable[[list[int]], Tensor], called: str = "jobs") -> Tensor:
    """Return the results `[count, …]` of jobs 0 … count - 1; each rank does some, by ``work(jobs) -> [jobs, …]``."""
    if world_size() == 1:
        return work(list(range(count)))
    with together({f"the number of {called}": count}):
        mine = list(range(rank(), count, world_size()))
        with alone():
            done = [(torch.tensor(mine), work(mine))] if mine else []
    return in_order(done)


@contextmanager
def adding_up(*totals: Tensor, same: Same | None = None) -> Iterator[None]:
    """Context for work that adds this rank's share to `totals`, in place; at its end they hold the sum of all shares.

    Args:
        *totals: the tensors that the work adds to; they have to be zero before.
        same: as in `together`.
    """
    with together(same):
        yield
    if world_size() > 1:
        for total in totals:
            messages.all_reduce_sum(total)


def add_up(part: Tensor | None) -> Tensor:
    """Return the sum of the parts of all ranks; a rank with an empty share passes None, as it knows no shape."""
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
    """Return all rows `[k, …]` in the order of their ids, from the blocks `(ids [b], rows [b, …])` of all ranks."""
    with together():
        found = list(blocks)
        ids = torch.cat([some for some, _ in found]).cpu() if found else None
        rows = torch.cat([rows for _, rows in found]) if found else None
    ids, rows = gathered(ids), gathered(rows)
    return rows if bool((ids[1:] > ids[:-1]).all()) else rows[ids.argsort().to(rows.device)]


def gathered(rows: Tensor | None) -> Tensor:
    """Return the rows `[n_r, …]` of all ranks, rank after rank `[Σ n_r, …]`; a rank without rows passes None."""
    if world_size() > 1:
        return messages.gather_rows(rows)
    assert rows is not None
    return rows


def anywhere(flag: bool) -> bool:
    """Whether `flag` is true on any rank."""
    return any(of_all(flag))


def of_all(value: T) -> list[T]:
    """Return the values of all ranks, in the order of the ranks."""
    return messages.gather_objects(value) if world_size() > 1 else [value]


def once(work: Callable[[], T]) -> T:
    """Run ``work()`` on one rank and return its result on all: for random work, or work that is faster done once."""
    if world_size() == 1:
        return work()
    result: T | None = None
    with together():
        if rank() == 0:
            with alone():
                result = work()
    return messages.broadcast_object(result)


def agreed(work: Callable[[], Tensor]) -> Tensor:
    """Run ``work()`` on every rank and return the numbers of the first rank, because the last bits may differ."""
    with together():
        found = work()
    return messages.broadcast(found) if world_size() > 1 else found


def checksum(tensors: Iterable[Tensor]) -> str:
    """A short text that differs for other tensors, to be used in `same`."""
    found = 0
    for tensor in tensors:
        values = tensor.detach().double()
        found = zlib.crc32(torch.stack([values.sum(), values.square().sum()]).cpu().numpy().data, found)
    return f"{found:08x}"


# the bar over a pass


class ProgressBar(tqdm):  # type: ignore[misc, unused-ignore]
    """A progress bar that shares nothing with other processes.

    tqdm's own lock is shared with forked processes, and every bar takes it. If a process is killed while it holds that
    lock, all other processes wait forever. This class has a lock of its own. It also runs without tqdm's monitor
    thread, which may hold the lock during a fork.
    """

    _lock = threading.RLock()
    monitor_interval = 0


def progress(total: int, title: str, show: bool | None, *, initial: int = 0) -> ProgressBar:
    """A progress bar over points; only the first rank shows it.

    Args:
        total: number of points.
        title: the text in front of the bar.
        show: True shows the bar at once, False never, None after `PATIENCE` seconds.
        initial: number of points that are already done.
    """
    return ProgressBar(
        total=total, initial=initial, desc=title, unit="point", disable=show is False or rank() > 0,
        delay=0 if show else PATIENCE,
    )  # fmt: skip


def with_progress(
    pairs: Iterator[tuple[S, T]], total: int, title: str, show: bool | None, done: int = 0
) -> Iterator[tuple[S, T]]:
    """Yield pairs of some points and their batch, and show a progress bar over the points.

    With ``show=None`` the bar is made only after `PATIENCE` seconds.
    """
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
