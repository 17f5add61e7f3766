"""`GroupGradients.on` and `.observe`: data that comes batch by batch, and gradients seen layer by layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ggda_ext import ExampleLoss, GroupGradients
from ggda_ext.gradients.layers import Layer
from ggda_ext.gradients.observation import Observer


class Counted(ExampleLoss):
    """A loss that counts how often it is asked."""

    calls = 0

    def each(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return (model(batch[0]) - batch[1]).square().sum(1)


def data(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4), torch.randn(n, 2)


@pytest.mark.parametrize("strategy", ["auto", "segmented", "backward", "persample"])
def test_more_data_gives_what_a_new_provider_gives(strategy: str) -> None:
    model, labels = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.arange(11) % 3
    first, more = data(5), data(11)
    provider = GroupGradients(model, Counted(), first, strategy=strategy).on(more, labels)
    expected = GroupGradients(model, Counted(), more, labels, strategy=strategy)
    assert provider.plan(None).strategy == expected.plan(None).strategy
    assert provider.plan(None).facts.points == 11
    torch.testing.assert_close(provider.rows(), expected.rows())


def test_more_data_does_not_look_into_the_model_again() -> None:
    loss = Counted()
    provider = GroupGradients(nn.Linear(4, 2), loss, data(40), strategy="segmented")
    provider.rows()
    before = loss.calls
    provider.on(data(6), [0, 0, 1, 1, 2, 2]).rows()
    assert loss.calls == before + 1


def test_observed_inputs_and_output_gradients_give_the_rows() -> None:
    model, given, labels = nn.Linear(4, 2), data(9), torch.arange(9) % 4
    provider = GroupGradients(model, Counted(), given, labels, parameters=["weight"], batch_size=4)
    found = torch.zeros(4, 2, 4)

    class Sum(Observer):
        def __init__(self, groups: Any) -> None:
            self.groups = groups

        def backward(self, layer: Layer, kept: Tensor, d: Tensor, repeats: int) -> None:
            for j, (low, high) in enumerate(zip(self.groups.starts, self.groups.starts[1:], strict=False)):
                found[self.groups.ids[j]] += d[low:high].T @ kept[low:high]

    assert sum(len(groups) for groups in provider.observe(Sum)) == 9
    torch.testing.assert_close(found.flatten(1), provider.rows())


def test_observing_a_layer_that_cannot_be_seen_names_the_parameter() -> None:
    provider = GroupGradients(nn.Sequential(nn.Linear(4, 2), nn.PReLU(2)), Counted(), data(5))
    with pytest.raises(ValueError, match=r"'1\.weight'"):
        next(provider.observe(lambda groups: Observer()))
