"""Batches of a data set by index, as cheaply as the data allows; and functions for batches of any shape.

Fetching tensor data item by item can cost more than running the model on it. So tensors are indexed as tensors (a
contiguous run as a view, without a copy). All other data goes through a DataLoader that keeps the user's workers,
pinned memory and collate function, and draws nothing from the global random state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from ggda_ext.data.loaders import GivenBatches, drops_last, loader_order, own_loader
from ggda_ext.sharing import my_share, share_of_stream
from ggda_ext.tables import Array, columns_of, holds_doubles, index_of, is_table, tensor_of, tensors_of, why_no_data


class ExampleSource(Protocol):
    """A data set that is not a torch `Dataset` but is read like one, such as a Hugging Face data set."""

    def __len__(self) -> int: ...

    def __getitems__(self, indices: list[int], /) -> Any: ...


DataLike: TypeAlias = (
    "DataLoader[Any] | Dataset[Any] | ExampleSource | Array | Sequence[Array] | Mapping[str, Array] | IndexedData"
)
"""A DataLoader, a Dataset, a tensor, a tuple of tensors, or a dict of tensors; also arrays or pandas frames in place of
tensors. An `IndexedData` if the library passes its own data on."""

_logger = logging.getLogger(__name__)


class IndexedData:
    """One interface to all kinds of data. Example i is the i-th example that the user's loader gives.

    Args:
        data: a DataLoader, a Dataset, a tensor, a tuple of tensors or a dict of tensors.
        name: name of the data in error messages.

    Attributes:
        n: number of examples, or None for a stream (an IterableDataset) of unknown length.
        batch_size: batch size of the user's DataLoader, or None.
        index: row index of a pandas table, or None.
        columns: names of the columns of a pandas table, or None.
        dropped: number of examples that the user's DataLoader leaves out because its last batch would be smaller.
    """

    batch_size: int | None = None
    index: Any = None
    columns: tuple[Any, ...] | None = None
    dropped = 0
    is_stream = False
    anchors: tuple[Any, ...] | None = None
    """The objects that hold the examples, to see whether two data sets are the same; None if that is not known."""

    _loader: DataLoader[Any] | None = None
    _order: np.ndarray | None = None
    _tensors: Any = None
    _doubles = False
    _cast: torch.dtype | None = None
    _repeats = False

    def __init__(self, data: DataLike, name: str = "data") -> None:
        self.name = name
        self._source: Any = data.dataset if isinstance(data, DataLoader) else data
        if isinstance(self._source, IndexedData):
            raise TypeError(f"{name} is already indexed.")
        if isinstance(self._source, str | bytes | Path):
            raise TypeError(f"{name} is the text {str(self._source)!r}: read the file first, and pass what it holds.")
        self.is_stream = isinstance(self._source, IterableDataset)
        if isinstance(data, DataLoader):
            self._read_through(data)
        else:
            self._read_itself()
        self.n = self._length()
        if self.n == 0:
            raise ValueError(f"{name} is empty: it holds no examples.")

    def _read_itself(self) -> None:
        """Read the examples from the data set itself."""
        parts = parts_of(self._source)
        self.anchors = tuple(parts)
        self._tensors = None if self.is_stream else as_tensors(self._source, self.name)
        if self._tensors is not None and not holds_tensors(self._source):
            self.index, self.columns, self._doubles = index_of(parts), columns_of(parts), holds_doubles(parts)

    def _read_through(self, loader: DataLoader[Any]) -> None:
        """Read the examples in the order and with the settings of a loader."""
        self._loader, self.batch_size, self.anchors = loader, loader.batch_size, (loader,)
        if self.is_stream:
            return
        self._order = loader_order(loader, self.name)
        sampler = getattr(loader.batch_sampler, "sampler", None)
        if drops_last(loader) and self._order is not None and isinstance(sampler, Sized):
            self.dropped = len(sampler) - len(self._order)
        by_example = isinstance(self._source, list | tuple)  # a DataLoader reads its entries as examples
        if by_example or loader.collate_fn is not default_collate:
            return
        self._tensors = as_tensors(self._source, self.name)
        if self._tensors is not None and self._order is None:
            self.anchors = (self._source,)  # another loader of this data set would give the same examples

    def suit(self, model: nn.Module) -> None:
        """From now on, convert float64 numbers of NumPy and pandas (their default dtype) to the model's dtype."""
        if self._doubles:
            found = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float64)
            cast = None if found == torch.float64 else found
            if cast is not None and self._cast is None:
                _logger.info("%s holds float64 numbers, which the model is given as %s.", self.name, cast)
            self._cast = cast

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what was done to the data; results show them."""
        if self._cast is None:
            return ()
        dtype = str(self._cast).removeprefix("torch.")
        return (f"The float64 numbers of {self.name} were given to the model as {dtype}, its dtype.",)

    @property
    def tensors(self) -> Any:
        """The tensors that hold the examples, in their order; None if the data is not made of tensors."""
        return self._tensors if self._order is None else None

    def is_fit_for(self, device: torch.device) -> bool:
        """Whether `to_device` leaves all batches unchanged."""
        tensors = [] if self._tensors is None else tensors_in(getattr(self._tensors, "tensors", self._tensors))
        return bool(tensors) and all(fit_for(tensor, device) is tensor for tensor in tensors)

    def _length(self) -> int | None:
        if self._order is not None:
            return len(self._order)
        if self._tensors is not None:
            return len(parts_of(self._tensors)[0])
        if isinstance(self._source, Sized) and not isinstance(self._source, Iterator):
            return len(self._source)
        if self.is_stream:
            return None
        raise TypeError(
            f"{self.name} is a {type(self._source).__name__}, which has no length or can be read only once: pass a "
            "DataLoader, a map-style Dataset, a tensor, a tuple of tensors or a dict of tensors."
        )

    def sequential(self, batch_size: int) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield all examples in order, as `(indices, batch)`."""
        if self.is_stream:
            yield from self._stream(batch_size)
            return
        assert self.n is not None
        yield from self._runs(0, self.n, batch_size)

    def _runs(self, low: int, high: int, batch_size: int) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield the examples low … high - 1 in order, as `(indices, batch)`."""
        runs = [range(start, min(start + batch_size, high)) for start in range(low, high, batch_size)]
        for run, batch in zip(runs, self.batches(runs), strict=True):
            yield np.arange(run.start, run.stop), batch

    def my_share(self, batch_size: int, *, whole_batches: bool = False) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield this rank's share of all examples in order, as `(indices, batch)`; in one process, all examples.

        From a stream, every rank reads all batches and keeps its share of them.

        Args:
            batch_size: number of examples per batch.
            whole_batches: whether ranks share the batches of `sequential`. Then every example is in the same batch for
                any number of ranks. By default, ranks get equal numbers of examples.
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
        loader = own_loader(self._source, None, batch_size=batch_size) if self._loader is None else self._loader
        seen, random = 0, torch.get_rng_state()
        batches = iter(loader)
        torch.set_rng_state(random)  # because a loader draws a seed for its workers
        for batch in batches:
            size = batch_length(batch) if loader.batch_size is not None else self._length_of_item(batch)
            yield np.arange(seen, seen + size), batch
            seen += size

    def _length_of_item(self, item: Any) -> int:
        """Return the number of examples in an item of a stream whose loader does not make batches."""
        lengths = [len(tensor) if tensor.dim() else None for tensor in tensors_in(item)]
        if None in lengths or len(set(lengths)) != 1:
            raise ValueError(
                f"{self.name} is a DataLoader with batch_size=None whose items hold tensors of lengths {lengths}, so "
                "they are no batches: pass batch_size= to the DataLoader, or let the data set give batches."
            )
        return batch_length(item)

    def batches(self, index_batches: Iterable[Sequence[int] | np.ndarray]) -> Iterator[Any]:
        """Yield one batch for every sequence of indices, in the order of the sequences."""
        if self.is_stream:
            raise TypeError(
                f"{self.name} is an IterableDataset, whose points cannot be fetched by index: pass a "
                "map-style Dataset, or use one property with strategy='directional' or 'forward'."
            )
        if self._tensors is not None:
            for indices in index_batches:
                batch = rows_at(self._tensors, self._positions(indices))
                yield batch if self._cast is None else map_tensors(self._as_cast, batch)
        else:
            asked = GivenBatches(np.asarray(self._positions(indices)).tolist() for indices in index_batches)
            for batch in own_loader(self._source, self._loader, batch_sampler=asked):
                self._check_length(batch, asked.sizes.popleft())
                yield batch

    def _check_length(self, batch: Any, asked: int) -> None:
        """Raise an error if a batch does not hold one row for each of its examples."""
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
        """Return the first `count` examples as one batch."""
        if self.is_stream:
            return take(next(batch for _, batch in self._stream(count)), count)
        assert self.n is not None
        return next(iter(self.batches([np.arange(min(count, self.n))])))

    def check_repeats(self) -> None:
        """Raise an error, once, if the first examples are others when they are fetched again; tensors stay the same."""
        if self._repeats or self._tensors is not None:
            return
        twice = [self.first(1), self.first(1)] if self.is_stream else list(self.batches([np.arange(1)] * 2))
        one, other = (tensors_in(batch) for batch in twice)
        same = (torch.equal(before.nan_to_num(), after.nan_to_num()) for before, after in zip(one, other, strict=False))
        if len(one) != len(other) or not all(same):
            raise ValueError(
                f"{self.name} gives another first example each time it is read: switch off what is random in it "
                "(augmentation, sampling), or pass one draw of it as tensors."
            )
        self._repeats = True

    def _positions(self, indices: Sequence[int] | np.ndarray) -> np.ndarray | range:
        """Return the positions of the examples in the data set. A range may stay one, so that tensors can be sliced."""
        if self._order is not None:
            return self._order[np.asarray(indices)]
        return indices if isinstance(indices, range) else np.asarray(indices)


class SomePoints(IndexedData):
    """A data set made of some points of another data set."""

    def __init__(self, data: IndexedData, positions: np.ndarray) -> None:
        self.data, self.positions = data, positions
        self.name, self.n = data.name, len(positions)

    def suit(self, model: nn.Module) -> None:
        """Tell the underlying data set, which converts the numbers; see `IndexedData.suit`."""
        self.data.suit(model)

    def check_repeats(self) -> None:
        """Check the underlying data set; see `IndexedData.check_repeats`."""
        self.data.check_repeats()

    def batches(self, index_batches: Iterable[Sequence[int] | np.ndarray]) -> Iterator[Any]:
        """Yield one batch for every sequence of indices, in the order of the sequences."""
        return self.data.batches(self.positions[np.asarray(indices)] for indices in index_batches)


# the tensors that batches are rows of


def as_tensors(source: Any, name: str) -> Any:
    """Return the tensors behind `source`, with examples along dim 0, or None if it is not made of tensors."""
    if isinstance(source, Tensor):
        return source
    if type(source) is TensorDataset:
        return source.tensors
    if type(source) is Subset:
        inner = as_tensors(source.dataset, name)
        return None if inner is None else SelectedRows(inner, _from_the_front(source, name))
    if isinstance(source, Dataset) or not isinstance(source, Mapping | tuple | list):
        return tensor_of(source, name) if isinstance(source, np.ndarray) or is_table(source) else None
    arrays = parts_of(source)
    if not arrays:
        return None
    if not all(isinstance(array, Tensor | np.ndarray) or is_table(array) for array in arrays):
        raise TypeError(why_no_data(source, arrays, name))
    scalar = next((j for j, array in enumerate(arrays) if not array.ndim), None)
    if scalar is not None:
        raise ValueError(f"part {scalar} of {name} is a single number: pass an entry for each example.")
    lengths = [len(array) for array in arrays]
    if len(set(lengths)) > 1:
        raise ValueError(f"{name} holds tensors of different lengths: {lengths}.")
    tensors = arrays if holds_tensors(source) else tensors_of(arrays, name)
    return dict(zip(source, tensors, strict=True)) if isinstance(source, Mapping) else tuple(tensors)


def holds_tensors(source: Any) -> bool:
    """Whether data is made only of tensors, so that nothing has to be converted and no rows have to be matched."""
    return all(isinstance(part, Tensor) for part in parts_of(source))


def _from_the_front(subset: Subset, name: str) -> np.ndarray:
    """Return the indices of a Subset, with negative indices (−1 is the last point) replaced by positive ones."""
    n, indices = len(subset.dataset), np.asarray(subset.indices, dtype=np.int64)  # type: ignore[arg-type]
    outside = indices[(indices < -n) | (indices >= n)]
    if len(outside):
        raise IndexError(f"{name} is a Subset with index {outside[0]} of a data set of {n} points.")
    return np.where(indices < 0, indices + n, indices)


class SelectedRows:
    """Some rows of tensors, selected like in a `Subset`, without a copy."""

    def __init__(self, tensors: Any, positions: np.ndarray) -> None:
        self.tensors, self.positions = tensors, positions

    def __len__(self) -> int:
        return len(self.positions)


def rows_at(tensors: Any, indices: np.ndarray | range) -> Any:
    """Return some rows of tensors as a batch; consecutive rows are a view."""
    if isinstance(tensors, SelectedRows):
        return rows_at(tensors.tensors, tensors.positions[np.asarray(indices)])
    if isinstance(indices, range):
        is_run = len(indices) > 0 and indices.step == 1
    else:
        could_be = len(indices) > 0 and indices[-1] - indices[0] == len(indices) - 1
        is_run = could_be and bool((np.diff(indices) == 1).all())
    if is_run:
        low, high = int(indices[0]), int(indices[-1]) + 1
        return map_tensors(lambda tensor: tensor[low:high], tensors)
    at = torch.from_numpy(np.array(indices, dtype=np.int64))
    return map_tensors(lambda tensor: tensor[at.to(tensor.device)], tensors)


# batches are tensors in tuples, lists and dicts


def parts_of(held: Any) -> Sequence[Any]:
    """Return the values of a dict, or the entries of a tuple or list; any other object is its own only part."""
    if isinstance(held, Mapping):
        return list(held.values())
    return held if isinstance(held, tuple | list) else [held]


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Return the batch with `function` applied to every tensor. Values that are not tensors are left unchanged."""
    if isinstance(batch, Tensor):
        return function(batch)
    if type(batch) is tuple:  # a fast path, as nearly every batch is a tuple
        return tuple([map_tensors(function, value) for value in batch])
    if isinstance(batch, Mapping | tuple | list):
        return _rebuilt(batch, lambda value: map_tensors(function, value))
    return batch


