"""Leave-group-out: the definition, by hand; resuming; ranks; and agreement with first-order scores."""

from __future__ import annotations

import copy
import random
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from torch import Tensor, nn

from ggda_ext import Groups, attribute, properties
from ggda_ext.counterfactual.leave_group_out import leave_group_out
from ggda_ext.storage.folder import StoreMismatch
from ggda_ext.training import Recipe, initial_model, train_one

LOSS = nn.CrossEntropyLoss()
RECIPE = Recipe(epochs=3, learning_rate=0.05, batch_size=16)
N, K = 60, 4


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(N + 40, 5, dtype=torch.float64)
    return x, (x[:, 0] + 0.5 * torch.randn(N + 40) > 0).long()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)).double()


def accuracy(model: nn.Module, test: tuple[Tensor, Tensor]) -> Tensor:
    return (model(test[0]).argmax(1) == test[1]).double().mean()


def trained(train: tuple[Tensor, Tensor], seed: int, kept: np.ndarray) -> nn.Module:
    return train_one(initial_model(make_model, seed), LOSS, train, RECIPE, seed=seed, subset=kept).model


def halves(data: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Groups]:
    x, y = data
    return (x[:N], y[:N]), (x[N:], y[N:]), Groups(np.arange(N) % 7 % K)


def test_scores_are_the_rise_of_the_test_loss_without_the_group(data: tuple[Tensor, Tensor]) -> None:
    train, test, groups = halves(data)
    found = leave_group_out(make_model, LOSS, train, groups, test, RECIPE, seeds=[3, 8, 9])
    rises = torch.zeros(3, K, dtype=torch.float64)
    for s, seed in enumerate([3, 8, 9]):
        values = [
            LOSS(trained(train, seed, kept)(test[0]), test[1]).item()
            for kept in (np.arange(N), *(np.flatnonzero(groups.labels != j) for j in range(K)))
        ]
        assert float(found.full[s]) == pytest.approx(values[0], rel=1e-10)
        rises[s] = torch.tensor(values[1:], dtype=torch.float64) - values[0]
    torch.testing.assert_close(found.per_seed, rises, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.scores, rises.mean(0), rtol=0, atol=1e-10)
    error = rises.std(0) / 3**0.5
    torch.testing.assert_close(found.stderr, error, rtol=0, atol=1e-10)
    low, high = found.interval
    torch.testing.assert_close(high - low, 2 * student.ppf(0.975, 2) * error, rtol=0, atol=1e-9)


def test_any_property_of_the_model_one_number_or_several(data: tuple[Tensor, Tensor]) -> None:
    train, test, groups = halves(data)
    options = {"seeds": [0, 1], "group_ids": [2, 0]}
    one = leave_group_out(make_model, LOSS, train, groups, lambda m: accuracy(m, test), RECIPE, **options)
    both = leave_group_out(
        make_model, LOSS, train, groups,
        lambda m: torch.stack([properties.mean_loss(test, LOSS)(m), accuracy(m, test)]), RECIPE, **options,
    )  # fmt: skip
    loss = leave_group_out(make_model, LOSS, train, groups, test, RECIPE, **options)
    assert one.scores.shape == (2,)
    assert both.scores.shape == (2, 2)
    assert both.full.shape == (2, 2)
    torch.testing.assert_close(both.scores, torch.stack([loss.scores, one.scores]), rtol=0, atol=1e-12)
    without = trained(train, 1, np.flatnonzero(groups.labels != 2))
    rise = accuracy(without, test) - accuracy(trained(train, 1, np.arange(N)), test)
    assert float(one.per_seed[1, 0]) == pytest.approx(float(rise), abs=1e-12)


def test_data_for_the_property_may_be_a_list(data: tuple[Tensor, Tensor]) -> None:
    train, test, groups = halves(data)
    found = leave_group_out(make_model, LOSS, train, groups, list(test), RECIPE, seeds=[0])  # type: ignore[arg-type]
    assert found.attribution().properties == ("mean_loss",)
    assert torch.equal(
        found.per_seed, leave_group_out(make_model, LOSS, train, groups, test, RECIPE, seeds=[0]).per_seed
    )


FIRST_DAY = date(2020, 1, 1)


@pytest.mark.parametrize(
    ("names", "asked", "expected"),
    [
        (None, [2, 0], [2, 0]),
        (None, 2, [2]),
        (None, torch.tensor([2, 0]), [2, 0]),
        (None, [torch.tensor(2)], [2]),
        (("a", "b", "c", "ab"), ["c", "a"], [2, 0]),
        (("a", "b", "c", "ab"), "ab", [3]),
        (("a", "b", "c", "ab"), [2, 0], [2, 0]),
        ((1, 2, 3, 4), [2, 4], [1, 3]),
        ((1, 2, 3, 4), np.array([2, 4]), [1, 3]),
        ((1, 2, 3, 4), 4, [3]),
        ((2019, 2020, 2021, 2022), [2020], [1]),
        ((0.5, 1.5, 2.5, 3.5), [1.5], [1]),
        ((0, 1, 2, "rest"), ["rest", 1], [3, 1]),
        (tuple(FIRST_DAY + timedelta(j) for j in range(4)), [FIRST_DAY + timedelta(1)], [1]),
        (tuple(FIRST_DAY + timedelta(j) for j in range(4)), FIRST_DAY, [0]),
        ((("a", 0), ("a", 1), ("b", 0), ("b", 1)), [("a", 1), ("b", 1)], [1, 3]),
        ((("a", 0), ("a", 1), ("b", 0), ("b", 1)), ("a", 1), [1]),
    ],
)
def test_groups_are_left_out_by_name_or_by_id_if_no_name_is_a_number(
    names: Any, asked: Any, expected: list[int]
) -> None:
    groups = Groups(np.arange(N) % K, names=names)
    x = torch.ones(N, 5, dtype=torch.float64)
    found = leave_group_out(
        make_model, LOSS, (x, torch.zeros(N).long()), groups, lambda model: torch.ones(()), Recipe(1, 0.1, N),
        seeds=[0], group_ids=asked,
    )  # fmt: skip
    assert found.group_ids.tolist() == expected
    assert found.attribution().names == tuple(groups.name(j) for j in expected)


