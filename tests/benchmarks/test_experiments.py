"""The experiments on made data: signs, sums, rows and what happens to a run that was stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ggda_dattri
import numpy as np
import pytest
import torch
from dattri.task import AttributionTask
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import experiments
from benchmarks.experiments import bench, groupings, methods, noisy, retrainings, what_if
from benchmarks.experiments.bench import Bench, Cell
from benchmarks.experiments.methods import METHODS, attributed
from benchmarks.experiments.retrainings import Retrainings, Wanted
from benchmarks.experiments.subject import LISSA_BATCH, Subject
from benchmarks.names import FISHER, GRAD_K_MEANS, GROUPINGS, PER_POINT, RATES, TRACIN
from benchmarks.report.rows import read
from benchmarks.report.what_if_tables import what_if_tables
from benchmarks.results import ResultFolder
from benchmarks.scales import SCALES, DataScale, Scale
from ggda_ext import Groups
from ggda_ext.evaluation import leave_group_out_correlation
from ggda_ext.grouping import random_groups

SMOKE = SCALES["smoke"]
TASK = "heloc-lr"


def tiny(**changes: Any) -> Scale:
    """Few points, few epochs, few of everything."""
    size = replace(SMOKE.experiments[TASK], **changes)
    return replace(
        SMOKE, data={**SMOKE.data, "heloc": DataScale(160, 80)}, epochs={**SMOKE.epochs, TASK: 10},
        experiments={**SMOKE.experiments, TASK: size},
    )  # fmt: skip


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    scale = tiny(trak_models=2)
    return Subject(experiments.experiment_task(TASK, scale), scale.experiments[TASK], 0, models=tmp_path / "models")


@pytest.fixture
def folder(tmp_path: Path) -> ResultFolder:
    return ResultFolder.open("run", {"command": "run", "scale": "smoke"}, base=tmp_path)


def test_every_method_predicts_the_rise_of_the_loss_when_a_group_is_left_out(subject: Subject, tmp_path: Path) -> None:
    """A wrong sign of a method would turn its correlation negative."""
    x = torch.randn(1160, 23, generator=torch.Generator().manual_seed(0))
    y = (x[:, :3].sum(1) > 0).long()
    groups, harmful = Groups(np.arange(160) // 10), np.arange(16) < 4
    labels = torch.where(torch.arange(160) < 40, 1 - y[:160], y[:160])
    data = replace(subject.task.data, train=(x[:160], labels), test=(x[160:], y[160:]))
    task = replace(subject.task, data=data, recipe=replace(subject.task.recipe, epochs=20))
    everything = np.arange(160)
    wanted = [Wanted(everything, 0), *(Wanted(np.setdiff1d(everything, group), 0) for group in groups)]
    with Retrainings(task, tmp_path / "retrainings", show_progress=False) as results:
        list(results.train(wanted))
        losses = np.array([results[one].loss for one in wanted])
    explained = Subject(task, subject.size, 0, models=tmp_path / "models")
    for method in METHODS:
        importance = attributed(method, explained, groups).importance
        assert leave_group_out_correlation(importance, losses[1:] - losses[0]).value > 0.4, method
        assert importance[harmful].mean() < importance[~harmful].mean(), method


def test_groups_have_the_sums_of_single_points(subject: Subject) -> None:
    groups, single = random_groups(160, 16, random_state=0), Groups.singletons(160)
    for method in (TRACIN, RATES, methods.LISSA):
        points = attributed(method, subject, single).importance
        summed = groups.sum(torch.from_numpy(points)).numpy()
        np.testing.assert_allclose(attributed(method, subject, groups).importance, summed, rtol=1e-3, atol=1e-6)
    captum, ours = (attributed(method, subject, single).importance for method in (TRACIN, PER_POINT))
    np.testing.assert_allclose(ours, captum, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("method", [method for method in METHODS if method != PER_POINT])
def test_timing_on_a_sample_changes_no_score(subject: Subject, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    single = Groups.singletons(160)
    whole = attributed(method, subject, single)
    monkeypatch.setattr(methods, "SAMPLED", 64)
    sampled = attributed(method, subject, single)
    assert "timed on 64 of 160 points" in sampled.settings
    scale = np.abs(whole.importance).max()
    np.testing.assert_allclose(sampled.importance / scale, whole.importance / scale, atol=2e-4)


def test_lissa_is_that_of_dattri_with_the_same_settings(subject: Subject) -> None:
    groups, settings, model = random_groups(160, 16, random_state=0), subject.task.lissa, subject.model

    def loss(parameters: dict[str, torch.Tensor], data: Any) -> torch.Tensor:
        return cross_entropy(functional_call(model, parameters, (data[0],)), data[1].long())

    attributor = ggda_dattri.IFAttributorLiSSA(
        AttributionTask(loss, model, model.state_dict()), groups=groups, show_progress=False, generator=0,
        recursion_depth=settings.depth, num_repeat=settings.repeats, damping=settings.damping, scaling=settings.scale,
        batch_size=LISSA_BATCH,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(*subject.train), batch_size=160)
    attributor.cache(loader)
    theirs = attributor.attribute(loader, property=subject.property)[:, 0]
    np.testing.assert_allclose(attributed(methods.LISSA, subject, groups).importance, theirs, rtol=1e-4)


def test_lissa_that_diverges_gets_a_larger_scale(subject: Subject) -> None:
    task = replace(subject.task, lissa=replace(subject.task.lissa, scale=0.5, depth=40))
    _, used = Subject(task, subject.size, 0, models=subject.models).solved
    assert used.scale > 0.5


def test_noise_flips_the_share_it_says_to_other_classes() -> None:
    labels = torch.arange(100) % 4
    changed, wrong = noisy.flipped(labels, 4, 0.25, seed=1)
    assert wrong.sum() == 25
    np.testing.assert_array_equal((changed != labels).numpy(), wrong)
    assert changed.min() >= 0
    assert changed.max() < 4
    assert not torch.equal(changed, noisy.flipped(labels, 4, 0.25, seed=2)[0])


def test_groupings_have_the_size_they_are_asked_for(subject: Subject) -> None:
    for name in GROUPINGS:
        groups = groupings.grouped(subject, name, 16, seed=0).value
        assert len(groups) == 10
        assert groups.n == 160
    assert groupings.grouped(subject, "none", 1, seed=0).value.are_singletons
    with pytest.raises(ValueError, match="grouping 'By-Hand' is not one of none, Random"):
        groupings.grouped(subject, "By-Hand", 16, seed=0)


def test_retrainings_are_made_once_and_survive_damage(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        trained.append(len(kwargs["seeds"]))
        return train_many(*args, **kwargs)

    train_many = retrainings.train_many
    monkeypatch.setattr(retrainings, "train_many", counted)
    wanted = [Wanted(np.arange(80), 0), Wanted(np.arange(80)[::-1].copy(), 0), Wanted(np.arange(80), 1)]

    def results() -> list[float]:
        with Retrainings(subject.task, tmp_path / "kept", show_progress=False) as found:
            list(found.train(wanted))
            return [found[one].loss for one in wanted]

    first = results()
    assert trained == [2]  # the same points in another order are the same model
    assert first[0] == first[1] != first[2]
    assert results() == first
    assert trained == [2]
    (tmp_path / "kept" / TASK / "results-0.npy").write_bytes(b"broken")
    assert results() == first
    assert trained == [2, 2]


def test_a_run_writes_all_rows_and_goes_on_where_it_was_stopped(folder: ResultFolder, tmp_path: Path) -> None:
    scale = tiny(left_out_groups=10)
    names = ["noisy", "lds", "pruning", "retraining"]
    experiments.run(names, [TASK], scale, folder)
    rows = folder.rows
    assert {row["experiment"] for row in rows} == set(names)
    assert {row["method"] for row in rows} == {*METHODS, "No removal", "Random removal", "Leave-group-out"}
    for row in rows:
        assert row["data"] == "HELOC"
        assert row["stand_in"]
        assert row["train_points"] == 160
        assert len(row["values"]) == len(row["model_seeds"]) or row["experiment"] == "lds"
        assert row["mean"] == pytest.approx(np.mean(row["values"]))
    by = {row["key"]: row for row in rows}
    directional, captum = (by[f"retraining/{TASK}/{name}/none/1/0/sum/0.2"] for name in (PER_POINT, TRACIN))
    assert directional["values"] == captum["values"]
    found = by[f"noisy/{TASK}/{TRACIN}/Grad-K-Means/16/0/sum"]
    assert set(found["seconds"]) == {"grouping", "gradients", "curvature", "scoring"}
    assert found["curve"][0] == [0, 0]
    assert found["curve"][-1] == [1, 1]
    fidelity = by[f"lds/{TASK}/{TRACIN}/Random/16/0/sum"]
    assert fidelity["interval"][0] <= fidelity["mean"] <= fidelity["interval"][1]
    assert -1 <= fidelity["loo_mean"] <= 1

    lines = (folder.path / "rows.jsonl").read_text().splitlines(keepends=True)
    half = len(lines) // 2
    (folder.path / "rows.jsonl").write_text("".join(lines[:half]) + lines[half][:20])  # as kill -9 leaves it
    again = ResultFolder.open("run", {"command": "run", "scale": "smoke"}, folder.path)
    assert len(again.rows) == half
    experiments.run(names, [TASK], scale, again)
    compared = ("values", "fraction", "groups")
    assert [[row.get(name) for name in compared] for row in again.rows] == [
        [row.get(name) for name in compared] for row in rows
    ]
    experiments.run(names, [TASK], scale, again)
    assert len(again.rows) == len(rows)


def test_a_scale_may_leave_out_retraining(folder: ResultFolder) -> None:
    scale = tiny(removed=(), pruned=(), lds_subsets=0, methods=("TracIn",))
    experiments.run(["retraining", "pruning", "lds"], [TASK], scale, folder)
    assert folder.rows == []


def test_cells_are_those_of_the_scale(folder: ResultFolder) -> None:
    scale = tiny(grouping_seeds=2, group_sizes=(1, 16, 1024), retrained_methods=("TracIn",), retrained_sizes=(16,))
    made = Bench(experiments.experiment_task(TASK, scale), scale, folder)
    assert list(made.cells()) == [Cell(TRACIN, name, 16, seed) for name in ("Random", GRAD_K_MEANS) for seed in (0, 1)]
    cells = list(made.cells(retrained=False))
    assert cells[: len(METHODS)] == [Cell(method) for method in METHODS]
    assert {cell.group_size for cell in cells} == {1, 16}  # 1024 is more than half of the points


def test_a_scale_may_retrain_for_fewer_groupings(folder: ResultFolder) -> None:
    scale = tiny(grouping_seeds=2, methods=(TRACIN,), retrained_groupings=("Random",), lds_grouping_seeds=1)
    made = Bench(experiments.experiment_task(TASK, scale), scale, folder)
    assert list(made.cells()) == [Cell(TRACIN), Cell(TRACIN, "Random", 16, 0), Cell(TRACIN, "Random", 16, 1)]
    assert {cell.grouping for cell in made.cells(retrained=False)} == {"none", "Random", GRAD_K_MEANS}
    experiments.run(["lds"], [TASK], scale, folder)
    assert {(row["grouping"], row["grouping_seed"]) for row in folder.rows} == {("none", 0), ("Random", 0)}


def test_lds_scores_all_methods_on_the_same_models(folder: ResultFolder) -> None:
    scale = tiny(methods=(TRACIN, FISHER), retrained_methods=(TRACIN,), left_out_groups=0)
    experiments.run(["lds"], [TASK], scale, folder)
    assert {row["method"] for row in folder.rows} == {TRACIN, FISHER}


def test_groupings_of_inputs_are_made_once_for_all_models(
    folder: ResultFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    grouped = groupings.grouped
    monkeypatch.setattr(bench, "grouped", lambda *args: made.append(args[1]) or grouped(*args))
    scale = tiny(methods=(TRACIN,), groupings=GROUPINGS, noisy_seeds=2)
    experiments.run(["noisy"], [TASK], scale, folder)
    assert {name: made.count(name) for name in GROUPINGS} == dict(zip(GROUPINGS, (1, 1, 2, 2), strict=True))


def test_what_if_has_a_row_for_every_predictor_and_protocol(folder: ResultFolder) -> None:
    """With eight retrainings for the calibration and some left to compare with; groups of equal size do not differ."""
    scale = tiny(methods=("Inf. (CG)",), lds_subsets=16, lds_grouping_seeds=1, left_out_groups=10, lds_seeds=2)
    experiments.run(["what-if"], [TASK], scale, folder)
    rows = {(row["grouping"], row["protocol"], row["method"]): row for row in folder.rows}
    assert {name for _, _, name in rows} == set(what_if.METHODS)
    assert {protocol for _, protocol, _ in rows} == {"halves", "keep 80 %", "leave one out"}
    row = rows["Random", "halves", "What-if"]
    assert row["mean"] > 0.2  # far from exact: ten epochs on 160 points do not end near an optimum
    assert {"pearson", "slope", "calibrated_slope", "ceiling", "additive_ceiling"} <= set(row)
    assert len(row["predicted"]) == len(row["real"]) == row["subsets"] == 16
    assert rows["Random", "halves", "Kept points"]["mean"] is None
    (table,) = what_if_tables(read([folder.path]).of("what-if"))
    assert {*what_if.METHODS, "Ceiling", "Best additive score"} == set(table.frame["Predictor"])
    experiments.run(["what-if"], [TASK], scale, folder)
    assert len(folder.rows) == len(rows)


def test_unknown_experiments_are_refused_before_any_work(folder: ResultFolder) -> None:
    with pytest.raises(ValueError, match="experiment 'everything' is not one of noisy, lds"):
        experiments.run(["everything"], [TASK], tiny(), folder)
