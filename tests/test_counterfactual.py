"""What-if: nothing changes without a change, linear models are retrained exactly, and small changes are influence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import descend, gradient_rows, make_case, relative_error
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ggda_ext import BatchLoss, Groups, properties
from ggda_ext.counterfactual import WhatIf, calibration, directions, features, linearized, refit, trust
from ggda_ext.counterfactual.convex import (
    AnyLoss,
    LogisticLoss,
    SoftmaxLoss,
    SquaredLoss,
    TwoClassLoss,
)
from ggda_ext.counterfactual.features import Linearizer
from ggda_ext.counterfactual.known_losses import convex_loss
from ggda_ext.curvature.damping import TrainingSteps
from ggda_ext.data import IndexedData
from ggda_ext.losses import as_example_loss
from ggda_ext.model import ParameterSpace
from ggda_ext.training import Recipe

N, DECAY = 120, 0.02
NAMES = ["web", "books", "forum", "news"]
SOURCES = [NAMES[j % 4] for j in range(N)]
LOSS = nn.CrossEntropyLoss()


def points(outputs: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 5, generator=generator, dtype=torch.float64)
    noisy = x @ torch.randn(5, outputs, generator=generator, dtype=torch.float64)
    noisy += 1.5 * torch.randn(N, outputs, generator=generator, dtype=torch.float64)
    return x.to(dtype), noisy.argmax(1)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def fitted(model: nn.Module, loss_fn: Callable[..., Tensor], data: Any, weights: Tensor | None = None) -> nn.Module:
    """The model trained to the optimum of its weighted mean loss with weight decay, by L-BFGS."""
    x, y = data
    weights = torch.ones(len(x), dtype=x.dtype) if weights is None else weights

    def penalised() -> Tensor:
        each = torch.stack([loss_fn(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))])
        penalty = sum(value.square().sum() for value in model.parameters())
        return (weights * each).sum() / weights.sum() + DECAY / 2 * penalty

    minimise(model.parameters(), penalised)
    return model.eval()


def minimise(values: Iterable[Tensor], objective: Callable[[], Tensor]) -> None:
    """Move values to where an objective has its minimum, by L-BFGS."""
    optimizer = torch.optim.LBFGS(
        values, max_iter=2000, tolerance_grad=1e-13, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective()
        loss.backward()
        return loss

    optimizer.step(closure)


def kept_rows() -> np.ndarray:
    return np.array([[1, 0, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 0], [1, 1, 0, 0.5]])


LINEAR: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], Callable[[], Tensor]]] = {
    "three classes": (lambda: nn.Linear(5, 3), F.cross_entropy, lambda: points()[1]),
    "two classes": (lambda: nn.Linear(5, 2), F.cross_entropy, lambda: points(2)[1]),
    "smoothed": (lambda: nn.Linear(5, 3), nn.CrossEntropyLoss(label_smoothing=0.1), lambda: points()[1]),
    "binary": (
        lambda: nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)),
        F.binary_cross_entropy_with_logits,
        lambda: points(2)[1].double(),
    ),
    "regression": (lambda: nn.Linear(5, 2), F.mse_loss, lambda: points()[0][:, :2].sin()),
    "poisson": (
        lambda: nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)),
        nn.PoissonNLLLoss(),
        lambda: points()[1].double(),
    ),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_models_are_retrained_exactly(name):
    make_model, loss_fn, targets = LINEAR[name]
    data = (points()[0], targets())
    torch.manual_seed(0)
    model = fitted(make_model().double(), loss_fn, data)
    what_if = WhatIf(model, loss_fn, data, SOURCES, weight_decay=DECAY)
    answer = what_if.without(["web", "news"])
    inside = torch.tensor([source in ("books", "forum") for source in SOURCES])
    truth = fitted(make_model().double(), loss_fn, (data[0][inside], data[1][inside]))
    assert (answer.outputs(data) - truth(data[0])).abs().max() < 1e-6
    measure = properties.mean_loss(data, loss_fn)
    assert abs(float(answer.value(measure)) - float(measure(truth))) < 1e-6


def test_weights_of_groups_and_points_are_those_of_a_weighted_training():
    data = points()
    own = torch.rand(N, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.2
    torch.manual_seed(0)
    model = fitted(nn.Linear(5, 3).double(), F.cross_entropy, data, own)
    what_if = WhatIf(model, LOSS, data, SOURCES, weight_decay=DECAY, point_weights=own)
    answer = what_if.with_weights({"web": 0.5, "news": 3.0})
    factor = torch.tensor([{"web": 0.5, "news": 3.0}.get(source, 1.0) for source in SOURCES])
    truth = fitted(nn.Linear(5, 3).double(), F.cross_entropy, data, own * factor)
    assert (answer.outputs(data) - truth(data[0])).abs().max() < 1e-6


def test_targets_that_a_mean_ignores_count_for_nothing():
    (x, y), ignored = points(), torch.arange(N) < N // 3
    what_if = WhatIf(network(), LOSS, (x, y.masked_fill(ignored, -100)), SOURCES, weight_decay=DECAY, ridge=0.01)
    others = [source for source, gone in zip(SOURCES, ignored, strict=True) if not gone]
    plain = WhatIf(network(), LOSS, (x[~ignored], y[~ignored]), others, weight_decay=DECAY, ridge=0.01)
    found, expected = (one.without(["web", "news"]).outputs((x, y)) for one in (what_if, plain))
    assert (found - expected).abs().max() < 1e-6 * (expected - network()(x)).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("directions", ["auto", "eigen", "groups", "both", "all"])
def test_keeping_everything_changes_nothing(dtype, directions):
    data, model = points(dtype=dtype), network(dtype)
    what_if = WhatIf(model, LOSS, data, SOURCES, directions=directions, rank=10)
    for answer in (what_if.with_weights({}), what_if.only(NAMES), what_if.with_weights(dict.fromkeys(NAMES, 2.0))):
        assert torch.equal(answer.outputs(data), model(data[0]))
        assert float(answer.change(properties.mean_loss(data, LOSS))) == 0


def test_a_part_of_the_points_keeps_that_law_and_the_weights_of_groups():
    data, model = points(), network()
    groups = Groups(np.repeat([0, 1, 2, -1], [70, 30, 15, 5]), rest="drop")
    what_if = WhatIf(model, LOSS, data, groups, most_points=40)
    assert torch.equal(what_if.with_weights({}).outputs(data), what_if.models[0].features(data)[0].outputs)
    assert torch.allclose(what_if.linearized[0].refit.masses, torch.tensor([70.0, 30.0, 15.0, 5.0]).double())
    assert len(what_if.linearized[0].chosen) < N


def test_a_small_change_is_the_influence_function():
    """d/dε of outputs without a share ε of a group: J (GN + λ)⁻¹ (g_G − n_G ḡ) / n, by dense matrices."""
    data, model = points(), network()
    x, y = data
    what_if = WhatIf(model, LOSS, data, SOURCES, directions="all", weight_decay=DECAY, ridge=0.0)
    members = torch.tensor([source == "forum" for source in SOURCES])
    jacobian = torch.func.jacrev(lambda values: torch.func.functional_call(model, values, (x,)))(
        dict(model.named_parameters())
    )
    dense = torch.cat([part.flatten(2) for part in jacobian.values()], 2).detach()
    p = model(x).softmax(1).detach()
    bend = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    newton = torch.einsum("nap,nab,nbq->pq", dense, bend, dense) / N + DECAY * torch.eye(dense.shape[2])
    each = torch.einsum("ncp,nc->np", dense, p - F.one_hot(y, 3))
    rest = (each[members].sum(0) - members.sum() * each.mean(0)) / N
    influence = dense @ torch.linalg.solve(newton, rest)
    eps = 1e-5
    found = (what_if.with_weights({"forum": 1 - eps}).outputs(data) - model(x)) / eps
    assert relative_error(found, influence) < 1e-3


def test_order_of_groups_and_subsets_does_not_matter():
    data, model = points(), network()
    measure = properties.mean_loss(data, LOSS)
    kept, order = kept_rows(), np.array([3, 0, 2, 1])
    plain = Groups(np.arange(N) % 4)
    what_if = WhatIf(model, LOSS, data, plain, rank=20)
    values = what_if.subsets(kept, measure)
    assert torch.allclose(what_if.subsets(kept[::-1], measure).flip(0), values, rtol=1e-8)
    other = WhatIf(model, LOSS, data, Groups(np.argsort(order)[np.arange(N) % 4]), rank=20)
    assert torch.allclose(other.subsets(kept[:, order], measure), values, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_subsets_at_once_are_each_of_them_alone(dtype):
    data, model = points(dtype=dtype), network(dtype)
    measure = properties.mean_loss(data, LOSS)
    what_if = WhatIf(model, LOSS, data, Groups(np.arange(N) % 4), rank=20)
    together = what_if.subsets(kept_rows(), measure)
    alone = torch.stack([what_if.subsets(row[None], measure)[0] for row in kept_rows()])
    assert torch.allclose(together, alone, rtol=1e-4 if dtype == torch.float32 else 1e-9)


def test_a_group_that_every_subset_of_a_block_keeps_is_as_exact_as_points_in_no_group():
    data, model = points(), network()
    measure, labels = properties.mean_loss(data, LOSS), np.arange(N) % 4
    kept = kept_rows().copy()
    kept[:, 3] = True
    options = {"directions": "all", "weight_decay": DECAY, "ridge": 0.01}
    values = WhatIf(model, LOSS, data, Groups(labels), **options).subsets(kept, measure)
    fixed = Groups(np.where(labels == 3, -1, labels), rest="drop")
    others = kept[:, :3].any(1)
    found = WhatIf(model, LOSS, data, fixed, **options).subsets(kept[:, :3], measure)
    torch.testing.assert_close(found[others], values[others], rtol=1e-9, atol=0)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "shared", "tied", "unknown"])
def test_features_are_the_jacobian(name, by_rows):
    case = make_case(name)
    space = ParameterSpace(case.model)
    directions = torch.randn(4, space.size, dtype=torch.float64)
    found = Linearizer(space, directions, batch_size=10, by_rows=by_rows).features(IndexedData(case.data))
    output = case.model(case.x)
    assert relative_error(found.outputs, output.detach()) < 1e-12
    rows = gradient_rows(output.flatten(), space.parameters.values())
    expected = (rows @ directions.T).view(*output.shape, 4)
    assert relative_error(found.tangents, expected) < 1e-10


def test_features_on_disk_and_any_kind_of_data_give_the_same_answers():
    data, model = points(), network()
    measure = properties.mean_loss(data, LOSS)
    expected = WhatIf(model, LOSS, data, SOURCES, rank=20).subsets(kept_rows(), measure)
    loader = DataLoader(
        TensorDataset(*data), batch_size=7, collate_fn=lambda rows: list(map(torch.stack, zip(*rows, strict=True)))
    )
    for source, options in ((data, {"memory_budget": 50_000}), (loader, {})):
        found = WhatIf(model, LOSS, source, SOURCES, rank=20, **options).subsets(kept_rows(), measure)
        assert torch.allclose(found, expected, rtol=1e-7)


def test_several_models_are_averaged():
    data, first, second = points(), network(), make_other()
    measure = properties.mean_loss(data, LOSS)
    both = WhatIf(first, LOSS, data, SOURCES, models=[second], rank=20).subsets(kept_rows(), measure)
    each = [WhatIf(model, LOSS, data, SOURCES, rank=20).subsets(kept_rows(), measure) for model in (first, second)]
    assert torch.allclose(both, (each[0] + each[1]) / 2, rtol=1e-9)


def test_checkpoints_are_explained_as_the_models_they_were(tmp_path):
    data, model = points(), network()
    before = copy.deepcopy(model.state_dict())
    earlier = copy.deepcopy(model)
    for value in earlier.parameters():
        value.data *= 0.8
    torch.save(earlier.state_dict(), tmp_path / "earlier.pt")
    measure = properties.mean_loss(data, LOSS)
    states = [tmp_path / "earlier.pt", model.state_dict()]
    found = WhatIf(model, LOSS, data, SOURCES, rank=20, checkpoints=states).subsets(kept_rows(), measure)
    models = WhatIf(earlier, LOSS, data, SOURCES, rank=20, models=[model]).subsets(kept_rows(), measure)
    assert torch.allclose(found, models, rtol=1e-9)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="models and checkpoints are both given"):
        WhatIf(model, LOSS, data, SOURCES, checkpoints=states, models=[earlier])
    with pytest.raises(ValueError, match=r"checkpoints\[0\] does not fit"):
        WhatIf(model, LOSS, data, SOURCES, checkpoints=make_other().state_dict())


def make_other() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


@pytest.mark.parametrize(
    ("loss_fn", "shape", "kind"),
    [
        (F.cross_entropy, 4, SoftmaxLoss),
        (nn.CrossEntropyLoss(label_smoothing=0.2, reduction="sum"), 4, SoftmaxLoss),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 0.0]).double(), reduction="sum"), 4, SoftmaxLoss),
        (F.cross_entropy, 2, TwoClassLoss),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), None, LogisticLoss),
        (nn.MSELoss(), None, SquaredLoss),
        (nn.HuberLoss(), None, AnyLoss),
        (nn.PoissonNLLLoss(), None, AnyLoss),
    ],
)
def test_losses_are_recognised_and_their_derivatives_are_autograds(loss_fn, shape, kind):
    torch.manual_seed(0)
    outputs = torch.randn(9, *([shape] if shape else []), dtype=torch.float64)
    targets = torch.arange(9) % shape if shape else (torch.arange(9) % 2).double()
    found = convex_loss(as_example_loss(loss_fn), outputs, targets)
    assert type(found) is kind
    z = found.columns(outputs.view(9, -1))[:, :, None]
    plain = AnyLoss(loss_fn, targets, outputs.shape[1:])
    state, own = found.state(z), outputs.view(9, -1, 1)
    assert torch.allclose(found.value(z), plain.value(own))
    assert torch.allclose(found.of_columns(found.slope(state)[:, :, 0]), plain.slope(own)[:, :, 0])
    t = torch.randn_like(own)
    bent = found.of_columns(found.bend(state, found.columns(t))[:, :, 0])
    assert torch.allclose(bent, plain.bend(own, t)[:, :, 0])
    root = found.root(state)
    assert torch.allclose((root.transpose(1, 2) @ root) @ found.columns(t), found.bend(state, found.columns(t)))


WEIGHTS = torch.tensor([1.0, 2.0, 0.5])
PRECISIONS: dict[str, Callable[[], tuple[Any, Tensor]]] = {
    "class weights": lambda: (nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"), points()[1]),
    "a closure over class weights": lambda: (
        lambda z, y: F.cross_entropy(z, y, weight=WEIGHTS.to(z), reduction="none"), points()[1]
    ),
    "a closure in single precision": lambda: (
        lambda z, y: -(WEIGHTS * F.one_hot(y, 3) * F.log_softmax(z, 1).float()).sum(1).float(), points()[1]
    ),
    "poisson": lambda: (nn.PoissonNLLLoss(), points()[0][:, :3].abs().round()),
    "huber": lambda: (nn.HuberLoss(), points()[0][:, :3]),
}  # fmt: skip


@pytest.mark.parametrize("name", PRECISIONS)
def test_losses_of_single_precision_give_the_answers_of_double_precision(name):
    """Every question is asked once, those that change nothing included."""
    loss_fn, targets = PRECISIONS[name]()
    answers = []
    for dtype in (torch.float32, torch.float64):
        data = (points(dtype=dtype)[0], targets.to(dtype) if targets.is_floating_point() else targets)
        own = copy.deepcopy(loss_fn).to(dtype) if isinstance(loss_fn, nn.Module) else loss_fn
        what_if = WhatIf(network(dtype), own, data, SOURCES, weight_decay=DECAY, directions="all", ridge=0.01)
        measure = properties.mean_loss(data, own)
        found = [what_if.subsets(kept_rows(), measure), what_if.interactions(measure).matrix.ravel()]
        answers.append(np.concatenate([*found, what_if.shapley(measure, samples=2).scores]))
    assert answers[0] == pytest.approx(answers[1], abs=2e-3 * np.abs(answers[1]).max())


def test_a_loss_that_makes_targets_of_single_precision_is_computed_in_that_of_the_model():
    x, y = points(dtype=torch.float32)
    pairs = ((lambda z, t: F.huber_loss(z, t.float()), F.one_hot(y, 3)), (nn.HuberLoss(), F.one_hot(y, 3).float()))
    answers = [
        WhatIf(network(torch.float32), loss_fn, (x, t), SOURCES, weight_decay=DECAY, directions="all").subsets(
            kept_rows(), properties.mean_loss((x, t), loss_fn)
        )
        for loss_fn, t in pairs
    ]
    torch.testing.assert_close(*answers, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("loss_fn", "last", "message"),
    [
        (nn.NLLLoss(), nn.LogSoftmax(1), "NLLLoss has no curvature in the outputs.*nn.CrossEntropyLoss"),
        (nn.MultiMarginLoss(), nn.Identity(), "MultiMarginLoss cannot be differentiated twice"),
        (lambda z, y: F.l1_loss(z[:, 0], y.to(z)), nn.Identity(), "has no curvature.*nn.HuberLoss"),
        (lambda z, y: -F.cross_entropy(z, y), nn.Identity(), "is not convex in the outputs"),
        (
            lambda z, y: F.binary_cross_entropy(z, F.one_hot(y, 3).to(z)),
            nn.Sigmoid(),
            "outputs that move a little.*without its last activation",
        ),
    ],
)
def test_losses_that_bound_no_refit_are_refused(loss_fn, last, message):
    with pytest.raises(ValueError, match=message):
        WhatIf(nn.Sequential(network(), last), loss_fn, points(), SOURCES, weight_decay=DECAY)


def test_any_property_of_outputs_is_computed_from_them_and_others_to_first_order():
    data, model = points(), network()
    what_if = WhatIf(model, LOSS, data, SOURCES, directions="all")
    answer = what_if.without("web")
    outputs = answer.outputs(data)
    accuracy = properties.of_outputs(data, lambda z, y: (z.argmax(1) == y).double().mean())
    assert float(answer.value(accuracy)) == float((outputs.argmax(1) == data[1]).double().mean())
    each = properties.point_losses(data, LOSS)
    assert torch.allclose(answer.value(each), F.cross_entropy(outputs, data[1], reduction="none"))
    gap = properties.contrast((data[0][:50], data[1][:50]), (data[0][50:], data[1][50:]), LOSS)
    losses = answer.value(each)
    assert torch.allclose(answer.value(gap), losses[:50].mean() - losses[50:].mean())
    assert not answer.is_linearised(gap)

    def size(model: nn.Module) -> Tensor:
        return sum(value.sum() for value in model.parameters())  # type: ignore[return-value]

    assert answer.is_linearised(size)
    moved = answer._coefficients[0][0].sum()
    assert torch.allclose(answer.change(size), moved)


def test_verify_finds_the_slope_and_nothing_left_out_stays_as_it_is():
    """Of a linear model predictions are exact; retrainings with three times the change need a slope of three."""
    data = points()
    torch.manual_seed(0)
    model = fitted(nn.Linear(5, 3).double(), F.cross_entropy, data)
    groups = Groups(np.arange(N) % 8)
    what_if = WhatIf(model, LOSS, data, groups, weight_decay=DECAY)
    measure = properties.mean_loss(data, LOSS)
    base = float(measure(model))
    exact = WhatIf(model, LOSS, data, groups, weight_decay=DECAY)

    def retrain(subsets: Any) -> np.ndarray:
        kept = np.array([[np.isin(members, subset).all() for members in groups] for subset in subsets])
        return base + 3 * (exact.subsets(kept, measure).numpy()[:, None] - base)

    assert "Not calibrated" in what_if.explain()
    found = what_if.verify(retrain, measure, 8)
    assert found.calibration.slope == pytest.approx(3, rel=1e-6)
    assert found.calibration.level == pytest.approx(0, abs=1e-6)
    assert found.calibration.error < 1e-6
    answer = what_if.without([0, 3])
    assert float(answer.change(measure)) == pytest.approx(3 * float(exact.without([0, 3]).change(measure)), rel=1e-6)
    assert answer.error(measure) == found.calibration.error
    low, high = answer.interval(measure) or (0.0, 0.0)
    assert low <= float(answer.value(measure)) <= high
    assert exact.without([0, 3]).interval(measure) is None
    again = properties.mean_loss(data, LOSS)
    assert float(answer.value(again)) == float(answer.value(measure)), "made again it is the same property"
    assert answer.interval(properties.mean_loss((data[0][:9], data[1][:9]), LOSS)) is None
    assert float(what_if.with_weights({}).change(measure)) == 0
    with pytest.raises(ValueError, match="at least 4"):
        what_if.verify(retrain, measure, 3)


def test_removed_is_the_share_of_points_left_out(asked):
    weights = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0], [0.5, 3.0, 1.0, 1.0], [2.0, 2.0, 1.0, 1.0]])
    assert asked.removed(weights).tolist() == [0, 0.25, 0.125, 0]


def line(predicted: np.ndarray, removed: np.ndarray, real: np.ndarray) -> calibration.Line:
    return calibration._likeliest({1.0: predicted}, removed, real)[1]


def test_a_slope_is_drawn_towards_one_by_as_much_as_the_retrainings_leave_it_open():
    predicted, removed = np.linspace(0.01, 0.08, 8), np.full(8, 0.5)
    real = 2 * predicted
    assert line(predicted, removed, real).slope == pytest.approx(2, rel=1e-6)
    noise = np.random.default_rng(0).standard_normal(8)
    slopes = [line(predicted, removed, real + size * noise).slope for size in (0.002, 0.02, 10.0)]
    plain = [np.polyfit(predicted, real + size * noise, 1)[0] for size in (0.002, 0.02, 10.0)]
    for shrunk, slope in zip(slopes[1:], plain[1:], strict=True):
        assert min(1, slope) <= shrunk <= max(1, slope)
    assert slopes[0] == pytest.approx(plain[0], abs=0.15)
    assert slopes[2] == pytest.approx(1, abs=0.2), "noise alone leaves predictions as they are"
    assert line(np.zeros(8), removed, real).slope == 1, "predictions that tell nothing apart"
    assert line(-predicted, removed, real).slope == 0, "never turned around"


def test_a_level_and_what_goes_with_the_share_left_out_are_found_beside_the_slope():
    """Drawn towards zero, and by less the more retrainings there are."""
    draw = np.random.default_rng(0)
    predicted, removed = draw.uniform(0, 0.1, 200), draw.uniform(0.2, 0.6, 200)
    real = 0.9 * predicted + 0.05 + 0.2 * (removed - removed.mean()) + 0.01 * draw.standard_normal(200)
    found = line(predicted, removed, real)
    middle = found.rise(0.0, removed.mean())
    assert (found.slope, middle, found.per_share) == pytest.approx((0.9, 0.05, 0.2), rel=0.15)
    assert found.rise(0.0, np.float64(0.9)) == pytest.approx(found.rise(0.0, removed.max()) * 0.9 / removed.max())
    assert found.rise(0.0, np.float64(0.0)) == 0
    few = line(predicted[:6], removed[:6], real[:6])
    assert 0 < few.rise(0.0, removed[:6].mean()) < 0.05 + 0.01
    assert line(predicted, np.full(200, 0.5), real).per_share == 0
    assert line(predicted, np.zeros(200), real).per_share == 0, "weights above 1 leave nothing out"


def test_shares_that_differ_by_a_few_points_count_as_the_same():
    """Halves have the same number of points but for the last group; errors are not to be read as their effect."""
    draw = np.random.default_rng(0)
    predicted, errors = draw.uniform(0, 0.3, 8), 0.05 * draw.standard_normal(8)
    real, same = 1.2 * predicted + errors, np.full(8, 0.5)
    nearly = same + 1e-3 * (errors - errors.mean()) / errors.std()
    found = line(predicted, nearly, real).rise(predicted, nearly)
    np.testing.assert_allclose(found, line(predicted, same, real).rise(predicted, same), atol=1e-3)


@pytest.fixture
def bent() -> tuple[WhatIf, WhatIf, properties.Property, Groups]:
    """A small network asked about groups that lie apart, twice, and its loss."""
    data = points()
    model = descend(network(), F.cross_entropy, data, 100, 0.02, weight_decay=DECAY)
    groups = Groups(np.argsort(np.argsort(data[0][:, 0].numpy())) * 8 // N)
    one, other = (WhatIf(model.eval(), LOSS, data, groups, weight_decay=DECAY, ridge=0.01) for _ in range(2))
    return one, other, properties.mean_loss(data, LOSS), groups


def as_refits(exact: WhatIf, measure: properties.Property, groups: Groups, factor: float) -> Callable[..., np.ndarray]:
    """Retrainings that are refits with a factor of the ridge."""

    def retrain(subsets: Any) -> np.ndarray:
        kept = [[float(np.isin(members, subset).all()) for members in groups] for subset in subsets]
        return exact.values(measure, torch.tensor(kept, dtype=torch.float64), factor)[0].numpy()

    return retrain


def test_the_ridge_under_which_retrainings_are_most_likely_is_taken(bent):
    """Retrainings that are the refits of another ridge bring that ridge back, for all models; answers follow."""
    what_if, exact, measure, groups = bent
    before = what_if.linearized[0].ridge
    asked = what_if.without([0, 3])
    found = what_if.verify(as_refits(exact, measure, groups, 8), measure, 8)
    assert found.ridge == (pytest.approx(8 * before),)
    assert found.calibration.slope == pytest.approx(1, abs=0.02)
    fresh = float(what_if.without([0, 3]).value(measure))
    assert float(asked.value(measure)) == pytest.approx(fresh, rel=1e-9), "an answer from before is as those from after"
    weights = torch.tensor([[0.0, 1, 1, 0, 1, 1, 1, 1]], dtype=torch.float64)
    assert fresh == pytest.approx(float(exact.values(measure, weights, 8)), rel=1e-2)
    assert float(what_if.with_weights({}).change(measure)) == 0


def test_a_level_is_shared_out_by_the_points_left_out_and_not_blamed_on_pairs(bent):
    """Found where two fifths and more were left out, it goes with the share below that: pairs have no part in it."""
    what_if, exact, measure, _ = bent
    slope, level = 1.5, 0.3
    found = calibration.Calibration(slope, level, 0.0, 0.4, 0.6, error=0.1, retrainings=8)
    what_if.calibrations[what_if.identity(measure)] = (measure, found)
    base, nothing = float(exact.with_weights({}).value(measure)), what_if.with_weights({})
    assert float(nothing.value(measure)) == base
    assert float(nothing.change(measure)) == 0
    alone, plain = what_if.leave_group_out(measure), exact.leave_group_out(measure)
    assert torch.allclose(alone.scores, slope * plain.scores + level / 0.4 / 8)
    half = [0, 1, 2, 3]
    assert float(what_if.without(half).change(measure)) == pytest.approx(
        slope * float(exact.without(half).change(measure)) + level
    )
    pairs = what_if.interactions(measure)
    np.testing.assert_allclose(pairs.matrix, slope * exact.interactions(measure).matrix, atol=1e-9)


def test_a_second_property_keeps_the_ridge_the_first_was_calibrated_with(bent):
    what_if, exact, measure, groups = bent
    ridge = what_if.linearized[0].ridge
    what_if.verify(as_refits(exact, measure, groups, 4), measure, 8)
    value = float(what_if.without([1]).value(measure))
    x, y = points()
    other = properties.mean_loss((x[:60], y[:60]), LOSS)
    assert what_if.verify(as_refits(exact, other, groups, 1), other, 8).ridge == (pytest.approx(4 * ridge),)
    assert float(what_if.without([1]).value(measure)) == value


@pytest.mark.parametrize("shares", ["the same", "of all sizes"])
def test_intervals_of_a_calibration_hold_what_is_retrained(shares: str):
    """Over 200 calibrations by eight retrainings a 95 % interval holds 92 to 99 % of the next ones."""
    draw, held = np.random.default_rng(0), []
    for _ in range(200):
        removed = np.full(9, 0.5) if shares == "the same" else draw.uniform(0.01, 0.1, 9)
        predicted = removed * draw.uniform(0, 0.2, 9)
        real = 1.5 * predicted + 0.05 * removed + 0.003 * draw.standard_normal(9)
        path = {factor: predicted[:8] * factor**-0.5 for factor in calibration.RIDGES.tolist()}
        factor, fitted_line = calibration._likeliest(path, removed[:8], real[:8])
        error = np.sqrt(np.mean((calibration._from_others(path, removed[:8], real[:8]) - real[:8]) ** 2))
        found = calibration.Calibration(**vars(fitted_line), error=error, retrainings=8)
        held.append(abs(found.rise(predicted[8] * factor**-0.5, removed[8]) - real[8]) <= found.width())
    assert 0.92 <= np.mean(held) <= 0.99


def test_subsets_to_retrain_reach_from_the_lowest_prediction_to_the_highest():
    data, model = points(), network()
    measure = properties.mean_loss(data, LOSS)
    what_if = WhatIf(model, LOSS, data, Groups(np.arange(N) % 10), rank=20)
    among = np.random.default_rng(0).random((40, 10)) < 0.6
    among[:, 0] = True
    predicted = what_if.subsets(among, measure)
    chosen = what_if.to_retrain(measure, 6, among=among)
    assert chosen.shape == (6, 10)
    assert len(np.unique(chosen, axis=0)) == 6
    assert all((among == row).all(1).any() for row in chosen)
    found = what_if.subsets(chosen, measure)
    assert float(found.min()) == pytest.approx(float(predicted.min()), rel=1e-6)
    assert float(found.max()) == pytest.approx(float(predicted.max()), rel=1e-6)


def test_a_ridge_without_a_recipe_is_raised_until_the_model_itself_follows():
    """A small regression network, only one source kept: what comes true of the promise is far below zero at first."""
    x = points()[0]
    data = (x, x[:, :1].sin() * 2 + x[:, 1:2] * x[:, 2:3])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    descend(model, F.mse_loss, data, 200, 0.02, weight_decay=1e-3)
    groups = np.argsort(np.argsort(x[:, 0].numpy())) * 6 // N
    what_if = WhatIf(model.eval(), nn.MSELoss(), data, groups, weight_decay=1e-3)
    first = what_if.linearized[0]
    guess = linearized._RELATIVE_RIDGE * float(torch.linalg.eigvalsh(first.refit._curvature.sum(0) / N)[-1])
    assert trust.kept_share(first, guess) < trust.LEAST <= trust.kept_share(first, first.ridge)
    assert trust.kept_share(first, 1e6) == pytest.approx(1, abs=1e-3), "small steps come true"
    assert "come true" in what_if.explain()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refit, "MOST_STEPS", 0)  # no refit ends
        assert trust.kept_share(first, guess) == -np.inf
    worst = float(what_if.only(0).value(properties.mean_loss(data, nn.MSELoss())))
    assert worst < 10 * float(data[1].square().mean()), "of the order of the targets"


def test_a_recipe_gives_the_ridge_in_the_metric_of_its_optimizer():
    data, model = points(), network()
    recipe = Recipe(epochs=3, learning_rate=0.01, batch_size=16, weight_decay=DECAY)
    with_recipe, longer = (
        WhatIf(model, LOSS, data, SOURCES, directions="all", recipe=replace(recipe, epochs=epochs)).linearized[0]
        for epochs in (3, 30)
    )
    assert with_recipe.ridge / longer.ridge == pytest.approx(10, rel=0.05)
    parts = with_recipe.penalty().ridge.diagonal()
    assert float((parts - parts.mean()).abs().max()) > 0  # Adam's steps differ from parameter to parameter
    assert "Adam" in with_recipe.explain()
    rates = TrainingSteps([0.1] * 20, weight_decay=DECAY)
    plain = WhatIf(model, LOSS, data, SOURCES, directions="all", recipe=rates).linearized[0]
    assert torch.allclose(plain.penalty().ridge, torch.eye(len(plain.metric), dtype=torch.float64) / 2)
    assert with_recipe.penalty().decay == plain.penalty().decay == DECAY


def least(objective: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """Where a smooth convex function of numbers `[size]` is least."""
    d = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    minimise([d], lambda: objective(d))
    return d.detach()


def linear_in_all(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Parameters in one row `[p]`, and the outputs' slopes along them `[n, C, p]`."""
    jacobian = torch.func.jacrev(lambda values: torch.func.functional_call(model, values, (x,)))(
        dict(model.named_parameters())
    )
    rows = torch.cat([part.flatten(2) for part in jacobian.values()], 2).detach()
    return torch.cat([value.detach().reshape(-1) for value in model.parameters()]), rows


