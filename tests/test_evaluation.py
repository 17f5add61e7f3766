"""Metrics of group scores: against dattri's and scikit-learn's, on cases with a known answer, and on bad input."""

from __future__ import annotations

import copy

import numpy as np
import pandas as pd
import pytest
import torch
from cases import descend
from dattri.metric import lds, loo_corr
from torch import nn

from ggda_ext import Groups, attribute, evaluation, properties
from ggda_ext.evaluation import (
    Retrainer,
    additive_ceiling,
    aggregated,
    agreement,
    group_lds,
    leave_group_out_correlation,
    noisy_label_detection,
    points_of,
    pruning_score,
    random_subsets,
    removal_order,
    retraining_score,
)
from ggda_ext.grouping import random_groups
from ggda_ext.training import Recipe


@pytest.fixture
def groups() -> Groups:
    return Groups([2, 0, 1, 1, 0, 2, 2, 0, 1, 2])  # sizes 3, 3, 4


def test_removal_takes_whole_groups_and_random_points_of_the_last(groups: Groups) -> None:
    removed = [removal_order([0.1, 3.0, -2.0], groups, 0.5, seed=seed) for seed in range(20)]
    for indices in removed:
        assert set(groups[1]) == set(indices[:3])
        assert set(indices[3:]) < set(groups[0])
        assert len(set(indices)) == 5
    assert len({tuple(sorted(indices)) for indices in removed}) == 3  # any two of the three


def test_removal_of_less_is_the_beginning_of_removal_of_more(groups: Groups) -> None:
    everything = removal_order([0.1, 3.0, -2.0], groups, largest_first=False)
    assert set(everything[:4]) == set(groups[2])
    np.testing.assert_array_equal(removal_order([0.1, 3.0, -2.0], groups, 0.7, largest_first=False), everything[:7])


def test_points_in_no_group_are_never_removed() -> None:
    groups = Groups([0, -1, 1, 1], rest="drop")
    assert sorted(removal_order([1.0, 2.0], groups)) == [0, 2, 3]
    assert [points.tolist() for points in points_of(groups, np.array([[True, False], [True, True]]))] == [
        [0, 1],
        [0, 1, 2, 3],
    ]


def test_groups_of_equal_importance_are_removed_in_random_order() -> None:
    groups = Groups.singletons(6)
    assert len({tuple(removal_order(np.zeros(6), groups, seed=seed)) for seed in range(10)}) > 5


def test_mean_aggregation_divides_by_the_size(groups: Groups) -> None:
    np.testing.assert_allclose(aggregated(torch.tensor([3.0, 6.0, 8.0]), groups, "mean"), [1, 2, 2])


def test_removal_curves_keep_the_right_points(groups: Groups) -> None:
    def sums(subsets: list[np.ndarray]) -> np.ndarray:
        return np.array([[kept.sum(), -kept.sum()] for kept in subsets], float)

    best = retraining_score([0.1, 3.0, -2.0], groups, sums, [0.0, 0.3])
    np.testing.assert_array_equal(best.values[:, 0], [45, 45 - groups[1].sum()])
    np.testing.assert_array_equal(best.mean, [0, 0])
    np.testing.assert_allclose(best.stderr, best.values[:, 0])  # two values v and -v
    worst = pruning_score([0.1, 3.0, -2.0], groups, sums, [0.4])
    assert worst.values[0, 0] == 45 - groups[2].sum()
    by_mean = pruning_score([-1.8, 3.0, -2.0], groups, sums, [0.3], aggregation="mean")  # group 2 has four members
    assert by_mean.values[0, 0] == 45 - groups[0].sum()


def test_a_removal_curve_says_what_was_removed_and_trains_no_subset_twice(groups: Groups) -> None:
    asked: list[int] = []

    def sizes(subsets: list[np.ndarray]) -> list[int]:
        asked.extend(map(len, subsets))
        return asked  # one number for each subset: one seed

    curve = retraining_score([0.1, 3.0, -2.0], groups, sizes, [0.29, 0.01, 0.3, 0.04])
    assert asked == [7, 10]
    np.testing.assert_allclose(curve.fractions, [0.3, 0, 0.3, 0])
    np.testing.assert_array_equal(curve.values, [[7], [10], [7], [10]])
    np.testing.assert_array_equal(curve.mean, [7, 10, 7, 10])


