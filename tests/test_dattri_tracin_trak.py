"""ggda_dattri's TracIn and TRAK: dattri's scores summed by group, projections, weights, properties, errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import dattri.algorithm as upstream
import ggda_dattri
import numpy as np
import pytest
import torch
from dattri.algorithm import tracin, trak
from dattri_cases import GROUPS, Case, N, close, make_case
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader

from ggda_ext.properties import mean_loss, point_losses

PROJECTIONS: dict[str, dict[str, Any]] = {
    "identity": {"proj_type": "identity"},
    "normal": {"proj_type": "normal", "proj_dim": 6},
    "in blocks": {"proj_type": "normal", "proj_dim": 130},
    "rademacher": {"proj_type": "rademacher", "proj_dim": 6, "proj_seed": 4},
    "mask": {"proj_type": "random_mask", "proj_dim": 6},
}
LAYERS: dict[str, list[str] | None] = {"all": None, "other order": ["2.weight", "0.bias"]}


@pytest.fixture(autouse=True)
def _own_defaults() -> Iterator[None]:
    """dattri's constructors change one shared dict of defaults: put it back."""
    shared = (tracin.DEFAULT_PROJECTOR_KWARGS, trak.DEFAULT_PROJECTOR_KWARGS)
    before = [dict(defaults) for defaults in shared]
    yield
    for defaults, kept in zip(shared, before, strict=True):
        defaults.clear()
        defaults.update(kept)


def make_tracin(package: Any, case: Case, normalized: bool = False, projection: str = "normal", **extra: Any) -> Any:
    task = case.task(2, unbatched=True, own_target=extra.pop("own_target", True))
    weights = torch.tensor([0.3, 0.7])
    return package.TracInAttributor(task, weights, normalized, dict(PROJECTIONS[projection]), **extra)


def make_trak(package: Any, case: Case, checkpoints: int = 2, **extra: Any) -> Any:
    task = case.task(checkpoints, unbatched=True, own_target=extra.pop("own_target", False))
    options = {"projector_kwargs": dict(PROJECTIONS["normal"]), "regularization": 0.01} | extra
    return package.TRAKAttributor(task, case.probability, **options)


@pytest.mark.parametrize("which", LAYERS)
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_tracin_additivity(projection, which):
    case = make_case()
    old = make_tracin(upstream, case, projection=projection, layer_name=LAYERS[which])
    expected = GROUPS.sum(old.attribute(case.train_loader(), case.test_loader()), 0)
    new = make_tracin(ggda_dattri, case, projection=projection, layer_name=LAYERS[which], groups=GROUPS)
    found = new.attribute(case.train_loader(), case.test_loader())
    close(found, expected)
    assert not found.requires_grad


def test_tracin_additivity_in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        test_tracin_additivity("normal", "other order")
        test_tracin_additivity("identity", "all")
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("projection", ["identity", "in blocks"])
def test_tracin_singletons_and_no_groups(projection, normalized):
    case = make_case()
    old = make_tracin(upstream, case, normalized, projection)
    torch.manual_seed(3)
    expected = old.attribute(case.train_loader(), case.test_loader()), old.self_attribute(case.train_loader())
    state = torch.get_rng_state()
    order = np.random.default_rng(0).permutation(N)
    for groups, rows in ((None, slice(None)), ([[i] for i in order], order)):
        new = make_tracin(ggda_dattri, case, normalized, projection, groups=groups)
        torch.manual_seed(3)
        assert torch.equal(new.attribute(case.train_loader(), case.test_loader()), expected[0][rows])
        assert torch.equal(new.self_attribute(case.train_loader()), expected[1][rows])
        assert torch.equal(torch.get_rng_state(), state)
    forced = make_tracin(ggda_dattri, case, normalized, projection, groups=np.arange(N), strategy="segmented")
    close(forced.attribute(case.train_loader(), case.test_loader()), expected[0], 1e-6)
    close(forced.self_attribute(case.train_loader()), expected[1], 1e-6)


