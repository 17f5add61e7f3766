"""What was found out about a model is kept for the next call, and dropped when anything it hangs on changes."""

from __future__ import annotations

import pytest
import torch
from cases import relative_error
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from unusual_cases import GROUPS, WIDTH, N, data, mlp
from unusual_checks import CE, DENSE, refusal_by_name
from unusual_rare import (
    Switches,
)

from ggda_ext import GroupGradients
from ggda_ext.gradients.observation import Watch
from ggda_ext.gradients.proof.descent import storage_of
from ggda_ext.losses import FunctionalLoss

pytestmark = pytest.mark.filterwarnings("ignore:.*(performance drop|target size|jit).*")


def test_findings_are_kept_for_the_next_call_and_dropped_when_the_model_changes():
    class Counted(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.body = nn.Linear(WIDTH, 3)

        def forward(self, x):
            type(self).calls += 1
            return self.body(x)

    model, points = Counted().double(), data("features", 0)

    def calls_of() -> int:
        before = Counted.calls
        GroupGradients(model, CE, points, GROUPS).scores(torch.ones(1, 21))
        return Counted.calls - before

    first, second = calls_of(), calls_of()
    assert second < first / 3
    assert calls_of() == 1
    model.body.register_forward_hook(lambda module, args, output: output * 2)
    assert calls_of() > 3


def test_findings_are_kept_for_an_equal_loss_and_a_new_loader_of_the_same_data():
    """Toolkits make a loader and users a loss for every call; another setting of the loss is another loss."""

    class Counted(nn.Module):
        calls = 0

        def forward(self, x):
            type(self).calls += 1
            return x

    model, points = nn.Sequential(Counted(), nn.Linear(WIDTH, 3)).double(), TensorDataset(*data("features", 0))

    def calls_of(**settings) -> int:
        before = Counted.calls
        loss, loader = nn.CrossEntropyLoss(**settings), DataLoader(points, batch_size=N)
        GroupGradients(model, loss, loader, GROUPS).scores(torch.ones(1, 21))
        return Counted.calls - before

    first, again = calls_of(), calls_of()
    assert again < first / 3
    other = calls_of(label_smoothing=0.1)
    assert other > again
    assert calls_of(weight=torch.ones(3).double(), reduction="sum") > again
    assert calls_of(label_smoothing=0.1) < other


def test_findings_are_kept_for_the_same_function_of_parameters_and_an_example():
    """A toolkit wraps it anew for every call, and a bound method is another object each time it is named."""
    calls: list[int] = []

    class Task:
        def loss(self, parameters, example):
            calls.append(1)
            x, y = example
            return CE(torch.func.functional_call(model, parameters, (x.reshape(1, -1),)), y.reshape(1))

    def calls_of(task: Task, **settings) -> int:
        calls.clear()
        GroupGradients(model, FunctionalLoss(task.loss, **settings), points, GROUPS).scores(torch.ones(1, 21))
        return len(calls)

    model, points = nn.Sequential(nn.Linear(WIDTH, 3)).double(), data("features", 0)
    one, other = Task(), Task()
    first, again = calls_of(one), calls_of(one)
    assert again < first / 3
    assert calls_of(other) == first
    assert calls_of(one, batch_of_one=True) > again


def test_findings_of_other_parameters_are_not_the_truth_of_these():
    """A strategy that is compared with autograd later is compared at the parameters of that moment."""
    model, points = mlp().double(), data("features", 0)
    GroupGradients(model, CE, points, GROUPS).plan(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    v = torch.randn(1, sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    found = [GroupGradients(model, CE, points, GROUPS, strategy=strategy).scores(v) for strategy in DENSE]
    assert all(relative_error(scores, found[0]) <= 1e-10 for scores in found)


@pytest.mark.parametrize("flag", ["twice", "reordered", "settings"])
def test_findings_are_dropped_when_a_flag_of_the_model_changes(flag):
    """A plain attribute may change what the model does; here also one that no parameter or module shows."""
    torch.manual_seed(0)
    model, points = Switches().double(), data("features", 0)
    provider = GroupGradients(model, CE, points, GROUPS)
    v = torch.randn(1, provider.p, dtype=torch.float64)
    provider.scores(v)
    model.switch(flag)
    expected = GroupGradients(model, CE, points, GROUPS, strategy="backward").scores(v)
    for strategy in ("auto", *DENSE):
        with refusal_by_name(strategy):
            assert (
                relative_error(GroupGradients(model, CE, points, GROUPS, strategy=strategy).scores(v), expected)
                <= 1e-10
            )


ROWS = torch.arange(N)
INDICES = {
    "a mask of transformers": ((ROWS[:, None, None, None], torch.arange(WIDTH)[None, None, None]), False),
    "a column for each row": ((ROWS, torch.zeros(N, dtype=torch.long)), False),
    "one column": ((ROWS, 2), False),
    "other rows": ((ROWS.tolist()[::-1], slice(None)), True),
    "other rows, with columns": ((torch.tensor([*range(1, N), 0])[:, None], torch.arange(WIDTH)[None]), True),
    "rows along the second dimension": ((ROWS[None], torch.arange(WIDTH)[:, None]), True),
    "columns with more dimensions": ((ROWS, torch.zeros(N, N, dtype=torch.long)), True),
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_that_may_move_rows_is_told_from_one_that_does_not(name):
    index, moves = INDICES[name]
    x = data("features", 0)[0]
    with Watch(N) as watch:
        x[index]
    assert (watch.moves is not None) == moves


def test_where_numbers_lie_is_not_told_under_vmap():
    found = []
    torch.vmap(lambda row: found.append(storage_of(row)) or row)(torch.randn(3, 2))
    assert found == [None]
    whole = torch.randn(4)
    assert storage_of(whole) == storage_of(whole[2:]) is not None
