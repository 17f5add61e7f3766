"""Batches of a data set by index, as cheaply as the data allows.

Fetching tensor data item by item can cost more than running the model on it, so what is
already a tensor is indexed as a tensor (a contiguous run as a view, without a copy).
Everything else goes through a DataLoader that keeps the user's workers, pinned memory and
collate function, and draws nothing from the global random state.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler
from tqdm.auto import tqdm

from ggda_ext.sharing import my_share, rank, share_of_stream
from ggda_ext.tables import aligned, columns_of, holds_doubles, index_of, is_table, tensor_of, why_no_data


class ExampleSource(Protocol):
    """A data set that is no torch `Dataset` but is fetched like one, such as those of Hugging Face."""

    def __len__(self) -> int: ...

    def __getitems__(self, indices: list[int], /) -> Any: ...


class Table(Protocol):
    """A pandas frame or column."""

    @property
    def iloc(self) -> Any: ...

    def to_numpy(self) -> np.ndarray: ...


Array: TypeAlias = Tensor | np.ndarray | Table
DataLike: TypeAlias = (
    "DataLoader[Any] | Dataset[Any] | ExampleSource | Array | Sequence[Array] | Mapping[str, Array] | IndexedData"
)
"""A DataLoader, a Dataset, a tensor, a tuple of tensors, or a dict of tensors, also as arrays or pandas frames; what is
indexed already where the library passes its own data on."""

PATIENCE = 5.0
"""Seconds after which a bar appears that was neither asked for nor turned off."""

S = TypeVar("S", bound=Sized)
T = TypeVar("T")

_logger = logging.getLogger(__name__)
_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class IndexedData:
    """One interface to whatever holds the examples; example i is the i-th one the user's loader gives.

    Args:
        data: a DataLoader, a Dataset, a tensor, a tuple of tensors or a dict of tensors.
        name: how errors call it.

    Attributes:
        n: number of examples, or None for a stream (an IterableDataset) of unknown length.
        batch_size: of the user's DataLoader, or None.
        index: of the rows of a pandas table, or None.
        columns: names of the columns of a pandas table, or None.
    """

    batch_size: int | None = None
    index: Any = None
    columns: tuple[Any, ...] | None = None
    _doubles = False
    _cast: torch.dtype | None = None

    anchors: tuple[Any, ...] | None = None
    """The objects that hold the examples, to see whether two data sets are the same; None if that cannot be seen."""

    def __init__(self, data: DataLike, name: str = "data") -> None:
        self.name = name
        self._loader = data if isinstance(data, DataLoader) else None
        source: Any = data.dataset if isinstance(data, DataLoader) else data
        if isinstance(source, IndexedData):
            raise TypeError(f"{name} is already indexed.")
        if isinstance(source, str | bytes | Path):
            raise TypeError(f"{name} is the text {str(source)!r}: read the file first, and pass what it holds.")
        self.is_stream = isinstance(source, IterableDataset)
        self._source = source
        if self._loader is not None:
            self.anchors = (self._loader,)
        elif isinstance(source, Mapping):
            self.anchors = tuple(source.values())
        else:
            self.anchors = tuple(source) if isinstance(source, tuple | list) else (source,)
        self._order = None if self._loader is None or self.is_stream else _loader_order(self._loader, name)
        own_collate = self._loader is not None and self._loader.collate_fn is not default_collate
        by_example = self._loader is not None and isinstance(source, list | tuple)  # entries, to a DataLoader
        self._tensors = None if own_collate or by_example or self.is_stream else _as_tensors(source, name)
        if self._loader is not None:
            if self._tensors is not None and self._order is None:
                self.anchors = (source,)  # the loader adds nothing: another one of this data set gives the same
            self.batch_size = self._loader.batch_size
        elif self._tensors is not None and not _holds_tensors(source):
            self.index, self.columns, self._doubles = index_of(source), columns_of(source), holds_doubles(source)
        self.n = self._length()
        if self.n == 0:
            raise ValueError(f"{name} is empty: it holds no examples.")

    def suit(self, model: nn.Module) -> None:
        """Convert float64 numbers of NumPy and pandas, where they are the default, to the model's dtype from now on."""
        if self._doubles:
            found = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float64)
            cast = None if found == torch.float64 else found
            if cast is not None and self._cast is None:
                _logger.info("%s holds float64 numbers, which the model is given as %s.", self.name, cast)
            self._cast = cast

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done to the data, for results to say."""
        if self._cast is None:
            return ()
        dtype = str(self._cast).removeprefix("torch.")
        return (f"The float64 numbers of {self.name} were given to the model as {dtype}, its dtype.",)

    @property
    def tensors(self) -> Any:
        """The tensors that hold the examples, in their order; None if the data is not made of tensors."""
        return None if getattr(self, "_order", None) is not None else getattr(self, "_tensors", None)

    def _length(self) -> int | None:
        if self._order is not None:
            return len(self._order)
        if self._tensors is not None:
            return len(_first_tensor(self._tensors))
        if isinstance(self._source, Sized) and not isinstance(self._source, Iterator):
            return len(self._source)
        if self.is_stream:
            return None
        raise TypeError(
            f"{self.name} is a {type(self._source).__name__}, which has no length or can be read only once: pass a "
            "DataLoader, a map-style Dataset, a tensor, a tuple of tensors or a dict of tensors."
        )

    def sequential(self, batch_size: int) -> Iterator[tuple[np.ndarray, Any]]:
        """All examples in order, as `(indices, batch)`."""
        if self.is_stream:
            yield from self._stream(batch_size)
            return
        assert self.n is not None
        yield from self._runs(0, self.n, batch_size)

    def _runs(self, low: int, high: int, batch_size: int) -> Iterator[tuple[np.ndarray, Any]]:
        """Examples low … high - 1 in order, as `(indices, batch)`."""
        runs = [range(start, min(start + batch_size, high)) for start in range(low, high, batch_size)]
        for run, batch in zip(runs, self.batches(runs), strict=True):
            yield np.arange(run.start, run.stop), batch

    def my_share(self, batch_size: int, *, whole_batches: bool = False) -> Iterator[tuple[np.ndarray, Any]]:
        """Our share of all examples in order, as `(indices, batch)`; all of them in one process.

        Of a stream every rank reads all batches, and keeps its share of them.

        Args:
            batch_size: examples per batch.
            whole_batches: whether to share out the batches of `sequential`, so that every example is in the same batch
                whatever the number of ranks; by default shares are equal in examples.
        """
        if self.is_stream:
            yield from share_of_stream(self._stream(batch_size))
            return
        assert self.n is not None
        if whole_batches:
            mine = my_share(-(-self.n // batch_size))
            low, high = mine.start * batch_size, min(mine.stop * batch_size, self.n)
        else:
            mine = my_share(self.n)
            low, high = mine.start, mine.stop
        yield from self._runs(low, high, batch_size)

    def _stream(self, batch_size: int) -> Iterator[tuple[np.ndarray, Any]]:
        loader = self._loader
        if loader is None:
            loader = _own_loader(self._source, None, batch_size=batch_size)
        seen, random = 0, torch.get_rng_state()
        batches = iter(loader)
        torch.set_rng_state(random)  # a loader draws a seed for its workers
        for batch in batches:
            size = batch_length(batch) if loader.batch_size is not None else self._length_of_item(batch)
            yield np.arange(seen, seen + size), batch
            seen += size

    def _length_of_item(self, item: Any) -> int:
        """Number of examples in what a stream gives that nobody batches."""
        lengths: list[int | None] = []
        _map(lambda tensor: lengths.append(len(tensor) if tensor.dim() else None), item)
        if None in lengths or len(set(lengths)) != 1:
            raise ValueError(
                f"{self.name} is a DataLoader with batch_size=None whose items hold tensors of lengths {lengths}, so "
                "they are no batches: pass batch_size= to the DataLoader, or let the data set give batches."
            )
        return batch_length(item)

    def batches(self, index_batches: Iterable[Sequence[int] | np.ndarray]) -> Iterator[Any]:
        """One batch for every sequence of indices, in that order."""
        if self.is_stream:
            raise TypeError(
                f"{self.name} is an IterableDataset, whose points cannot be fetched by index: pass a "
                "map-style Dataset, or use one property with strategy='directional' or 'forward'."
            )
        if self._tensors is not None:
            for indices in index_batches:
                batch = _index(self._tensors, self._positions(indices))
                yield batch if self._cast is None else _map(self._as_cast, batch)
        else:
            asked: deque[int] = deque()
            positions = _counted((np.asarray(self._positions(indices)).tolist() for indices in index_batches), asked)
            for batch in _own_loader(self._source, self._loader, batch_sampler=_Batches(positions)):
                self._check_length(batch, asked.popleft())
                yield batch

    def _check_length(self, batch: Any, asked: int) -> None:
        """Refuse a batch that does not hold its examples row by row."""
        found = batch_length(batch)
        if found != asked:
            raise ValueError(
                f"{self.name} made a batch whose first tensor has {found} rows of {asked} examples (a collate_fn that "
                "joins graphs or sequences of several lengths?), so what belongs to which example cannot be told: let "
                "it give one row, or one entry of a list, for each example, or pass the loss as a BatchLoss of padded "
                "batches."
            )

    def _as_cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._cast) if tensor.dtype == torch.float64 else tensor

    def first(self, count: int) -> Any:
        """The first `count` examples as one batch."""
        if self.is_stream:
            return take(next(batch for _, batch in self._stream(count)), count)
        assert self.n is not None
        return next(iter(self.batches([np.arange(min(count, self.n))])))

    def _positions(self, indices: Sequence[int] | np.ndarray) -> np.ndarray | range:
        """Where the examples are in the data set; a range stays one, which tensors are cut by."""
        if self._order is not None:
            return self._order[np.asarray(indices)]
        return indices if isinstance(indices, range) else np.asarray(indices)


class SomePoints(IndexedData):
    """Some points of a data set, as a data set."""

    def __init__(self, data: IndexedData, positions: np.ndarray) -> None:
        self.data, self.positions = data, positions
        self.name, self.n, self.is_stream = data.name, len(positions), False

    def suit(self, model: nn.Module) -> None:
        """The data set they are of gives them."""
        self.data.suit(model)

    def batches(self, index_batches: Iterable[Sequence[int] | np.ndarray]) -> Iterator[Any]:
        """One batch for every sequence of indices, in that order."""
        return self.data.batches(self.positions[np.asarray(indices)] for indices in index_batches)


def _counted(batches: Iterator[list[int]], sizes: deque[int]) -> Iterator[list[int]]:
    """The same, keeping the size of each: a loader with workers asks for batches ahead."""
    for batch in batches:
        sizes.append(len(batch))
        yield batch


class _Batches:
    """Index batches as a batch sampler that is iterated once."""

    def __init__(self, batches: Iterator[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches


def _own_loader(source: Dataset, loader: DataLoader | None, **batching: Any) -> DataLoader:
    """A DataLoader over `source` that treats it as the user's `loader` does, with our batches."""
    kept: dict[str, Any] = {}
    if loader is not None:
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"):
            kept[name] = getattr(loader, name)
        if loader.num_workers:
            kept |= {name: getattr(loader, name) for name in ("multiprocessing_context", "prefetch_factor")}
    return DataLoader(source, generator=torch.Generator(), **kept, **batching)