@pytest.mark.parametrize("projection", ["identity", "normal"])
def test_tracin_normalises_the_sum_of_a_group(projection):
    case = make_case()
    new = make_tracin(ggda_dattri, case, True, projection, groups=GROUPS)
    found = new.attribute(case.train_loader(), case.test_loader())
    old = make_tracin(upstream, case, True, projection)
    expected = torch.zeros_like(found)
    for index, weight in enumerate((0.3, 0.7)):
        parameters = old.task.get_param(index)[0]
        train = GROUPS.sum(old.grad_loss_func(parameters, case.train.tensors), 0)
        test = old.grad_target_func(parameters, case.test.tensors)
        train, test = (
            upstream.tracin.random_project(rows, len(rows), **old.projector_kwargs)(rows, ensemble_id=index).detach()
            for rows in (train, test)
        )
        expected += weight * normalize(train) @ normalize(test).T
    close(found, expected)
    close(new.self_attribute(case.train_loader()), torch.ones(len(GROUPS)))


@pytest.mark.parametrize("projection", ["identity", "normal"])
def test_tracin_self_attribute_is_the_diagonal(projection):
    case = make_case()
    new = make_tracin(ggda_dattri, case, projection=projection, groups=GROUPS, own_target=False)
    every = new.attribute(case.train_loader(), case.train_loader())
    close(new.self_attribute(case.train_loader()), GROUPS.sum(every, 1).diagonal())


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("groups", [None, GROUPS])
@pytest.mark.parametrize("projection", ["identity", "normal"])
def test_tracin_property_of_points_is_the_test_points(projection, groups, normalized):
    case = make_case()
    new = make_tracin(ggda_dattri, case, normalized, projection, groups=groups, own_target=False)
    scores = new.attribute(case.train_loader(), case.test_loader())
    losses, mean = (make(case.test.tensors, cross_entropy) for make in (point_losses, mean_loss))
    close(new.attribute(case.train_loader(), property=losses), scores)
    if not normalized:
        close(new.attribute(case.train_loader(), property=mean), scores.mean(1, keepdim=True))


def test_projector_arguments_stay_with_the_instance():
    case = make_case()
    new = make_tracin(ggda_dattri, case, projection="rademacher", groups=GROUPS)
    assert new.projector_kwargs["proj_dim"] == 6
    assert tracin.DEFAULT_PROJECTOR_KWARGS["proj_dim"] == 512
    make_tracin(ggda_dattri, case, projection="rademacher")  # dattri's own, without groups
    assert tracin.DEFAULT_PROJECTOR_KWARGS["proj_dim"] == 6
    assert make_tracin(ggda_dattri, case, projection="normal", groups=GROUPS).projector_kwargs["proj_seed"] == 0
    assert tracin.DEFAULT_PROJECTOR_KWARGS["proj_seed"] == 4


def test_tracin_refuses_wrong_weights_and_both_sides():
    case = make_case()
    new = make_tracin(ggda_dattri, case, groups=GROUPS)
    with pytest.raises(ValueError, match="both test_dataloader and property"):
        new.attribute(case.train_loader(), case.test_loader(), property=lambda model: model(torch.ones(1, 4)).sum())
    with pytest.raises(ValueError, match="neither"):
        new.attribute(case.train_loader())
    with pytest.raises(ValueError, match="shuffles"):
        new.attribute(DataLoader(case.train, shuffle=True), case.test_loader())
    new.weight_list = torch.ones(3)
    with pytest.raises(ValueError, match="weight_list has 3 entries for 2 checkpoints"):
        new.attribute(case.train_loader(), case.test_loader())


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("which", LAYERS)
@pytest.mark.parametrize("checkpoints", [1, 2])
def test_trak_additivity_with_the_exact_fisher(checkpoints, which, cached):
    case = make_case()
    options = {"checkpoints": checkpoints, "layer_name": LAYERS[which], "own_target": True}
    old = make_trak(upstream, case, **options)
    new = make_trak(ggda_dattri, case, **options, groups=GROUPS, fisher="exact")
    scores = []
    for attributor in (old, new):
        if cached:
            attributor.cache(case.train_loader())
        train = [] if cached else [case.train_loader()]
        scores.append(attributor.attribute(case.test_loader(), *train))
    close(scores[1], GROUPS.sum(scores[0], 0))


