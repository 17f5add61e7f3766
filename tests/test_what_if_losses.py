"""Losses of what-if: recognised or refused, in any precision; properties of the outputs it predicts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from what_if_cases import DECAY, LOSS, SOURCES, kept_rows, minimise, network, points

from ggda_ext import properties
from ggda_ext.counterfactual import WhatIf
from ggda_ext.counterfactual.convex import (
    AnyLoss,
    LogisticLoss,
    SoftmaxLoss,
    SquaredLoss,
    TwoClassLoss,
)
from ggda_ext.counterfactual.known_losses import convex_loss
from ggda_ext.losses import as_example_loss


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


def test_a_huber_loss_is_no_squared_error_where_all_residuals_are_small():
    """A refit may leave the points that are removed with residuals beyond its bend."""
    outputs, targets = 40 * torch.randn(30, 1).double(), 40 * torch.randn(30, 1).double()
    for loss, kind in ((nn.HuberLoss(delta=400.0), AnyLoss), (nn.MSELoss(), SquaredLoss)):
        assert type(convex_loss(as_example_loss(loss), outputs, targets)) is kind


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4])
def test_refits_of_single_precision_are_as_good_for_small_targets(size):
    """A loss of one hundredth is not nearly solved at the start."""
    x, higher = points()[0], torch.tensor([[2.0 * (source == "web")] for source in SOURCES])
    y = size * (points()[0][:, :1].sin() + higher)
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    minimise(
        first.parameters(),
        lambda: (
            F.huber_loss(first(x), y / size, delta=0.1) + 1e-3 * sum(one.square().sum() for one in first.parameters())
        ),
    )
    with torch.no_grad():
        first[2].weight *= size
        first[2].bias *= size
    loss, found = nn.HuberLoss(delta=0.1 * size), []
    for dtype in (torch.float32, torch.float64):
        model = copy.deepcopy(first).to(dtype)
        data = (x.to(dtype), y.to(dtype))
        what_if = WhatIf(model, loss, data, SOURCES, directions="all", ridge=1e-2 * size**2)
        found.append((what_if.without("web").outputs(data) - model(data[0])).double())
    assert (found[0] - found[1]).norm() < 1e-2 * found[1].norm()


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