def test_changes_of_a_model_that_settles_are_those_from_there():
    """Settled where all points would put it, then refitted from there, both by plain autograd."""
    (x, y), model = points(), network()
    recipe = TrainingSteps([0.1] * 100, weight_decay=DECAY)
    what_if = WhatIf(model, LOSS, (x, y), SOURCES, directions="all", recipe=recipe, settle=True)
    theta, rows = linear_in_all(model, x)
    ridge, outputs = 0.1, model(x).detach()

    def loss(d: Tensor, kept: Any = slice(None)) -> Tensor:
        return LOSS((outputs + rows @ d)[kept], y[kept])

    def decay(d: Tensor) -> Tensor:
        return DECAY / 2 * (theta + d).square().sum()

    settled = least(lambda d: loss(d) + linearized.SETTLED * ridge / 2 * d.square().sum() + decay(d), len(theta))
    pull = torch.func.grad(loss)(settled)
    kept = torch.tensor([source in ("web", "forum") for source in SOURCES])
    moved = least(lambda d: loss(d, kept) - pull @ d + (ridge + DECAY) / 2 * (d - settled).square().sum(), len(theta))
    measure = properties.mean_loss((x, y), LOSS)
    answer, own = what_if.only(["web", "forum"]), float(measure(model).detach())
    assert float(answer.value(measure)) - own == pytest.approx(float(loss(moved) - loss(settled)), rel=1e-5)
    assert relative_error(answer.outputs((x, y)) - outputs, rows @ (moved - settled)) < 1e-5
    nothing = what_if.with_weights({})
    assert torch.equal(nothing.outputs((x, y)), outputs)
    assert float(nothing.value(measure)) == own
    assert "settled" in what_if.explain()


