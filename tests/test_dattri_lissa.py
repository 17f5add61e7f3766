"""LiSSA for groups: dattri's estimator, solved once, reproducible, and stopped when it diverges."""

from __future__ import annotations

from typing import Any

import ggda_dattri
import numpy as np
import pytest
import torch
from dattri.algorithm import IFAttributorLiSSA
from dattri_cases import GROUPS, TESTS, Case, N, close, make_case
from torch import Tensor
from torch.nn.functional import cross_entropy

from ggda_ext import curvature
from ggda_ext.data import IndexedData
from ggda_ext.model import ParameterSpace
from ggda_ext.properties import mean_loss, point_losses, weighted_sum

OPTIONS: dict[str, Any] = {"batch_size": 3, "recursion_depth": 15, "scaling": 5.0, "damping": 0.02, "num_repeat": 2}


def grouped(case: Case, **changes: Any) -> Any:
    options = {"groups": GROUPS, "show_progress": False} | OPTIONS | changes
    attributor = ggda_dattri.IFAttributorLiSSA(case.task(), **options)
    attributor.cache(case.full_loader(10))
    return attributor


def scores(case: Case, **changes: Any) -> Tensor:
    return grouped(case, **changes).attribute(case.train_loader(), case.test_loader())


def test_upstream_curvature_gives_dattris_own_random_numbers():
    case = make_case()
    short = OPTIONS | {"recursion_depth": 4}
    old = IFAttributorLiSSA(case.task(), **short)
    old.cache(case.full_loader(10))
    torch.manual_seed(7)
    expected = old.attribute(case.train_loader(N), case.test_loader())  # one batch: dattri solves once
    new = grouped(case, curvature="upstream", **short)
    torch.manual_seed(7)
    close(new.attribute(case.train_loader(), case.test_loader()), GROUPS.sum(expected, 0))


def test_estimates_have_dattris_mean():
    case = make_case()
    old = IFAttributorLiSSA(case.task(), **OPTIONS | {"batch_size": N, "num_repeat": 1, "recursion_depth": 6})
    old.cache(case.full_loader())  # all data in every step: no randomness
    expected = GROUPS.sum(old.attribute(case.train_loader(N), case.test_loader(TESTS)), 0)

    def error(repeats: int, seed: int) -> float:
        found = scores(case, num_repeat=repeats, batch_size=8, recursion_depth=6, generator=seed)
        return float((found - expected).detach().abs().max() / expected.detach().abs().max())

    few, many = (sum(error(repeats, seed) for seed in range(6)) / 6 for repeats in (1, 40))
    assert many < 0.04
    assert many < few / 2  # a sixth on average