def _rebuilt(held: Any, function: Callable[[Any], Any]) -> Any:
    """Return a container of the same kind, with `function` applied to every value."""
    if isinstance(held, Mapping):  # a tokenizer's BatchEncoding, too, becomes a plain dict
        return {key: function(value) for key, value in held.items()}
    values = [function(value) for value in held]
    return type(held)(*values) if hasattr(held, "_fields") else type(held)(values)


def take(batch: Any, count: int) -> Any:
    """Return the first `count` examples of a batch."""
    return map_tensors(lambda tensor: tensor[:count], batch)


def pick(batch: Any, positions: Sequence[int]) -> Any:
    """Return some examples of a batch, as a batch."""
    chosen, size = list(positions), batch_length(batch)
    if isinstance(batch, tuple | list):  # its parts, and not an entry for each example
        return _rebuilt(batch, lambda value: _picked(value, chosen, size))
    return _picked(batch, chosen, size)


def _picked(batch: Any, positions: list[int], size: int) -> Any:
    if isinstance(batch, Tensor):
        if not batch.dim() or len(batch) != size:
            return batch
        if batch.layout != torch.strided:  # sparse tensors cannot be indexed by a list
            return batch.index_select(0, torch.tensor(positions, device=batch.device))
        return batch[positions]
    if not isinstance(batch, Mapping | tuple | list):
        return batch
    if not isinstance(batch, Mapping) and not hasattr(batch, "_fields") and len(batch) == size:
        told = any(isinstance(value, Tensor | Mapping | tuple | list) for value in batch)
        if not told or _one_each(batch, size):
            return type(batch)(batch[at] for at in positions)  # strings, numbers, sequences: one for each example
    return _rebuilt(batch, lambda value: _picked(value, positions, size))


