"""Weighted losses: the gradients of Σ w_i ℓ_i."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ggda_ext import GroupGradients
from ggda_ext.data import IndexedData
from ggda_ext.gradients.weighting import WeightedData, WeightedLoss
from ggda_ext.losses import FunctionalLoss, OutputLoss

LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 0])


@pytest.mark.parametrize("strategy", ["segmented", "backward", "persample", "directional"])
@pytest.mark.parametrize("functional", [False, True])
def test_weighted_gradients_are_weighted_sums_of_point_gradients(strategy, functional):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data, weights = (torch.randn(7, 3), torch.randint(0, 2, (7,))), torch.randn(7)
    loss = OutputLoss(cross_entropy)
    if functional:

        def of_one(parameters, example):
            return cross_entropy(torch.func.functional_call(model, parameters, (example[0],)), example[1])

        loss = FunctionalLoss(of_one)
    points = GroupGradients(model, OutputLoss(cross_entropy), data).rows()
    expected = torch.zeros(3, points.shape[1]).index_add_(0, LABELS, points * weights[:, None])
    weighted = WeightedData(IndexedData(data), weights)
    provider = GroupGradients(model, WeightedLoss(loss), weighted, LABELS, strategy=strategy)
    directions = torch.randn(2, points.shape[1])
    assert torch.allclose(provider.scores(directions), directions @ expected.T, atol=1e-5)


def test_weights_of_the_wrong_length_are_refused():
    with pytest.raises(ValueError, match=r"shape \[3\]: pass one for each of the 7 points"):
        WeightedData(IndexedData(torch.ones(7, 2)), torch.ones(3))