def test_ranks_agree_with_first_order_scores_of_a_trained_model() -> None:
    torch.manual_seed(1)
    x = torch.randn(200, 3, dtype=torch.float64)
    y = (x[:, 0] > 0).long()
    groups = Groups(np.arange(120) // 20)
    y[80:100] = 1 - y[80:100]  # the harmful group
    train, test = (x[:120], y[:120]), (x[120:], y[120:])
    recipe = Recipe(20, 0.05, 40)
    found = leave_group_out(lambda: nn.Linear(3, 2).double(), LOSS, train, groups, test, recipe, seeds=range(4))
    model = train_one(initial_model(lambda: nn.Linear(3, 2).double(), 0), LOSS, train, recipe, seed=0).model
    first_order = attribute(model, LOSS, train, groups, properties.mean_loss(test, LOSS))[0]
    assert int(found.scores.argmin()) == int(first_order.argmin()) == 4
    assert found.interval[1][4] < 0


def test_a_stopped_run_goes_on_and_gives_the_same(data: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    train, test, groups = halves(data)
    calls = 0

    def stopping(model: nn.Module) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return LOSS(model(test[0]), test[1])

    def run(save_dir: Path | None) -> Tensor:
        return leave_group_out(
            make_model, LOSS, train, groups, stopping, RECIPE, seeds=[0, 1], at_once=2, save_dir=save_dir
        ).per_seed

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert len(list(tmp_path.glob("values-*.npy"))) == 2  # one call for the shape, two chunks of two, then the stop
    resumed = run(tmp_path)
    assert calls == 6 + 1 + 6  # the shape again, and only the six trainings that were missing
    assert torch.equal(resumed, run(None))


def test_a_folder_of_another_run_is_refused(data: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    train, test, groups = halves(data)
    leave_group_out(make_model, LOSS, train, groups, test, RECIPE, seeds=[0], group_ids=[0], save_dir=tmp_path)
    with pytest.raises(StoreMismatch, match="seeds"):
        leave_group_out(make_model, LOSS, train, groups, test, RECIPE, seeds=[1], group_ids=[0], save_dir=tmp_path)


def test_a_folder_of_other_random_numbers_or_under_autocast_is_refused(
    data: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    train, test, groups = halves(data)

    def run(seed: int) -> Tensor:
        draw = random.Random(seed)

        def some(model: nn.Module) -> Tensor:
            at = random.Random(draw.random()).sample(range(40), 5)
            return LOSS(model(test[0][at]), test[1][at])

        return leave_group_out(
            make_model, LOSS, train, groups, some, RECIPE, seeds=[0], group_ids=[0], save_dir=tmp_path
        ).scores

    run(0)
    with pytest.raises(StoreMismatch, match="made with property"):
        run(1)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(StoreMismatch, match="made with autocast = None"):
        run(0)


def test_a_recipe_of_numpys_numbers_finds_its_folder(data: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    train, test, groups = halves(data)
    found = [
        leave_group_out(
            make_model, LOSS, train, groups, test, Recipe(1, rate, 16), seeds=[0], group_ids=[0], save_dir=tmp_path
        ).scores
        for rate in (np.float32(0.125), 0.125)
    ]
    assert torch.equal(*found)


def test_bad_input(data: tuple[Tensor, Tensor]) -> None:
    train, test, groups = halves(data)

    def run(groups: object = groups, property: object = test, **options: object) -> None:
        leave_group_out(make_model, LOSS, train, groups, property, RECIPE, **{"seeds": [0], **options})  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="seeds is empty"):
        run(seeds=[])
    with pytest.raises(ValueError, match="group_ids holds 9: pass ids from 0 to 3"):
        run(group_ids=[9])
    for strange in ([1.7], [1.0], [True], np.array([True]), 1.5):
        with pytest.raises(TypeError, match=r"group_ids holds .*: pass names of groups, or whole numbers"):
            run(group_ids=strange)
    for named, asked in (([1, 2, 3, 4], 0), ([2019, 2020, 2021, 2022], 1), (None, FIRST_DAY), (None, "a")):
        with pytest.raises(KeyError, match=r"there is no group .*; the first ones are"):
            run(groups=Groups(groups, names=named), group_ids=[asked])
    with pytest.raises(ValueError, match=r"make_model .* makes a new model at every call"):
        leave_group_out(partial(copy.copy, make_model()), LOSS, train, groups, test, RECIPE)
    with pytest.raises(ValueError, match="nothing is left to train on"):
        run(groups=np.zeros(N, int))
    with pytest.raises(ValueError, match=r"property returned shape \[40, 2\]"):
        run(property=lambda model: model(test[0]))
    with pytest.raises(TypeError, match=r"property is a int: pass test data \(x, y\), or a callable"):
        run(property=3)
    missing = (test[0].index_fill(0, torch.tensor([3]), float("nan")), test[1])
    for broken in (missing, lambda model: LOSS(model(missing[0]), missing[1])):
        with pytest.raises(ValueError, match=r"the property is \[nan\] before any training"):
            run(property=broken)
