"""Data and groups of unusual form give the truth, or are named."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import pytest
import torch
from cases import gradient_rows, relative_error
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate
from unusual_cases import GROUPS, WIDTH, N, data, mlp
from unusual_checks import BATCH_SIZES, CE, DENSE, refusal_by_name

from ggda_ext import GroupGradients, Groups
from ggda_ext.losses import BatchLoss

pytestmark = pytest.mark.filterwarnings("ignore:.*(performance drop|target size|jit).*")


class Stream(IterableDataset):
    def __init__(self, points, batched):
        self.points, self.batched = points, batched

    def __iter__(self):
        parts = (part.split(6) for part in self.points) if self.batched else self.points
        return zip(*parts, strict=True)


def test_data_of_unusual_form_gives_the_same_scores_or_is_named():
    torch.manual_seed(0)
    model, (x, y) = mlp().double(), data("features", 0)
    v = torch.randn(1, sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    expected = GroupGradients(model, CE, (x, y), GROUPS).scores(v)
    backwards = Subset(TensorDataset(x.flip(0), y.flip(0)), [-1 - i for i in range(N)])
    for points in (backwards, DataLoader(Stream((x, y), True), batch_size=None), Stream((x, y), False)):
        assert relative_error(GroupGradients(model, CE, points, GROUPS).scores(v), expected) <= 1e-12
    with pytest.raises(ValueError, match="batch_size=None whose items hold tensors of lengths"):
        GroupGradients(model, CE, DataLoader(Stream((x, y), False), batch_size=None), GROUPS).scores(v)
    with pytest.raises(IndexError, match="Subset with index 24 of a data set of 24 points"):
        GroupGradients(model, CE, Subset(TensorDataset(x, y), [0, 24]), [0, 1])


class Pools(nn.Module):
    """Takes its examples as a sparse tensor, or as a list of sequences of several lengths."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 4), nn.Linear(4, 3)

    def forward(self, x):
        if isinstance(x, torch.Tensor):
            return self.head(self.body(x.to_dense()).tanh())
        return self.head(torch.stack([self.body(one).tanh().sum(0) for one in x]))


COLLATED = {
    "sparse rows": lambda items: (
        torch.stack([x[0] for x, _ in items]).to_sparse(),
        torch.stack([y for _, y in items]),
    ),
    "sequences": lambda items: ([x for x, _ in items], torch.stack([y for _, y in items])),
}


@pytest.mark.parametrize("strategy", ["auto", *DENSE])
@pytest.mark.parametrize("form", COLLATED)
def test_batches_of_sparse_rows_or_of_sequences_give_the_truth(form, strategy):
    torch.manual_seed(0)
    x, y = data("features", 0)
    points = [(x[i : i + 1 + i % 3], y[i]) for i in range(N)]
    model, collate = Pools().double(), COLLATED[form]
    alone = (collate([point]) for point in points)
    rows = gradient_rows((CE(model(one), target) for one, target in alone), model.parameters())
    v = torch.randn(1, len(rows[0]), dtype=torch.float64)
    for batch_size in BATCH_SIZES:
        loader = DataLoader(points, batch_size=6, collate_fn=collate)
        provider = GroupGradients(model, CE, loader, GROUPS, strategy=strategy, batch_size=batch_size)
        with refusal_by_name(strategy):
            assert relative_error(provider.scores(v), Groups(GROUPS).sum(v @ rows.T)) <= 1e-10


def test_batches_of_objects_are_named():
    @dataclass
    class Batch:
        x: torch.Tensor

    loader = DataLoader(
        TensorDataset(*data("features", 0)), collate_fn=lambda items: Batch(torch.stack([x for x, _ in items]))
    )
    loss = BatchLoss(lambda model, batch: model(batch.x).sum(1))
    with pytest.raises(TypeError, match=r"a batch of type Batch holds no tensor.*dataclasses\.asdict"):
        GroupGradients(mlp().double(), loss, loader, GROUPS).rows()


def test_batches_that_join_examples_are_named():
    points = [(torch.randn(1 + i % 3, WIDTH), i % 3) for i in range(N)]
    joined = DataLoader(
        points, batch_size=6, collate_fn=lambda items: (torch.cat([x for x, _ in items]), torch.ones(6))
    )
    with pytest.raises(ValueError, match=r"a batch whose first tensor has \d+ rows of \d+ examples .a collate_fn"):
        GroupGradients(mlp(), CE, joined, GROUPS).scores(torch.ones(1, 58))


@pytest.mark.parametrize("batch_size", [2, 3])
def test_a_batch_may_hold_a_tensor_that_all_examples_share(batch_size):
    """With three parts and three examples the parts are still parts, and not one for each example."""

    class Shared(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, x, turn):
            return self.body(x @ turn)

    (x, y), body = data("features", 0), mlp().double()
    turn = torch.eye(WIDTH, dtype=torch.float64)
    loader = DataLoader(
        TensorDataset(x, y),
        batch_size=batch_size,
        collate_fn=lambda items: (*default_collate(items)[:1], turn, *default_collate(items)[1:]),
    )
    shared = GroupGradients(Shared(body), CE, loader, GROUPS)
    v = torch.randn(1, shared.p, dtype=torch.float64)
    found = shared.scores(v)
    assert relative_error(found, GroupGradients(body, CE, (x, y), GROUPS).scores(v)) <= 1e-10


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        (pd.Series(["a", pd.NA] * 12), "12 of 24 points are in no group"),
        (["a", pd.NA] * 12, "12 of 24 points are in no group"),
        (pd.Series([1, pd.NA] * 12, dtype="Int64"), "12 of 24 points are in no group"),
        ({}, "groups is empty"),
        ({"a": 3}, "must hold one list of indices per group, not 3"),
        ("clinic", "not 'clinic', which is one value: pass one label per training point"),
        ({"a": set(range(12)), "b": set(range(12, 24))}, 2),
        ([set(range(12)), set(range(12, 24))], 2),
    ],
)
def test_groups_of_unusual_form_are_taken_or_named(groups, found):
    if isinstance(found, int):
        assert len(Groups(groups, 24)) == found
        return
    with pytest.raises((ValueError, TypeError), match=found):
        Groups(groups, 24)
