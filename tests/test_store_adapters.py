"""`save_dir` on the adapters: the same scores, found again without the training data, refused where they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import captum_cases
import dattri_cases
import ggda_dattri
import ggda_trak
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ggda_ext.storage.jobs
from ggda_ext import GroupGradients, Groups, properties
from ggda_ext.storage.folder import StoreMismatch


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggda_ext.storage.jobs, "BATCHES_PER_BLOCK", 0)
    monkeypatch.setattr(ggda_ext.storage.jobs, "MOST_BLOCKS", 3)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every pass over training data by group: of scores, of gradients or of blocks."""
    seen: list[int] = []
    for name in ("scores", "blocks"):
        method = getattr(GroupGradients, name)

        def counted(self: GroupGradients, *args: Any, method: Callable[..., Any] = method, **options: Any) -> Any:
            if not self.groups.are_singletons:
                seen.append(1)
            return method(self, *args, **options)

        monkeypatch.setattr(GroupGradients, name, counted)
    return seen


def same_without_a_pass(run: Callable[[], Tensor], passes: list[int], expected: Tensor, tolerance: float) -> None:
    """The first run makes what `expected` says, the second finds it, bit for bit."""
    first = run().clone()
    assert passes
    assert first.shape == expected.shape
    assert first.dtype == expected.dtype
    assert float((first - expected).abs().max() / expected.abs().max()) < tolerance
    passes.clear()
    assert torch.equal(run(), first)
    assert not passes


# Captum


@pytest.mark.parametrize("name", captum_cases.CLASSES)
def test_captum_scores_are_kept(name: str, tmp_path: Path, passes: list[int]) -> None:
    given = captum_cases.problem()
    goal = properties.mean_loss(given.test, nn.CrossEntropyLoss())

    def tracin(**options: Any) -> Any:
        torch.manual_seed(3)  # random projections
        return captum_cases.ours(name, given, groups=captum_cases.UNEVEN, **options)

    expected, of_goal = captum_cases.score(tracin(), given.test), captum_cases.score(tracin(), property=goal)
    passes.clear()
    same_without_a_pass(lambda: captum_cases.score(tracin(save_dir=tmp_path), given.test), passes, expected, 1e-10)
    found = captum_cases.score(tracin(save_dir=tmp_path), property=goal)
    assert captum_cases.relative_error(found, of_goal) < 1e-10
    with pytest.raises(StoreMismatch, match="groups = '4 groups of 17 points"):
        captum_cases.score(
            captum_cases.ours(name, given, groups=[range(9), range(9, 17)], save_dir=tmp_path), given.test
        )


def test_captum_keeps_self_influence_and_groups_of_one(tmp_path: Path) -> None:
    given = captum_cases.problem()
    expected = captum_cases.ours("TracInCP", given, groups=captum_cases.UNEVEN).self_influence()
    for _ in range(2):
        found = captum_cases.ours("TracInCP", given, groups=captum_cases.UNEVEN, save_dir=tmp_path).self_influence()
        assert captum_cases.relative_error(found, expected) < 1e-10
    single = captum_cases.ours("TracInCP", given, groups=range(17), save_dir=tmp_path / "one")
    expected = captum_cases.score(captum_cases.captums("TracInCP", given), given.test)
    assert captum_cases.relative_error(captum_cases.score(single, given.test), expected) < 1e-10
    assert list((tmp_path / "one").rglob("*block-*.npy"))


# dattri


