"""The comparison of speed: what is extrapolated, what counts, and that nothing is measured on other work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import check, compare
from benchmarks.check.case import Case
from benchmarks.compare import table
from benchmarks.compare.hessians import Hessians
from benchmarks.compare.measure import Clock, climb, decide, take_turns
from benchmarks.compare.sizes import SIZES
from benchmarks.names import DEFAULT_MODE, EXACT_MODE, ONE_PROPERTY, TEST_POINTS
from benchmarks.results import ResultFolder
from benchmarks.scales import SCALES
from benchmarks.sizes import CheckScale
from ggda_ext import GroupGradients

SIZE = CheckScale(points=64, dattri_points=64, tests=4, group_size=8, batch=8, curvature_points=8, depth=2)


class MadeClock(Clock):
    """Calls give their own seconds."""

    def timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        return call(), None


@pytest.fixture
def case() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    x, y = torch.randn(72, 5), torch.arange(72) % 3
    return Case(model, (x[:64], y[:64]), (x[64:], y[64:]), SIZE, 16)


def test_a_line_with_fixed_costs_is_extrapolated_exactly() -> None:
    found = climb(MadeClock(), lambda n: 0.5 + 0.01 * n, first=10, points=1000, seconds=1.0)
    assert max(found.seconds) < 1000
    assert found.extrapolated == pytest.approx(0.5 + 0.01 * 1000)
    assert found.linearity == pytest.approx(1)


def test_what_is_timed_whole_is_not_extrapolated() -> None:
    found = climb(MadeClock(), lambda n: 1e-6 * n**2, first=10, points=100, seconds=1.0)
    assert found.timed_points == 100
    assert found.extrapolated == pytest.approx(1e-2)
    assert found.linearity is None


def test_all_points_are_timed_where_that_takes_little_longer() -> None:
    asked: list[int] = []
    found = climb(MadeClock(), lambda n: asked.append(n) or 1e-3 * n, first=10, points=1000, seconds=0.2)  # type: ignore[func-returns-value]
    assert asked == [10, 20, 40, 160, 640, 1000]
    assert found.last == [1000]
    assert found.extrapolated == 1


def test_an_original_that_is_slow_for_one_batch_gets_three() -> None:
    found = climb(MadeClock(), lambda n: 0.5 + n, first=8, points=100, seconds=1.0)
    assert sorted(found.seconds) == [8, 16, 24]
    assert found.extrapolated == pytest.approx(100.5)
    assert found.linearity == pytest.approx(1)


def test_a_first_call_that_warms_up_and_noise_do_not_bend_the_line() -> None:
    """dattri's TRAK on MNIST came out at 3 seconds in place of 90, and once all points were timed on its account."""
    calls: list[int] = []

    def original(n: int) -> float:
        calls.append(n)
        warming, noise = (2.0 if len(calls) == 1 else 0.0), (0.05 if n == 128 else 0.0)
        return 0.3 + warming + noise + 0.01 * n

    found = climb(MadeClock(), original, first=64, points=10_000, seconds=0.2)
    assert calls == [64, 128, 192, 64]
    assert found.extrapolated == pytest.approx(0.3 + 0.01 * 10_000)
    assert found.linearity == pytest.approx(1, abs=0.1)


def test_a_time_foretold_from_noise_is_found_out_before_all_points_are_timed() -> None:
    times = {64: 0.9, 128: 0.85, 192: 0.9, 256: 0.9}
    asked: list[int] = []

    def original(n: int) -> float:
        asked.append(n)
        return times.get(n, 0.01 * n)

    climb(MadeClock(), original, first=64, points=100_000, seconds=0.2)
    assert max(asked) < 1_000


def test_what_is_no_line_is_seen_and_counts_for_less() -> None:
    found = climb(MadeClock(), lambda n: 1e-4 * n**2, first=10, points=10_000, seconds=1.0)
    assert found.linearity is not None
    assert found.linearity < 0.7
    assert found.extrapolated < 1e-4 * 10_000**2