def test_where_the_last_steps_left_a_model_hardly_matters_once_it_has_settled():
    """A converged model, moved along the direction of highest curvature, as one batch more would have done."""
    (x, y), model = points(), network()
    model = fitted(model, F.cross_entropy, (x, y))
    measure = properties.mean_loss((x, y), LOSS)
    _, rows = linear_in_all(model, x)
    chances = model(x).detach().softmax(1)
    bent = (torch.diag_embed(chances) - chances[:, :, None] * chances[:, None]) @ rows
    direction = torch.linalg.eigh(torch.einsum("ncp,ncq->pq", rows, bent))[1][:, -1]
    other = copy.deepcopy(model)
    step = 0.3 * direction
    for value in other.parameters():
        value.data += step[: value.numel()].view_as(value)
        step = step[value.numel() :]

    def apart(**options: Any) -> float:
        one, two = (
            WhatIf(at, LOSS, (x, y), SOURCES, directions="all", **options).leave_group_out(measure).scores
            for at in (model, other)
        )
        return float((one - two).norm() / one.norm())

    steps = TrainingSteps([0.1] * 10_000, weight_decay=DECAY)
    assert apart(recipe=steps, settle=True) < 0.3 * apart(recipe=steps)


def test_answers_of_copies_nearby_are_changes_added_to_the_models_own_values():
    """Each copy settles and is refitted; its change counts, as it would in a what-if of its own."""
    (x, y), model = points(), network()
    recipe = TrainingSteps([0.1] * 100, weight_decay=DECAY)
    what_if = WhatIf(model, LOSS, (x, y), SOURCES, directions="all", recipe=recipe, nearby=2)
    measure, shift = properties.mean_loss((x, y), LOSS), ["web", "forum"]
    own = float(measure(model).detach())
    copies = [linear.provider.model for linear in what_if.linearized]
    assert copies[0] is model
    alone = [
        WhatIf(one, LOSS, (x, y), SOURCES, directions="all", recipe=recipe, settle=one is not model) for one in copies
    ]
    changes = [float(one.only(shift).change(measure)) for one in alone]
    assert len(set(changes)) == 3
    answer = what_if.only(shift)
    assert float(answer.value(measure)) == pytest.approx(own + np.mean(changes), rel=1e-9)
    assert float(answer.change(measure)) == pytest.approx(np.mean(changes), rel=1e-9)
    assert float(what_if.with_weights({}).value(measure)) == pytest.approx(own, rel=1e-14)
    assert float(what_if.with_weights({}).change(measure)) == 0
    assert torch.equal(what_if.with_weights({}).outputs((x, y)), model(x).detach())
    kept = np.array([[name in shift for name in what_if.names]])
    assert what_if.values(measure, what_if.checked_weights(kept)).shape == (1, 1), "copies are no models of their own"
    assert float(what_if.subsets(kept, measure)) == pytest.approx(own + np.mean(changes), rel=1e-9)

    def size(one: nn.Module) -> Tensor:
        return torch.stack([value.square().sum() for value in one.parameters()]).sum()

    assert float(what_if.with_weights({}).value(size)) == pytest.approx(float(size(model).detach()), rel=1e-9)
    assert "2 copies nearby" in what_if.explain()