def test_trak_singletons_and_no_groups():
    case = make_case()
    order = np.random.default_rng(0).permutation(N)
    old = make_trak(upstream, case)
    torch.manual_seed(3)
    own = old.self_attribute(case.train_loader())
    old.cache(case.train_loader())
    expected, state = old.attribute(case.test_loader()), torch.get_rng_state()
    for groups, rows in ((None, slice(None)), ([[i] for i in order], order)):
        new = make_trak(ggda_dattri, case, groups=groups)
        torch.manual_seed(3)
        assert torch.equal(new.self_attribute(case.train_loader()), own[rows])
        new.cache(case.train_loader())
        assert torch.equal(new.attribute(case.test_loader()), expected[rows])
        assert torch.equal(torch.get_rng_state(), state)
        close(new.self_attribute(), own[rows], 1e-6)  # dattri fails after cache
    for fisher, damping in (("exact", "auto"), ("batched", 0)):
        forced = make_trak(ggda_dattri, case, groups=np.arange(N), strategy="segmented", fisher=fisher, damping=damping)
        forced.cache(case.train_loader())
        close(forced.attribute(case.test_loader()), expected, 1e-6)
        close(forced.self_attribute(), own, 1e-6)


@pytest.mark.parametrize("groups", [None, np.arange(N), GROUPS], ids=["none", "singletons", "groups"])
def test_trak_self_attribute_is_of_the_last_cache(groups):
    case, other = make_case(), make_case()
    other.train.tensors[0].mul_(-2)
    new = make_trak(ggda_dattri, case, groups=groups)
    new.cache(other.train_loader())
    before = new.self_attribute()
    new.cache(case.train_loader())
    fresh = make_trak(ggda_dattri, case, groups=groups)
    fresh.cache(case.train_loader())
    close(new.self_attribute(), fresh.self_attribute())
    assert (new.self_attribute() - before).abs().max() > 0.01 * before.abs().max()


@pytest.mark.parametrize(("batch_size", "memory_budget", "most"), [(5, 2**26, N), (N, 1, 1), (N, 2**26, N)])
def test_trak_batches_for_the_weights_fit_the_budget_for_any_loader(batch_size, memory_budget, most):
    case, sizes = make_case(), []

    def probability(parameters: dict[str, Tensor], data: Any) -> Tensor:
        return case.probability(parameters, data)

    options = {"projector_kwargs": dict(PROJECTIONS["normal"]), "memory_budget": memory_budget}
    task = case.task(1, unbatched=True)
    new = ggda_dattri.TRAKAttributor(task, probability, groups=GROUPS, **options)
    mapped = new.correct_probability_func
    new.correct_probability_func = lambda parameters, data: (sizes.append(len(data[0])), mapped(parameters, data))[1]
    new.cache(case.train_loader(batch_size))
    assert sum(sizes) == N
    assert max(sizes) == most


@pytest.mark.parametrize("fisher", ["batched", "paper"])
def test_trak_fisher_is_that_of_the_group_sums(fisher):
    case = make_case()
    new = make_trak(ggda_dattri, case, checkpoints=1, groups=GROUPS, damping=0.5, own_target=True, fisher=fisher)
    new.cache(case.train_loader())
    assert new.chosen_damping == {0: 0.5}
    old = make_trak(upstream, case, checkpoints=1, own_target=True)
    parameters = old.task.get_param(0)[0]

    def features(rows: Tensor) -> Tensor:
        rows = rows.detach() / old.norm_scaler
        return trak.random_project(rows, len(rows), **old.projector_kwargs)(rows, ensemble_id=0)

    train = features(old.grad_loss_func(parameters, case.train.tensors))
    test = features(old.grad_target_func(parameters, case.test.tensors))
    wrong = 1 - old.correct_probability_func(dict(case.model.named_parameters()), case.train.tensors).detach()
    weighted = GROUPS.sum(train * wrong[:, None], 0)
    sizes = torch.from_numpy(GROUPS.sizes.astype(float))[:, None]
    rows = GROUPS.sum(train, 0) / sizes.sqrt().to(train) if fisher == "batched" else weighted
    matrix = rows.T @ rows
    matrix += torch.eye(len(matrix)) * (0.01 + 0.5 * matrix.diagonal().mean())
    expected = weighted @ torch.linalg.solve(matrix, test.T)
    close(new.attribute(case.test_loader()), expected, 1e-4)


