"""The directions that what-if refits in: what they hold, within which memory, and for many groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from what_if_cases import DECAY, LOSS, SOURCES, N, network, points

from ggda_ext import Groups, properties
from ggda_ext.counterfactual import WhatIf, directions, features, linearized
from ggda_ext.data import IndexedData
from ggda_ext.gradients import GroupGradients
from ggda_ext.model import ParameterSpace


def test_directions_hold_what_learned_groups_have_taught():
    """Of points that are learned the gradient is nearly zero; what would take them back is among the directions."""
    data, model = points(), network()
    what_if = WhatIf(model, LOSS, data, Groups(np.arange(N) % 4), directions="groups", rank=30)
    rows = what_if.linearized[0].directions.rows
    for group in range(4):
        model.zero_grad()
        members = torch.arange(N) % 4 == group
        outputs = model(data[0][members])
        taught = 1 / 3 - F.one_hot(data[1][members], 3).double()
        (outputs * taught).sum().backward()
        row = torch.cat([value.grad.flatten() for value in model.parameters()])
        assert (row - (rows @ row) @ rows).norm() < 1e-6 * row.norm()
    model.zero_grad(set_to_none=True)


def test_directions_are_looked_for_within_the_memory_budget(monkeypatch):
    """Of a large model fewer eigenvectors, of many groups random bundles: no more rows than there is room for."""
    formed, made = [], directions.pulled_back

    def counted(*given: Any) -> GroupGradients:
        formed.append(len((provider := made(*given)).groups))
        return provider

    monkeypatch.setattr(directions, "pulled_back", counted)
    model = network()
    size = sum(value.numel() for value in model.parameters()) * 8
    groups = np.arange(N) // 2
    roomy = WhatIf(model, LOSS, points(), groups, rank=20)
    assert formed == [10 * directions.OVERSAMPLED, 40, 40]  # 60 groups in two bundles for each direction
    formed.clear()
    narrow = WhatIf(model, LOSS, points(), groups, rank=20, memory_budget=30 * size)
    assert formed == [30, 10, 10]
    assert "memory_budget" in narrow.explain()
    assert "memory_budget" not in roomy.explain()


def test_bundles_of_groups_are_signed_sums_of_their_gradients():
    groups = Groups(np.repeat([0, 1, 2, 3, 4, -1], 2), rest="drop")
    found, signs = directions.bundled(groups, 2, seed=0)
    assert len(found) == 2
    for group in range(5):
        members = groups.labels == group
        assert len(set(found.labels[members])) == 1
        assert len(set(signs[members].tolist())) == 1
        assert abs(float(signs[members][0])) == 1
    assert (found.labels[-2:] < 0).all()
    same, ones = directions.bundled(groups, 5, seed=0)
    assert same is groups
    assert bool((ones == 1).all())


def test_a_thousand_groups_are_no_trouble():
    """Also where the curvature of each apart would not fit the memory, and only their sum is kept."""
    torch.manual_seed(0)
    x, y = torch.randn(2_000, 3).double(), torch.arange(2_000) % 2
    model, measure = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(),
        properties.mean_loss((x, y), LOSS),
    )
    what_if = WhatIf(model, LOSS, (x, y), np.arange(2_000) // 2, weight_decay=DECAY, rank=6)
    kept = np.random.default_rng(0).random((3, 1_000)) < 0.5
    apart = what_if.subsets(kept, measure)
    refit = what_if.linearized[0].refit
    assert refit._curvature.shape[0] == 1_001
    refit._curvature = refit._curvature.sum(0, keepdim=True)
    torch.testing.assert_close(what_if.subsets(kept, measure), apart, rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_model_is_linear_in_its_parameters_or_not_in_every_precision(dtype):
    """A random step is far larger than the parameters, so a ReLU is nearly linear along it; Tanh is odd."""
    torch.manual_seed(0)
    data = IndexedData((torch.randn(16, 60).to(dtype), torch.zeros(16).long()), "data")
    last = [(), (nn.ReLU(),), (nn.Tanh(),), (nn.Linear(8, 8),)]
    found = [
        features.is_linear(ParameterSpace(nn.Sequential(nn.Linear(60, 8), *more).to(dtype)), data, 8) for more in last
    ]
    assert found == [True, False, False, False]


def test_fewer_subsets_are_refitted_at_once_where_their_curvature_is_large():
    """A refit along r directions holds a few matrices [r, r] for every subset, within the memory budget."""
    refit = WhatIf(network(), LOSS, points(), SOURCES, directions="all").linearized[0].refit
    roomy, refit.r = refit._at_once(), 4_000
    assert roomy == 64
    assert refit._at_once() * refit.r**2 * 8 <= refit.most_bytes


def test_gradients_of_outputs_are_formed_where_points_use_each_parameter_often(monkeypatch):
    """A convolution over many places with two outputs; not a table's network, nor with as many outputs."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)]
    x, y, sources = torch.randn(24, 1, 12, 12), torch.arange(24) % 2, np.arange(24) % 6
    images = WhatIf(nn.Sequential(*layers), LOSS, (x, y), sources, weight_decay=DECAY, ridge=0.1)
    found = images.without([0, 1])
    assert images.linearized[0]._linearizer.by_rows
    assert not WhatIf(network(), LOSS, points(), SOURCES).linearized[0]._linearizer.by_rows
    facts = images.linearized[0].provider.plan(None).facts
    assert not features.are_rows_less_work(facts, outputs=100, directions=100)
    monkeypatch.setattr(linearized, "are_rows_less_work", lambda *_: False)
    again = WhatIf(nn.Sequential(*layers), LOSS, (x, y), sources, weight_decay=DECAY, ridge=0.1).without([0, 1])
    torch.testing.assert_close(found.outputs((x, y)), again.outputs((x, y)), rtol=1e-3, atol=1e-4)