def test_seeds_are_reproducible_and_leave_the_global_random_state():
    case = make_case()
    state = torch.get_rng_state()
    first, again, other = scores(case, generator=1), scores(case, generator=1), scores(case, generator=2)
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    runs = [scores(case, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*runs)
    assert torch.equal(torch.get_rng_state(), state)
    generator = torch.Generator().manual_seed(5)
    attributor = grouped(case, generator=generator)
    twice = [attributor.attribute(case.train_loader(), case.test_loader()) for _ in range(2)]
    assert torch.equal(twice[0], runs[0])
    assert not torch.equal(*twice)  # a generator moves on
    with pytest.raises(TypeError, match="generator is a str"):
        grouped(case, generator="seed")


def test_one_seed_is_one_linear_map():
    case = make_case()
    attributor = grouped(case)
    losses, mean = (make(case.test.tensors, cross_entropy) for make in (point_losses, mean_loss))
    by_test = attributor.attribute(case.train_loader(), case.test_loader())
    close(attributor.attribute(case.train_loader(), property=losses), by_test)
    combined = weighted_sum([losses.mean(), mean], [2.0, -0.5])
    close(attributor.attribute(case.train_loader(), property=combined), 1.5 * by_test.mean(1, keepdim=True))


def test_chunks_and_blocks_of_vectors_change_nothing(monkeypatch):
    case = make_case()
    expected = scores(case)
    monkeypatch.setattr(curvature.hessian, "_CHUNK_BYTES", 400)
    monkeypatch.setattr("ggda_dattri.checkpoint.ROWS_BUDGET", 400)
    close(scores(case), expected)


def test_the_recursion_runs_once_for_all_groups(monkeypatch):
    case = make_case()
    products = []
    original = curvature.Hessian.on_batch
    monkeypatch.setattr(
        curvature.Hessian, "on_batch", lambda self, batch, v: products.append(len(v)) or original(self, batch, v)
    )
    scores(case, num_repeat=1)
    assert products == [TESTS] * OPTIONS["recursion_depth"]


def test_divergence_is_an_error_that_leaves_the_model():
    case = make_case()
    before = {name: value.clone() for name, value in case.checkpoints[0].items()}
    message = r"LiSSA diverged at step \d+ of recursion_depth=15, with damping=0\.02, scaling=0\.01.*Try scaling="
    with pytest.raises(ValueError, match=message):
        scores(case, scaling=0.01)
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    assert all(parameter.requires_grad for parameter in case.model.parameters())


def test_the_suggested_scaling_converges():
    case = make_case()
    with pytest.raises(ValueError, match="Try scaling=") as error:
        scores(case, scaling=0.01, damping=0.0)
    suggested = float(str(error.value).split("Try scaling=")[1].split(" ")[0])
    assert bool(torch.isfinite(scores(case, scaling=suggested, damping=0.0)).all())


def test_negative_curvature_suggests_damping_that_holds():
    model = torch.nn.Linear(2, 1, bias=False)
    space = ParameterSpace(model)
    data = IndexedData((torch.eye(2),))
    saddle = torch.tensor([[1.0, 0.0], [0.0, -0.2]])

    def loss(module: Any, batch: Any) -> Tensor:
        weight = module.weight[0]
        return 0.5 * weight @ saddle @ weight + 0 * batch[0].sum()

    hessian = curvature.Hessian(space, loss, data)
    vectors = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    with pytest.raises(ValueError, match="negative curvature") as error:
        curvature.lissa(hessian, vectors, depth=400, scaling=2.0, batch_size=2)
    damping = float(str(error.value).split("Try damping=")[1].split(" ")[0])
    solved = curvature.lissa(hessian, vectors, depth=400, scaling=2.0, damping=damping, batch_size=2)
    expected = torch.linalg.solve(saddle / 2.0 + damping * torch.eye(2), vectors.T).T / 2.0
    assert torch.allclose(solved, expected, rtol=1e-4)


def test_self_attribute_and_relatif_with_random_batches():
    case = make_case()
    attributor = grouped(case)
    every = attributor.attribute(case.train_loader(), case.train_loader())
    own = GROUPS.sum(every, 1).diagonal()
    close(attributor.self_attribute(case.train_loader()), own)
    divided = attributor.attribute(case.train_loader(), case.test_loader(), "l")
    plain = attributor.attribute(case.train_loader(), case.test_loader())
    close(divided, plain / own.sqrt()[:, None], 1e-4)


def test_labels_stay_whole_numbers():
    case = make_case()
    seen: list[torch.dtype] = []
    task = case.task()
    original = task.original_loss_func

    def loss(parameters: Any, data: Any) -> Tensor:
        seen.append(data[1].dtype)
        return original(parameters, data)

    attributor = ggda_dattri.IFAttributorLiSSA(
        type(task)(loss, case.model, case.checkpoints[:1]), groups=GROUPS, **OPTIONS
    )
    attributor.cache(case.full_loader())
    attributor.attribute(case.train_loader(), case.test_loader())
    assert set(seen) == {torch.int64}


def test_progress_bar_over_the_recursion(capsys):
    scores(make_case(), show_progress=True)
    assert "LiSSA" in capsys.readouterr().err
    scores(make_case(), show_progress=False)
    assert "LiSSA" not in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("recursion_depth", -1), ("num_repeat", 0), ("batch_size", 0)])
def test_bad_options_are_named(option, value):
    with pytest.raises(ValueError, match=f"{value}: LiSSA needs at least"):
        scores(make_case(), **{option: value})


def test_groups_given_as_names_or_lists():
    case = make_case()
    names = np.array(["a", "b", "c", "d", "e"])[GROUPS.labels]
    close(scores(case, groups=names), scores(case))
    close(scores(case, groups=[GROUPS[j].tolist() for j in range(5)]), scores(case))
