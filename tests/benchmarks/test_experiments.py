"""The experiments on made data: signs, sums, rows and what happens to a run that was stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ggda_dattri
import numpy as np
import pytest
import torch
from cases import gradient_rows
from dattri.metric import lds as upstream_lds
from dattri.task import AttributionTask
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import data, experiments
from benchmarks.experiments import bench, dattri, groupings, lds, methods, noisy, refits, retrainings
from benchmarks.experiments.bench import Bench, Cell
from benchmarks.experiments.methods import METHODS, attributed
from benchmarks.experiments.predictions import Predictor, Truth, explained_seeds
from benchmarks.experiments.retrainings import Retrainings, Wanted
from benchmarks.experiments.subject import LISSA_BATCH, Subject
from benchmarks.names import (
    AVERAGED,
    CG,
    CLASS_BALANCE,
    DATTRI_TASKS,
    EQUAL_GROUPINGS,
    FROM_START,
    GRAD_K_MEANS,
    GROUPINGS,
    INFLUENCE,
    INFLUENCE_3,
    LEAVE_GROUP_OUT,
    PER_POINT,
    PROTOCOLS,
    RATES,
    REFITS,
    TRACIN,
    TRIVIAL,
    WARM_START,
    WHAT_IF,
    WHAT_IF_3,
)
from benchmarks.report.dattri_tables import dattri_tables
from benchmarks.report.rows import read
from benchmarks.report.what_if_figures import fidelity_figures, predicted_figures
from benchmarks.report.what_if_tables import what_if_tables
from benchmarks.results import ResultFolder
from benchmarks.scales import SCALES
from benchmarks.sizes import CellScale, DataScale, Scale
from ggda_ext import Groups
from ggda_ext.evaluation import agreement, leave_group_out_correlation, points_of, random_subsets
from ggda_ext.grouping import random_groups

SMOKE = SCALES["smoke"]
TASK = "heloc-lr"


def tiny(**changes: Any) -> Scale:
    """Few points, few epochs, few of everything; changes are fields of the experiments' sizes."""
    size = SMOKE.experiments[TASK]
    for name, fields in changes.items():
        part = getattr(size, name)
        size = replace(size, **{name: replace(part, **fields) if isinstance(fields, dict) else fields})
    return replace(
        SMOKE, data={**SMOKE.data, "heloc": DataScale(160, 80)}, epochs={**SMOKE.epochs, TASK: 10},
        experiments={**SMOKE.experiments, TASK: size},
    )  # fmt: skip


def cells(*methods: str, **groups: tuple[int, ...]) -> CellScale:
    """Methods on groupings: `none`, `Random`, `Grad` for Grad-K-Means."""
    return CellScale(methods, {GRAD_K_MEANS if name == "Grad" else name: sizes for name, sizes in groups.items()})


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    scale = tiny(methods={"trak_models": 2})
    methods = scale.experiments[TASK].methods
    return Subject(experiments.experiment_task(TASK, scale), methods, 0, models=tmp_path / "models")


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
    explained = Subject(task, subject.methods, 0, models=tmp_path / "models")
    for method in METHODS:
        importance = attributed(method, explained, groups).importance
        assert importance.shape == (16,), method
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