def _loader_order(loader: DataLoader, name: str) -> np.ndarray | None:
    """Data set positions in the order a loader gives them; None for 0, 1, 2, …"""
    if loader.batch_sampler is None:
        raise ValueError(
            f"{name} is a DataLoader with batch_size=None, whose items cannot be put into other batches: pass the "
            "data set itself, or a DataLoader that batches single examples."
        )
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(sampler, SequentialSampler) and not loader.drop_last:
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


def _as_tensors(source: Any, name: str) -> Any:
    """The tensors behind `source` with examples along dim 0, or None if it is not made of tensors."""
    if isinstance(source, Tensor):
        return source
    if type(source) is TensorDataset:
        return source.tensors
    if type(source) is Subset:
        inner = _as_tensors(source.dataset, name)
        return None if inner is None else _Selected(inner, _from_the_front(source, name))
    plain = _holds_tensors(source)
    if not plain and (isinstance(source, np.ndarray) or is_table(source)):
        return tensor_of(source, name)
    arrays = list(source.values()) if isinstance(source, Mapping) else source
    if not isinstance(arrays, tuple | list) or not arrays or isinstance(source, Dataset):
        return None
    if not plain and not all(isinstance(array, Tensor | np.ndarray) or is_table(array) for array in arrays):
        raise TypeError(why_no_data(source, arrays, name))
    scalar = next((j for j, array in enumerate(arrays) if not array.ndim), None)
    if scalar is not None:
        raise ValueError(f"part {scalar} of {name} is a single number: pass an entry for each example.")
    lengths = [len(array) for array in arrays]
    if len(set(lengths)) > 1:
        raise ValueError(f"{name} holds tensors of different lengths: {lengths}.")
    if plain:
        return dict(source) if isinstance(source, Mapping) else tuple(source)
    index, rest = index_of(source), f"the first table of {name}"
    tensors = [
        tensor_of(aligned(array, index, f"part {j} of {name}", rest), f"part {j} of {name}")
        for j, array in enumerate(arrays)
    ]
    return dict(zip(source, tensors, strict=True)) if isinstance(source, Mapping) else tuple(tensors)


