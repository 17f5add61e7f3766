"""Questions put to what-if: leave group out, search, interactions, values of groups, accuracy and F1."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch import Tensor, nn
from what_if_cases import DECAY, LOSS, SOURCES, N, fitted, network, points

from ggda_ext import Groups, properties
from ggda_ext.counterfactual import WhatIf


def test_leave_group_out_is_each_group_alone():
    data, model = points(), network()
    measure = properties.mean_loss(data, LOSS)
    what_if = WhatIf(model, LOSS, data, SOURCES, rank=20)
    found = what_if.leave_group_out(measure)
    for name, score in zip(what_if.names, found.scores, strict=True):
        assert float(score) == pytest.approx(float(what_if.without(name).change(measure)), rel=1e-6)
    assert found.scores.shape == (4,)
    assert what_if.leave_group_out(properties.point_losses(data, LOSS)).scores.shape == (N, 4)


def redundant() -> tuple[tuple[Tensor, Tensor], list[str], nn.Module]:
    """Sources a and b tell the same, c is wrong, d is about the rest."""
    generator = torch.Generator().manual_seed(2)
    half = N // 4
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    x[: 2 * half, 2:], x[3 * half :, :2] = 0, 0
    truth = (x[:, 0] + x[:, 2] > 0).long()
    y = torch.where((torch.arange(N) // half) == 2, 1 - truth, truth)
    torch.manual_seed(0)
    return (x, y), [name for name in "abcd" for _ in range(half)], fitted(nn.Linear(4, 2).double(), LOSS, (x, y))


def test_search_drops_what_harms_and_interactions_find_what_is_redundant():
    data, sources, model = redundant()
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(200, 4, generator=generator, dtype=torch.float64)
    test = (x, (x[:, 0] + x[:, 2] > 0).long())
    measure = properties.mean_loss(test, LOSS)
    what_if = WhatIf(model, LOSS, data, sources, weight_decay=DECAY)
    found = what_if.search(measure, remove=1, holdout=measure)
    assert found.removed == ("c",)
    assert found.values[1] < found.values[0]
    assert found.holdout == pytest.approx(found.values)
    assert found.value == pytest.approx(float(what_if.without("c").value(measure)), rel=1e-6)
    assert what_if.search(measure, budget=30).removed == ("c",)
    pairs = what_if.interactions(measure, ["a", "b", "d"])
    assert set(pairs.strongest(1)[0][:2]) == {"a", "b"}
    assert [line.split()[0] for line in repr(found).splitlines()[:3]] == ["left", "nothing", "c"]
    assert repr(pairs).splitlines()[3].split()[:2] == ["a", "b"]
    joint, alone = what_if.without(["a", "b"]).change(measure), pairs.alone
    assert pairs.matrix[0, 1] == pytest.approx(float(joint) - alone[0] - alone[1], rel=1e-6)


@pytest.mark.parametrize("kind", ["shapley", "banzhaf"])
def test_values_of_groups_have_the_sign_of_scores(kind):
    data, sources, model = redundant()
    what_if = WhatIf(model, LOSS, data, sources, weight_decay=DECAY)
    x, y = data
    clean = torch.tensor([source != "c" for source in sources])
    measure = properties.mean_loss((x[clean], y[clean]), LOSS)
    found = what_if.shapley(measure, samples=12, kind=kind)
    assert found.scores[2] < 0 < found.scores[3]
    assert (found.stderr >= 0).all()
    assert "atoms=" in found.note
    named = found.attribution()
    assert float(named["c"]) == pytest.approx(found.scores[2])
    assert named.effects()[2] == "hurts"
    assert repr(found) == repr(named)
    assert not what_if.shapley(measure, samples=2, kind=kind, atoms=15).note
    if kind == "shapley":  # they share out the whole change from no data to all of it
        assert found.scores.sum() == pytest.approx(np.log(2) - float(measure(model)), rel=1e-6)


def test_answers_say_that_they_are_not_calibrated_until_they_are():
    data, model = points(), network()
    measure = properties.mean_loss(data, LOSS)
    what_if = WhatIf(model, LOSS, data, np.arange(N) % 6, ridge=0.01)

    def said() -> list[bool]:
        answers = what_if.search(measure, remove=1), what_if.interactions(measure), what_if.leave_group_out(measure)
        return ["Not calibrated" in repr(answer) for answer in answers]

    assert all(said())
    what_if.verify(lambda subsets: [[0.9 + 0.001 * len(points)] for points in subsets], measure)
    assert not any(said())
    exact = WhatIf(nn.Linear(5, 3).double(), LOSS, data, np.arange(N) % 6, weight_decay=DECAY)
    assert "Not calibrated" not in repr(exact.leave_group_out(measure))


@pytest.mark.parametrize("average", ["macro", "binary"])
def test_accuracy_and_f1_are_asked_of_counterfactual_predictions(average):
    data, sources, model = redundant()
    what_if = WhatIf(model, LOSS, data, sources, weight_decay=DECAY)
    answer = what_if.without("c")
    predicted, y = answer.outputs(data).argmax(1).numpy(), data[1].numpy()
    assert float(answer.value(properties.accuracy(data))) == pytest.approx((predicted == y).mean())
    expected = f1_score(y, predicted, average=average)
    assert float(answer.value(properties.f1(data, average=average))) == pytest.approx(expected)


def test_pieces_make_shapley_values_indifferent_to_splitting_a_group():
    data, model = points(), network()
    measure = properties.mean_loss(data, LOSS)
    whole, split = np.arange(N) // 60, np.repeat([0, 1, 2], [30, 30, 60])
    first, second = (
        WhatIf(model, LOSS, data, Groups(labels), ridge=0.01).shapley(measure, samples=4, atoms=30).scores
        for labels in (whole, split)
    )
    assert first == pytest.approx([second[:2].sum(), second[2]], rel=1e-5)