def test_detection_of_noise_by_its_two_areas() -> None:
    draw = np.random.default_rng(0)
    groups = random_groups(200, 4, random_state=0)
    noisy, importance = draw.random(200) < 0.2, draw.normal(size=50)
    found = noisy_label_detection(importance, groups, noisy)
    share = noisy.mean()
    assert found.auc == pytest.approx(share / 2 + (1 - share) * found.roc_auc)  # how the two areas are related
    assert found.checked[-1] == found.found[-1] == 1
    assert noisy_label_detection(np.zeros(50), groups, noisy).auc == pytest.approx(0.5)


def test_detection_finds_harmful_groups_first() -> None:
    groups = Groups([0, 0, 1, 1, 1, 1])
    found = noisy_label_detection([-1.0, 1.0], groups, [True, True, False, False, False, False])
    assert (found.auc, found.roc_auc) == pytest.approx((1 - 1 / 6, 1.0))
    np.testing.assert_allclose(found.checked, [0, 1 / 3, 1])
    np.testing.assert_allclose(found.found, [0, 1, 1])


def test_group_lds_is_the_one_of_dattri() -> None:
    draw = np.random.default_rng(1)
    groups = random_groups(24, 2, random_state=0)
    importance, kept = draw.normal(size=(3, 12)), random_subsets(groups, 30, seed=2)
    values = draw.normal(size=(30, 3)) - kept @ importance.T
    ours = group_lds(importance, kept, values)
    chosen = torch.from_numpy(np.stack([np.flatnonzero(row) for row in kept]))
    theirs, _ = lds(torch.from_numpy(-importance.T), (torch.from_numpy(values), chosen))
    np.testing.assert_allclose(ours.columns, theirs, rtol=1e-12)
    assert ours.value == pytest.approx(float(theirs.mean()))
    assert ours.interval[0] < ours.value < ours.interval[1]
    assert group_lds(importance[0], kept, -(kept @ importance[0])).value == pytest.approx(1)


def test_leave_group_out_correlation_is_the_one_of_dattri() -> None:
    draw = np.random.default_rng(3)
    importance, rises = draw.normal(size=(2, 15)), draw.normal(size=(2, 15))
    theirs, _ = loo_corr(torch.from_numpy(importance.T), (torch.from_numpy(rises.T), torch.arange(15)))
    ours = leave_group_out_correlation(importance, rises)
    np.testing.assert_allclose(ours.columns, theirs, rtol=1e-12)
    monotone = leave_group_out_correlation(importance[0], np.exp(importance[0]), kind="spearman")
    assert monotone.value == pytest.approx(1)
    assert monotone.interval == pytest.approx((1, 1))


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    draw = np.random.default_rng(4)
    covered = 0
    for _ in range(300):
        pair = draw.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], 60)
        low, high = leave_group_out_correlation(pair[:, 0], pair[:, 1], resamples=200).interval
        covered += low <= 0.6 <= high
    assert 0.85 <= covered / 300 <= 1


