"""The user's DataLoader: the order of its examples, and a similar DataLoader for the library's own batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def loader_order(loader: DataLoader, name: str) -> np.ndarray | None:
    """Return the data set positions in the order in which a loader gives the examples; None for 0, 1, 2, …"""
    if loader.batch_sampler is None:
        raise ValueError(
            f"{name} is a DataLoader with batch_size=None, whose items cannot be put into other batches: pass the "
            "data set itself, or a DataLoader that batches single examples."
        )
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if _in_order(loader):
        return None
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise ValueError(
            f"{name} is a DataLoader with a DistributedSampler, which gives each rank other points: pass the data "
            "set, or a DataLoader without that sampler; the work is split over the ranks here."
        )
    if isinstance(sampler, _SHUFFLING):
        raise ValueError(
            f"{name} is a DataLoader that shuffles ({type(sampler).__name__}), so its points have no fixed "
            "index: pass the data set, or a DataLoader with shuffle=False."
        )
    order, again = ([int(i) for batch in loader.batch_sampler for i in batch] for _ in range(2))
    if order != again:
        raise ValueError(
            f"{name} is a DataLoader whose sampler gives another order each time "
            f"({type(sampler or loader.batch_sampler).__name__}): pass one with a fixed order."
        )
    return np.asarray(order)


def drops_last(loader: DataLoader) -> bool:
    """Whether a loader leaves out a last batch that would be smaller; its batch sampler knows, if it was given one."""
    return bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last))


def _in_order(loader: DataLoader) -> bool:
    """Whether a loader is known to give the examples 0, 1, 2, … of its data set; a subclass may have another order."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if type(loader.batch_sampler) is not BatchSampler or type(sampler) is not SequentialSampler:
        return False
    return sampler.data_source is loader.dataset and not drops_last(loader)


def own_loader(source: Dataset, loader: DataLoader | None, **batching: Any) -> DataLoader:
    """Return a DataLoader over `source` with the settings of the user's `loader`, and with our own batches."""
    kept: dict[str, Any] = {}
    if loader is not None:
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"):
            kept[name] = getattr(loader, name)
        if loader.num_workers:
            kept |= {name: getattr(loader, name) for name in ("multiprocessing_context", "prefetch_factor")}
    return DataLoader(source, generator=torch.Generator(), **kept, **batching)


class GivenBatches:
    """Index batches, as a batch sampler that is iterated once.

    Attributes:
        sizes: sizes of the batches that were requested but are not delivered yet; a loader with workers requests ahead.
    """

    def __init__(self, batches: Iterator[list[int]]) -> None:
        self._batches, self.sizes = batches, deque[int]()

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            self.sizes.append(len(batch))
            yield batch