@pytest.mark.parametrize("name", dattri_cases.INFLUENCE)
def test_dattri_influence_is_kept_with_its_solutions(
    name: str, tmp_path: Path, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = dattri_cases.make_case()
    checkpoints = 1 if name == "EKFAC" else 2

    def run(save_dir: Path | None = None, **settings: Any) -> Tensor:
        attributor = dattri_cases.ours(
            name, case.task(checkpoints), groups=dattri_cases.GROUPS, save_dir=save_dir, **settings
        )
        attributor.cache(case.full_loader())
        solver = attributor._solver
        monkeypatch.setattr(attributor, "_solver", lambda checkpoint: counted(solver(checkpoint)))
        return attributor.attribute(case.train_loader(), case.test_loader())

    solved: list[int] = []

    def counted(solve: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda rows: (solved.append(1), solve(rows))[1]

    expected = run()
    passes.clear()
    same_without_a_pass(lambda: run(tmp_path), passes, expected, 1e-5)
    solved.clear()
    run(tmp_path)
    assert not solved
    setting = "damping" if name in ("LiSSA", "EKFAC") else "regularization"
    run(tmp_path / "other", **{setting: 3.0})
    with pytest.raises(StoreMismatch, match=f"solver.*{setting}"):
        run(tmp_path, **{setting: 3.0})


@pytest.mark.parametrize("name", dattri_cases.INFLUENCE)
def test_dattri_own_curvature_is_kept_for_the_same_cache(name: str, tmp_path: Path) -> None:
    case = dattri_cases.make_case()

    def run(folder: Path | None, batch_size: int = dattri_cases.N) -> Tensor:
        torch.manual_seed(0)
        attributor = dattri_cases.ours(
            name, case.task(), groups=dattri_cases.GROUPS, save_dir=folder, curvature="upstream"
        )
        attributor.cache(case.full_loader(batch_size))
        return attributor.attribute(case.train_loader(), case.test_loader()).clone()  # two batches of test points

    first = run(tmp_path)
    assert torch.equal(run(tmp_path), first)
    with pytest.raises(StoreMismatch, match="batches of cached points"):
        run(tmp_path, 8)


def test_dattri_factors_and_random_batches_of_other_settings_are_refused(tmp_path: Path) -> None:
    case = dattri_cases.make_case()
    for folder, first, second in (("factors", None, 1), ("first", 1, None)):
        for max_iter in (first, second):
            attributor = dattri_cases.ours("EKFAC", case.task(), groups=dattri_cases.GROUPS, save_dir=tmp_path / folder)
            attributor.cache(case.full_loader(12), max_iter)
            if max_iter == first:
                attributor.attribute(case.train_loader(), case.test_loader())
        with pytest.raises(StoreMismatch, match=r"solver.*max_iter"):
            attributor.attribute(case.train_loader(), case.test_loader())
    for seed in (1, 2):
        attributor = dattri_cases.ours(
            "LiSSA", case.task(), groups=dattri_cases.GROUPS, save_dir=tmp_path / "drawn",
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        attributor.cache(case.full_loader())
        if seed == 1:
            attributor.attribute(case.train_loader(), case.test_loader())
    with pytest.raises(StoreMismatch, match=r"solver.*seed"):
        attributor.attribute(case.train_loader(), case.test_loader())


@pytest.mark.parametrize("checkpoints", [1, 2])
def test_dattri_relatif_is_kept(checkpoints: int, tmp_path: Path) -> None:
    case = dattri_cases.make_case()
    found = []
    for folder in (None, tmp_path, tmp_path):
        attributor = dattri_cases.ours("Explicit", case.task(checkpoints), groups=dattri_cases.GROUPS, save_dir=folder)
        attributor.cache(case.full_loader())
        found.append(attributor.attribute(case.train_loader(), case.test_loader(), relatif_method="l").clone())
    dattri_cases.close(found[1], found[0])
    assert torch.equal(found[1], found[2])


@pytest.mark.parametrize("projector", [None, {"proj_dim": 8, "proj_type": "normal", "device": "cpu"}])
@pytest.mark.parametrize("normalized", [False, True])
def test_dattri_tracin_is_kept(
    projector: dict[str, Any] | None, normalized: bool, tmp_path: Path, passes: list[int]
) -> None:
    case = dattri_cases.make_case()

    def run(save_dir: Path | None = None) -> Tensor:
        attributor = ggda_dattri.TracInAttributor(
            case.task(2, unbatched=True), weight_list=torch.tensor([0.3, 0.7]), normalized_grad=normalized,
            projector_kwargs=projector, groups=dattri_cases.GROUPS, save_dir=save_dir,
        )  # fmt: skip
        return attributor.attribute(case.train_loader(), case.test_loader())

    expected = run()
    passes.clear()
    if projector is None and normalized:  # norms are computed again
        dattri_cases.close(run(tmp_path), expected)
        return
    same_without_a_pass(lambda: run(tmp_path), passes, expected, 1e-5)


@pytest.mark.parametrize("name", ["TracIn", "TRAK"])
def test_dattri_projections_of_another_order_of_layers_are_refused(name: str, tmp_path: Path) -> None:
    case = dattri_cases.make_case()

    def run(*layers: str) -> Tensor:
        own: Any = {"weight_list": [1.0], "normalized_grad": False} if name == "TracIn" else {}
        own |= {"correct_probability_func": case.probability} if name == "TRAK" else {}
        attributor = getattr(ggda_dattri, f"{name}Attributor")(
            case.task(unbatched=True), **own, projector_kwargs={"proj_dim": 8}, layer_name=list(layers),
            groups=dattri_cases.GROUPS, save_dir=tmp_path,
        )  # fmt: skip
        loaders = {"train_dataloader": case.train_loader(), "test_dataloader": case.test_loader()}
        return attributor.attribute(**loaders)

    run("0.weight", "2.weight")
    with pytest.raises(StoreMismatch, match="layer_name"):
        run("2.weight", "0.weight")


@pytest.mark.parametrize("fisher", ["batched", "exact", "paper"])
def test_dattri_trak_is_kept(fisher: str, tmp_path: Path, passes: list[int]) -> None:
    case = dattri_cases.make_case()

    def run(save_dir: Path | None = None, loader: Any = None) -> Tensor:
        attributor = ggda_dattri.TRAKAttributor(
            case.task(2, unbatched=True), case.probability, projector_kwargs={"proj_dim": 8, "device": "cpu"},
            groups=dattri_cases.GROUPS, fisher=fisher, regularization=0.1, save_dir=save_dir,
        )  # fmt: skip
        attributor.cache(case.full_loader())
        return attributor.attribute(loader or case.test_loader())

    expected = run()
    passes.clear()
    found = run(tmp_path).clone()
    dattri_cases.close(found, expected)
    passes.clear()
    assert torch.equal(run(tmp_path), found)
    dattri_cases.close(run(tmp_path, case.train_loader()), run(loader=case.train_loader()))  # new test points


# TRAK


@pytest.mark.parametrize("fisher", ["batched", "exact", "paper"])
def test_fisher_influence_is_kept(fisher: str, tmp_path: Path, passes: list[int]) -> None:
    case = dattri_cases.make_case()
    train, test = case.train.tensors, case.test.tensors

    def run(save_dir: Path | None = None, **options: Any) -> Tensor:
        influence = ggda_trak.FisherInfluence(
            case.model, train, cross_entropy, np.arange(dattri_cases.N) // 3, checkpoints=case.checkpoints, proj_dim=8,
            fisher=fisher, damping=0.5, save_dir=save_dir, **options,
        )  # fmt: skip
        return influence.influence(test)

    expected = run()
    passes.clear()
    same_without_a_pass(lambda: run(tmp_path), passes, expected, 1e-5) if fisher != "exact" else run(tmp_path)
    assert torch.allclose(run(tmp_path), expected, rtol=1e-4)
    with pytest.raises(StoreMismatch, match="seed = '0', now it is '4'"):
        run(tmp_path, projector_seed=4)


# all


def test_a_folder_needs_groups(tmp_path: Path) -> None:
    given, case = captum_cases.problem(), dattri_cases.make_case()
    with pytest.raises(ValueError, match="given without groups"):
        captum_cases.ours("TracInCP", given, save_dir=tmp_path)
    with pytest.raises(ValueError, match="given without groups"):
        dattri_cases.ours("CG", case.task(), save_dir=tmp_path)


def test_large_scores_of_the_adapters_are_memory_maps(tmp_path: Path) -> None:
    given, case = captum_cases.problem(), dattri_cases.make_case()
    tracin = captum_cases.ours("TracInCP", given, groups=captum_cases.UNEVEN, save_dir=tmp_path / "captum")
    attributor = dattri_cases.ours("CG", case.task(), groups=Groups(dattri_cases.GROUPS), save_dir=tmp_path / "dattri")
    attributor.cache(case.full_loader())
    for found, folder in (
        (captum_cases.score(tracin, given.test), tmp_path / "captum" / "inputs"),
        (attributor.attribute(case.train_loader(), case.test_loader()).T, tmp_path / "dattri"),
    ):
        (file,) = folder.glob("scores-*.npy")
        assert np.array_equal(np.load(file, allow_pickle=False), found.numpy())
