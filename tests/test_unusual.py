"""No silent wrong number: unusual models, losses and data, under every strategy, give the truth or an error."""

from __future__ import annotations

import pytest
import torch
from cases import relative_error
from unusual_cases import CASES, GROUPS, N, make, point_gradients

from ggda_ext import STRATEGIES, GroupGradients, Groups
from ggda_ext.gradients import PointGradients
from ggda_ext.data import IndexedData
from ggda_ext.losses import as_example_loss

SEEDS = {"reordered batch": 40, "unique tokens": 40, "unpadded tokens": 40, "experts by example": 40,
         "rare expert": 40, "experts by token": 40}  # fmt: skip


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def scores_or_error(name, model, points, strategy, batch_size, truth):
    case = CASES[name]
    provider = GroupGradients(
        model, case.loss, points, GROUPS, parameters=case.parameters, strategy=strategy, batch_size=batch_size
    )
    if strategy == "ghost":
        asked = PointGradients(as_example_loss(case.loss), IndexedData(tuple(part[-5:] for part in points)))
        return provider.scores(asked), truth[-5:] @ truth.T
    v = torch.randn(2, provider.p, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return provider.scores(v), v @ truth.T


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
@pytest.mark.parametrize("name", CASES)
def test_every_strategy_gives_the_truth_or_names_the_cause(name, strategy):
    for seed in range(SEEDS.get(name, 2) if strategy in ("auto", "directional") else 2):
        model, points = make(name, seed)
        truth = None if CASES[name].refused else point_gradients(name, model, points)
        before = state_of(model)
        for batch_size in (1, 5, None):
            try:
                found, expected = scores_or_error(name, model, points, strategy, batch_size, truth if truth is not None else torch.zeros(N, 1))
            except ValueError as error:
                wanted = CASES[name].refused or "cannot be used here"
                assert wanted in str(error), (seed, batch_size, str(error))
                assert strategy != "auto" or CASES[name].refused, (seed, batch_size, str(error))
            else:
                assert CASES[name].refused is None, (seed, batch_size)
                assert relative_error(found, Groups(GROUPS).sum(expected)) <= 1e-10, (seed, batch_size)
            after = state_of(model)
            assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("strategy", ["auto", "segmented", "backward", "persample"])
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].refused is None])
def test_rows_are_the_truth_or_the_cause_is_named(name, strategy):
    model, points = make(name, 3)
    truth = Groups(GROUPS).sum(point_gradients(name, model, points), 0)
    for batch_size in (1, 5, None):
        provider = GroupGradients(
            model, CASES[name].loss, points, GROUPS, parameters=CASES[name].parameters, strategy=strategy,
            batch_size=batch_size,
        )  # fmt: skip
        try:
            assert relative_error(provider.rows(), truth) <= 1e-10
        except ValueError as error:
            assert strategy != "auto" and "cannot be used here" in str(error)