@pytest.mark.parametrize("fisher", ["exact", "batched", "paper"])
def test_trak_property_of_points_is_the_test_points(fisher):
    case = make_case()
    new = make_trak(ggda_dattri, case, groups=GROUPS, fisher=fisher)
    new.cache(case.train_loader())
    losses, mean = (make(case.test.tensors, cross_entropy) for make in (point_losses, mean_loss))
    scores = new.attribute(case.test_loader())
    close(new.attribute(property=losses), scores)
    close(new.attribute(property=mean), scores.mean(1, keepdim=True))


def test_trak_property_without_groups():
    case = make_case()
    new = make_trak(ggda_dattri, case)
    new.cache(case.train_loader())
    losses = point_losses(case.test.tensors, cross_entropy)
    close(new.attribute(property=losses), new.attribute(case.test_loader()), 2e-5)


def test_trak_refuses_what_it_cannot_do():
    case = make_case()
    new = make_trak(ggda_dattri, case, groups=GROUPS)
    with pytest.raises(ValueError, match="no training points: call cache"):
        new.attribute(case.test_loader())
    with pytest.raises(ValueError, match="known after cache"):
        new.chosen_damping  # noqa: B018
    with pytest.raises(ValueError, match="neither"):
        new.attribute()
    with pytest.raises(ValueError, match="built for 23 training points"):
        new.cache(case.test_loader())
    new.cache(case.train_loader())
    with pytest.raises(ValueError, match="after cache"):
        new.attribute(case.test_loader(), case.train_loader())
    with pytest.raises(ValueError, match="fisher='loss'"):
        make_trak(ggda_dattri, case, groups=GROUPS, fisher="loss")
    with pytest.raises(ValueError, match="singular"):
        make_trak(ggda_dattri, case, groups=GROUPS, regularization=0.0, damping=0).cache(case.train_loader())
    with pytest.raises(ValueError, match="singular"):
        make_trak(
            ggda_dattri, case, groups=GROUPS, regularization=0.0, fisher="exact",
            projector_kwargs={"proj_type": "normal", "proj_dim": 40},
        ).cache(case.train_loader())  # fmt: skip


class Dicts(torch.utils.data.Dataset):
    """The points of a data set as dicts."""

    def __init__(self, points: Any) -> None:
        self.points = points

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(zip(("x", "y"), self.points[index], strict=True))


def test_dict_batches_serve_as_well_as_tuples():
    case = make_case()
    tuples = make_tracin(ggda_dattri, case, groups=GROUPS, own_target=False)
    expected = tuples.attribute(case.train_loader(), case.test_loader())

    def loss(parameters: dict[str, Tensor], example: dict[str, Tensor]) -> Tensor:
        logits = torch.func.functional_call(case.model, parameters, (example["x"],))
        return cross_entropy(logits, example["y"])

    task = type(tuples.task)(loss, case.model, case.checkpoints)
    new = ggda_dattri.TracInAttributor(
        task, torch.tensor([0.3, 0.7]), False, dict(PROJECTIONS["normal"]), groups=GROUPS
    )
    close(new.attribute(DataLoader(Dicts(case.train), 8), DataLoader(Dicts(case.test), 3)), expected)


@pytest.mark.parametrize("groups", [np.arange(N), GROUPS])
def test_a_loader_that_does_not_fit_is_refused_before_any_work(groups):
    case = make_case()
    attributor = make_tracin(ggda_dattri, case, groups=groups)
    attributor.task._load_checkpoints = None  # any work would fail
    with pytest.raises(ValueError, match="built for 23 training points"):
        attributor.attribute(case.test_loader(), case.test_loader())
    with pytest.raises(ValueError, match="shuffles"):
        attributor.self_attribute(DataLoader(case.train, shuffle=True))


def test_a_missing_dattri_says_what_to_install():
    code = "import sys; sys.modules['dattri'] = None; import ggda_dattri"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'ggda-ext[dattri]'" in run.stderr