def test_copies_of_a_linear_model_are_left_out_because_its_refits_are_exact():
    recipe = TrainingSteps([0.1] * 100, weight_decay=DECAY)
    what_if = WhatIf(nn.Linear(5, 3).double(), LOSS, points(), SOURCES, recipe=recipe, nearby=2)
    assert len(what_if.linearized) == 1


@pytest.mark.parametrize("kind", ["classes", "numbers", "checkpoint"])
def test_with_a_start_refits_begin_at_its_outputs_and_answers_are_what_is_lost_since(kind):
    """d_S − d_all, each the optimum of the linearised kept loss with the ridge around the start, by plain autograd.

    Features are those of a checkpoint, if there is one; what changes are the outputs of the model as it is.
    """
    (x, y), model, before = points(), network(), network()
    loss_fn: Any = nn.MSELoss() if kind == "numbers" else LOSS
    y = x[:, :3].sin() if kind == "numbers" else y
    for value in before.parameters():
        value.data.mul_(-0.3).add_(0.1)
    recipe = TrainingSteps([0.1] * 100, weight_decay=DECAY)
    early = copy.deepcopy(model)
    if kind == "checkpoint":
        for value in early.parameters():
            value.data.mul_(0.5)
    checkpoints = [early.state_dict()] if kind == "checkpoint" else None
    what_if = WhatIf(
        model, loss_fn, (x, y), SOURCES, directions="all", recipe=recipe, start=before, checkpoints=checkpoints
    )
    _, dense = linear_in_all(early, x)
    then, _ = linear_in_all(before, x)

    def moved(kept: Tensor) -> Tensor:
        harder = linearized.FROM_START * N / int(kept.sum()) / 10  # 1 / Σ η_t, of fewer steps
        return least(
            lambda d: (
                loss_fn((before(x).detach() + dense @ d)[kept], y[kept])
                + harder / 2 * d.square().sum()
                + DECAY / 2 * (then + d).square().sum()
            ),
            len(then),
        )

    kept = torch.tensor([source in ("web", "forum") for source in SOURCES])
    expected = dense @ (moved(kept) - moved(torch.ones_like(kept)))
    found = what_if.only(["web", "forum"]).outputs((x, y)) - model(x)
    assert relative_error(found, expected) < 1e-5
    assert torch.equal(what_if.with_weights({}).outputs((x, y)), model(x)), "nothing changed"
    measure = properties.mean_loss((x, y), loss_fn)
    alone = torch.stack([what_if.subsets(row[None], measure)[0] for row in kept_rows()])
    assert torch.allclose(what_if.subsets(kept_rows(), measure), alone, rtol=1e-9)
    assert "where the training started" in what_if.explain()

    def size(at: nn.Module) -> Tensor:
        return torch.stack([value.square().sum() for value in at.parameters()]).sum()

    assert float(what_if.with_weights({}).value(size)) == pytest.approx(float(size(model)))