def test_good_scores_lower_the_accuracy_more_and_predict_retraining() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(240, 6, generator=draw)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    train, test = (x[:160], y[:160].clone()), (x[160:], y[160:])
    train[1][:40] = 1 - train[1][:40]  # these points harm
    groups = Groups(np.arange(160) // 10)
    recipe = Recipe(epochs=20, learning_rate=0.05, batch_size=32)
    loss = nn.functional.cross_entropy

    def make_model() -> nn.Module:
        return nn.Linear(6, 2)

    retrain = Retrainer(make_model, loss, train, test, recipe, seeds=(0, 1))
    torch.manual_seed(0)
    model = descend(make_model(), loss, train, 100, 0.05)
    importance = attribute(model, loss, train, groups, properties.mean_loss(test, loss))[0]
    assert set(importance.argsort()[:4].tolist()) == {0, 1, 2, 3}
    removed = retraining_score(importance, groups, retrain, [0.4])
    pruned = pruning_score(importance, groups, retrain, [0.4])
    assert removed.mean < pruned.mean - 0.1
    assert noisy_label_detection(importance, groups, np.arange(160) < 40).roc_auc == pytest.approx(1)
    kept = random_subsets(groups, 12)
    losses = Retrainer(make_model, loss, train, test, recipe, measure="loss")(points_of(groups, kept))
    assert group_lds(importance, kept, losses.mean(1), resamples=100).value > 0.7
    own = Retrainer(make_model, loss, train, test, recipe, measure=lambda outputs, targets: len(targets))
    assert own([np.arange(50)]).tolist() == [[80.0]]


def test_a_retrainer_refuses_what_it_cannot_train_or_measure() -> None:
    x, y = torch.randn(40, 3), torch.arange(40) % 2
    recipe, given = Recipe(epochs=1, learning_rate=0.1, batch_size=8), {"epochs": 1}

    def make(test: object = (x, y), recipe: object = recipe, measure: object = "accuracy") -> Retrainer:
        loss = nn.CrossEntropyLoss()
        return Retrainer(lambda: nn.Linear(3, 2), loss, (x, y), test, recipe, measure=measure)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="recipe is a dict"):
        make(recipe=given)
    with pytest.raises(TypeError, match=r"test holds a DataFrame: pass tensors"):
        make((pd.DataFrame(x.numpy()), pd.Series(y.numpy())))
    with pytest.raises(ValueError, match="subsets is empty"):
        make()([])
    unknown = x.clone()
    unknown[2, 1] = torch.nan
    for measure in ("accuracy", "loss"):
        with pytest.raises(ValueError, match=f"measure='{measure}' cannot be taken of test.*not finite"):
            make((unknown, y), measure=measure)([range(20)])
        with pytest.raises(ValueError, match=r"inputs of shape \[40, 2\]"):
            make((x[:, :2], y), measure=measure)([range(20)])


def test_removals_of_no_fraction_are_refused(groups: Groups) -> None:
    for score in (retraining_score, pruning_score):
        with pytest.raises(ValueError, match="fractions is empty: pass at least one"):
            score([1.0, 2.0, 3.0], groups, lambda subsets: np.zeros((len(subsets), 1)), [])


def retrainer(outputs: nn.Module, loss: nn.Module, targets: torch.Tensor, tested: torch.Tensor, measure="accuracy"):  # type: ignore[no-untyped-def]
    x = torch.linspace(-1, 1, 40)[:, None]
    recipe = Recipe(epochs=10, learning_rate=0.1, batch_size=8)
    return Retrainer(lambda: copy.deepcopy(outputs), loss, (x, targets), (x, tested), recipe, measure=measure)


@pytest.mark.parametrize(
    "form", ["two logits", "a column of labels", "one logit", "a logit without a column", "a probability", "pixels"]
)
def test_accuracy_of_retrained_models_holds_for_every_form_of_classes(form) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    y = (torch.arange(40) >= 20).long()
    one = y.double().float()
    outputs, loss, targets, tested = {
        "two logits": (nn.Linear(1, 2), nn.CrossEntropyLoss(), y, y),
        "a column of labels": (nn.Linear(1, 2), nn.CrossEntropyLoss(), y, y[:, None]),
        "one logit": (nn.Linear(1, 1), nn.BCEWithLogitsLoss(), one[:, None], one[:, None]),
        "a logit without a column": (
            nn.Sequential(nn.Linear(1, 1), nn.Flatten(0)), nn.BCEWithLogitsLoss(), one, one
        ),
        "a probability": (nn.Sequential(nn.Linear(1, 1), nn.Sigmoid()), nn.BCELoss(), one[:, None], one[:, None]),
        "pixels": (
            nn.Sequential(nn.Linear(1, 6), nn.Unflatten(1, (2, 3))), nn.CrossEntropyLoss(),
            y[:, None].repeat(1, 3), y[:, None].repeat(1, 3),
        ),
    }[form]  # fmt: skip
    assert retrainer(outputs, loss, targets, tested)([np.arange(40)])[0, 0] >= 0.9


