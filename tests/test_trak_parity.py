"""`ggda_trak.TRAKer` against `trak.TRAKer`: without groups, groups of one, and sums over groups."""

from __future__ import annotations

from pathlib import Path

import ggda_trak
import numpy as np
import pytest
import torch
import trak
from trak_cases import N, case, error, scored, scores, summed, take, uneven_labels

from ggda_ext import Groups

TASKS = ("image_classification", "text_classification", "iterative_image_classification")
WELL_CONDITIONED = 1.0
"""A ridge with which single precision keeps six digits: without it the inverse of the features loses one more."""


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_without_groups_it_is_trak_bit_for_bit(task: str, half: bool, tmp_path: Path) -> None:
    options = {"use_half_precision": half, "lambda_reg": 0.1}
    expected = scores(trak.TRAKer, case(task), tmp_path / "a", models=2, **options)
    state = torch.get_rng_state()
    found = scores(ggda_trak.TRAKer, case(task), tmp_path / "b", models=2, **options)
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("half", [False, True])
def test_singletons_are_trak_bit_for_bit_in_group_order(half: bool, tmp_path: Path) -> None:
    order = np.random.default_rng(2).permutation(N)
    options = {"use_half_precision": half, "lambda_reg": 0.1}
    expected = scores(trak.TRAKer, case(TASKS[0]), tmp_path / "a", models=2, **options)
    for name, groups in (("same", np.arange(N)), ("permuted", [[i] for i in order])):
        found = scores(ggda_trak.TRAKer, case(TASKS[0]), tmp_path / name, models=2, groups=groups, **options)
        assert np.array_equal(found, expected if name == "same" else expected[order])


@pytest.mark.parametrize("fisher", ["exact", "batched"])
@pytest.mark.parametrize("strategy", ["segmented", "backward", "persample"])
def test_singletons_on_the_group_path_equal_trak(fisher: str, strategy: str, tmp_path: Path) -> None:
    expected = scores(trak.TRAKer, case(TASKS[0]), tmp_path / "a", lambda_reg=WELL_CONDITIONED)
    options = {"groups": np.arange(N), "fisher": fisher, "strategy": strategy, "damping": 0.0}
    options["lambda_reg"] = WELL_CONDITIONED
    found = scores(ggda_trak.TRAKer, case(TASKS[0]), tmp_path / "b", **options)
    assert error(found, expected) < 1e-5


@pytest.mark.parametrize("models", [1, 3])
@pytest.mark.parametrize("task", TASKS)
def test_additivity_exact_fisher_gives_the_sum_of_trak_scores(task: str, models: int, tmp_path: Path) -> None:
    labels = uneven_labels()
    options = {"lambda_reg": WELL_CONDITIONED}
    expected = summed(scores(trak.TRAKer, case(task), tmp_path / "a", models, **options), labels)
    options |= {"groups": labels, "fisher": "exact"}
    found = scores(ggda_trak.TRAKer, case(task), tmp_path / "b", models, size=37, **options)
    assert found.shape == expected.shape
    assert error(found, expected) < 1e-5


def test_points_in_no_group_do_not_count_in_the_exact_fisher(tmp_path: Path) -> None:
    labels = np.where(np.arange(N) % 3 == 0, -1, uneven_labels())
    inside = np.flatnonzero(labels >= 0)
    groups, given = Groups(labels, rest="drop"), case(TASKS[0])
    checkpoint = given.checkpoints(1)[0]
    alone = trak.TRAKer(
        given.model, TASKS[0], len(inside), save_dir=tmp_path / "a", lambda_reg=WELL_CONDITIONED, **given.options
    )
    alone.load_checkpoint(checkpoint, model_id=0)
    alone.featurize(take(given.train, inside), num_samples=len(inside))
    expected = summed(scored(alone, given, [checkpoint]), groups.labels[inside])
    options = {"groups": groups, "fisher": "exact", "lambda_reg": WELL_CONDITIONED}
    assert error(scores(ggda_trak.TRAKer, case(TASKS[0]), tmp_path / "b", **options), expected) < 1e-5
