"""How sure a score is: intervals over test points and checkpoints, warnings in the row, truth beside prediction."""

import numpy as np
import pytest
import torch
from cases import descend
from scipy.stats import t as student
from torch import nn

from ggda_ext import attribute, properties, property_gradient
from ggda_ext.data import SomePoints
from ggda_ext.evaluation import Retrainer
from ggda_ext.methods import METHODS
from ggda_ext.properties.resampling import jackknifed, spread
from ggda_ext.training import Recipe

CE = nn.CrossEntropyLoss()
N, TESTS = 40, 24
GROUPS = np.arange(N) % 4


def points(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] + torch.randn(n, generator=generator, dtype=torch.float64) > 0).long()


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


TEST = points(TESTS, 1)
SENSITIVE = np.arange(TESTS) % 2
PROPERTIES = {
    "mean": properties.mean_loss(TEST, CE),
    "named": properties.named(properties.mean_loss(TEST, CE), "loss of May"),
    "f1": properties.soft_f1(TEST),
    "gap": properties.demographic_parity_gap(TEST, SENSITIVE),
    "odds": properties.equalized_odds_gap(TEST, SENSITIVE, agg="mean"),
    "two": properties.stack(properties.mean_loss(TEST, CE), properties.soft_accuracy(TEST)),
}


def test_folds_of_a_pandas_table_come_in_the_dtype_of_the_model():
    pandas = pytest.importorskip("pandas")
    train, test = ((pandas.DataFrame(x.numpy()), pandas.Series(y.numpy())) for x, y in (points(N, 0), points(TESTS, 1)))
    result = attribute(network().float(), CE, train, GROUPS, properties.mean_loss(test, CE), intervals=True)
    assert bool((result.high > result.low).all())


def without(name, left):
    """The property written down again for the test points that are left."""
    some = (TEST[0][left], TEST[1][left])
    if name == "gap":
        return properties.demographic_parity_gap(some, SENSITIVE[left])
    if name == "odds":
        return properties.equalized_odds_gap(some, SENSITIVE[left], agg="mean")
    return properties.soft_f1(some) if name == "f1" else properties.mean_loss(some, CE)


@pytest.mark.parametrize("name", ["mean", "named", "f1", "gap", "odds"])
def test_changes_are_those_of_the_property_without_each_fold(name):
    model = network()
    parameters = dict(model.named_parameters())
    whole, changes = jackknifed(PROPERTIES[name], model, parameters, folds=4, seed=3)
    torch.testing.assert_close(whole, property_gradient(PROPERTIES[name], model, parameters))
    folds = np.array_split(np.random.default_rng(3).permutation(TESTS), 4)
    for fold, change in zip(folds, changes, strict=True):
        left = np.setdiff1d(np.arange(TESTS), fold)
        expected = property_gradient(without(name, left), model, parameters) - whole
        torch.testing.assert_close(change, expected, rtol=1e-6, atol=1e-10)


