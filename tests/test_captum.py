"""ggda_captum against Captum itself: without groups, with groups of one, and summed by group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ggda_captum
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ggda_ext import Groups
from tests.captum_cases import (
    CAPTUM,
    CLASSES,
    LAST_LAYER,
    UNEVEN,
    M,
    N,
    assert_most_influential,
    captums,
    load,
    ours,
    problem,
    relative_error,
    score,
)

GROUPS = Groups(UNEVEN)
FLOAT64, FLOAT32 = (torch.float64, 1e-12), (torch.float32, 1e-5)
CASES = [
    (name, reduction, layers, other)
    for name in CLASSES
    for reduction in ("none", "sum", "mean")
    for layers in (None, ["last", "first"])
    for other in (False, True)
    if name not in LAST_LAYER or (reduction != "none" and layers is None)
]


@pytest.mark.parametrize(("dtype", "tolerance"), [FLOAT64, FLOAT32])
@pytest.mark.parametrize(("name", "reduction", "layers", "other"), CASES)
def test_additivity(
    name: str, reduction: str, layers: list[str] | None, other: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """A group's score is the sum of its members' scores in Captum, for uneven groups and two checkpoints."""
    given = problem(dtype)
    options: dict[str, Any] = {"reduction": reduction, "layers": layers, "other_test_loss": other}
    found = score(ours(name, given, groups=UNEVEN, **options), given.test)
    if name == "TracInCPFastRandProj" and other:
        name = "TracInCPFast"  # without a projection the same, and right where Captum's RandProj is not
    expected = GROUPS.sum(score(captums(name, given, **options), given.test))
    assert found.shape == (M, len(UNEVEN))
    assert relative_error(found, expected) < tolerance


def _squares(reduction: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: F.mse_loss(output, F.one_hot(target, 3).to(output), reduction=reduction)


def _marked(loss_fn: Any, reduction: str) -> Any:
    loss_fn.reduction = reduction
    return loss_fn


@pytest.mark.parametrize(
    ("loss_fn", "reduction"),
    [
        (None, "none"),
        (_squares("none"), "none"),
        (_squares("sum"), "sum"),
        (_marked(_squares("mean"), "mean"), "mean"),
        (nn.MultiLabelSoftMarginLoss(reduction="mean"), "mean"),
    ],
    ids=["no loss", "function, per output", "function, sum", "function, mean", "module, mean"],
)
def test_additivity_for_losses_of_any_kind(loss_fn: Any, reduction: str) -> None:
    given = problem()
    if isinstance(loss_fn, nn.Module):
        given.train, given.test = ((x, F.one_hot(y, 3).to(x)) for x, y in (given.train, given.test))
    options: dict[str, Any] = {"loss_fn": loss_fn, "reduction": reduction}
    found = score(ours("TracInCP", given, groups=UNEVEN, **options), given.test)
    expected = GROUPS.sum(score(captums("TracInCP", given, **options), given.test))
    assert relative_error(found, expected) < 1e-12


@pytest.mark.parametrize("name", CLASSES)
def test_points_left_out_of_every_group_count_in_none(name: str) -> None:
    given = problem()
    partial = Groups(UNEVEN[:3], N, rest="drop")
    expected = GROUPS.sum(score(captums(name, given), given.test))[:, :3]
    assert relative_error(score(ours(name, given, groups=partial), given.test), expected) < 1e-12


@pytest.mark.parametrize("name", CLASSES)
def test_self_influence_is_the_quadratic_form_of_the_group_gradient(name: str) -> None:
    """It is the influence of a group on itself: Captum's scores of all pairs of members, summed."""
    given = problem()
    pairs = GROUPS.sum(GROUPS.sum(score(captums(name, given), given.train)), dim=0)
    found = ours(name, given, groups=UNEVEN).self_influence()
    assert relative_error(found, pairs.diagonal()) < 1e-12


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "influence": lambda influence, given: score(influence, given.test),
    "influence, loader": lambda influence, given: score(influence, DataLoader(TensorDataset(*given.test), 2)),
    "k": lambda influence, given: influence.influence(given.test, k=3),
    "opponents": lambda influence, given: influence.influence(given.test, 4, False),
    "self_influence": lambda influence, given: influence.self_influence(),
    "self_influence of points": lambda influence, given: influence.self_influence(given.test),
    "intermediate": lambda influence, given: influence.compute_intermediate_quantities(given.test),
    "aggregate": lambda influence, given: influence.influence(given.test, aggregate=True),
    "intermediate, aggregate": lambda influence, given: influence.compute_intermediate_quantities(given.test, True),
}
UNKNOWN_TO_CAPTUM = {
    "TracInCPFast": {"influence, loader", "intermediate", "aggregate", "intermediate, aggregate"},
    "TracInCPFastRandProj": {
        "self_influence",
        "self_influence of points",
        "aggregate",
        "intermediate, aggregate",
    },
    "NaiveInfluenceFunction": {"aggregate"},
    "ArnoldiInfluenceFunction": {"aggregate"},
}
KNOWN = [(name, call) for name in CLASSES for call in CALLS if call not in UNKNOWN_TO_CAPTUM.get(name, ())]


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return all(map(torch.equal, found, expected))
    return torch.equal(found, expected)