def test_the_best_turn_counts_and_what_is_slow_takes_one() -> None:
    times = {"fast": iter([0.4, 0.3, 0.3, 0.2, 0.1, 0.2]), "slow": iter([6.0, 5.0]), "no first": iter([5.0])}
    found = climb(MadeClock(), lambda n: 1.0 * n, first=1, points=4, seconds=1.0)
    groups = {name: (lambda name=name: next(times[name])) for name in times}
    best, first, _ = take_turns(MadeClock(), found, lambda n: 0.9 * n, groups, seconds=1.0, also_first=("fast", "slow"))
    assert best == {"fast": 0.1, "slow": 5.0, "no first": 5.0}
    assert first == {"fast": 0.3, "slow": 6.0}
    assert not any(list(left) for left in times.values())
    assert found.seconds[4] == 4  # it had used up its time


def test_a_close_call_gives_both_sides_more_turns_and_a_clear_one_none() -> None:
    found = climb(MadeClock(), lambda n: 1.0, first=4, points=4, seconds=10.0)
    ours, theirs = iter([0.9, 0.8, 0.85]), iter([0.95, 1.0, 0.7])
    assert decide(MadeClock(), found, lambda n: next(theirs), lambda: next(ours), 4, 1.0, seconds=10.0) == 0.8
    assert found.seconds[4] == 0.7
    assert next(ours, None) is None
    assert decide(MadeClock(), found, pytest.fail, pytest.fail, 4, 0.1, seconds=10.0) == 0.1


def test_a_group_version_that_comes_out_slow_is_timed_again() -> None:
    found = climb(MadeClock(), lambda n: 1.0, first=4, points=4, seconds=10.0)
    assert decide(MadeClock(), found, lambda n: 1.0, iter([0.6, 0.5, 0.7]).__next__, 4, 2.0, seconds=10.0) == 0.5


def test_fewer_points_are_asked_the_same_way(case: Case) -> None:
    few = case.grouped_by(16).first(20)
    assert len(few.train[0]) == 20
    for name in ("part", "curvature_set", "projection_dim", "lissa_scaling", "loss_ridge", "margin_ridge"):
        assert getattr(few, name) is getattr(case, name) or getattr(few, name) == getattr(case, name)
    assert case.asking(2, True).groups is case.groups
    assert case.grouped_by(1).groups.are_singletons


def test_a_first_call_looks_at_the_model_and_later_ones_do_not() -> None:
    calls, model = [], nn.Sequential(nn.Linear(3, 2))
    model.register_forward_hook(lambda *_: calls.append(1))
    points, loss = (torch.randn(64, 3), torch.arange(64) % 2), nn.CrossEntropyLoss()

    def call() -> int:
        before = len(calls)
        GroupGradients(model, loss, points).scores(torch.ones(1, 8))
        return len(calls) - before

    found = climb(MadeClock(), lambda n: 100.0, first=4, points=4, seconds=100.0)
    best, first, _ = take_turns(MadeClock(), found, lambda n: 100.0, {"ours": call}, 100.0, ["ours"])
    assert best["ours"] == 1 < first["ours"]


@pytest.mark.parametrize("method", [one for one in check.methods() if one.own_code], ids=lambda method: method.name)
def test_groups_of_one_are_the_toolkits_own_code_for_test_points(method: Any, case: Case) -> None:
    """So there is nothing to compare: the same code gives the same bits."""
    single, found = case.grouped_by(1), []
    for score in (method.original, method.grouped):
        torch.manual_seed(0)  # LiSSA draws an order
        found.append(score(single))
    assert torch.equal(*found)


@pytest.mark.parametrize("method", check.methods(), ids=lambda method: method.name)
def test_one_property_is_the_mean_of_its_test_points(method: Any, case: Case) -> None:
    """Original and group version answer the same question, up to the toolkit's own meaning of a property."""
    asked = replace(case, one_property=True)
    theirs, ours = case.groups.sum(method.original(asked), 1), method.grouped(asked)
    assert theirs.shape == ours.shape == (1, len(case.groups))
    torch.testing.assert_close(theirs[0], case.groups.sum(method.original(case), 1).mean(0), rtol=1e-3, atol=1e-5)
    if method.name == "TRAKer":
        return  # a property is explained by its own gradient, test points by that of their margin
    scale = float(theirs.abs().max())
    torch.testing.assert_close(ours / scale, theirs / scale, rtol=0, atol=1e-3)


