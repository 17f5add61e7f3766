"""Messages between the ranks of `torch.distributed`; used only if there are several ranks (see `ggda_ext.sharing`)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_KNOWN = (ValueError, TypeError, LookupError, OSError, RuntimeError, Exception)


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Add up `tensor` over all ranks, in place; every rank gets the same bits."""
    sent = _sent(tensor)
    dist.all_reduce(sent)
    return tensor if sent is tensor else tensor.copy_(sent)


def broadcast(tensor: Tensor) -> Tensor:
    """Give every rank the numbers of rank 0, in place: for numbers that are random or may differ in the last bit."""
    sent = _sent(tensor)
    dist.broadcast(sent, src=0)
    return tensor if sent is tensor else tensor.copy_(sent)


def gather_rows(rows: Tensor | None) -> Tensor:
    """Return the rows `[n_r, …]` of all ranks, rank after rank `[Σ n_r, …]`; a rank without rows passes None."""
    kinds = gather_objects(None if rows is None else (len(rows), tuple(rows.shape[1:]), rows.dtype))
    known = [kind for kind in kinds if kind is not None]
    if len({kind[1:] for kind in known}) != 1:
        raise ValueError(f"the ranks have rows of different shapes or dtypes (rows, shape, dtype): {kinds}.")
    _, shape, dtype = known[0]
    device = rows.device if rows is not None else message_device()
    padded = torch.zeros(max(kind[0] for kind in known), *shape, dtype=dtype, device=device)
    if rows is not None:
        padded[: len(rows)] = rows
    sent = _sent(padded)
    received = [torch.empty_like(sent) for _ in kinds]
    dist.all_gather(received, sent)
    parts = [part[: kind[0]] for part, kind in zip(received, kinds, strict=True) if kind is not None]
    return torch.cat(parts).to(device)


def gather_objects(value: T) -> list[T]:
    """Return the small values of all ranks, in the order of the ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def broadcast_object(value: T | None) -> T:
    """Return the small value of rank 0 on every rank."""
    sent: list[Any] = [value]
    dist.broadcast_object_list(sent, src=0)
    return sent[0]


def check_same(same: Mapping[str, Any]) -> None:
    """Raise an error that names a value if it is not equal on all ranks."""
    own = zlib.crc32(repr(sorted(same.items())).encode())
    bounds = torch.tensor([own, -own], dtype=torch.int64, device=message_device())
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


def raise_everywhere(failure: Exception | None) -> None:
    """If any rank has failed, raise an error on every rank.

    A rank that failed raises its own error. The other ranks raise an error of a similar type that names a failed rank.
    """
    flag = torch.tensor([failure is not None], dtype=torch.int64, device=message_device())
    dist.all_reduce(flag)
    if not int(flag):
        return
    found = gather_objects(None if failure is None else (_known_type(failure), f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    failed, (known, message) = next((at, text) for at, text in enumerate(found) if text is not None)
    raise known(f"rank {failed} failed: {message}")


def _known_type(failure: Exception) -> type[Exception]:
    """The nearest built-in type of an error, because the error itself cannot be sent to other ranks."""
    return next(kind for kind in type(failure).__mro__ if kind in _KNOWN)


def message_device() -> torch.device:
    """The device on which small messages are made: NCCL reads only from the GPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _sent(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and on a device from which the process group can read it."""
    backend = dist.get_backend()
    if backend in ("gloo", "nccl"):  # other settings have a backend for every device
        tensor = tensor if tensor.device.type == message_device().type else tensor.to(message_device())
    return tensor.contiguous()