def test_of_a_linear_model_neither_a_start_nor_checkpoints_change_answers():
    data, model, before = points(), nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
    recipe = TrainingSteps([0.1] * 100, weight_decay=DECAY)
    plain, whole = (
        WhatIf(model, LOSS, data, SOURCES, recipe=recipe, directions="all", **options).without("web").outputs(data)
        for options in ({}, {"start": before, "checkpoints": [before.state_dict()]})
    )
    assert relative_error(whole, plain) < 1e-9


def test_directions_hold_what_learned_groups_have_taught():
    """Of points that are learned the gradient is nearly zero; what would take them back is among the directions."""
    data, model = points(), network()
    what_if = WhatIf(model, LOSS, data, Groups(np.arange(N) % 4), directions="groups", rank=30)
    rows = what_if.linearized[0].directions.rows
    for group in range(4):
        model.zero_grad()
        members = torch.arange(N) % 4 == group
        outputs = model(data[0][members])
        taught = 1 / 3 - F.one_hot(data[1][members], 3).double()
        (outputs * taught).sum().backward()
        row = torch.cat([value.grad.flatten() for value in model.parameters()])
        assert (row - (rows @ row) @ rows).norm() < 1e-6 * row.norm()
    model.zero_grad(set_to_none=True)


def test_leave_group_out_is_each_group_alone():
    data, model = points(), network()
    measure = properties.mean_loss(data, LOSS)
    what_if = WhatIf(model, LOSS, data, SOURCES, rank=20)
    found = what_if.leave_group_out(measure)
    for name, score in zip(what_if.names, found.scores, strict=True):
        assert float(score) == pytest.approx(float(what_if.without(name).change(measure)), rel=1e-6)
    assert found.scores.shape == (4,)
    assert what_if.leave_group_out(properties.point_losses(data, LOSS)).scores.shape == (N, 4)


