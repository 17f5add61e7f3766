"""Gradients of any callable: rows, columns, and a model that is left as it was."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from property_cases import (
    CE,
    DATA,
    D,
    X,
    Y,
    build,
    gradient,
    plain,
    z,
)
from torch import Tensor, nn
from torch.nn import functional as F

from ggda_ext import properties
from ggda_ext.model import SavedState
from ggda_ext.properties import (
    mean_loss,
    property_gradient,
)


def test_doctests_of_the_module() -> None:
    result = doctest.testmod(properties)
    assert result.attempted >= 4
    assert result.failed == 0


def test_vector_callable_has_a_row_for_each_component() -> None:
    model = build()
    rows = gradient(lambda m: m(X)[:2].flatten(), model)
    torch.testing.assert_close(rows, plain(lambda m: m(X)[:2].flatten(), model), rtol=1e-12, atol=1e-12)
    assert rows.shape == (6, sum(q.numel() for q in model.parameters()))


def test_columns_follow_the_dict_and_unused_parameters_are_zero() -> None:
    model = build()
    chosen = {"last.bias": model.last.bias, "first.weight": model.first.weight}
    whole = model.first(X).square().sum()
    rows = property_gradient(lambda m: m.first(X).square().sum(), model, chosen)
    assert rows.shape == (1, 3 + 20)
    assert torch.equal(rows[0, :3], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(rows[0, 3:], torch.autograd.grad(whole, model.first.weight)[0].flatten())
    ready = property_gradient(mean_loss(DATA, CE), model, chosen)
    expected = torch.autograd.grad(F.cross_entropy(z(model), Y), list(chosen.values()))
    torch.testing.assert_close(ready[0], torch.cat([grad.flatten() for grad in expected]))


def test_sparse_embedding_gradients_become_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 2, sparse=True), nn.Flatten()).double()
    tokens, y = torch.tensor([[1], [4], [1]]), torch.tensor([0, 1, 1])
    rows = gradient(mean_loss((tokens, y), CE, batch_size=2), model)
    assert (rows.reshape(6, 2).abs().sum(1) > 0).tolist() == [False, True, False, False, True, False]


def test_own_gradient_method_is_used() -> None:
    class Own:
        def __call__(self, model: nn.Module) -> Tensor:
            raise AssertionError("not called")

        def gradient(self, model: nn.Module, parameters: Any) -> Tensor:
            return torch.full((2, sum(q.numel() for q in parameters.values())), 7.0)

    assert torch.equal(gradient(Own(), build()), torch.full((2, 43), 7.0))


def test_a_property_that_switches_modes_or_updates_buffers_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(D, 3), nn.BatchNorm1d(3)).double().eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}

    def training(m: nn.Module) -> Tensor:
        m.train()
        return m(X).square().mean() + m[1].running_mean.sum() + m[0].bias.sum()

    gradient(training, model)
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_values_are_copied_once_to_see_that_a_model_leaves_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    copy = SavedState.copy_values
    monkeypatch.setattr(SavedState, "copy_values", lambda saved, names=None: (copied.extend(names), copy(saved, names)))
    model = build()
    goal = mean_loss((X, Y), nn.CrossEntropyLoss())
    first = gradient(goal, model)
    assert set(copied) == {name for name, _ in model.named_parameters()}
    copied.clear()
    assert torch.equal(gradient(goal, model), first)
    assert not copied
    model.last.register_forward_hook(lambda *_: None)  # which may do anything
    gradient(goal, model)
    assert copied


def test_a_model_that_writes_to_its_parameters_is_put_back_or_refused() -> None:
    calls: list[nn.Module] = []

    class Writes(nn.Module):
        def __init__(self, from_call: int, counts: bool) -> None:
            super().__init__()
            self.linear, self.calls, self.from_call, self.counts = nn.Linear(D, 3).double(), 0, from_call, counts

        def forward(self, x: Tensor) -> Tensor:
            calls.append(self)
            self.calls += self.counts
            if calls.count(self) >= self.from_call:
                with torch.no_grad():
                    self.linear.bias += 1
            return self.linear(x)

    goal = mean_loss((X, Y), nn.CrossEntropyLoss())
    for model in (Writes(1, counts=False), Writes(2, counts=True)):  # one that counts is not the one that was looked at
        before = model.linear.bias.detach().clone()
        for _ in range(2):
            gradient(goal, model)
            assert torch.equal(model.linear.bias, before)
    late = Writes(3, counts=False)  # the first time some examples run twice
    gradient(goal, late)
    with pytest.raises(ValueError, match=r"wrote to 'linear\.bias'.*as it did not before"):
        gradient(goal, late)