def test_captums_hessian_is_computed_once_and_its_time_stands_apart(case: Case) -> None:
    naive = next(method for method in check.methods() if method.name == "NaiveInfluenceFunction")
    alone = naive.grouped(case)
    clock = Clock()
    _, scores = clock.timed(lambda: naive.original(case))
    apart = clock.hessians.apart
    assert apart > 0
    _, grouped = clock.timed(lambda: naive.grouped(case))
    assert clock.hessians.apart == apart
    assert clock.hessians.inside == 0
    torch.testing.assert_close(grouped, alone)
    with Hessians().shared():
        pass
    torch.testing.assert_close(naive.original(case), scores)


def test_rows_are_measured_once_and_say_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ResultFolder.open("compare", {"command": "compare", "scale": "smoke"}, base=tmp_path)
    chosen = ["TracInCP", "TRAKAttributor"]
    rows = compare.run(["heloc-lr"], SCALES["smoke"], folder, chosen=chosen, show_progress=False)
    assert [(row["method"], row["question"]) for row in rows] == [
        (method, question) for method in chosen for question in (ONE_PROPERTY, TEST_POINTS)
    ]
    assert table.passed(rows), list(table.problems(rows))
    for row in rows:
        assert row["experiment"] == "speed"
        sizes = {1, 64} if row["question"] == ONE_PROPERTY else {64}  # 1,024 is more than there are
        assert {cell["group_size"] for cell in row["cells"]} == sizes
        assert row["own_code"] == ([] if row["question"] == ONE_PROPERTY else [1])
        found = sorted((cell["group_size"], cell["mode"]) for cell in row["cells"])
        if row["method"] == "TRAKAttributor":
            exact = [(64, EXACT_MODE)] if row["question"] == ONE_PROPERTY else []
            assert found == sorted([*((size, DEFAULT_MODE) for size in sizes), *exact])
        else:
            assert found == [(size, EXACT_MODE) for size in sorted(sizes)]
        firsts = [cell for cell in row["cells"] if cell["speed_up_first"] is not None]
        assert [cell["group_size"] for cell in firsts] == ([64] if row["question"] == ONE_PROPERTY else [])
        assert all(cell["speed_up"] >= cell["speed_up_first"] > 0 for cell in firsts)
        assert set(row["grouping_seconds"]) == {"1", "64"}
    assert "HELOC (stand-in) · LR" in capsys.readouterr().out
    monkeypatch.setattr(compare.Comparison, "of", lambda *_: pytest.fail("a finished row runs again"))
    assert compare.run(["heloc-lr"], SCALES["smoke"], folder, chosen=chosen, show_progress=False) == rows


def test_what_fails_is_a_row_and_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (right, *_) = check.methods()

    def broken(case: Case) -> Any:
        raise KeyError("x")

    monkeypatch.setattr(check, "methods", lambda: (replace(right, grouped=broken),))
    folder = ResultFolder.open("compare", {"command": "compare", "scale": "smoke"}, base=tmp_path)
    rows = compare.run(["heloc-lr"], SCALES["smoke"], folder, show_progress=False)
    assert not table.passed(rows)
    assert any("KeyError: 'x'" in line for line in table.problems(rows))


def made(question: str, *cells: tuple[int, str, float]) -> dict[str, Any]:
    found = [
        {"group_size": size, "mode": mode, "speed_up": value, "speed_up_first": value / 2}
        for size, mode, value in cells
    ]
    about = {"data": "HELOC", "model": "LR", "toolkit": "TRAK", "method": "TRAKer", "status": "measured"}
    return about | {"question": question, "cells": found}


def test_the_headline_is_of_the_default_mode_and_slower_ones_are_named() -> None:
    rows = [
        made(ONE_PROPERTY, (64, EXACT_MODE, 2.0), (64, DEFAULT_MODE, 10.0), (1, EXACT_MODE, 0.8)),
        made(ONE_PROPERTY, (64, EXACT_MODE, 30.0)),
        made(TEST_POINTS, (64, EXACT_MODE, 0.97)),
    ]
    median, slower, *lines = table.verdict(rows)
    assert "median speed-up 20× for one property and groups of 64 (10× to 30×, 2 methods and tasks), 10× on" in median
    assert slower == "slower than the original: 1 of 5 measurements"
    assert lines == ["slower: HELOC LR, TRAK TRAKer, one property, groups of 1, exact mode: 0.80×"]


def test_every_scale_has_sizes_for_every_task() -> None:
    assert {name: set(sizes) for name, sizes in SIZES.items()} == {
        name: set(scale.check) for name, scale in SCALES.items()
    }
