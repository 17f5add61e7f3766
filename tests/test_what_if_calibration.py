"""What retrained models say about refits: slope, level, ridge, and intervals that hold what is retrained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import descend
from torch import nn
from torch.nn import functional as F
from what_if_cases import DECAY, LOSS, N, fitted, network, points

from ggda_ext import Groups, properties
from ggda_ext.counterfactual import WhatIf, calibration, linearized, refit, trust


def test_verify_finds_the_slope_and_nothing_left_out_stays_as_it_is():
    """Of a linear model predictions are exact; retrainings with three times the change need a slope of three."""
    data = points()
    torch.manual_seed(0)
    model = fitted(nn.Linear(5, 3).double(), F.cross_entropy, data)
    groups = Groups(np.arange(N) % 8)
    what_if = WhatIf(model, LOSS, data, groups, weight_decay=DECAY)
    measure = properties.mean_loss(data, LOSS)
    base = float(measure(model))
    exact = WhatIf(model, LOSS, data, groups, weight_decay=DECAY)

    def retrain(subsets: Any) -> np.ndarray:
        kept = np.array([[np.isin(members, subset).all() for members in groups] for subset in subsets])
        return base + 3 * (exact.subsets(kept, measure).numpy()[:, None] - base)

    assert "Not calibrated" in what_if.explain()
    found = what_if.verify(retrain, measure, 8)
    assert found.calibration.slope == pytest.approx(3, rel=1e-6)
    assert found.calibration.level == pytest.approx(0, abs=1e-6)
    assert found.calibration.error < 1e-6
    answer = what_if.without([0, 3])
    assert float(answer.change(measure)) == pytest.approx(3 * float(exact.without([0, 3]).change(measure)), rel=1e-6)
    assert answer.error(measure) == found.calibration.error
    low, high = answer.interval(measure) or (0.0, 0.0)
    assert low <= float(answer.value(measure)) <= high
    assert exact.without([0, 3]).interval(measure) is None
    again = properties.mean_loss(data, LOSS)
    assert float(answer.value(again)) == float(answer.value(measure)), "made again it is the same property"
    assert answer.interval(properties.mean_loss((data[0][:9], data[1][:9]), LOSS)) is None
    assert float(what_if.with_weights({}).change(measure)) == 0
    fair, fair_before = (one.shapley(measure, samples=2) for one in (what_if, exact))
    np.testing.assert_allclose(fair.scores, fair_before.scores)
    assert ["as before verify" in one.note for one in (fair, fair_before)] == [True, False]
    with pytest.raises(ValueError, match="at least 4"):
        what_if.verify(retrain, measure, 3)


def test_subsets_to_choose_from_are_found_by_name():
    """As in a table of subsets; and each keeps a group or leaves it out."""
    pandas = pytest.importorskip("pandas")
    what_if = WhatIf(network(), LOSS, points(), ["a", "b", "c"] * (N // 3), rank=10)
    measure = properties.mean_loss(points(), LOSS)
    table = pandas.DataFrame({"c": [1, 1], "b": [0, 1], "a": [0, 0]})
    assert what_if.to_retrain(measure, 2, among=table).tolist() == [[False, False, True], [False, True, True]]
    with pytest.raises(ValueError, match="among holds weights other than 0 and 1"):
        what_if.to_retrain(measure, 2, among=[[0.5, 1, 1]])
    with pytest.raises(ValueError, match=r"among has shape \[2\]"):
        what_if.to_retrain(measure, 2, among=[1, 0])


def line(predicted: np.ndarray, removed: np.ndarray, real: np.ndarray) -> calibration.Line:
    return calibration._likeliest({1.0: predicted}, removed, real)[1]


def test_a_slope_is_drawn_towards_one_by_as_much_as_the_retrainings_leave_it_open():
    predicted, removed = np.linspace(0.01, 0.08, 8), np.full(8, 0.5)
    real = 2 * predicted
    assert line(predicted, removed, real).slope == pytest.approx(2, rel=1e-6)
    noise = np.random.default_rng(0).standard_normal(8)
    slopes = [line(predicted, removed, real + size * noise).slope for size in (0.002, 0.02, 10.0)]
    plain = [np.polyfit(predicted, real + size * noise, 1)[0] for size in (0.002, 0.02, 10.0)]
    for shrunk, slope in zip(slopes[1:], plain[1:], strict=True):
        assert min(1, slope) <= shrunk <= max(1, slope)
    assert slopes[0] == pytest.approx(plain[0], abs=0.15)
    assert slopes[2] == pytest.approx(1, abs=0.2), "noise alone leaves predictions as they are"
    assert line(np.zeros(8), removed, real).slope == 1, "predictions that tell nothing apart"
    assert line(-predicted, removed, real).slope == 0, "never turned around"


def test_a_level_and_what_goes_with_the_share_left_out_are_found_beside_the_slope():
    """Drawn towards zero, and by less the more retrainings there are."""
    draw = np.random.default_rng(0)
    predicted, removed = draw.uniform(0, 0.1, 200), draw.uniform(0.2, 0.6, 200)
    real = 0.9 * predicted + 0.05 + 0.2 * (removed - removed.mean()) + 0.01 * draw.standard_normal(200)
    found = line(predicted, removed, real)
    middle = found.rise(0.0, removed.mean())
    assert (found.slope, middle, found.per_share) == pytest.approx((0.9, 0.05, 0.2), rel=0.15)
    assert found.rise(0.0, np.float64(0.9)) == pytest.approx(found.rise(0.0, removed.max()) * 0.9 / removed.max())
    assert found.rise(0.0, np.float64(0.0)) == 0
    few = line(predicted[:6], removed[:6], real[:6])
    assert 0 < few.rise(0.0, removed[:6].mean()) < 0.05 + 0.01
    assert line(predicted, np.full(200, 0.5), real).per_share == 0
    assert line(predicted, np.zeros(200), real).per_share == 0, "weights above 1 leave nothing out"


def test_shares_that_differ_by_a_few_points_count_as_the_same():
    """Halves have the same number of points but for the last group; errors are not to be read as their effect."""
    draw = np.random.default_rng(0)
    predicted, errors = draw.uniform(0, 0.3, 8), 0.05 * draw.standard_normal(8)
    real, same = 1.2 * predicted + errors, np.full(8, 0.5)
    nearly = same + 1e-3 * (errors - errors.mean()) / errors.std()
    found = line(predicted, nearly, real).rise(predicted, nearly)
    np.testing.assert_allclose(found, line(predicted, same, real).rise(predicted, same), atol=1e-3)


@pytest.fixture
def bent() -> tuple[WhatIf, WhatIf, properties.Property, Groups]:
    """A small network asked about groups that lie apart, twice, and its loss."""
    data = points()
    model = descend(network(), F.cross_entropy, data, 100, 0.02, weight_decay=DECAY)
    groups = Groups(np.argsort(np.argsort(data[0][:, 0].numpy())) * 8 // N)
    one, other = (WhatIf(model.eval(), LOSS, data, groups, weight_decay=DECAY, ridge=0.01) for _ in range(2))
    return one, other, properties.mean_loss(data, LOSS), groups


def as_refits(exact: WhatIf, measure: properties.Property, groups: Groups, factor: float) -> Callable[..., np.ndarray]:
    """Retrainings that are refits with a factor of the ridge."""

    def retrain(subsets: Any) -> np.ndarray:
        kept = [[float(np.isin(members, subset).all()) for members in groups] for subset in subsets]
        return exact.values(measure, torch.tensor(kept, dtype=torch.float64), factor)[0].numpy()

    return retrain


def test_the_ridge_under_which_retrainings_are_most_likely_is_taken(bent):
    """Retrainings that are the refits of another ridge bring that ridge back, for all models; answers follow."""
    what_if, exact, measure, groups = bent
    before = what_if.linearized[0].ridge
    asked = what_if.without([0, 3])
    found = what_if.verify(as_refits(exact, measure, groups, 8), measure, 8)
    assert found.ridge == (pytest.approx(8 * before),)
    assert found.calibration.slope == pytest.approx(1, abs=0.02)
    fresh = float(what_if.without([0, 3]).value(measure))
    assert float(asked.value(measure)) == pytest.approx(fresh, rel=1e-9), "an answer from before is as those from after"
    weights = torch.tensor([[0.0, 1, 1, 0, 1, 1, 1, 1]], dtype=torch.float64)
    assert fresh == pytest.approx(float(exact.values(measure, weights, 8)), rel=1e-2)
    assert float(what_if.with_weights({}).change(measure)) == 0


def test_a_level_is_shared_out_by_the_points_left_out_and_not_blamed_on_pairs(bent):
    """Found where two fifths and more were left out, it goes with the share below that: pairs have no part in it."""
    what_if, exact, measure, _ = bent
    slope, level = 1.5, 0.3
    found = calibration.Calibration(slope, level, 0.0, 0.4, 0.6, error=0.1, retrainings=8)
    what_if.calibrations[what_if.identity(measure)] = (measure, found)
    base, nothing = float(exact.with_weights({}).value(measure)), what_if.with_weights({})
    assert float(nothing.value(measure)) == base
    assert float(nothing.change(measure)) == 0
    alone, plain = what_if.leave_group_out(measure), exact.leave_group_out(measure)
    assert torch.allclose(alone.scores, slope * plain.scores + level / 0.4 / 8)
    half = [0, 1, 2, 3]
    assert float(what_if.without(half).change(measure)) == pytest.approx(
        slope * float(exact.without(half).change(measure)) + level
    )
    pairs = what_if.interactions(measure)
    np.testing.assert_allclose(pairs.matrix, slope * exact.interactions(measure).matrix, atol=1e-9)


def test_a_second_property_keeps_the_ridge_the_first_was_calibrated_with(bent):
    what_if, exact, measure, groups = bent
    ridge = what_if.linearized[0].ridge
    what_if.verify(as_refits(exact, measure, groups, 4), measure, 8)
    value = float(what_if.without([1]).value(measure))
    x, y = points()
    other = properties.mean_loss((x[:60], y[:60]), LOSS)
    assert what_if.verify(as_refits(exact, other, groups, 1), other, 8).ridge == (pytest.approx(4 * ridge),)
    assert float(what_if.without([1]).value(measure)) == value


@pytest.mark.parametrize("shares", ["the same", "of all sizes"])
def test_intervals_of_a_calibration_hold_what_is_retrained(shares: str):
    """Over 200 calibrations by eight retrainings a 95 % interval holds 92 to 99 % of the next ones."""
    draw, held = np.random.default_rng(0), []
    for _ in range(200):
        removed = np.full(9, 0.5) if shares == "the same" else draw.uniform(0.01, 0.1, 9)
        predicted = removed * draw.uniform(0, 0.2, 9)
        real = 1.5 * predicted + 0.05 * removed + 0.003 * draw.standard_normal(9)
        path = {factor: predicted[:8] * factor**-0.5 for factor in calibration.RIDGES.tolist()}
        factor, fitted_line = calibration._likeliest(path, removed[:8], real[:8])
        error = np.sqrt(np.mean((calibration._from_others(path, removed[:8], real[:8]) - real[:8]) ** 2))
        found = calibration.Calibration(**vars(fitted_line), error=error, retrainings=8)
        held.append(abs(found.rise(predicted[8] * factor**-0.5, removed[8]) - real[8]) <= found.width())
    assert 0.92 <= np.mean(held) <= 0.99


def held_and_wide(asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How often 95 % intervals hold rises whose errors grow with them, and how wide they are, by predicted rise."""
    draw, held, widths, removed = np.random.default_rng(0), [], [], np.full(8, 0.5)

    def retrained(rises: np.ndarray) -> np.ndarray:
        return 1.5 * rises + (0.02 + 0.3 * rises) * draw.standard_normal(len(rises))

    for _ in range(200):
        predicted = np.append(draw.uniform(0.01, 0.05, 5), draw.uniform(0.1, 0.4, 3))
        real, then = retrained(predicted), retrained(asked)
        found = calibration._likeliest({1.0: predicted}, removed, real)[1]
        others = calibration._from_others({1.0: predicted}, removed, real)
        error = float(np.sqrt(np.mean(((others - real) / found.spread(predicted)) ** 2)))
        fitted_line = calibration.Calibration(**vars(found), error=error, retrainings=8)
        widths.append([fitted_line.width(error=error * fitted_line.spread(rise)) for rise in asked])
        held.append(np.abs(fitted_line.rise(asked, np.full(len(asked), 0.5)) - then) <= widths[-1])
    return np.mean(held, 0), np.median(widths, 0)