@pytest.mark.parametrize("method", [method for method in METHODS if method not in (PER_POINT, *REFITS)])
def test_timing_on_a_sample_changes_no_score(subject: Subject, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    single = Groups.singletons(160)
    whole = attributed(method, subject, single)
    monkeypatch.setattr(methods, "SAMPLED", 64)
    sampled = attributed(method, subject, single)
    assert "timed on 64 of 160 points" in sampled.settings
    scale = np.abs(whole.importance).max()
    np.testing.assert_allclose(sampled.importance / scale, whole.importance / scale, atol=2e-4)


def test_lissa_is_that_folder_with_the_same_settings(subject: Subject) -> None:
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
    _, used = Subject(task, subject.methods, 0, models=subject.models).solved
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
    for name in (*GROUPINGS, *EQUAL_GROUPINGS):
        groups = groupings.grouped(subject, name, 16, seed=0).value
        assert len(groups) == 10
        assert groups.n == 160
        assert set(groups.sizes) == {16} or name not in EQUAL_GROUPINGS
    assert groupings.grouped(subject, "none", 1, seed=0).value.are_singletons
    with pytest.raises(ValueError, match="grouping 'By-Hand' is not one of none, Sources, Random"):
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
    scale = tiny(lds={"left_out_groups": 10})
    names = ["noisy", "lds", "pruning", "retraining"]
    experiments.run(names, [TASK], scale, folder)
    rows = folder.rows
    assert {row["experiment"] for row in rows} == set(names)
    predictors = {*METHODS, *AVERAGED, FROM_START, *TRIVIAL, LEAVE_GROUP_OUT}
    assert {row["method"] for row in rows} == {*predictors, "No removal", "Random removal"}
    for row in rows:
        assert row["data"] == "HELOC"
        assert row["stand_in"]
        assert row["train_points"] == 160
        assert len(row["values"]) == len(row["model_seeds"]) or row["experiment"] == "lds"
        assert row["mean"] == row["values"][0] or row["mean"] == pytest.approx(np.mean(row["values"]))
    by = {row["key"]: row for row in rows}
    directional, captum = (by[f"retraining/{TASK}/{name}/none/1/0/sum/0.2"] for name in (PER_POINT, TRACIN))
    assert directional["values"] == captum["values"]
    found = by[f"noisy/{TASK}/{TRACIN}/Grad-K-Means/16/0/sum"]
    assert set(found["seconds"]) == {"grouping", "gradients", "curvature", "scoring"}
    assert found["curve"][0] == [0, 0]
    assert found["curve"][-1] == [1, 1]
    for protocol in PROTOCOLS:
        fidelity = by[f"lds/{TASK}/{TRACIN}/Random/16/0/sum/{protocol}"]
        assert fidelity["interval"][0] <= fidelity["mean"] <= fidelity["interval"][1]
        assert -1 <= fidelity["pearson"] <= 1
    for method in REFITS:
        assert {row["experiment"] for row in rows if row["method"] == method} == set(names)

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


def test_a_scale_may_leave_out_experiments(folder: ResultFolder) -> None:
    scale = tiny(noisy=None, removal=None, lds=None)
    experiments.run(["retraining", "pruning", "lds", "noisy"], [TASK], scale, folder)
    assert folder.rows == []


def test_cells_are_those_of_the_scale(folder: ResultFolder) -> None:
    scale = tiny()
    made = Bench(experiments.experiment_task(TASK, scale), scale, folder)
    size = cells(TRACIN, Random=(16,), Grad=(16, 1024))  # 1024 is more than half of the points
    assert list(made.cells(replace(size, grouping_seeds=range(2)))) == [
        Cell(TRACIN, name, 16, seed) for name in ("Random", GRAD_K_MEANS) for seed in (0, 1)
    ]
    every = list(made.cells(cells(*METHODS, none=(1,), Random=(16,), Grad=(16,))))
    single = [method for method in METHODS if method not in REFITS]
    assert every[: len(single)] == [Cell(method) for method in single]
    assert [cell.grouping for cell in every if cell.method == RATES] == ["none", GRAD_K_MEANS]
    few = replace(cells(WHAT_IF, Random=(16, 32)), refitted_groups=5)
    assert list(made.cells(few)) == [Cell(WHAT_IF, "Random", 32)]


def test_pruning_takes_two_groupings_of_the_scale(folder: ResultFolder) -> None:
    size = cells(TRACIN, Random=(4, 8, 16))
    experiments.run(["pruning"], [TASK], tiny(removal={"cells": size, "seeds": 1}), folder)
    found = {(row["grouping"], row["group_size"]) for row in folder.rows if row["method"] == TRACIN}
    assert found == {("Random", 8), ("Random", 16)}


def test_lds_has_a_row_for_every_method_protocol_and_grouping_seed(folder: ResultFolder, tmp_path: Path) -> None:
    """With eight retrainings for the calibration and some left to compare with; groups of equal size do not differ."""
    size = replace(cells(CG, INFLUENCE, WHAT_IF, WARM_START, Random=(16,), none=(1,)), grouping_seeds=range(2))
    scale = tiny(lds={"cells": size, "subsets": 16, "left_out_groups": 10, "seeds": 2})
    experiments.run(["lds"], [TASK], scale, folder)
    rows = {(row["grouping"], row["grouping_seed"], row["protocol"], row["method"]): row for row in folder.rows}
    methods = {CG, INFLUENCE, WHAT_IF, WARM_START, *TRIVIAL}
    for seed in (0, 1):
        for protocol in PROTOCOLS:
            found = {name for *where, name in rows if where == ["Random", seed, protocol]}
            assert found == methods | (set() if protocol == "leave one out" else {LEAVE_GROUP_OUT})
    assert {name for grouping, _, _, name in rows if grouping == "none"} == {CG, INFLUENCE, *TRIVIAL}
    row = rows["Random", 0, "halves", WHAT_IF]
    assert row["mean"] > 0.2  # far from exact: ten epochs on 160 points do not end near an optimum
    assert {"pearson", "slope", "calibrated_slope", "ceiling", "additive_ceiling"} <= set(row)
    assert "additive_ceiling" not in rows["Random", 0, "leave one out", WHAT_IF]
    assert "calibrated_slope" not in rows["Random", 0, "leave one out", WHAT_IF]  # two of ten would be left
    assert len(row["predicted"]) == len(row["real"]) == row["subsets"] == 16
    assert rows["Random", 0, "halves", "Kept points"]["mean"] is None
    assert row["real"] != rows["Random", 1, "halves", WHAT_IF]["real"]
    results = read([folder.path])
    tables = {table.name: table.frame for table in what_if_tables(results.of("lds"))}
    levels = tables.pop("what-if-levels")
    assert set(tables) == {"what-if", "what-if-keep-80", "what-if-leave-one-out"}
    for name, frame in tables.items():
        additive = [] if name == "what-if-leave-one-out" else ["Best additive score"]
        methods = [WHAT_IF, WARM_START, INFLUENCE, CLASS_BALANCE]  # groups of equal size have no kept points to tell
        assert list(frame) == ["Data / model", "Groups", "Models", *methods, "Ceiling", *additive]
    assert set(levels["Protocol"]) == set(PROTOCOLS)
    assert set(levels["Predictor"]) == {WHAT_IF}
    pictures = [*predicted_figures(results, tmp_path), *fidelity_figures(results, tmp_path)]
    assert [picture.name.split("-heloc")[0] for picture in pictures] == ["predicted", "fidelity-speed"]
    assert "Influence: Random 16" in pictures[0].svg.read_text()
    experiments.run(["lds"], [TASK], scale, folder)
    assert len(folder.rows) == len(rows)


def test_other_trios_of_models_are_explained_on_the_same_groups_and_retrainings(folder: ResultFolder) -> None:
    cell = cells(INFLUENCE_3, WHAT_IF, WHAT_IF_3, Random=(16,))
    experiments.run(["lds"], [TASK], tiny(lds={"cells": cell, "subsets": 16, "seeds": 1, "trios": 2}), folder)
    rows = {(row["trio"], row["method"]): row for row in folder.rows if row["protocol"] == "halves"}
    explaining = {INFLUENCE_3, WHAT_IF, WHAT_IF_3}
    assert {name for trio, name in rows if trio == 1} == explaining
    for method in explaining:
        first, second = rows[0, method], rows[1, method]
        assert first["real"] == second["real"]
        assert first["predicted"] != second["predicted"]
    seeds = [explained_seeds(trio) for trio in range(3)]
    assert seeds[0] == [0, 501, 502]
    assert len({seed for three in seeds for seed in three}) == 9


def test_the_ceiling_is_what_as_many_models_of_other_seeds_reach() -> None:
    draw = np.random.default_rng(0)
    worth = draw.normal(size=(4_000, 1))
    first, others = (worth + 1.5 * draw.normal(size=(4_000, 4)) for _ in range(2))
    real = agreement(others.mean(1), first.mean(1), resamples=1).spearman.value
    assert lds.ceiling(first) == pytest.approx(real, abs=0.03)
    assert lds.ceiling(first[:, :1]) is None
    assert lds.ceiling(np.stack([np.arange(5.0), -np.arange(5.0)], 1)) == pytest.approx(-1)


def test_a_calibration_leaves_the_refit_as_it_was(folder: ResultFolder) -> None:
    scale = tiny(lds={"cells": cells(WHAT_IF, Random=(16,)), "subsets": 16})
    made = Bench(experiments.experiment_task(TASK, scale), scale, folder)
    predictor = Predictor(made, made.groups(Cell("", "Random", 16)), Cell("", "Random", 16))
    kept = random_subsets(predictor.groups, 16, seed=3)
    losses = np.random.default_rng(0).normal(size=(16, 2))
    first, again = (predictor(WHAT_IF, Truth(kept, losses)) for _ in range(2))
    np.testing.assert_array_equal(first.values, again.values)
    assert first.calibrated is not None
    np.testing.assert_array_equal(first.calibrated, again.calibrated)


def test_what_if_explains_settled_checkpoints_and_copies_nearby_where_they_are_asked_for(subject: Subject) -> None:
    network = replace(subject.task, make_model=lambda: nn.Sequential(nn.Linear(23, 4), nn.Tanh(), nn.Linear(4, 2)))
    subject = Subject(network, subject.methods, 0, models=subject.models)
    groups = groupings.grouped(subject, "Random", 16, seed=0).value
    found = refits.what_if([subject, subject], groups, copies=2, settled=True)
    count = len(subject.trained.checkpoints)
    assert [len(one.models) for one in found.models] == [3] * 2 * count
    first, last = (dict(found.models[j].models[0].provider.model.named_parameters()) for j in (0, count - 1))
    for name, value in subject.model.named_parameters():
        assert torch.equal(first[name], subject.trained.checkpoints[0][name])
        assert torch.equal(last[name], value)
    assert all(bool(model.settled.any()) for model in found.linearized)


def test_groupings_of_inputs_are_made_once_for_all_models(
    folder: ResultFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    grouped = groupings.grouped
    monkeypatch.setattr(bench, "grouped", lambda *args: made.append(args[1]) or grouped(*args))
    scale = tiny(noisy={"cells": CellScale((TRACIN,), dict.fromkeys(GROUPINGS, (16,))), "seeds": 2})
    experiments.run(["noisy"], [TASK], scale, folder)
    assert {name: made.count(name) for name in GROUPINGS} == dict(zip(GROUPINGS, (1, 1, 2, 2), strict=True))


def test_dattris_settings_have_rows_of_its_original_code_and_of_what_if(folder: ResultFolder) -> None:
    experiments.run(["noisy", "lds"], DATTRI_TASKS[1:], SMOKE, folder)
    rows = {row["method"]: row for row in folder.rows}
    assert {"What-if", "dattri TracIn", "dattri CG", "dattri TRAK-2", "Kept points of its class"} <= set(rows)
    assert all(row["stand_in"] and row["subsets"] == 6 and row["test_points"] == 20 for row in rows.values())
    (table,) = dattri_tables(read([folder.path]).of("dattri"))
    assert table.frame.set_index("Method")["Published"]["dattri TracIn"] == "0.15"
    for name, row in rows.items():  # what models cost does not hang on whether they were there
        one = row["seconds_of_half"] if "TRAK" in name else rows["What-if"]["training_seconds"]
        assert one > 0
        assert row["training_seconds"] == pytest.approx(row["models"] * one)
    count = len(folder.rows)
    experiments.run(["lds"], DATTRI_TASKS[1:], SMOKE, folder)
    assert len(folder.rows) == count


def test_additive_predictions_folders_scores_have_its_own_lds(tmp_path: Path) -> None:
    """Our mean over test points is that of `dattri.metric.lds`, up to the sign: kept points that help lower a loss."""
    problem = dattri.Problem("dattri-mnist-lr", SMOKE.dattri, data.load("mnist"), tmp_path)
    scores = torch.randn(100, 20, generator=torch.Generator().manual_seed(0))
    kept = torch.stack([torch.from_numpy(points) for points in points_of(problem.groups, problem.kept)])
    truth = torch.from_numpy(problem.losses.mean(0))
    theirs = upstream_lds(scores, (truth, kept))[0].mean()
    ours = agreement(dattri._additive(problem, scores), truth.numpy()).spearman.value
    np.testing.assert_allclose(-ours, theirs, atol=1e-6)


def test_influence_on_margins_is_the_damped_solve_with_their_gauss_newton_matrix() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
    train, test = ((torch.randn(n, 4).double(), torch.arange(n) % 3) for n in (12, 4))

    def gradients(part: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        p = model(part[0]).softmax(1).gather(1, part[1][:, None])[:, 0]
        return p.detach(), gradient_rows(p.logit(), model.parameters())

    (p, m), (p_test, m_test) = gradients(train), gradients(test)
    curvature = (m.T * p * (1 - p)) @ m / len(m) + 0.01 * torch.eye(m.shape[1], dtype=m.dtype)
    falls = (1 - p)[:, None] * m @ torch.linalg.solve(curvature, m_test.T) / len(m)
    margins, scores = dattri.margins_and_scores(model, train, test, 0.01)
    torch.testing.assert_close(margins, p_test.logit())
    torch.testing.assert_close(scores, falls, rtol=1e-8, atol=1e-12)


def test_unknown_experiments_are_refused_before_any_work(folder: ResultFolder) -> None:
    with pytest.raises(ValueError, match="experiment 'everything' is not one of noisy, lds"):
        experiments.run(["everything"], [TASK], tiny(), folder)
