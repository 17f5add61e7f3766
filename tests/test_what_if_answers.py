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
    linear = fitted(nn.Linear(5, 3).double(), LOSS, data)
    exact = WhatIf(linear, LOSS, data, np.arange(N) % 6, weight_decay=DECAY)
    assert "Not calibrated" not in repr(exact.leave_group_out(measure))


def resting() -> tuple[tuple[Tensor, Tensor], Groups, nn.Module]:
    """Two groups, and a third of the points in none."""
    labels = np.array(["a", "b", None] * (N // 3), dtype=object)
    return points(), Groups(labels, rest="drop"), fitted(nn.Linear(5, 3).double(), LOSS, points())


@pytest.mark.parametrize("atoms", [None, 10])
def test_shapley_values_share_out_what_the_points_in_no_group_leave(atoms):
    """These points are in every training set, so without all groups their model is left, not one of zeros."""
    data, groups, model = resting()
    what_if, measure = WhatIf(model, LOSS, data, groups, weight_decay=DECAY), properties.mean_loss(data, LOSS)
    found = what_if.shapley(measure, samples=4, atoms=atoms)
    assert found.scores.sum() == pytest.approx(float(what_if.without(["a", "b"]).change(measure)), rel=1e-6)


def test_one_group_beside_points_in_no_group_can_be_left_out_of_every_question():
    data, _, model = resting()
    groups, measure = Groups(np.where(np.arange(N) < 40, 0, -1), rest="drop"), properties.mean_loss(data, LOSS)
    what_if = WhatIf(model, LOSS, data, groups, weight_decay=DECAY)
    change = float(what_if.without(0).change(measure))
    assert float(what_if.leave_group_out(measure).scores[0]) == pytest.approx(change, rel=1e-6)
    assert what_if.shapley(measure, samples=2).scores[0] == pytest.approx(change, rel=1e-6)
    assert what_if.shapley(measure, samples=2, kind="banzhaf").scores[0] == pytest.approx(change, rel=1e-6)
    found = what_if.search(measure, remove=1)
    assert found.values[1] - found.values[0] == pytest.approx(change, rel=1e-6)


@pytest.mark.parametrize("ignored", [False, True])
def test_groups_without_weight_count_for_nothing_in_every_question(ignored):
    """By their points' weights, or by targets that the mean loss ignores."""
    (x, y), light = points(), torch.arange(N) % 3 == 0
    targets = y.masked_fill(light, -100) if ignored else y
    weights = None if ignored else (~light).double()
    data, measure = (x, targets), properties.mean_loss((x, y), LOSS)
    what_if = WhatIf(network(), LOSS, data, np.arange(N) % 3, ridge=0.01, point_weights=weights)
    plain = WhatIf(
        network(), LOSS, (x[~light], y[~light]), (np.arange(N) % 3)[~light.numpy()] - 1, ridge=0.01
    )  # fmt: skip
    for atoms in (None, 5):
        assert what_if.shapley(measure, samples=3, atoms=atoms).scores[0] == pytest.approx(0, abs=1e-9)
    fair, expected = (one.shapley(measure, samples=40).scores for one in (what_if, plain))
    assert fair[1:].sum() == pytest.approx(expected.sum(), rel=1e-6)
    found = what_if.search(measure, remove=2, goal="max")
    assert 0 in found.removed
    assert what_if.to_retrain(measure, 4, fraction=0.34).tolist() == [[False, False, True], [False, True, False]]
    with pytest.raises(ValueError, match="without 1 and 2 nothing is left to train on"):
        what_if.interactions(measure)
    assert what_if.interactions(measure, [0, 1]).matrix[0, 1] == pytest.approx(0, abs=1e-9)


def test_what_is_predicted_to_first_order_is_said_and_asked_of_the_model_once():
    (x, y), _, model = resting()
    what_if, calls = WhatIf(model, LOSS, (x, y), SOURCES, weight_decay=DECAY), []

    def own(model: nn.Module) -> Tensor:
        calls.append(model)
        return nn.functional.cross_entropy(model(x), y)

    answer = what_if.without("web")
    assert "first order" not in repr(answer)
    answer.value(own)
    many = len(calls)
    found = what_if.search(own, remove=2, goal="min"), what_if.interactions(own), what_if.leave_group_out(own)
    assert len(calls) == many
    assert all(
        "first order" in text and "properties.of_outputs" in text for text in (*map(repr, found), what_if.note(own))
    )
    assert "to first order: own" in repr(answer)
    assert not what_if.note(properties.mean_loss((x, y), LOSS))


def test_inference_mode_around_the_questions_changes_nothing():
    def huber(z: Tensor, y: Tensor) -> Tensor:  # differentiated by autograd
        return nn.functional.huber_loss(z, nn.functional.one_hot(y, 3).to(z), delta=3.0)

    def size(model: nn.Module) -> Tensor:
        return sum(value.square().sum() for value in model.parameters())  # type: ignore[return-value]

    data, model = points(), network()

    def answers() -> list[Tensor]:
        what_if = WhatIf(model, huber, data, SOURCES, ridge=0.01, most_points=80)
        measure = properties.mean_loss(data, huber)
        values = what_if.without("web").value(measure), what_if.without(["web", "news"]).value(size)
        return [*values, torch.from_numpy(what_if.shapley(measure, samples=2, atoms=20).scores)]

    expected = answers()
    with torch.inference_mode():
        found = answers()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


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
