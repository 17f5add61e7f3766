"""The laws of the design for every strategy, model and dtype: group gradients against one backward per point."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import MODELS, NOT_CAPTURED, NOT_GHOST, N, make_case, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ggda_ext import STRATEGIES, GroupGradients, Groups, PointGradients, attribute, properties
from ggda_ext.data import IndexedData
from ggda_ext.gradients import layers
from ggda_ext.gradients.strategies import BY_NAME, directional
from ggda_ext.losses import OutputLoss

LOSS = nn.CrossEntropyLoss()
UNEVEN = np.array([0] * 9 + [1] + [2] * 4 + [3] * 2 + [1] * 3 + [2] * 4)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def usable(model: str, strategy: str) -> bool:
    return not (
        (strategy == "ghost" and model in NOT_GHOST)
        or (strategy in ("directional", "segmented") and model in NOT_CAPTURED)
    )


FORM_ROWS = [name for name in STRATEGIES if BY_NAME[name].blocks is not None]
PAIRS = [(model, strategy) for model in MODELS for strategy in (*STRATEGIES, "auto") if usable(model, strategy)]


def scores_along(provider: GroupGradients, case, strategy: str):
    """Scores and truth `[m, n]`: along random directions, or (ghost) along gradients of test points."""
    gradients = case.gradients()
    if strategy == "ghost":
        points = PointGradients(OutputLoss(LOSS), IndexedData((case.x[:6], case.y[:6])))
        return provider.scores(points), gradients[:6] @ gradients.T
    directions = torch.randn(3, provider.p, dtype=gradients.dtype)
    return provider.scores(directions), directions @ gradients.T


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("model", "strategy"), PAIRS)
def test_additivity_a_groups_score_is_the_sum_of_its_members(model, strategy, dtype):
    case = make_case(model, dtype)
    groups = Groups(UNEVEN)
    scores, truth = scores_along(GroupGradients(case.model, LOSS, case.data, groups, strategy=strategy), case, strategy)
    assert scores.dtype == dtype
    assert relative_error(scores, groups.sum(truth)) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("model", "strategy"), PAIRS)
def test_singletons_are_points(model, strategy):
    case = make_case(model)
    scores, truth = scores_along(GroupGradients(case.model, LOSS, case.data, strategy=strategy), case, strategy)
    assert relative_error(scores, truth) <= 1e-12


@pytest.mark.parametrize(("model", "strategy"), PAIRS)
def test_batch_size_does_not_change_a_score(model, strategy):
    case = make_case(model)
    groups = Groups(UNEVEN)
    for batch_size in (1, 4, 10):
        provider = GroupGradients(case.model, LOSS, case.data, groups, strategy=strategy, batch_size=batch_size)
        scores, truth = scores_along(provider, case, strategy)
        assert relative_error(scores, groups.sum(truth)) <= 1e-12, batch_size


@pytest.mark.parametrize("groups", [Groups(UNEVEN), Groups.singletons(N)], ids=["uneven", "singletons"])
@pytest.mark.parametrize("model", [model for model in MODELS if usable(model, "directional")])
def test_blocks_of_rows_and_of_batches_do_not_change_a_score(model, groups, monkeypatch):
    monkeypatch.setattr(layers, "_NEAR", 1)
    monkeypatch.setattr(layers, "_ENOUGH", 2)
    monkeypatch.setattr(directional, "_TOGETHER", 8)
    case = make_case(model)
    provider = GroupGradients(case.model, LOSS, case.data, groups, strategy="directional", batch_size=5)
    scores, truth = scores_along(provider, case, "directional")
    assert relative_error(scores, groups.sum(truth)) <= 1e-12


@pytest.mark.parametrize(("out", "into"), [(2, 5), (40, 5), (20, 30)], ids=["few", "wide", "narrow"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 1500])
def test_scores_of_a_linear_layer_are_products_with_its_output(out, into, bias, rows):
    layer, rule = nn.Linear(into, out, bias).double().requires_grad_(False), layers.rule_for(nn.Linear(into, out))
    for shape in ([rows], [rows, 3]):
        a, d = torch.randn(*shape, into).double(), torch.randn(*shape, out).double()
        scores = torch.ones(rows).double()
        rule.add_scores(layer, a, d, rule.arranged(layer.weight), layer.bias, scores)
        assert relative_error(scores - 1, (layer(a) * d).flatten(1).sum(1)) <= 1e-12


@pytest.mark.parametrize("strategy", [*FORM_ROWS, "auto"])
@pytest.mark.parametrize("model", MODELS)
def test_rows_are_group_summed_gradients(model, strategy):
    if not usable(model, strategy):
        with pytest.raises(ValueError, match="cannot see the gradient"):
            GroupGradients(*_of(model), strategy=strategy).rows()
        return
    case = make_case(model)
    groups = Groups(UNEVEN)
    truth = groups.sum(case.gradients(), 0)
    for batch_size, max_rows in ((4, 1), (5, 3), (100, 100)):
        provider = GroupGradients(case.model, LOSS, case.data, groups, strategy=strategy, batch_size=batch_size)
        blocks = list(provider.blocks(max_rows))
        assert max(len(rows) for _, rows in blocks) <= max_rows
        ids = torch.cat([ids for ids, _ in blocks])
        assert sorted(ids.tolist()) == list(range(len(groups)))
        assert relative_error(torch.cat([rows for _, rows in blocks])[ids.argsort()], truth) <= 1e-12


@pytest.mark.parametrize("strategy", [*FORM_ROWS, "auto"])
@pytest.mark.parametrize("model", MODELS)
def test_weighted_rows_are_weighted_sums_of_gradients_for_every_weighting(model, strategy):
    if not usable(model, strategy):
        return
    case, groups = make_case(model), Groups(UNEVEN)
    weights = torch.stack([torch.linspace(-1, 2, N), torch.ones(N), torch.zeros(N)]).double()
    truth = torch.stack([groups.sum(case.gradients() * own[:, None], 0) for own in weights], 1)
    for batch_size, max_rows in ((4, 1), (5, 3), (100, None)):
        provider = GroupGradients(case.model, LOSS, case.data, groups, strategy=strategy, batch_size=batch_size)
        blocks = list(provider.blocks(max_rows, weights))
        ids = torch.cat([ids for ids, _ in blocks])
        assert sorted(ids.tolist()) == list(range(len(groups)))
        assert relative_error(torch.cat([rows for _, rows in blocks])[ids.argsort()], truth) <= 1e-12


def _of(model: str):
    case = make_case(model)
    return case.model, LOSS, case.data, UNEVEN


@given(labels=st.lists(st.integers(0, 5), min_size=N, max_size=N), strategy=st.sampled_from(STRATEGIES))
@settings(max_examples=40, deadline=None)
def test_refinement_merging_two_groups_adds_their_scores(labels, strategy):
    case = make_case("mlp")
    fine = Groups(labels)
    merged = Groups(np.where(fine.labels == 1, 0, fine.labels))
    fine_scores, _ = scores_along(
        GroupGradients(case.model, LOSS, case.data, fine, strategy=strategy),
        case,
        "ghost" if strategy == "ghost" else _fixed(strategy),
    )
    merged_scores, _ = scores_along(
        GroupGradients(case.model, LOSS, case.data, merged, strategy=strategy),
        case,
        "ghost" if strategy == "ghost" else _fixed(strategy),
    )
    member = torch.zeros(len(merged), len(fine), dtype=torch.float64)
    for j in range(len(fine)):
        member[merged.labels[fine[j][0]], j] = 1
    assert relative_error(merged_scores, fine_scores @ member.T) <= 1e-12


def _fixed(strategy: str) -> str:
    torch.manual_seed(1)  # the same random directions each time
    return strategy


@given(order=st.permutations(range(N)), strategy=st.sampled_from([*STRATEGIES, "auto"]))
@settings(max_examples=25, deadline=None)
def test_order_permuting_the_data_permutes_nothing_but_the_points(order, strategy):
    case = make_case("mlp")
    directions = torch.randn(2, 73, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    points = PointGradients(OutputLoss(LOSS), IndexedData((case.x[:6], case.y[:6])))
    asked = points if strategy == "ghost" else directions[:, : sum(p.numel() for p in case.model.parameters())]
    before = GroupGradients(case.model, LOSS, case.data, UNEVEN, strategy=strategy).scores(asked)
    shuffled = (case.x[list(order)], case.y[list(order)])
    after = GroupGradients(case.model, LOSS, shuffled, UNEVEN[list(order)], strategy=strategy).scores(asked)
    assert relative_error(after, before) <= 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_order_permuting_the_groups_permutes_the_scores(strategy):
    case = make_case("mlp")
    new_id = np.array([2, 0, 3, 1])
    before, _ = scores_along(
        GroupGradients(case.model, LOSS, case.data, UNEVEN, strategy=strategy), case, _fixed(strategy)
    )
    after, _ = scores_along(
        GroupGradients(case.model, LOSS, case.data, new_id[UNEVEN], strategy=strategy), case, _fixed(strategy)
    )
    assert relative_error(after[:, new_id], before) <= 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_determinism_same_call_same_bits(strategy):
    case = make_case("mlp", torch.float32)
    first, second = (
        scores_along(GroupGradients(case.model, LOSS, case.data, UNEVEN, strategy=strategy), case, _fixed(strategy))[0]
        for _ in range(2)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("model", ["mlp", "cnn", "transformer", "unknown"])
def test_property_loss_of_test_point_j_gives_the_scores_of_test_point_j(model):
    case = make_case(model)
    tests = (case.x[:4], case.y[:4])
    truth = Groups(UNEVEN).sum(case.gradients()[:4] @ case.gradients().T)
    ready = attribute(case.model, LOSS, case.data, UNEVEN, properties.point_losses(tests, LOSS), method="tracin")
    own = attribute(
        case.model,
        LOSS,
        case.data,
        UNEVEN,
        lambda m: nn.functional.cross_entropy(m(tests[0]), tests[1], reduction="none"),
        method="tracin",
    )
    mean = attribute(case.model, LOSS, case.data, UNEVEN, properties.mean_loss(tests, LOSS), method="tracin")
    assert relative_error(ready, truth) <= 1e-12
    assert relative_error(own, truth) <= 1e-12
    assert relative_error(mean[0], truth.mean(0)) <= 1e-12


def test_checkpoints_are_summed_with_their_weights_and_the_model_gets_its_own_back():
    case = make_case("mlp")
    states = [{name: torch.randn_like(value) for name, value in case.model.state_dict().items()} for _ in range(2)]
    kept = {name: value.clone() for name, value in case.model.state_dict().items()}
    goal = properties.mean_loss(case.data, LOSS)
    expected = torch.zeros(1, 4, dtype=torch.float64)
    for state, weight in zip(states, (0.1, 0.3), strict=True):
        case.model.load_state_dict(state)
        expected += weight * attribute(case.model, LOSS, case.data, UNEVEN, goal, method="tracin")
    case.model.load_state_dict(kept)
    found = attribute(
        case.model, LOSS, case.data, UNEVEN, goal, checkpoints=states, weights=[0.1, 0.3], method="tracin"
    )
    assert relative_error(found, expected) <= 1e-12
    assert all(torch.equal(value, kept[name]) for name, value in case.model.state_dict().items())


def test_left_out_points_count_for_no_group():
    case = make_case("cnn")
    labels = UNEVEN.copy()
    labels[[3, 11, 22]] = -1
    groups = Groups(labels, rest="drop")
    truth = case.gradients()
    for strategy in ("directional", "forward", "segmented", "backward", "persample"):
        scores, along = scores_along(
            GroupGradients(case.model, LOSS, case.data, groups, strategy=strategy), case, strategy
        )
        assert scores.shape == (3, 4)
        assert relative_error(scores, groups.sum(along)) <= 1e-12
    assert truth.shape[0] == N


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if not BY_NAME[name].of_points])
def test_a_choice_of_layers_and_frozen_parameters(strategy):
    case = make_case("transformer")
    every = case.gradients()
    names = [name for name, _ in case.model.named_parameters()]
    sizes = [p.numel() for p in case.model.parameters()]
    chosen = [name for name in names if name.startswith(("qkv", "head")) or name == "norm.bias"]
    columns = torch.cat(
        [block for name, block in zip(names, torch.arange(sum(sizes)).split(sizes), strict=True) if name in chosen]
    )
    provider = GroupGradients(
        case.model, LOSS, case.data, UNEVEN, parameters=["qkv", case.model.head, "norm.bias"], strategy=strategy
    )
    directions = torch.randn(2, provider.p, dtype=torch.float64)
    truth = Groups(UNEVEN).sum(directions @ every[:, columns].T)
    assert relative_error(provider.scores(directions), truth) <= 1e-12
    for name, parameter in case.model.named_parameters():
        parameter.requires_grad_(name in chosen)
    assert (
        relative_error(GroupGradients(case.model, LOSS, case.data, UNEVEN, strategy=strategy).scores(directions), truth)
        <= 1e-12
    )