def test_where_errors_grow_with_the_change_intervals_do_so_too(monkeypatch):
    """Small changes are not judged by the errors of large ones, nor large ones by those of small ones."""
    asked = np.array([0.02, 0.3])
    held, wide = held_and_wide(asked)
    monkeypatch.setattr(calibration, "GROWS", 1e-12)
    held_before, same = held_and_wide(asked)
    assert same[0] == same[1], "errors of one size"
    assert wide[0] < 0.7 * same[0] < same[1] < wide[1]
    assert held[0] >= 0.92
    assert held[1] > held_before[1]


def test_errors_of_one_size_are_seldom_taken_for_growing_ones():
    draw, removed = np.random.default_rng(0), np.full(8, 0.5)
    predicted = draw.uniform(0, 0.3, (100, 8))
    grown = [line(one, removed, 1.2 * one + 0.03 * draw.standard_normal(8)).per_rise > 0 for one in predicted]
    assert np.mean(grown) < 0.25
    exact = line(predicted[0], removed, 2 * predicted[0])
    assert (exact.per_rise, exact.spread(0.1)) == (0, 1), "nor where there are none"


def test_the_interval_of_an_answer_goes_with_the_change_it_predicts(bent):
    what_if, _, measure, _ = bent
    found = calibration.Calibration(1.0, 0.0, 0.0, 0.4, 0.6, error=0.1, retrainings=8, at_rest=0.5, per_rise=2.0)
    what_if.calibrations[what_if.identity(measure)] = (measure, found)
    nothing, half = what_if.with_weights({}), what_if.without([0, 1, 2, 3])
    assert nothing.error(measure) == pytest.approx(0.05)
    rise = abs(float(half.change(measure)))
    assert half.error(measure) == pytest.approx(0.1 * (0.5 + 2 * rise))
    low, high = half.interval(measure) or (0.0, 0.0)
    assert high - low == pytest.approx(2 * found.width() * (0.5 + 2 * rise))
    assert "less for small changes" in found.explain()


