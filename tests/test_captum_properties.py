"""Properties in the five classes: against Captum's own per-example gradients and an autograd gradient of g."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ggda_captum
import pytest
import torch
from cases import gradient_rows
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ggda_ext import Groups, properties
from tests.captum_cases import (
    CAPTUM,
    CLASSES,
    CURVED,
    LAST_LAYER,
    UNEVEN,
    N,
    Normalised,
    Problem,
    assert_most_influential,
    captums,
    load,
    ours,
    problem,
    relative_error,
    score,
)

GROUPS = Groups(UNEVEN)
CROSS_ENTROPY = nn.CrossEntropyLoss()
SENSITIVE = [0, 1, 0, 1, 1]
READY: dict[str, Callable[[Any], properties.Property]] = {
    "point_losses": lambda test: properties.point_losses(test, CROSS_ENTROPY),
    "mean_loss": lambda test: properties.mean_loss(test, CROSS_ENTROPY),
    "contrast": lambda test: properties.contrast((test[0][:2], test[1][:2]), (test[0][2:], test[1][2:]), CROSS_ENTROPY),
    "attacked_loss": lambda test: properties.attacked_loss(test, CROSS_ENTROPY, properties.fgsm(0.0)),
    "margins": lambda test: properties.margins(test),
    "correct_logits": lambda test: properties.correct_logits(test),
    "soft_accuracy": lambda test: properties.soft_accuracy(test),
    "soft_f1": lambda test: properties.soft_f1(test),
    "demographic_parity_gap": lambda test: properties.demographic_parity_gap(test, SENSITIVE),
    "equalized_odds_gap": lambda test: properties.equalized_odds_gap(
        (test[0], torch.tensor([1, 1, 0, 0, 2])), SENSITIVE
    ),
    "soft_calibration_error": lambda test: properties.soft_calibration_error(test),
    "of_outputs": lambda test: properties.of_outputs(test, lambda outputs, targets: outputs.std(0)),
    "stack": lambda test: properties.stack(properties.margins(test), properties.soft_f1(test)),
    "weighted_sum": lambda test: properties.weighted_sum([properties.soft_accuracy(test), _norm], [0.5, 2.0]),
    "any callable": lambda test: _norm,
}


def _norm(model: nn.Module) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum().sqrt()


def _gradient(g: properties.Property, parameters: list[nn.Parameter], model: nn.Module) -> Tensor:
    """Rows `[m, p]` by plain autograd through the property as a function."""
    return gradient_rows(g(model).reshape(-1), parameters)


def _expected(name: str, given: Problem, g: properties.Property) -> Tensor:
    """Scores `[m, n]` of single points, from what Captum itself says about them."""
    if name in CURVED:
        influence = captums(name, given)
        projection = influence.R if isinstance(influence.R, Tensor) else _columns(influence.R)
        test_side = _gradient(g, list(given.model.parameters()), given.model) @ projection
        return test_side @ influence.compute_intermediate_quantities(given.train).T
    layers = ["last"] if name in LAST_LAYER else None
    train_side = captums("TracInCP", given, layers=layers).compute_intermediate_quantities(given.train)
    test_side = []
    for checkpoint in given.checkpoints:
        load(given.model, checkpoint)
        parameters = list((given.model.last if name in LAST_LAYER else given.model).parameters())
        test_side.append(_gradient(g, parameters, given.model))
        if name in LAST_LAYER:
            test_side[-1][:, given.model.last.weight.numel() :] = 0  # Captum leaves out the bias
    return torch.cat(test_side, 1) @ train_side.T


def _columns(vectors: list[tuple[Tensor, ...]]) -> Tensor:
    return torch.stack([torch.cat([part.flatten() for part in vector]) for vector in vectors], 1)


@pytest.mark.parametrize("ready", READY)
@pytest.mark.parametrize("name", CLASSES)
def test_every_property_in_every_class(name: str, ready: str) -> None:
    given = problem()
    g = READY[ready](given.test)
    expected = _expected(name, given, g)
    assert relative_error(score(ours(name, given, groups=UNEVEN), property=g), GROUPS.sum(expected)) < 1e-11
    singletons = torch.randperm(N)
    for groups, order in ((None, slice(None)), (singletons, singletons.argsort())):
        assert relative_error(score(ours(name, given, groups=groups), property=g), expected[:, order]) < 1e-11


@pytest.mark.parametrize("name", CLASSES)
def test_the_loss_of_test_points_as_a_property_gives_their_scores(name: str) -> None:
    given = problem()
    influence = ours(name, given, groups=UNEVEN)
    points = score(influence, given.test)
    assert relative_error(score(influence, property=properties.point_losses(given.test, CROSS_ENTROPY)), points) < 1e-12
    mean = score(influence, property=properties.mean_loss(given.test, CROSS_ENTROPY))
    assert relative_error(mean, points.mean(0, keepdim=True)) < 1e-12


@pytest.mark.parametrize("name", CLASSES)
def test_k_most_influential_groups_for_a_property(name: str) -> None:
    given = problem()
    g = properties.soft_f1(given.test)
    influence = ours(name, given, groups=UNEVEN)
    scores = score(influence, property=g)
    for proponents in (True, False):
        assert_most_influential(
            influence.influence(property=g, k=4, proponents=proponents).indices, scores, 4, proponents
        )


def test_aggregate_sums_over_the_components_of_a_property() -> None:
    given = problem()
    influence = ours("TracInCP", given, groups=UNEVEN)
    for g in (properties.margins(given.test), READY["stack"](given.test)):
        expected = influence.influence(property=g).sum(0, keepdim=True)
        assert relative_error(influence.influence(property=g, aggregate=True), expected) < 1e-12


@pytest.mark.parametrize("name", CURVED)
def test_more_directions_than_the_projection_has_change_nothing(name: str) -> None:
    """m < r directions go over the data as R Rᵀ∇g, m ≥ r as R: the same scores."""
    given = problem()
    few, many = (
        ours(name, given, groups=UNEVEN, projection_dim=3),
        (given.test[0].repeat(2, 1), given.test[1].repeat(2)),
    )
    both = score(few, many)
    one_by_one = torch.cat([score(few, (x[None], y[None])) for x, y in zip(*many, strict=True)])
    assert relative_error(both, one_by_one) < 1e-12


@pytest.mark.parametrize("name", ["TracInCP", *CURVED])
def test_parameters_that_captum_drops_count_and_are_mentioned_once(name: str) -> None:
    given = problem(net=Normalised)
    expected = score(captums(name, given, reduction="none"), given.test)
    influence = ours(name, given, reduction="mean", groups=UNEVEN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = score(influence, given.test)
        influence.self_influence()
    said = [str(warning.message) for warning in caught if "leaves them out" in str(warning.message)]
    assert len(said) == 1
    assert said[0].startswith("5 parameters, first 'tokens.weight'")
    assert relative_error(found, GROUPS.sum(expected)) < 1e-11


@pytest.mark.parametrize("unpack_inputs", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_captums_own_models_and_data(name: str, unpack_inputs: bool, tmp_path: Path) -> None:
    """Networks that go on after their last layer, several inputs, single examples as data, files as checkpoints."""
    common = pytest.importorskip("captum.testing.helpers.influence.common", reason="not shipped before Captum 0.9")
    kind = "trained_NN" if name in CURVED else "random"
    net, train, samples, labels = common.get_random_model_and_data(str(tmp_path), unpack_inputs, model_type=kind)
    inputs = (*samples, labels) if unpack_inputs else (samples, labels)
    options: dict[str, Any] = {"loss_fn": nn.MSELoss(reduction="sum"), "batch_size": 5}
    if name not in LAST_LAYER:
        options["sample_wise_grads_per_batch"] = True
    if name == "TracInCPFastRandProj":
        options["nearest_neighbors"] = ggda_captum.ExactNearestNeighbors()
    checkpoints = str(sorted(tmp_path.iterdir())[-1]) if name in CURVED else str(tmp_path)
    first = (net, net.linear2) if name in LAST_LAYER else (net,)
    groups = torch.arange(len(train)) % 5
    plain = getattr(CAPTUM, name)(*first, train, checkpoints, **options)
    grouped = getattr(ggda_captum, name)(*first, DataLoader(train, 7), checkpoints, groups=groups, **options)
    assert relative_error(score(grouped, inputs), Groups(groups).sum(score(plain, inputs))) < 1e-11
