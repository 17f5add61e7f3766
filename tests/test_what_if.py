"""What-if: nothing changes without a change, linear models are retrained exactly, and small changes are influence."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cases import gradient_rows, make_case, relative_error
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from what_if_cases import DECAY, LOSS, NAMES, SOURCES, N, fitted, kept_rows, make_other, network, points

from ggda_ext import Groups, properties
from ggda_ext.counterfactual import WhatIf, linearized
from ggda_ext.counterfactual.features import Linearizer
from ggda_ext.counterfactual.newton import Subsets
from ggda_ext.data import IndexedData
from ggda_ext.model import ParameterSpace

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


@pytest.mark.parametrize("decay", [DECAY, 0.0])
def test_a_linear_model_of_more_parameters_than_directions_is_refitted_along_all_of_them(decay):
    """As if all were asked for, to the optimum of the kept points; where they do not fit, nothing is called exact."""
    data = points()
    torch.manual_seed(0)
    model, measure = fitted(nn.Linear(5, 3).double(), F.cross_entropy, data), properties.mean_loss(data, LOSS)
    options = {"weight_decay": decay, "rank": 4}
    found, expected = (
        WhatIf(model, LOSS, data, SOURCES, **options, directions=directions) for directions in ("auto", "all")
    )
    outputs = (one.without(["web", "news"]).outputs(data) for one in (found, expected))
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)
    assert found.linearized[0].exact
    at_optimum = decay == DECAY
    assert at_optimum != ("not at the optimum" in found.note(measure))
    assert at_optimum == ("refits are exact" in found.explain())
    assert "but for rounding" not in found.explain()
    for narrow in ({"directions": "eigen"}, {"memory_budget": 10_000}):
        part = WhatIf(model, LOSS, data, SOURCES, **options, **narrow)
        assert len(part.linearized[0].directions.rows) < 18
        assert "Not calibrated" in part.note(measure)
        assert "are not exact" in part.explain()
        assert part.linearized[0].ridge > 1e3 * found.linearized[0].ridge


def test_exact_refits_say_where_the_budget_leaves_them_in_single_precision():
    (x, y), model = points(), fitted(nn.Linear(5, 3).double(), F.cross_entropy, points()).float()
    options = {"weight_decay": DECAY, "directions": "all"}
    narrow = WhatIf(model, LOSS, (x.float(), y), SOURCES, **options, memory_budget=20_000)
    assert "exact, but for rounding: memory_budget is too small" in narrow.explain()
    assert "but for rounding" not in WhatIf(model, LOSS, (x.float(), y), SOURCES, **options).explain()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_units_of_features_do_not_matter_to_a_linear_model(dtype):
    x = points()[0] * torch.tensor([1.0, 10.0, 1000.0, 0.1, 1.0], dtype=torch.float64)
    y = points()[0][:, :2].sin()

    def least_squares(at):
        model, rows = nn.Linear(5, 2).double(), torch.cat([x, torch.ones(N, 1).to(x)], 1)
        found = torch.linalg.lstsq(rows[at], y[at]).solution
        with torch.no_grad():
            model.weight.copy_(found[:5].T)
            model.bias.copy_(found[5])
        return model

    inside = torch.tensor([source in ("books", "forum") for source in SOURCES])
    model = least_squares(torch.ones(N, dtype=torch.bool)).to(dtype)
    what_if = WhatIf(model, F.mse_loss, (x.to(dtype), y.to(dtype)), SOURCES)
    found = what_if.without(["web", "news"]).outputs((x.to(dtype), y.to(dtype)))
    assert (found - least_squares(inside)(x)).abs().max() < 1e-5


@pytest.mark.parametrize("offset", [0.0, 2_020.0, 10_000.0])
def test_where_a_feature_lies_does_not_matter_to_a_linear_model(offset):
    """A year, with decimals: its own curvature is large, but next to the bias it tells little."""
    x, y = points()[0][:, :2], points()[0][:, 2:3] + points()[0].sum(1, keepdim=True)
    moved = x + torch.tensor([offset, 0.0])

    def least_squares(at):
        mean, model = x[at].mean(0), nn.Linear(2, 1).double()
        slopes = torch.linalg.lstsq(x[at] - mean, y[at] - y[at].mean()).solution
        with torch.no_grad():
            model.weight.copy_(slopes.T)
            model.bias.copy_(y[at].mean() - (mean + torch.tensor([offset, 0.0])) @ slopes[:, 0])
        return model

    inside = torch.tensor([source in ("books", "forum") for source in SOURCES])
    what_if = WhatIf(least_squares(torch.ones(N, dtype=torch.bool)), F.mse_loss, (moved, y), SOURCES)
    found = what_if.without(["web", "news"]).outputs((moved, y))
    assert (found - least_squares(inside)(moved)).abs().max() < 1e-3


def test_a_linear_model_that_is_not_at_its_optimum_is_not_called_exact():
    """Trained without a decay of the biases, or with another decay: what is told is not what was trained."""
    data, measure = points(), properties.mean_loss(points(), LOSS)
    torch.manual_seed(0)
    model = fitted(nn.Linear(5, 3).double(), F.cross_entropy, data)
    assert not WhatIf(model, LOSS, data, SOURCES, weight_decay=DECAY).note(measure)
    skewed = (data[0] + 1, data[1].clamp(max=1))
    free = fitted(nn.Linear(5, 3).double(), F.cross_entropy, skewed)
    with torch.no_grad():
        free.bias += torch.tensor([0.5, -0.5, 0.0])
    for what_if in (WhatIf(free, LOSS, skewed, SOURCES, weight_decay=DECAY), WhatIf(model, LOSS, data, SOURCES)):
        assert "not at the optimum of its training loss" in what_if.note(measure)
        assert "refits are exact" not in what_if.explain()
        assert "Not calibrated" in repr(what_if.leave_group_out(measure))


def test_a_model_that_is_linear_for_the_first_points_only_is_not_called_exact():
    """Rows are often sorted by their kind, and a model may treat kinds differently."""

    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.deep = nn.Linear(5, 3), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x[:, :1] < 1, self.plain(x), self.deep(x))

    x, y = points()
    x = x[x[:, 0].argsort()]
    assert (x[:32, 0] < 1).all()
    what_if = WhatIf(Kinds().double(), LOSS, (x, y), SOURCES, weight_decay=DECAY)
    assert not what_if.linearized[0].is_linear


def test_a_linear_model_of_single_precision_is_refitted_in_double_precision():
    """A class is left out of features of different sizes, and the weight decay hardly bounds anything."""
    (x, y), sizes, found = points(), torch.tensor([1.0, 10.0, 100.0, 0.1, 1.0], dtype=torch.float64), []
    torch.manual_seed(0)
    model = fitted(nn.Linear(5, 3).double(), F.cross_entropy, (x, y))
    model.weight.data /= sizes
    for dtype in (torch.float32, torch.float64):
        data, model = ((x * sizes).to(dtype), y), copy.deepcopy(model).to(dtype)
        what_if = WhatIf(model, LOSS, data, y.tolist(), weight_decay=1e-4)
        found.append(what_if.without(2).outputs(data).double())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("decay", [0.0, 1e-6])
def test_what_only_removed_groups_use_is_not_driven_by_what_is_left_of_the_training(decay):
    """A training that ends a little off its optimum leaves a gradient; nothing else is left along those parameters."""
    x = torch.cat([points()[0], F.one_hot(torch.tensor([NAMES.index(source) for source in SOURCES])).double()], 1)
    y, near = points()[0][:, :2].sin(), []
    torch.manual_seed(0)
    for change in (0.0, 1e-3):
        model = nn.Linear(x.shape[1], 2).double()
        solution = torch.linalg.lstsq(x, y, driver="gelsd").solution
        with torch.no_grad():
            model.weight.copy_(solution.T + change * torch.randn(2, x.shape[1]))
            model.bias.zero_()
        what_if = WhatIf(model, F.mse_loss, (x, y), SOURCES, weight_decay=decay)
        near.append(what_if.without("web").outputs((x, y)))
    torch.testing.assert_close(*near, rtol=0, atol=0.02)


def test_what_training_has_not_learned_does_not_drive_refits():
    """Two parameters change the outputs of few points, or of all points very little; their optimum is far away."""
    torch.manual_seed(0)
    web = torch.tensor([source == "web" for source in SOURCES])
    x = torch.cat([points()[0], 1e-4 * torch.randn(N, 1).double()], 1)
    x[:, 4] = torch.where(web, x[:, 4], 1e-4 * x[:, 4])
    y = (x[:, :5] @ torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0]).double() + torch.randn(N).double() > 0).long()

    def outputs(model):
        return model(x).diff()[~web].detach()

    def trained(at):
        model = nn.Linear(6, 2).double()
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        descent = torch.optim.SGD(model.parameters(), 0.5)
        for _ in range(100):
            descent.zero_grad()
            F.cross_entropy(model(x[at]), y[at]).backward()
            descent.step()
        return model

    model = trained(torch.ones(N, dtype=torch.bool))
    what_if = WhatIf(model, LOSS, (x, y), SOURCES)
    assert "training has not reached the optimum" in what_if.explain()
    predicted, real = what_if.without("web").outputs((x, y)).diff()[~web], outputs(trained(~web))
    assert (predicted - real).abs().mean() < 0.75 * (outputs(model) - real).abs().mean()


def test_a_linear_model_of_too_many_parameters_is_not_called_exact(monkeypatch):
    monkeypatch.setattr(linearized, "MOST_PARAMETERS", 17)
    what_if = WhatIf(nn.Linear(5, 3).double(), LOSS, points(), SOURCES, weight_decay=DECAY, rank=4)
    assert not what_if.linearized[0].exact


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


def test_a_part_of_the_points_has_the_gradients_of_all():
    """Where a refit starts, its slope for any weights of the groups is that of all their points, by autograd."""
    (x, y), model = points(), network()
    groups = Groups(np.repeat([0, 1, 2, -1], [70, 30, 15, 5]), rest="drop")
    of_points = torch.linspace(0.5, 2, N, dtype=torch.float64)
    what_if = WhatIf(model, LOSS, (x, y), groups, rank=12, most_points=40, point_weights=of_points)
    linearized, parameters = what_if.linearized[0], tuple(model.parameters())
    labels = torch.tensor(groups.labels)

    def slope(group_weights):
        each = of_points * torch.tensor([*group_weights, 1.0], dtype=torch.float64)[labels]  # -1 is the last
        mean = F.cross_entropy(model(x), y, reduction="none") @ each / each.sum()
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(mean, parameters)])
        return linearized.directions.rows @ gradient

    for weights in ([1.0, 0.0, 1.0], [0.3, 2.0, 0.0]):
        subsets = Subsets(linearized.refit, torch.tensor([[*weights, 1.0]]).double(), linearized.penalty())
        expected = slope(weights) - slope([1.0, 1.0, 1.0])
        assert torch.allclose(subsets.gradient()[0], expected, atol=1e-9 * float(expected.norm()))


def test_what_a_part_of_the_points_says_is_told_and_near_to_what_all_say():
    data, model = points(), fitted(nn.Linear(5, 3).double(), F.cross_entropy, points())
    measure = properties.mean_loss(data, LOSS)
    whole, part = (WhatIf(model, LOSS, data, SOURCES, weight_decay=DECAY, most_points=most) for most in (N, N // 2))
    found, expected = (one.without("web").outputs(data) - model(data[0]) for one in (part, whole))
    assert (found - expected).norm() < 0.3 * expected.norm()
    assert not whole.note(measure)
    assert f"{len(part.linearized[0].chosen)} of {N} training points" in part.note(measure)
    assert "exact for these points" in part.explain()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make_model", [lambda: nn.Linear(5, 3).double(), network])
def test_a_model_of_half_precision_has_the_answers_of_its_values(make_model, dtype):
    """Those of a model of double precision with the same, rounded, parameters and inputs."""
    torch.manual_seed(0)
    half = fitted(make_model(), F.cross_entropy, points()).to(dtype)
    x, y = points(dtype=dtype)
    wide, inputs = copy.deepcopy(half).double(), x.double()
    changes = [
        WhatIf(model, LOSS, (given, y), SOURCES, weight_decay=DECAY, ridge=0.01).leave_group_out(
            properties.mean_loss((given, y), LOSS)
        ).scores
        for model, given in ((half, x), (wide, inputs))
    ]  # fmt: skip
    found, expected = (torch.as_tensor(one).double() for one in changes)
    assert (found - expected).norm() < 0.05 * expected.norm()


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
