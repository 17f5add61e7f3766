"""Refits of models that were not trained to their optimum: recipes, settling, copies nearby, starts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import relative_error
from torch import Tensor, nn
from torch.nn import functional as F
from what_if_cases import DECAY, LOSS, SOURCES, N, fitted, kept_rows, minimise, network, points

from ggda_ext import properties
from ggda_ext.counterfactual import WhatIf, linearized
from ggda_ext.curvature.damping import TrainingSteps
from ggda_ext.training import Recipe


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


def test_early_checkpoints_of_several_trainings_are_averaged_for_the_one_model():
    (x, y), model, others = points(), network(), [network() for _ in range(2)]
    for number, other in enumerate(others):
        for value in other.parameters():
            value.data.mul_(0.5 - number).add_(0.1 * number)
    early, recipe = [other.state_dict() for other in others], TrainingSteps([0.1] * 100, weight_decay=DECAY)
    measure = properties.mean_loss((x, y), LOSS)

    def rises(checkpoints: list[dict[str, Tensor]]) -> Tensor:
        what_if = WhatIf(model, LOSS, (x, y), SOURCES, recipe=recipe, start=network(), checkpoints=checkpoints)
        assert torch.equal(what_if.with_weights({}).outputs((x, y)), model(x))
        return what_if.subsets(kept_rows(), measure) - measure(model).detach()

    together, apart = rises(early), [rises([one]) for one in early]
    assert relative_error(apart[0], apart[1]) > 0.01, "or this test would compare one thing with itself"
    torch.testing.assert_close(together, torch.stack(apart).mean(0), rtol=1e-6, atol=1e-9)