def test_with_a_fold_for_every_point_the_error_is_that_of_a_mean():
    model = network()
    parameters = dict(model.named_parameters())
    _, changes = jackknifed(PROPERTIES["mean"], model, parameters, folds=TESTS)
    along = torch.randn(changes.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    each = torch.stack(
        [
            property_gradient(properties.mean_loss((TEST[0][i : i + 1], TEST[1][i : i + 1]), CE), model, parameters)[0]
            for i in range(TESTS)
        ]
    )
    error = spread((changes @ along)[:, :, None])
    torch.testing.assert_close(error.reshape(()), (each @ along).std() / TESTS**0.5)


def test_parts_on_the_same_points_vary_together_and_parts_on_others_by_themselves():
    model = network()
    parameters = dict(model.named_parameters())
    loss, other = properties.mean_loss(TEST, CE), properties.mean_loss(points(3, 2), CE)

    def error(explained):
        return spread(jackknifed(explained, model, parameters)[1])

    halves = properties.weighted_sum([loss, properties.mean_loss(TEST, CE)], [0.5, 0.5])
    torch.testing.assert_close(error(halves), error(loss))
    assert float(error(properties.weighted_sum([loss, loss], [1.0, -1.0])).abs().max()) < 1e-12
    torch.testing.assert_close(error(properties.stack(loss, other)), torch.cat([error(loss), error(other)]))
    both = error(properties.weighted_sum([loss, other], [1.0, -2.0]))
    torch.testing.assert_close(both, (error(loss).square() + 4 * error(other).square()).sqrt())


def test_errors_of_a_fold_name_the_points_of_the_user():
    model, data = network(), points(N, 0)
    spoilt = TEST[0].clone()
    spoilt[17] = float("nan")
    with pytest.raises(ValueError, match="nan at test point 17"):
        attribute(model, CE, data, GROUPS, properties.mean_loss((spoilt, TEST[1]), CE), intervals=True)
    rare = properties.demographic_parity_gap(TEST, ["a"] * (TESTS - 1) + ["b"])
    with pytest.raises(ValueError, match="interval over test points leaves them out, sensitive group 'b' has no test"):
        attribute(model, CE, data, GROUPS, rare, intervals=True)


@pytest.mark.parametrize("method", ["tracin", "influence", "ekfac", "fisher"])
@pytest.mark.parametrize("name", ["mean", "gap", "two"])
def test_intervals_change_no_score_and_hold_it(method, name):
    model, data = network(), points(N, 0)
    exact = METHODS[method](tolerance=1e-12, steps=60) if method in ("influence", "fisher") else METHODS[method]()
    plain = attribute(model, CE, data, GROUPS, PROPERTIES[name], method=exact)
    found = attribute(model, CE, data, GROUPS, PROPERTIES[name], method=exact, intervals=True)
    torch.testing.assert_close(found.scores, plain.scores, rtol=1e-6, atol=1e-10)
    assert (found.low < found.scores).all()
    assert (found.scores < found.high).all()
    assert "test points" in found.interval
    assert "does not cover another training" in found.interval
    assert found.properties == plain.properties


def test_the_interval_over_checkpoints_is_students():
    model, data = network(), points(N, 0)
    states = [network(seed).state_dict() for seed in range(4)]
    options = {"method": "influence", "checkpoints": states}
    found = attribute(model, CE, data, GROUPS, PROPERTIES["mean"], intervals="checkpoints", **options)
    each = torch.stack(
        [
            attribute(model, CE, data, GROUPS, PROPERTIES["mean"], method="influence", checkpoints=s).scores
            for s in states
        ]
    )
    width = student.ppf(0.975, 3) * each.std(0) / 2
    torch.testing.assert_close(found.scores, each.mean(0))
    torch.testing.assert_close(found.high - found.scores, width)
    both = attribute(model, CE, data, GROUPS, PROPERTIES["mean"], intervals="both", **options)
    assert "test points and 4 checkpoints" in both.interval
    assert (both.high - both.low > 0).all()


def test_a_folder_keeps_intervals(tmp_path):
    model, data = network(), points(N, 0)
    options = {"method": "influence", "intervals": True, "checkpoints": [network(s).state_dict() for s in (0, 1)]}
    plain = attribute(model, CE, data, GROUPS, PROPERTIES["mean"], **options)
    for _ in range(2):
        kept = attribute(model, CE, data, GROUPS, PROPERTIES["mean"], save_dir=tmp_path, **options)
        for name in ("scores", "low", "high"):
            torch.testing.assert_close(getattr(kept, name), getattr(plain, name))


@pytest.mark.parametrize(
    ("goal", "intervals", "message"),
    [
        (properties.point_losses(TEST, CE), True, "test points cannot be drawn again"),
        (lambda model: CE(model(TEST[0]), TEST[1]), True, "test points cannot be drawn again"),
        (PROPERTIES["mean"], "checkpoints", "with 1 checkpoint: pass several"),
        (PROPERTIES["mean"], "bootstrap", "intervals='bootstrap' is not one of"),
    ],
)
def test_intervals_that_cannot_be_had_are_refused(goal, intervals, message):
    with pytest.raises((TypeError, ValueError), match=message):
        attribute(network(), CE, points(N, 0), GROUPS, goal, intervals=intervals)


def test_groups_that_a_first_order_estimate_fails_for_are_warned_of_in_their_row():
    x, y = points(N, 0)
    large = np.where(np.arange(N) < 15, "large", "rest")
    found = attribute(network(), CE, (x, y), large, PROPERTIES["mean"], method="tracin")
    assert "holds 38% of all points" in found.warnings["large"][0]
    assert "holds 38% of all points" in str(found)
    assert any("WhatIf" in note for note in found.notes)
    classes = attribute(network(), CE, (x, y), np.where(y == 1, "ones", "zeros"), PROPERTIES["mean"], method="tracin")
    assert any("whole class" in text for text in classes.warnings["ones"])
    wrong = y.clone()
    wrong[:4] = 1 - wrong[:4]
    model = network()
    with torch.no_grad():
        model[2].weight.mul_(20)
    names = np.array(["odd"] * 4 + [f"rest {j % 9}" for j in range(N - 4)])
    wrong[:4] = 1 - model(x[:4]).argmax(1)
    wrong[4:] = model(x[4:]).argmax(1)
    strong = attribute(model, CE, (x, wrong), names, PROPERTIES["mean"], method="influence", damping=1.0)
    assert any("of the curvature" in text for text in strong.warnings["odd"])
    few = attribute(network(), CE, (x, y), GROUPS + 4 * (np.arange(N) // 20), PROPERTIES["mean"], method="tracin")
    assert not few.warnings


def test_verify_puts_retraining_beside_the_prediction():
    data = points(200, 0)
    data[1][:60] = 1 - data[1][:60]
    groups = np.array(["flipped"] * 60 + ["a"] * 70 + ["b"] * 70)
    recipe, test = Recipe(30, 0.05, 32), points(100, 5)

    def make_model():
        return nn.Linear(3, 2).double()

    retrain = Retrainer(make_model, CE, data, test, recipe, seeds=(0, 1), measure="loss")
    torch.manual_seed(0)
    model = descend(make_model(), CE, data, 150, 0.05)
    result = attribute(model, CE, data, groups, properties.mean_loss(test, CE), method="influence")
    found = result.verify(retrain, top=2)
    assert found.names[0] == "flipped"
    assert found.real.shape == (2, 2)
    assert found.agrees[0]
    assert found.rises[0] < 0
    assert "flipped" in str(found)
    assert "same sign" in str(found)


def test_a_retraining_that_failed_is_not_called_another_sign():
    result = attribute(network(), CE, points(N, 0), GROUPS, PROPERTIES["mean"], method="tracin")
    found = str(result.verify(lambda subsets: np.full((len(subsets), 2), np.nan), top=1))
    assert "not a number" in found
    assert "OTHER SIGN" not in found


@pytest.mark.parametrize(
    ("retrain", "top", "message"),
    [
        (None, 3, "retrain is a NoneType"),
        (lambda subsets: np.zeros((1, 1)), 3, "one value per subset"),
        (lambda subsets: np.zeros(len(subsets)), 0, "top=0"),
    ],
)
def test_verify_refuses_what_it_cannot_use(retrain, top, message):
    result = attribute(network(), CE, points(N, 0), GROUPS, PROPERTIES["mean"], method="tracin")
    with pytest.raises((TypeError, ValueError), match=message):
        result.verify(retrain, top=top)


def test_some_test_points_are_a_data_set():
    """`SomePoints` is what folds are made of: batches of it are batches of the points."""
    chosen = SomePoints(PROPERTIES["mean"].data, np.array([3, 1, 8]))
    (batch,) = chosen.batches([[0, 2]])
    assert torch.equal(batch[0], TEST[0][[3, 8]])