def test_the_loss_of_retrained_models_is_a_mean_for_every_reduction() -> None:
    y = (torch.arange(40) >= 20).long()

    def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, reduction="sum")

    for loss in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum"), total):
        model = nn.Linear(1, 2)
        nn.init.zeros_(model.weight).requires_grad_(False)
        nn.init.zeros_(model.bias)  # as many points of both classes, so that it stays at 0 or near
        found = retrainer(model, loss, y, y, "loss")
        kept = (np.arange(40) for _ in range(1))
        assert found(kept)[0, 0] == pytest.approx(np.log(2), abs=0.1)


@pytest.mark.parametrize(
    ("outputs", "loss", "targets", "measure", "message"),
    [
        (nn.Linear(1, 1), nn.MSELoss(), torch.rand(40, 1), "accuracy", "measure='accuracy' cannot .* no class of the"),
        (nn.Linear(1, 3), nn.BCEWithLogitsLoss(), torch.ones(40, 3), "accuracy", r"targets of shape \[40, 3\] for 40"),
        (
            nn.Linear(1, 2), nn.CrossEntropyLoss(torch.ones(2)), torch.ones(40).long(), "loss",
            r"measure='loss' cannot .* pass another measure, e.g. a function measure\(outputs",
        ),
    ],
)  # fmt: skip
def test_a_measure_that_cannot_be_taken_is_named_before_training(outputs, loss, targets, measure, message, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr("ggda_ext.evaluation.retrainer.train_many", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(ValueError, match=message):
        retrainer(outputs, loss, targets, targets, measure)([np.arange(40)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: removal_order([1.0], [0, 1]), r"importance has shape \[1\]: pass one number for each of 2 groups"),
        (
            lambda: removal_order([1.0, float("nan")], [0, 1]),
            r"importance holds 1 NaN or infinite numbers, first at \[1\]",
        ),
        (lambda: removal_order([1.0, 2.0], [0, 1], 1.5), "fraction=1.5"),
        (lambda: aggregated([1.0, 2.0], [0, 1], "median"), "aggregation='median'"),
        (
            lambda: retraining_score([1.0, 2.0], Groups([0, -1, 1, 1], rest="drop"), len, [0.5, 1.0]),
            "fractions holds 1.0, and the groups hold 3 of 4 training points: pass at most 0.75",
        ),
        (lambda: noisy_label_detection([1.0, 2.0], [0, 1], [True]), "one entry for each of 2 points"),
        (lambda: noisy_label_detection([1.0, 2.0], [0, 1], [False, False]), "marks 0 of 2 points"),
        (lambda: random_subsets([0, 0], 3), "keeps 0 of them"),
        (lambda: group_lds([1.0, 2.0], np.ones((4, 3)), np.arange(4)), r"kept has shape \[4, 3\]: pass \[subsets, 2\]"),
        (lambda: group_lds([1.0, 2.0], np.ones((4, 2)), np.arange(3)), r"pass values \[4, 1\]"),
        (lambda: leave_group_out_correlation([1.0, 2.0], [1.0, 2.0]), "at least 3"),
        (lambda: leave_group_out_correlation([1.0], [1.0], kind="kendall"), "kind='kendall'"),
        (
            lambda: leave_group_out_correlation(np.ones((2, 5)), np.ones((5, 2))),
            r"rises has shape \[5, 2\]: pass \[2, 5\]",
        ),
    ],
)
def test_bad_input_is_named(call, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()


def test_one_seed_has_no_standard_error() -> None:
    assert np.isnan(evaluation.standard_error(np.ones((2, 1)))).all()


def test_the_additive_ceiling_is_high_for_sums_and_low_for_products():
    draw = np.random.default_rng(0)
    kept = random_subsets(np.arange(8), 120, seed=1)
    sums = kept @ draw.normal(size=8)
    assert additive_ceiling(kept, sums + 0.01 * draw.normal(size=120)).value > 0.95
    signs = 2.0 * kept - 1
    products = signs[:, 0] * signs[:, 1] + 0.01 * draw.normal(size=120)
    found = additive_ceiling(kept, np.stack([sums, products], 1))
    assert found.columns[0] > 0.95
    assert found.columns[1] < 0.5
    assert found.interval[0] <= found.value <= found.interval[1]


def test_the_additive_ceiling_leaves_out_points_that_all_models_treat_alike():
    draw = np.random.default_rng(0)
    kept = random_subsets(np.arange(8), 60, seed=1)
    sums = kept @ draw.normal(size=(8, 2))
    alone, beside = additive_ceiling(kept, sums), additive_ceiling(kept, np.insert(sums, 1, 3.0, axis=1))
    assert beside.value == pytest.approx(alone.value)
    assert beside.interval == pytest.approx(alone.interval)
    assert np.isnan(beside.columns).tolist() == [False, True, False]


def test_the_additive_ceiling_names_bad_input():
    kept = random_subsets(np.arange(8), 6, seed=1)
    with pytest.raises(ValueError, match=r"kept has shape \[6, 8\]: pass \[5, groups\]"):
        additive_ceiling(kept, np.ones(5))
    with pytest.raises(ValueError, match="3 left to compare with"):
        additive_ceiling(kept, np.arange(6.0))


def test_subsets_of_equal_points_are_nearest_to_the_share_and_different():
    groups = Groups(np.repeat(np.arange(8), [1, 2, 4, 8, 16, 32, 64, 128]))
    kept = random_subsets(groups, 10, equal_points=True, seed=3)
    plain = random_subsets(groups, 10, seed=3)
    off = [np.abs(rows @ groups.sizes - groups.n / 2) for rows in (kept, plain)]
    assert off[0].max() <= off[1].min() + off[1].max()
    assert off[0].mean() < off[1].mean()
    assert len(np.unique(kept, axis=0)) == 10
    assert (kept.sum(1) == 4).all()


def test_agreement_is_that_of_scipy_column_by_column():
    from scipy.stats import linregress, pearsonr, spearmanr

    draw = np.random.default_rng(0)
    predicted = draw.normal(size=(20, 3))
    real = predicted * [2.0, 0.5, -1.0] + draw.normal(size=(20, 3))
    found = agreement(predicted, real)
    columns = list(zip(predicted.T, real.T, strict=True))
    np.testing.assert_allclose(found.spearman.columns, [spearmanr(x, y).statistic for x, y in columns])
    np.testing.assert_allclose(found.pearson.columns, [pearsonr(x, y).statistic for x, y in columns])
    np.testing.assert_allclose(found.slope, np.mean([linregress(x, y).slope for x, y in columns]))
    one = agreement(predicted[:, 0], real[:, 0])
    np.testing.assert_allclose(one.spearman.value, found.spearman.columns[0])
    assert one.pearson.interval[0] <= one.pearson.value <= one.pearson.interval[1]
    assert np.isnan(agreement(np.ones(20), real[:, 0]).slope)
    with pytest.raises(ValueError, match=r"predicted has shape \[20\], real \[20, 3\]"):
        agreement(predicted[:, 0], real)


def test_points_that_all_models_treat_alike_tell_nothing_and_constant_predictions_count_as_none():
    draw = np.random.default_rng(0)
    real = draw.standard_normal((20, 3))
    real[:, 1] = 0.0  # e.g. a loss of exactly zero
    predicted = real + 0.1
    predicted[:, 1] = draw.standard_normal(20)
    found = agreement(predicted, real, resamples=20)
    assert found.spearman.value == pytest.approx(1)
    assert found.slope == pytest.approx(1)
    predicted[:, 2] = 5.0
    assert agreement(predicted, real, resamples=20).spearman.value == pytest.approx(0.5)
    assert np.isnan(agreement(predicted[:, 2], real[:, 2], resamples=20).spearman.value)