def _holds_tensors(source: Any) -> bool:
    """Whether data is made of tensors alone: nothing to convert, and no rows to match."""
    parts = source.values() if isinstance(source, Mapping) else source if isinstance(source, tuple | list) else [source]
    return all(isinstance(part, Tensor) for part in parts)


def _from_the_front(subset: Subset, name: str) -> np.ndarray:
    """The indices of a Subset, where −1 is the last point."""
    n, indices = len(subset.dataset), np.asarray(subset.indices, dtype=np.int64)  # type: ignore[arg-type]
    outside = indices[(indices < -n) | (indices >= n)]
    if len(outside):
        raise IndexError(f"{name} is a Subset with index {outside[0]} of a data set of {n} points.")
    return np.where(indices < 0, indices + n, indices)


class _Selected:
    """Some rows of tensors, as `Subset` selects them, without copying them."""

    def __init__(self, tensors: Any, positions: np.ndarray) -> None:
        self.tensors, self.positions = tensors, positions

    def __len__(self) -> int:
        return len(self.positions)


def _first_tensor(tensors: Any) -> Sized:
    if isinstance(tensors, Mapping):
        return next(iter(tensors.values()))
    return tensors[0] if isinstance(tensors, tuple) else tensors


def _index(tensors: Any, indices: np.ndarray | range) -> Any:
    if isinstance(tensors, _Selected):
        return _index(tensors.tensors, tensors.positions[np.asarray(indices)])
    if isinstance(indices, range):
        run = len(indices) > 0 and indices.step == 1
        indices = indices if run else np.asarray(indices)
    else:
        run = len(indices) > 0 and indices[-1] - indices[0] == len(indices) - 1 and bool((np.diff(indices) == 1).all())
    if run:
        low, high = int(indices[0]), int(indices[-1]) + 1
        return _map(lambda tensor: tensor[low:high], tensors)
    at = torch.from_numpy(np.array(indices, dtype=np.int64))
    return _map(lambda tensor: tensor[at.to(tensor.device)], tensors)


