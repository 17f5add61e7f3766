"""Data access: the same batches from every kind of data, tensors indexed as tensors, the user's loader kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from ggda_ext import GroupGradients
from ggda_ext.data import IndexedData, batch_length, take, to_device

X, Y = torch.arange(14.0).view(7, 2), torch.arange(7)


class Items(Dataset):
    """A map-style data set that counts how its items are fetched."""

    def __init__(self) -> None:
        self.fetched = 0

    def __len__(self) -> int:
        return 7

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        self.fetched += 1
        return X[i], int(Y[i])


class Stream(IterableDataset):
    def __iter__(self):
        return ((X[i], int(Y[i])) for i in range(7))


class Reversed:
    """A fixed order that is not a shuffle."""

    def __iter__(self):
        return iter(range(6, -1, -1))

    def __len__(self) -> int:
        return 7


def double_collate(items):
    x, y = zip(*items, strict=True)
    return torch.stack(x) * 2, torch.tensor(y)


def values(batches) -> list:
    return [(batch[0][:, 0].tolist(), batch[1].tolist()) for batch in batches]


KINDS = {
    "tensors": (X, Y),
    "arrays": (X.numpy(), Y.numpy()),
    "tensor data set": TensorDataset(X, Y),
    "subset": Subset(TensorDataset(torch.cat([X, X]), torch.cat([Y, Y])), range(7, 14)),
    "items": Items(),
    "loader": DataLoader(TensorDataset(X, Y), batch_size=3),
    "loader of items": DataLoader(Items(), batch_size=3),
    "workers": DataLoader(Items(), batch_size=3, num_workers=1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_the_same_batches(kind):
    data = IndexedData(KINDS[kind])
    assert data.n == 7
    assert values(data.batches([[5, 0], [3]])) == [([10.0, 0.0], [5, 0]), ([6.0], [3])]
    indices, batches = zip(*data.sequential(4), strict=True)
    assert np.concatenate(indices).tolist() == list(range(7))
    assert values(batches) == [([0.0, 2.0, 4.0, 6.0], [0, 1, 2, 3]), ([8.0, 10.0, 12.0], [4, 5, 6])]
    assert values([data.first(2)]) == [([0.0, 2.0], [0, 1])]


def test_dicts_and_single_tensors():
    data = IndexedData({"input_ids": X, "labels": Y})
    batch = next(data.batches([[1, 2]]))
    assert batch["labels"].tolist() == [1, 2]
    assert next(IndexedData(X).batches([[1]])).tolist() == [[2.0, 3.0]]


def test_runs_of_tensor_data_are_views_not_copies():
    _, batch = next(IndexedData((X, Y)).sequential(4))
    assert batch[0].data_ptr() == X.data_ptr()


def test_the_loaders_own_collate_function_and_order_are_kept():
    doubled = IndexedData(DataLoader(TensorDataset(X, Y), batch_size=2, collate_fn=double_collate))
    assert next(doubled.batches([[3]]))[0].tolist() == [[12.0, 14.0]]
    backwards = IndexedData(DataLoader(TensorDataset(X, Y), batch_size=2, sampler=Reversed()))
    assert values([backwards.first(2)]) == [([12.0, 10.0], [6, 5])]
    dropped = IndexedData(DataLoader(TensorDataset(X, Y), batch_size=3, drop_last=True))
    assert dropped.n == 6
    own_batches = IndexedData(DataLoader(TensorDataset(X, Y), batch_sampler=[[4, 5], [0]]))
    assert values(batch for _, batch in own_batches.sequential(9)) == [([8.0, 10.0, 0.0], [4, 5, 0])]


class FromBehind(BatchSampler):
    def __iter__(self):
        return reversed(list(super().__iter__()))


class Evens(SequentialSampler):
    def __iter__(self):
        return iter(range(0, 7, 2))


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({"batch_sampler": FromBehind(SequentialSampler(range(7)), 3, False)}, [6, 3, 4, 5, 0, 1, 2]),
        ({"batch_sampler": BatchSampler(SequentialSampler(range(7)), 3, True)}, [0, 1, 2, 3, 4, 5]),
        ({"batch_sampler": BatchSampler(SequentialSampler(range(7)), 3, False)}, [0, 1, 2, 3, 4, 5, 6]),
        ({"sampler": Evens(range(7)), "batch_size": 3}, [0, 2, 4, 6]),
        ({"sampler": SequentialSampler(range(5)), "batch_size": 3}, [0, 1, 2, 3, 4]),
    ],
    ids=["batches from behind", "a last batch dropped", "in order", "a subclass", "of fewer points"],
)
def test_examples_are_those_the_loader_gives_in_its_order(options, order):
    loader = DataLoader(TensorDataset(X, Y), **options)
    assert torch.cat([y for _, y in loader]).tolist() == order
    data = IndexedData(loader)
    assert data.n == len(order)
    assert torch.cat([batch[1] for _, batch in data.sequential(2)]).tolist() == order


@pytest.mark.parametrize("data", [Stream(), DataLoader(Stream(), batch_size=3)], ids=["raw", "loader"])
def test_streams_are_read_in_order_but_not_by_index(data):
    stream = IndexedData(data, "the training data")
    assert stream.n is None
    indices, batches = zip(*stream.sequential(4), strict=True)
    assert np.concatenate(indices).tolist() == list(range(7))
    assert torch.cat([batch[1] for batch in batches]).tolist() == list(range(7))
    assert values([stream.first(2)]) == [([0.0, 2.0], [0, 1])]
    with pytest.raises(TypeError, match=r"the training data is an IterableDataset.*map-style"):
        next(stream.batches([[0]]))


def test_nothing_is_drawn_from_the_global_random_state():
    before = torch.get_rng_state()
    list(IndexedData(DataLoader(Items(), batch_size=3)).sequential(3))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (
            DataLoader(TensorDataset(X, Y), shuffle=True),
            ValueError,
            "train is a DataLoader that shuffles.*shuffle=False",
        ),
        (DataLoader(TensorDataset(X, Y), sampler=SubsetRandomSampler(range(7))), ValueError, "shuffles"),
        ((X, Y[:3]), ValueError, r"different lengths: \[7, 3\]"),
        ((X, "labels"), TypeError, "does not hold tensors only"),
        (({"a": X, "b": X}, Y), TypeError, "train is a tuple that does not hold tensors only, but a dict.*Dataset"),
        (42, TypeError, "train is a int, which has no length"),
        ((X[:0], Y[:0]), ValueError, "train is empty"),
    ],
)
def test_bad_data_is_named(data, error, message):
    with pytest.raises(error, match=message):
        IndexedData(data, "train")


def test_a_sampler_with_another_order_each_time_is_refused():
    class Unsteady:
        def __iter__(self):
            return iter(torch.randperm(7).tolist())

        def __len__(self):
            return 7

    with pytest.raises(ValueError, match="another order each time"):
        IndexedData(DataLoader(TensorDataset(X, Y), sampler=Unsteady()))


def test_batches_of_any_structure():
    batch = {"x": X, "more": [Y, {"z": X}], "name": "text"}
    assert take(batch, 2)["more"][1]["z"].shape == (2, 2)
    assert to_device(batch, torch.device("cpu"))["name"] == "text"
    assert batch_length(batch) == 7
    with pytest.raises(TypeError, match="holds no tensor"):
        batch_length("text")


@pytest.mark.parametrize(
    "options", [{"batch_size": 3, "drop_last": True}, {"batch_sampler": BatchSampler(SequentialSampler(X), 3, True)}]
)
def test_a_loader_that_drops_its_last_batch_is_named_where_groups_do_not_fit(options):
    loader = DataLoader(TensorDataset(X, Y), **options)
    left = len(X) - len(X) % 3
    with pytest.raises(
        ValueError, match=f"has {left}: .*drop_last=True, which leaves out {len(X) - left} points: pass"
    ):
        GroupGradients(nn.Linear(X.shape[1], 3), nn.CrossEntropyLoss(), loader, range(len(X)))
    fitting = GroupGradients(nn.Linear(X.shape[1], 3), nn.CrossEntropyLoss(), loader, range(left))
    assert fitting.groups.n == left