def test_subsets_to_retrain_reach_from_the_lowest_prediction_to_the_highest():
    data, model = points(), network()
    measure = properties.mean_loss(data, LOSS)
    what_if = WhatIf(model, LOSS, data, Groups(np.arange(N) % 10), rank=20)
    among = np.random.default_rng(0).random((40, 10)) < 0.6
    among[:, 0] = True
    predicted = what_if.subsets(among, measure)
    chosen = what_if.to_retrain(measure, 6, among=among)
    assert chosen.shape == (6, 10)
    assert len(np.unique(chosen, axis=0)) == 6
    assert all((among == row).all(1).any() for row in chosen)
    found = what_if.subsets(chosen, measure)
    assert float(found.min()) == pytest.approx(float(predicted.min()), rel=1e-6)
    assert float(found.max()) == pytest.approx(float(predicted.max()), rel=1e-6)


def test_a_ridge_without_a_recipe_is_raised_until_the_model_itself_follows():
    """A small regression network, only one source kept: what comes true of the promise is far below zero at first."""
    x = points()[0]
    data = (x, x[:, :1].sin() * 2 + x[:, 1:2] * x[:, 2:3])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    descend(model, F.mse_loss, data, 200, 0.02, weight_decay=1e-3)
    groups = np.argsort(np.argsort(x[:, 0].numpy())) * 6 // N
    what_if = WhatIf(model.eval(), nn.MSELoss(), data, groups, weight_decay=1e-3)
    first = what_if.linearized[0]
    guess = linearized._RELATIVE_RIDGE * float(torch.linalg.eigvalsh(first.refit._curvature.sum(0) / N)[-1])
    assert trust.kept_share(first, guess) < trust.LEAST <= trust.kept_share(first, first.ridge)
    assert trust.kept_share(first, 1e6) == pytest.approx(1, abs=1e-3), "small steps come true"
    assert "come true" in what_if.explain()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refit, "MOST_STEPS", 0)  # no refit ends
        assert trust.kept_share(first, guess) == -np.inf
    worst = float(what_if.only(0).value(properties.mean_loss(data, nn.MSELoss())))
    assert worst < 10 * float(data[1].square().mean()), "of the order of the targets"