def _map(function: Any, batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if type(batch) is tuple:  # nearly always
        return tuple([_map(function, value) for value in batch])
    if isinstance(batch, Mapping):  # also a tokenizer's BatchEncoding, as a plain dict
        return {key: _map(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(function, value) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_map(function, value) for value in batch)
    return batch


def take(batch: Any, count: int) -> Any:
    """The first `count` examples of a batch."""
    return _map(lambda tensor: tensor[:count], batch)


def pick(batch: Any, positions: Sequence[int]) -> Any:
    """Some examples of a batch, as a batch."""
    return _picked(batch, list(positions), batch_length(batch))


def _picked(batch: Any, positions: list[int], size: int) -> Any:
    if isinstance(batch, Tensor):
        if not batch.dim() or len(batch) != size:
            return batch
        if batch.layout != torch.strided:  # sparse rows cannot be indexed by a list
            return batch.index_select(0, torch.tensor(positions, device=batch.device))
        return batch[positions]
    if isinstance(batch, Mapping):
        return {key: _picked(value, positions, size) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_picked(value, positions, size) for value in batch))
    if isinstance(batch, tuple | list):
        told = any(isinstance(value, Tensor | Mapping | tuple | list) for value in batch)
        if len(batch) == size and (not told or _one_each(batch, size)):
            return type(batch)(batch[at] for at in positions)  # strings, numbers, sequences: one for each example
        return type(batch)(_picked(value, positions, size) for value in batch)
    return batch


def as_batch_of_one(example: Any) -> Any:
    """One example, without a batch dimension, as a batch."""
    return _map(lambda tensor: tensor.unsqueeze(0), example)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on `device`, and fit for autograd if it was made in inference mode."""
    with torch.inference_mode(False):
        return _map(lambda tensor: _fit_for(tensor, device), batch)


def _fit_for(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.is_inference():
        tensor = tensor.clone()
    if tensor.requires_grad:  # of inputs nobody asks for a gradient
        tensor = tensor.detach()
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def tensors_in(batch: Any) -> list[Tensor]:
    """All tensors of a batch."""
    found: list[Tensor] = []
    _map(found.append, batch)
    return found


def batch_length(batch: Any) -> int:
    """Number of examples in a batch: the length of its first tensor, or of a list with a tensor for each example."""
    if isinstance(batch, tuple) and batch and isinstance(batch[0], Tensor) and batch[0].dim():
        return batch[0].shape[0]  # nearly always
    parts = (
        list(batch.values()) if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    )
    first: list[int] = []
    for part in parts:
        _map(lambda tensor: first.append(tensor.shape[0]) if tensor.dim() else None, part)
        if first:
            break
    else:
        raise TypeError(
            f"a batch of type {type(batch).__name__} holds no tensor with a batch dimension that can be found: let the "
            "data, or its collate_fn, give tuples, named tuples, dicts or tensors (dataclasses.asdict makes a dict)."
        )
    plain = (other.shape[0] for other in parts if isinstance(other, Tensor) and other.dim())
    return next((size for size in plain if _one_each(part, size)), first[0])


def _one_each(part: Any, size: int) -> bool:
    """Whether a part of a batch is a list that holds one tensor for each of its examples, of any length."""
    if not isinstance(part, tuple | list) or len(part) != size or not all(isinstance(one, Tensor) for one in part):
        return False
    return any(not one.dim() or one.shape[0] != size for one in part)


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
