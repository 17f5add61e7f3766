"""Weighted gradients: Σ w_i ∇ℓ_i of each group, for several weightings from one pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ggda_ext import GroupGradients
from ggda_ext.curvature.sampled import SampledCurvature
from ggda_ext.data import IndexedData
from ggda_ext.losses import FunctionalLoss, OutputLoss

LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 0])
DATA = torch.linspace(-2, 3, 21).view(7, 3).sin(), torch.tensor([0, 1, 1, 0, 1, 0, 0])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("strategy", ["segmented", "backward", "persample"])
@pytest.mark.parametrize("functional", [False, True])
def test_weighted_gradients_are_weighted_sums_of_point_gradients(strategy, functional):
    model, weights = network(), torch.randn(2, 7)
    loss = OutputLoss(cross_entropy)
    if functional:

        def of_one(parameters, example):
            return cross_entropy(torch.func.functional_call(model, parameters, (example[0],)), example[1])

        loss = FunctionalLoss(of_one)
    points = GroupGradients(model, OutputLoss(cross_entropy), DATA).rows()
    expected = torch.stack([(points * row[:, None])[j == LABELS].sum(0) for j in range(3) for row in weights])
    provider = GroupGradients(model, loss, DATA, LABELS, strategy=strategy)
    found = torch.cat([rows.flatten(0, 1) for _, rows in provider.blocks(weights=weights)])
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 8)])
def test_weights_of_the_wrong_shape_are_refused(shape):
    provider = GroupGradients(network(), cross_entropy, DATA, LABELS)
    with pytest.raises(ValueError, match=r"weights has shape .*: pass \[w, 7\], a row for each weighting"):
        provider.blocks(weights=torch.ones(shape))


def test_products_with_the_fisher_are_those_of_its_gradients_where_these_are_not_kept():
    provider = GroupGradients(network(), cross_entropy, DATA, LABELS, strategy="directional")
    rows, vectors = GroupGradients(provider.model, cross_entropy, DATA).rows(), torch.randn(3, provider.p)
    curvature = SampledCurvature(provider, "fisher", 7, 0)
    expected = vectors @ rows.T @ rows / 7
    assert torch.allclose(curvature.on(IndexedData(DATA), vectors), expected, atol=1e-5)