def as_batch_of_one(example: Any) -> Any:
    """Turn one example, which has no batch dimension, into a batch."""
    return map_tensors(lambda tensor: tensor.unsqueeze(0), example)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor on `device`; tensors made in inference mode become usable for autograd."""
    with torch.inference_mode(False):
        return map_tensors(lambda tensor: fit_for(tensor, device), batch)


def fit_for(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`, without a graph; the same tensor if nothing has to change."""
    if tensor.is_inference():
        tensor = tensor.clone()
    if tensor.requires_grad:  # gradients of inputs are not needed
        tensor = tensor.detach()
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def tensors_in(batch: Any) -> list[Tensor]:
    """Return all tensors of a batch."""
    found: list[Tensor] = []
    map_tensors(found.append, batch)
    return found


def batch_length(batch: Any) -> int:
    """Return the number of examples in a batch: the length of its first tensor, or of a list with one tensor each."""
    if isinstance(batch, tuple) and batch and isinstance(batch[0], Tensor) and batch[0].dim():
        return batch[0].shape[0]  # a fast path for nearly all batches
    parts = parts_of(batch)
    for part in parts:
        lengths = [tensor.shape[0] for tensor in tensors_in(part) if tensor.dim()]
        if lengths:
            plain = (other.shape[0] for other in parts if isinstance(other, Tensor) and other.dim())
            return next((size for size in plain if _one_each(part, size)), lengths[0])
    raise TypeError(
        f"a batch of type {type(batch).__name__} holds no tensor with a batch dimension that can be found: let the "
        "data, or its collate_fn, give tuples, named tuples, dicts or tensors (dataclasses.asdict makes a dict)."
    )


def _one_each(part: Any, size: int) -> bool:
    """Whether a part of a batch is a list with one tensor, of any length, for each of `size` examples."""
    if not isinstance(part, tuple | list) or len(part) != size or not all(isinstance(one, Tensor) for one in part):
        return False
    return any(not one.dim() or one.shape[0] != size for one in part)