@pytest.mark.parametrize(("name", "call"), KNOWN)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_without_groups_it_is_captum_bit_for_bit(name: str, call: str, reduction: str) -> None:
    given = problem(torch.float32)
    torch.manual_seed(5)
    expected = CALLS[call](captums(name, given, reduction=reduction), given)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    assert _equal(CALLS[call](ours(name, given, reduction=reduction), given), expected)
    assert torch.equal(torch.get_rng_state(), state)


PERMUTED = torch.randperm(N, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("name", "call"), KNOWN)
def test_singletons_are_captum_in_group_order(name: str, call: str) -> None:
    given = problem(torch.float32)
    expected = CALLS[call](captums(name, given, other_test_loss=True), given)
    found = CALLS[call](ours(name, given, groups=PERMUTED, other_test_loss=True), given)
    if isinstance(expected, tuple):
        expected = PERMUTED[expected[0]], expected[1]
    elif "intermediate" not in call and "points" not in call:
        expected = expected[..., PERMUTED.argsort()]
    assert _equal(found, expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("strategy", ["persample", "segmented", "backward"])
@pytest.mark.parametrize("name", CLASSES)
def test_singletons_computed_as_groups(name: str, strategy: str, dtype: torch.dtype, tolerance: float) -> None:
    given = problem(dtype)
    forced = ours(name, given, groups=PERMUTED, strategy=strategy)
    expected = score(captums(name, given), given.test)[:, PERMUTED.argsort()]
    assert relative_error(score(forced, given.test), expected) < tolerance
    if name != "TracInCPFastRandProj":
        expected = captums(name, given).self_influence()[PERMUTED.argsort()]
        assert relative_error(forced.self_influence(), expected) < tolerance


@pytest.mark.parametrize("k", [1, 3, 100])
@pytest.mark.parametrize("proponents", [True, False])
@pytest.mark.parametrize("name", CLASSES)
def test_k_most_influential_are_group_ids(name: str, proponents: bool, k: int) -> None:
    given = problem()
    influence = ours(name, given, groups=UNEVEN, other_test_loss=True)
    scores = score(influence, given.test)
    found = influence.influence(given.test, k=k, proponents=proponents)
    assert_most_influential(found.indices, scores, k, proponents)
    torch.testing.assert_close(found.influence_scores, scores.gather(1, found.indices), rtol=1e-12, atol=0)


@pytest.mark.parametrize("given_k", [None, 2])
@pytest.mark.parametrize("groups", [None, PERMUTED, UNEVEN], ids=["no groups", "singletons", "groups"])
@pytest.mark.parametrize("name", CLASSES)
def test_test_points_as_a_tuple_or_as_any_loader(name: str, groups: Any, given_k: int | None) -> None:
    given = problem()
    influence = ours(name, given, groups=groups)
    expected = influence.influence(given.test, k=None)
    whole = DataLoader([given.test], batch_size=None)
    for loader in (DataLoader(TensorDataset(*given.test), 2), whole):
        found = influence.influence(loader, k=given_k)
        if given_k is None:
            assert relative_error(found, expected) < 1e-12
        else:
            assert_most_influential(found.indices, expected, given_k)


def test_aggregate_sums_over_the_test_points() -> None:
    given = problem()
    influence = ours("TracInCP", given, groups=UNEVEN)
    expected = GROUPS.sum(captums("TracInCP", given).influence(given.test, aggregate=True))
    assert relative_error(influence.influence(given.test, aggregate=True), expected) < 1e-12
    best = influence.influence(given.test, k=1, aggregate=True)
    assert_most_influential(best.indices, expected, 1)


@pytest.mark.parametrize("projection_dim", [None, 4, 100])
def test_projections_are_captums(projection_dim: int | None) -> None:
    """The same random projections, applied to groups: one stored row each."""
    given = problem()
    expected = captums("TracInCPFastRandProj", given, projection_dim=projection_dim, seed=3)
    found = ours("TracInCPFastRandProj", given, projection_dim=projection_dim, seed=3, groups=UNEVEN)
    assert relative_error(score(found, given.test), GROUPS.sum(score(expected, given.test))) < 1e-12
    rows = GROUPS.sum(expected.src_intermediate_quantities, dim=0)
    assert relative_error(found.src_intermediate_quantities, rows) < 1e-12
    assert relative_error(found.self_influence(), rows.square().sum(1)) < 1e-12
    points = expected.compute_intermediate_quantities(given.test)
    assert torch.equal(found.compute_intermediate_quantities(given.test), points)
    assert relative_error(found.self_influence(given.test), points.square().sum(1)) < 1e-12


@pytest.mark.parametrize("name", ["TracInCP", "NaiveInfluenceFunction", "ArnoldiInfluenceFunction"])
def test_compute_intermediate_quantities_keeps_captums_meaning(name: str) -> None:
    given = problem()
    grouped, plain = ours(name, given, groups=UNEVEN), captums(name, given)
    for aggregate in (False, True):
        expected = plain.compute_intermediate_quantities(given.test, aggregate=aggregate)
        assert torch.equal(grouped.compute_intermediate_quantities(given.test, aggregate=aggregate), expected)


def test_each_checkpoint_is_loaded_once_per_call_and_the_last_one_stays() -> None:
    given, loaded = problem(), []

    def counting_load(model: torch.nn.Module, checkpoint: Any) -> float:
        loaded.append(checkpoint[1])
        return load(model, checkpoint)

    for name in ("TracInCP", "TracInCPFast"):
        influence = ours(name, given, groups=UNEVEN, checkpoints_load_func=counting_load)
        for call in ("influence", "k", "self_influence"):
            loaded.clear()
            CALLS[call](influence, given)
            assert loaded == [0.3, 0.7]
    for found, expected in zip(given.model.state_dict().values(), given.checkpoints[-1][0].values(), strict=True):
        assert torch.equal(found, expected)


def test_groups_never_touch_the_hessian() -> None:
    given = problem()
    for name in ("NaiveInfluenceFunction", "ArnoldiInfluenceFunction"):
        found, expected = ours(name, given, groups=UNEVEN).R, captums(name, given).R
        pairs = [(found, expected)] if isinstance(found, Tensor) else zip(found, expected, strict=True)
        assert all(_equal(a, b) for a, b in pairs)


def test_it_stands_where_captum_influence_stood() -> None:
    for name in (*CAPTUM.__dict__, "ArnoldiInfluenceFunction"):
        assert issubclass(getattr(ggda_captum, name), getattr(CAPTUM, name))
    for name in CLASSES:
        assert getattr(ggda_captum, name).get_name() == name
    assert issubclass(ggda_captum.TracInCPFastRandProj, ggda_captum.TracInCPFast)