def redundant() -> tuple[tuple[Tensor, Tensor], list[str], nn.Module]:
    """Sources a and b tell the same, c is wrong, d is about the rest."""
    generator = torch.Generator().manual_seed(2)
    half = N // 4
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    x[: 2 * half, 2:], x[3 * half :, :2] = 0, 0
    truth = (x[:, 0] + x[:, 2] > 0).long()
    y = torch.where((torch.arange(N) // half) == 2, 1 - truth, truth)
    torch.manual_seed(0)
    return (x, y), [name for name in "abcd" for _ in range(half)], fitted(nn.Linear(4, 2).double(), LOSS, (x, y))


def test_search_drops_what_harms_and_interactions_find_what_is_redundant():
    data, sources, model = redundant()
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(200, 4, generator=generator, dtype=torch.float64)
    test = (x, (x[:, 0] + x[:, 2] > 0).long())
    measure = properties.mean_loss(test, LOSS)
    what_if = WhatIf(model, LOSS, data, sources, weight_decay=DECAY)
    found = what_if.search(measure, remove=1, holdout=measure)
    assert found.removed == ("c",)
    assert found.values[1] < found.values[0]
    assert found.holdout == pytest.approx(found.values)
    assert found.value == pytest.approx(float(what_if.without("c").value(measure)), rel=1e-6)
    assert what_if.search(measure, budget=30).removed == ("c",)
    pairs = what_if.interactions(measure, ["a", "b", "d"])
    assert set(pairs.strongest(1)[0][:2]) == {"a", "b"}
    assert [line.split()[0] for line in repr(found).splitlines()[:3]] == ["left", "nothing", "c"]
    assert repr(pairs).splitlines()[3].split()[:2] == ["a", "b"]
    joint, alone = what_if.without(["a", "b"]).change(measure), pairs.alone
    assert pairs.matrix[0, 1] == pytest.approx(float(joint) - alone[0] - alone[1], rel=1e-6)


@pytest.mark.parametrize("kind", ["shapley", "banzhaf"])
def test_values_of_groups_have_the_sign_of_scores(kind):
    data, sources, model = redundant()
    what_if = WhatIf(model, LOSS, data, sources, weight_decay=DECAY)
    x, y = data
    clean = torch.tensor([source != "c" for source in sources])
    measure = properties.mean_loss((x[clean], y[clean]), LOSS)
    found = what_if.shapley(measure, samples=12, kind=kind)
    assert found.scores[2] < 0 < found.scores[3]
    assert (found.stderr >= 0).all()
    assert "atoms=" in found.note
    named = found.attribution()
    assert float(named["c"]) == pytest.approx(found.scores[2])
    assert named.effects()[2] == "hurts"
    assert repr(found) == repr(named)
    assert not what_if.shapley(measure, samples=2, kind=kind, atoms=15).note
    if kind == "shapley":  # they share out the whole change from no data to all of it
        assert found.scores.sum() == pytest.approx(np.log(2) - float(measure(model)), rel=1e-6)


def test_answers_say_that_they_are_not_calibrated_until_they_are():
    data, model = points(), network()
    measure = properties.mean_loss(data, LOSS)
    what_if = WhatIf(model, LOSS, data, np.arange(N) % 6, ridge=0.01)

    def said() -> list[bool]:
        answers = what_if.search(measure, remove=1), what_if.interactions(measure), what_if.leave_group_out(measure)
        return ["Not calibrated" in repr(answer) for answer in answers]

    assert all(said())
    what_if.verify(lambda subsets: [[0.9 + 0.001 * len(points)] for points in subsets], measure)
    assert not any(said())
    exact = WhatIf(nn.Linear(5, 3).double(), LOSS, data, np.arange(N) % 6, weight_decay=DECAY)
    assert "Not calibrated" not in repr(exact.leave_group_out(measure))


@pytest.mark.parametrize("average", ["macro", "binary"])
def test_accuracy_and_f1_are_asked_of_counterfactual_predictions(average):
    data, sources, model = redundant()
    what_if = WhatIf(model, LOSS, data, sources, weight_decay=DECAY)
    answer = what_if.without("c")
    predicted, y = answer.outputs(data).argmax(1).numpy(), data[1].numpy()
    assert float(answer.value(properties.accuracy(data))) == pytest.approx((predicted == y).mean())
    expected = f1_score(y, predicted, average=average)
    assert float(answer.value(properties.f1(data, average=average))) == pytest.approx(expected)


def test_pieces_make_shapley_values_indifferent_to_splitting_a_group():
    data, model = points(), network()
    measure = properties.mean_loss(data, LOSS)
    whole, split = np.arange(N) // 60, np.repeat([0, 1, 2], [30, 30, 60])
    first, second = (
        WhatIf(model, LOSS, data, Groups(labels), ridge=0.01).shapley(measure, samples=4, atoms=30).scores
        for labels in (whole, split)
    )
    assert first == pytest.approx([second[:2].sum(), second[2]], rel=1e-5)


def test_bad_input_is_named():
    data, model = points(), network()
    what_if = WhatIf(model, LOSS, data, SOURCES, rank=10)
    measure = properties.mean_loss(data, LOSS)
    with pytest.raises(ValueError, match=r"no group 'forums'; did you mean 'forum'"):
        what_if.without("forums")
    with pytest.raises(ValueError, match="leave nothing to train on"):
        what_if.without(NAMES)
    with pytest.raises(ValueError, match="a weight is a finite number, 0 or more"):
        what_if.with_weights({"web": -1.0})
    with pytest.raises(ValueError, match=r"kept has shape \[2, 3\]"):
        what_if.subsets(np.ones((2, 3)), measure)
    with pytest.raises(ValueError, match="is not convex in the outputs"):
        WhatIf(model, lambda z, y: z.sin().sum(), data, SOURCES)
    with pytest.raises(TypeError, match="does not say how the loss depends on the outputs"):
        WhatIf(model, BatchLoss(lambda model, batch: model(batch[0]).sum(1)), data, SOURCES)
    with pytest.raises(ValueError, match="of_outputs"):
        what_if.without("web").value(lambda model: (model(data[0]).argmax(1) == data[1]).double().mean())
    with pytest.raises(ValueError, match="of_outputs"):
        what_if.shapley(lambda model: model[0].weight.sum())
    with pytest.raises(ValueError, match="directions='some'"):
        WhatIf(model, LOSS, data, SOURCES, directions="some")
    with pytest.raises(ValueError, match="pass one of them"):
        WhatIf(model, LOSS, data, SOURCES, weight_decay=0.1, recipe=Recipe(1, 0.1, 8))
    with pytest.raises(ValueError, match="point_weights has shape"):
        WhatIf(model, LOSS, data, SOURCES, point_weights=torch.ones(3))
    for options in ({}, {"remove": 4}, {"remove": 1, "goal": "best"}):
        with pytest.raises(ValueError, match=r"pass remove|remove=4|goal='best'"):
            what_if.search(measure, **options)
    broken = (data[0].clone(), data[1])
    broken[0][7] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite outputs for 1 of 120 examples, first 7"):
        WhatIf(model, LOSS, broken, SOURCES)
    with pytest.raises(ValueError, match="NaN or infinite outputs"):
        what_if.without("web").value(properties.mean_loss(broken, LOSS))


BAD_QUESTIONS: dict[str, tuple[Callable[[WhatIf, Any, Any], Any], str]] = {
    "weights without names": (lambda w, m, e: w.with_weights(["web"]), "weights is a list: pass a dict"),
    "a weight that is a word": (lambda w, m, e: w.with_weights({"web": "half"}), r"weights\['web'\]='half'"),
    "no subset": (lambda w, m, e: w.subsets(np.ones((0, 4)), m), r"kept has shape \[0, 4\]"),
    "names as subsets": (lambda w, m, e: w.subsets([["web"]], m), "kept holds what is no number"),
    "no property": (lambda w, m, e: w.without("web").value(None), "property is a NoneType"),
    "data as property": (lambda w, m, e: w.subsets(np.eye(4), points()), "property is a tuple"),
    "many numbers, search": (lambda w, m, e: w.search(e, remove=1), "gives 120 numbers"),
    "many numbers, held out": (lambda w, m, e: w.search(m, remove=1, holdout=e), "gives 120 numbers"),
    "many numbers, shapley": (lambda w, m, e: w.shapley(e, samples=2), "gives 120 numbers"),
    "many numbers, pairs": (lambda w, m, e: w.interactions(e), "gives 120 numbers"),
    "many numbers, verify": (lambda w, m, e: w.verify(len, e), "gives 120 numbers"),
    "half a group": (lambda w, m, e: w.search(m, remove=1.5), "remove=1.5: pass a whole number"),
    "a budget below all groups": (lambda w, m, e: w.search(m, budget=29), "the smallest group has 30"),
    "half a sample": (lambda w, m, e: w.shapley(m, samples=2.5), "samples=2.5"),
    "nothing to retrain with": (lambda w, m, e: w.verify([1.0], m), "retrain is a list"),
    "one value too many": (
        lambda w, m, e: w.verify(lambda s: np.zeros(len(s) + 1), m, 4),
        r"shape \[5\]: return \[4, ",
    ),
    "no values": (lambda w, m, e: w.verify(lambda s: None, m, 4), r"shape \[\]"),
    "values that are not finite": (lambda w, m, e: w.verify(lambda s: np.full(4, np.nan), m, 4), "NaN or infinite"),
    "half a retraining": (lambda w, m, e: w.verify(len, m, np.full((4, 4), 0.5)), "other than 0 and 1"),
    "few retrainings": (lambda w, m, e: w.verify(len, m, 3), "subsets=3: pass a whole number, at least 4"),
}


@pytest.fixture(scope="module")
def asked() -> WhatIf:
    return WhatIf(network(), LOSS, points(), SOURCES, rank=10)


@pytest.mark.parametrize("name", BAD_QUESTIONS)
def test_bad_questions_are_named(asked, name):
    ask, message = BAD_QUESTIONS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        ask(asked, properties.mean_loss(points(), LOSS), properties.point_losses(points(), LOSS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2.5}, "rank=2.5: pass a whole number"),
        ({"weight_decay": "1e-3"}, "weight_decay='1e-3': pass a number"),
        ({"ridge": float("inf")}, "ridge=inf"),
        ({"folder": "no/such/folder"}, "folder='no/such/folder' is no folder"),
        ({"recipe": {"lr": 0.1}}, "recipe is a dict"),
        ({"start": network()}, "start is given without a recipe"),
        ({"start": nn.Linear(5, 3), "recipe": Recipe(1, 0.1, 8)}, "start has no parameter 0.weight"),
        ({"settle": True}, "settle=True needs a recipe"),
        ({"settle": True, "start": network(), "recipe": Recipe(1, 0.1, 8)}, "settle and start are both given"),
        ({"nearby": 2}, "nearby=2 needs a recipe"),
        ({"nearby": 2, "start": network(), "recipe": Recipe(1, 0.1, 8)}, "nearby and start are both given"),
        ({"nearby": -1}, "nearby=-1: pass a whole number, at least 0"),
        ({"models": network()}, "models is a Sequential: pass a list"),
        ({"models": [nn.Linear(5, 4).double()]}, r"models\[0\] gives outputs \[4\] for a point, the model \[3\]"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        WhatIf(network(), LOSS, points(), SOURCES, **{"rank": 10, **options})


def test_groups_whose_points_weigh_nothing_leave_nothing():
    own = [0.0 if source == "web" else 1.0 for source in SOURCES]
    what_if = WhatIf(network(), LOSS, points(), SOURCES, point_weights=own, rank=10)
    with pytest.raises(ValueError, match="leave nothing to train on"):
        what_if.only("web")


def test_a_singular_small_problem_is_named():
    """A loss that rises without bound in one direction only, and no weight decay: no optimum."""
    data = (torch.ones(4, 1).double(), torch.tensor([1.0, 1.0, 1.0, 0.0]).double())
    model = nn.Linear(1, 1, bias=False).double()

    def falling(z: Tensor, y: Tensor) -> Tensor:
        return ((1 - y) * z[:, 0].exp() - z[:, 0]).sum()

    with torch.no_grad():
        model.weight.fill_(float(np.log(4)))
    what_if = WhatIf(model, falling, data, [0, 0, 0, 1], ridge=0.0)
    with pytest.raises(ValueError, match="the small problem is singular"):
        what_if.without(1)


def test_directions_are_looked_for_within_the_memory_budget(monkeypatch):
    """Of a large model fewer eigenvectors, of many groups random bundles: no more rows than there is room for."""
    formed, made = [], directions.pulled_back

    def counted(*given: Any) -> Tensor:
        formed.append(len(rows := made(*given)))
        return rows

    monkeypatch.setattr(directions, "pulled_back", counted)
    model = network()
    size = sum(value.numel() for value in model.parameters()) * 8
    groups = np.arange(N) // 2
    roomy = WhatIf(model, LOSS, points(), groups, rank=20)
    assert formed == [10 * directions.OVERSAMPLED, 40, 40]  # 60 groups in two bundles for each direction
    formed.clear()
    narrow = WhatIf(model, LOSS, points(), groups, rank=20, memory_budget=30 * size)
    assert formed == [30, 10, 10]
    assert "memory_budget" in narrow.explain()
    assert "memory_budget" not in roomy.explain()


def test_bundles_of_groups_are_signed_sums_of_their_gradients():
    groups = Groups(np.repeat([0, 1, 2, 3, 4, -1], 2), rest="drop")
    found, signs = directions.bundled(groups, 2, seed=0)
    assert len(found) == 2
    for group in range(5):
        members = groups.labels == group
        assert len(set(found.labels[members])) == 1
        assert len(set(signs[members].tolist())) == 1
        assert abs(float(signs[members][0])) == 1
    assert (found.labels[-2:] < 0).all()
    same, ones = directions.bundled(groups, 5, seed=0)
    assert same is groups
    assert bool((ones == 1).all())


def test_a_thousand_groups_are_no_trouble():
    """Also where the curvature of each apart would not fit the memory, and only their sum is kept."""
    torch.manual_seed(0)
    x, y = torch.randn(2_000, 3).double(), torch.arange(2_000) % 2
    model, measure = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(),
        properties.mean_loss((x, y), LOSS),
    )
    what_if = WhatIf(model, LOSS, (x, y), np.arange(2_000) // 2, weight_decay=DECAY, rank=6)
    kept = np.random.default_rng(0).random((3, 1_000)) < 0.5
    apart = what_if.subsets(kept, measure)
    refit = what_if.linearized[0].refit
    assert refit._curvature.shape[0] == 1_001
    refit._curvature = refit._curvature.sum(0, keepdim=True)
    torch.testing.assert_close(what_if.subsets(kept, measure), apart, rtol=1e-9, atol=0)


def test_gradients_of_outputs_are_formed_where_points_use_each_parameter_often(monkeypatch):
    """A convolution over many places with two outputs; not a table's network, nor with as many outputs."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)]
    x, y, sources = torch.randn(24, 1, 12, 12), torch.arange(24) % 2, np.arange(24) % 6
    images = WhatIf(nn.Sequential(*layers), LOSS, (x, y), sources, weight_decay=DECAY, ridge=0.1)
    found = images.without([0, 1])
    assert images.linearized[0]._linearizer.by_rows
    assert not WhatIf(network(), LOSS, points(), SOURCES).linearized[0]._linearizer.by_rows
    facts = images.linearized[0].provider.plan(None).facts
    assert not features.are_rows_less_work(facts, outputs=100, directions=100)
    monkeypatch.setattr(linearized, "are_rows_less_work", lambda *_: False)
    again = WhatIf(nn.Sequential(*layers), LOSS, (x, y), sources, weight_decay=DECAY, ridge=0.1).without([0, 1])
    torch.testing.assert_close(found.outputs((x, y)), again.outputs((x, y)), rtol=1e-3, atol=1e-4)
