"""Ranks of `torch.distributed`: who does what, and how the parts become one result, the same on every rank.

Under ``torchrun`` every rank runs the same script on the same model, data and groups. A pass over the data is cut
into shares, one per rank, and ends with a sum over ranks. So what uses more than one rank has to be called by all
of them. Without a process group, or with one rank, nothing here does anything.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_working_alone = ContextVar("working_alone", default=False)
_KNOWN = (ValueError, TypeError, LookupError, OSError, RuntimeError, Exception)


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


def my_share(count: int) -> range:
    """Which of `count` pieces of work are this rank's: neighbours, and as many as on other ranks up to one."""
    return range(count * rank() // world_size(), count * (rank() + 1) // world_size())


def share_of_stream(items: Iterable[T]) -> Iterator[T]:
    """Every `world_size`-th item of a sequence of unknown length; each rank reads all of it."""
    mine, of = rank(), world_size()
    return (item for number, item in enumerate(items) if number % of == mine)


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Add up `tensor` over ranks, in place; every rank gets the same bits."""
    if world_size() > 1:
        sent = _sent(tensor)
        dist.all_reduce(sent)
        if sent is not tensor:
            tensor.copy_(sent)
    return tensor


def sum_of_ranks(part: Tensor | None) -> Tensor:
    """The sum of what every rank has, on each of them; None on a rank that has nothing."""
    if world_size() > 1:
        kinds = [kind for kind in gather_objects(None if part is None else (part.shape, part.dtype)) if kind]
        if part is None and kinds:
            part = torch.zeros(kinds[0][0], dtype=kinds[0][1], device=_device())
    if part is None:
        raise ValueError("there is nothing to add up: no rank had a part of the work.")
    return all_reduce_sum(part)


def broadcast(tensor: Tensor) -> Tensor:
    """Give every rank the numbers of rank 0, in place: for what may differ in the last bit or was drawn at random."""
    if world_size() > 1:
        sent = _sent(tensor)
        dist.broadcast(sent, src=0)
        if sent is not tensor:
            tensor.copy_(sent)
    return tensor


def gather_rows(rows: Tensor | None) -> Tensor:
    """The rows `[n_r, …]` of all ranks, rank after rank `[Σ n_r, …]`; None on a rank that has none."""
    if world_size() == 1:
        assert rows is not None
        return rows
    kinds = gather_objects(None if rows is None else (len(rows), tuple(rows.shape[1:]), rows.dtype))
    known = [kind for kind in kinds if kind is not None]
    if len({kind[1:] for kind in known}) != 1:
        raise ValueError(f"the ranks have rows of different shapes or dtypes (rows, shape, dtype): {kinds}.")
    _, shape, dtype = known[0]
    device = rows.device if rows is not None else _device()
    padded = torch.zeros(max(kind[0] for kind in known), *shape, dtype=dtype, device=device)
    if rows is not None:
        padded[: len(rows)] = rows
    sent = _sent(padded)
    received = [torch.empty_like(sent) for _ in kinds]
    dist.all_gather(received, sent)
    parts = [part[: kind[0]] for part, kind in zip(received, kinds, strict=True) if kind is not None]
    return torch.cat(parts).to(device)


def in_order(blocks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """All rows `[k, …]` in the order of their ids, from this rank's blocks `(ids [b], rows [b, …])` and the others'."""
    with together():
        found = list(blocks)
        ids = torch.cat([some for some, _ in found]).cpu() if found else None
        rows = torch.cat([rows for _, rows in found]) if found else None
    places = gather_rows(ids).argsort()
    rows = gather_rows(rows)
    return rows[places.to(rows.device)]


def gather_objects(value: T) -> list[T]:
    """The small values of all ranks, in their order."""
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, value)
    return found


def from_first_rank(work: Callable[[], T]) -> T:
    """``work()``, done by rank 0 alone and given to every rank: for what is random, or quicker done once.

    An error in it is raised on every rank.
    """
    if world_size() == 1:
        return work()
    result: list[Any] = [None]
    with together():
        if rank() == 0:
            with alone():
                result = [work()]
    dist.broadcast_object_list(result, src=0)
    return result[0]


@contextmanager
def together(same: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Around one rank's share of the work, in which ranks do not talk: if one of them fails, all of them raise.

    Args:
        same: what has to be equal on all ranks before the work starts, by name; an error names what is not.
    """
    if world_size() == 1:
        yield
        return
    if same:
        _check_same(same)
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    flag = torch.tensor([failure is not None], dtype=torch.int64, device=_device())
    dist.all_reduce(flag)
    if int(flag):
        _raise_everywhere(failure)


def _check_same(same: Mapping[str, Any]) -> None:
    own = zlib.crc32(repr(sorted(same.items())).encode())
    bounds = torch.tensor([own, -own], dtype=torch.int64, device=_device())
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    if int(bounds[0]) == -int(bounds[1]):
        return
    found = gather_objects(dict(same))
    for name in dict.fromkeys(name for values in found for name in values):
        values = [given.get(name) for given in found]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"the ranks differ in {name}: {values} on ranks 0, 1, …. Give every rank the same model, checkpoint, "
                "data and groups (the same seeds; no DistributedSampler): the work is split over them here."
            )


def checksum(tensors: Iterable[Tensor]) -> str:
    """A short text that differs for other tensors, to be compared by `together`."""
    found = 0
    for tensor in tensors:
        values = tensor.detach().double()
        found = zlib.crc32(torch.stack([values.sum(), values.square().sum()]).cpu().numpy().data, found)
    return f"{found:08x}"


def _raise_everywhere(failure: Exception | None) -> None:
    """Raise this rank's own error, or one of a type as near as can be that says which rank failed."""
    found = gather_objects(None if failure is None else (_known_type(failure), f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    failed, (known, message) = next((at, text) for at, text in enumerate(found) if text is not None)
    raise known(f"rank {failed} failed: {message}")


def _known_type(failure: Exception) -> type[Exception]:
    """The type that Python itself knows, for ranks that cannot be sent the error."""
    return next(kind for kind in type(failure).__mro__ if kind in _KNOWN)


def _device() -> torch.device:
    """Where small messages are made: NCCL reads the GPU only."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _sent(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and where the process group can read it."""
    backend = dist.get_backend()
    if backend in ("gloo", "nccl"):  # otherwise there is a backend for every device
        tensor = tensor if tensor.device.type == _device().type else tensor.to(_device())
    return tensor.contiguous()
