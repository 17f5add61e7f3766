"""Unusual models and settings around them: the truth, or an error that names the cause."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from cases import gradient_rows, point_rows, relative_error
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from unusual_cases import CASES, GROUPS, WIDTH, Encoder, LaterOnly, data, make, mlp, point_gradients
from unusual_checks import BATCH_SIZES, CE, DENSE, state_of

from ggda_ext import GroupGradients, Groups, PointGradients, attribute, find_label_issues, properties
from ggda_ext.data import IndexedData
from ggda_ext.grouping import features
from ggda_ext.losses import BatchLoss, OutputLoss
from ggda_ext.methods import Influence

pytestmark = pytest.mark.filterwarnings("ignore:.*(performance drop|target size|jit).*")


class Padded(nn.Module):
    """A model whose test points have tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.body(x) if x.dim() == 2 else self.body(x).mean(1)


@pytest.mark.parametrize("strategy", ["auto", *DENSE])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_point_without_a_finite_gradient_is_named_and_not_taken_for_mixing(value, strategy):
    torch.manual_seed(0)
    model, (x, y) = mlp().double(), data("features", 0)
    x[5, 0] = value
    for size in BATCH_SIZES:
        provider = GroupGradients(model, CE, (x, y), GROUPS, strategy=strategy, batch_size=size)
        with pytest.raises(ValueError, match=r"non-finite.*first group 1 |cannot be used here"):
            provider.scores(torch.ones(1, provider.p, dtype=torch.float64))


def test_a_mean_over_targets_that_count_leaves_out_examples_without_any():
    """As a function, alone: 0 / 0 for an example whose target is ignored, and no gradient."""
    torch.manual_seed(0)
    model, (x, y) = mlp().double(), data("ignored first", 0)
    expected = GroupGradients(model, CE, (x, y), GROUPS, strategy="backward").rows()
    assert (
        relative_error(GroupGradients(model, lambda o, t: F.cross_entropy(o, t), (x, y), GROUPS).rows(), expected)
        <= 1e-10
    )
    forward = GroupGradients(model, lambda o, t: F.cross_entropy(o, t), (x, y), GROUPS, strategy="forward")
    with pytest.raises(ValueError, match=r"strategy='forward' cannot be used here: forward-mode .* disagrees"):
        forward.scores(expected)  # 0 / 0 has no derivative there
    scaled = lambda o, t: F.cross_entropy(o, t) * len(t) ** 0.5  # noqa: E731
    with pytest.raises(ValueError, match="neither their mean nor their sum"):
        GroupGradients(model, scaled, (x, y), GROUPS).rows()


def test_the_gradient_of_a_property_leaves_a_renormalised_embedding_as_it_was():
    model, points = make("renormalised embedding")
    before = state_of(model)
    properties.property_gradient(properties.mean_loss(points, CE), model, dict(model.named_parameters()))
    assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())


def test_ghost_sees_what_a_test_loss_depends_on_besides_the_outputs():
    model, points = make("label smoothing")
    truth = point_gradients("label smoothing", model, points)

    def with_penalty(model, batch):
        penalty = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") + 0.01 * penalty

    penalised = (with_penalty(model, tuple(part[i : i + 1] for part in points)).sum() for i in range(5))
    rows = gradient_rows(penalised, model.parameters())
    tests = PointGradients(BatchLoss(with_penalty), IndexedData(tuple(part[:5] for part in points)))
    loss = CASES["label smoothing"].loss
    found = GroupGradients(model, loss, points, GROUPS).scores(tests)
    assert relative_error(found, Groups(GROUPS).sum(rows @ truth.T)) <= 1e-10
    with pytest.raises(ValueError, match="'ghost' cannot be used here: the loss of the test points"):
        GroupGradients(model, loss, points, GROUPS, strategy="ghost").scores(tests)


def test_test_points_with_tokens_are_scored_by_rows():
    torch.manual_seed(0)
    model, (x, y) = Padded().double(), data("features", 0)
    tokens = torch.randn(4, 3, WIDTH, dtype=torch.float64)
    tests = PointGradients(OutputLoss(CE), IndexedData((tokens, y[:4])))
    expected = Groups(GROUPS).sum(point_rows(model, CE, (tokens, y[:4])) @ point_rows(model, CE, (x, y)).T)
    assert relative_error(GroupGradients(model, CE, (x, y), GROUPS).scores(tests), expected) <= 1e-10
    with pytest.raises(ValueError, match="for the test points, Linear 'body' sees more than one token"):
        GroupGradients(model, CE, (x, y), GROUPS, strategy="ghost").scores(tests)


@pytest.mark.parametrize("strategy", DENSE)
def test_sums_over_many_points_do_not_lose_small_ones(strategy):
    """A gradient of 2^27 and then 4,000 of 1: in float32 the ones would all be lost."""
    x = torch.ones(4001, 1)
    x[0] = 2.0**27
    model = nn.Linear(1, 1, bias=False)
    provider = GroupGradients(
        model, BatchLoss(lambda m, b: m(b)[:, 0]), x, torch.zeros(4001), strategy=strategy, batch_size=16
    )
    v = torch.ones(1, 1)
    assert float(provider.scores(v)) == pytest.approx(2.0**27 + 4000, rel=1e-6)
    if strategy in ("segmented", "backward", "persample"):
        assert float(provider.rows()) == pytest.approx(2.0**27 + 4000, rel=1e-6)


def test_the_gradient_of_a_property_does_not_lose_small_points():
    x = torch.ones(4001, 1)
    x[0] = 2.0**27
    goal = properties.mean_loss(x, BatchLoss(lambda m, b: m(b)[:, 0]), batch_size=16)
    model = nn.Linear(1, 1, bias=False)
    found = properties.property_gradient(goal, model, dict(model.named_parameters()))
    assert float(found) == pytest.approx((2.0**27 + 4000) / 4001, rel=1e-7)


def test_freezing_an_encoder_does_not_change_its_outputs():
    """PyTorch's fused path runs only when nothing requires a gradient, and zeroes padded outputs."""
    torch.manual_seed(0)
    model, points = Encoder().double().eval(), data("tokens", 0)
    goal = properties.mean_loss(points, CE)
    expected = torch.stack([CE(model(x[None]), y[None]) for x, y in zip(*points, strict=True)]).mean()
    row = gradient_rows([expected], model.head.parameters())[0]
    found = properties.property_gradient(goal, model, {f"head.{k}": p for k, p in model.head.named_parameters()})
    assert relative_error(found[0], row) <= 1e-10
    outputs = properties.of_outputs(points, lambda o, y: F.cross_entropy(o, y))
    found = properties.property_gradient(outputs, model, {f"head.{k}": p for k, p in model.head.named_parameters()})
    assert relative_error(found[0], row) <= 1e-10
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_layer_that_only_late_points_use_is_proven_when_they_come():
    """More points than the probe looks at: the pass itself has to see that something new is used."""
    torch.manual_seed(0)
    model, n = LaterOnly().double(), 400
    x = torch.randn(n, WIDTH, dtype=torch.float64)
    x[:, 5] = -x[:, 5].abs()
    x[n - 7 : n - 2, 5] = 1.0
    y, labels = torch.arange(n) % 3, torch.arange(n) % 4
    truth = Groups(labels).sum(point_rows(model, CE, (x, y)), 0)
    v = torch.randn(2, truth.shape[1], dtype=torch.float64)
    for batch_size in (16, 400):
        provider = GroupGradients(model, CE, (x, y), labels, batch_size=batch_size)
        assert relative_error(provider.scores(v), v @ truth.T) <= 1e-10
        assert relative_error(provider.rows(), truth) <= 1e-10
        for strategy in ("directional", "segmented", "forward", "persample"):
            with pytest.raises(ValueError, match="cannot be used here"):
                GroupGradients(model, CE, (x, y), labels, strategy=strategy, batch_size=batch_size).scores(v)


@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("strategy", ["auto", *DENSE])
def test_autocast_is_the_models_and_not_ours(where, strategy):
    class Autocast(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.body(x).float()

    torch.manual_seed(0)
    body, (x, y) = mlp(), data("features", 0)
    model, x = Autocast(body) if where == "inside" else body, x.float()
    v = torch.randn(1, sum(p.numel() for p in body.parameters()))
    expected = GroupGradients(body, CE, (x, y), GROUPS, strategy="backward").scores(v)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "around"):
        provider = GroupGradients(model, CE, (x, y), GROUPS, strategy=strategy)
        found = provider.scores(v)
        assert strategy != "auto" or provider.plan(1).strategy == "directional"
    assert found.dtype == torch.float32
    assert relative_error(found, expected) <= 0.05


class InFull(nn.Module):
    """A model that is not rounded by an autocast around it."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.body(x)


def both(function):
    """What a function returns, and what it returns inside autocast."""
    outside = function()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return outside, function()


@pytest.mark.parametrize("method", ["influence", "hessian", "fisher", "ekfac", "tracin"])
def test_autocast_does_not_round_what_is_not_the_models(method):
    torch.manual_seed(0)
    model, (x, y) = InFull(mlp()), data("features", 0)
    goal, chosen = properties.mean_loss((x[:7].float(), y[:7]), CE), Influence("hessian", damping=5.0)
    expected, found = both(
        lambda: (
            attribute(model, CE, (x.float(), y), GROUPS, goal, method=chosen if method == "hessian" else method).scores
        )
    )
    assert relative_error(found, expected) <= 1e-5


@pytest.mark.parametrize("strategy", DENSE)
def test_autocast_does_not_round_rows_norms_and_weights(strategy):
    torch.manual_seed(0)
    model, (x, y) = InFull(mlp()), data("features", 0)
    weights = torch.rand(2, len(x))

    def answers():
        provider = GroupGradients(model, CE, (x.float(), y), GROUPS, strategy=strategy)
        if provider.plan(1).strategy in ("directional", "forward"):
            return (provider.scores(torch.ones(1, provider.p)),)
        return (
            provider.rows(),
            provider.squared_norms(),
            torch.cat([rows for _, rows in provider.blocks(None, weights)]),
        )

    for expected, found in zip(*both(answers), strict=True):
        assert relative_error(found, expected) <= 1e-5


@pytest.mark.parametrize("name", ["demographic_parity_gap", "soft_calibration_error", "mean_loss"])
def test_autocast_does_not_round_properties(name):
    torch.manual_seed(0)
    model, (x, y) = InFull(mlp()), data("features", 0)
    batch = x.float(), y
    goal = {
        "demographic_parity_gap": lambda: properties.demographic_parity_gap(batch, torch.arange(len(x)) % 2),
        "soft_calibration_error": lambda: properties.soft_calibration_error(batch, temperature=0.1),
        "mean_loss": lambda: properties.mean_loss(batch, CE),
    }[name]()
    parameters = dict(model.named_parameters())
    expected, found = both(lambda: (goal(model).detach(), properties.property_gradient(goal, model, parameters)))
    for one, other in zip(expected, found, strict=True):
        assert relative_error(other, one) <= 1e-5


def test_checkpoints_inside_autocast_are_the_checkpoints():
    """Autocast keeps rounded copies of parameters, which a loaded checkpoint must not leave in use."""
    torch.manual_seed(0)
    model, other, (x, y) = mlp(), mlp(), data("features", 0)
    batch, before = (x.float(), y), model(x.float()).detach()
    goal = properties.mean_loss(batch, CE)
    states = [copy.deepcopy(each.state_dict()) for each in (model, other)]
    expected, found = both(
        lambda: attribute(model, CE, batch, GROUPS, goal, method="tracin", checkpoints=states).scores
    )
    assert relative_error(found, expected) <= 0.02
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attribute(model, CE, batch, GROUPS, goal, method="tracin", checkpoints=states)
        assert relative_error(model(x.float()).detach().float(), before) <= 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("strategy", ["auto", *DENSE])
def test_half_precision_models_go_to_the_fast_strategy(dtype, strategy):
    torch.manual_seed(0)
    model, (x, y) = mlp(), data("features", 0)
    v = torch.randn(1, sum(p.numel() for p in model.parameters()))
    expected = GroupGradients(model, CE, (x.float(), y), GROUPS, strategy="backward").scores(v)
    provider = GroupGradients(model.to(dtype), CE, (x.to(dtype), y), GROUPS, strategy=strategy)
    assert relative_error(provider.scores(v), expected) <= 0.05
    assert strategy != "auto" or provider.plan(1).strategy == "directional"


@pytest.mark.parametrize("way", ["script", "trace"])
def test_a_scripted_model_is_served_and_named(way):
    torch.manual_seed(0)
    model, (x, y) = mlp().double(), data("features", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(model) if way == "script" else torch.jit.trace(model, x[:2])
    v = torch.randn(1, sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    expected = GroupGradients(model, CE, (x, y), GROUPS).scores(v)
    for strategy in ("auto", "forward", "backward", "persample"):
        found = GroupGradients(scripted, CE, (x, y), GROUPS, strategy=strategy).scores(v)
        assert relative_error(found, expected) <= 1e-10
    with pytest.raises(ValueError, match="Module '0' is not a layer known"):
        GroupGradients(scripted, CE, (x, y), GROUPS, strategy="directional").scores(v)


class RarelyMore(nn.Module):
    """Adds a layer that takes some rows of a batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.more = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x):
        rows = (x[:, 0] > 1).nonzero()[:, 0]
        out = self.first(x)
        return out.index_add(0, rows, self.more(x[rows])) if len(rows) else out


class OneByOne(IterableDataset):
    def __init__(self, *columns: torch.Tensor) -> None:
        self.columns = columns

    def __iter__(self):
        return zip(*self.columns, strict=True)


def test_a_layer_that_a_stream_reaches_later_is_answered_or_named():
    torch.manual_seed(0)
    model, (x, y) = RarelyMore().double(), data("features", 0)
    x[:, 0] = x[:, 0].clamp(max=0.9)
    x[[7, 13], 0] = 2.0
    v = torch.randn(1, sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    expected, random = GroupGradients(model, CE, (x, y), GROUPS).scores(v), torch.get_rng_state()
    for strategy in ("auto", "directional", "forward"):
        provider = GroupGradients(model, CE, DataLoader(OneByOne(x, y), batch_size=4), GROUPS, strategy=strategy)
        told, found = "", expected
        try:
            found = provider.scores(v)
        except (ValueError, TypeError) as error:
            told = str(error)
        assert not told or "cannot be used here" in told or "pass a map-style Dataset" in told
        assert relative_error(found, expected) <= 1e-10
    assert torch.equal(torch.get_rng_state(), random)


IN_INFERENCE_MODE = {
    **{
        method: lambda model, batch, method=method: attribute(
            model, CE, batch, GROUPS, properties.mean_loss(batch, CE), method=method
        ).scores
        for method in ("influence", "tracin", "ekfac", "fisher")
    },
    "label issues": lambda model, batch: find_label_issues(
        model, CE, batch, validation=tuple(part[:5] for part in batch)
    ).influence,
    "gradients of grouping": lambda model, batch: features.gradients(model, CE, batch),
    "rows": lambda model, batch: GroupGradients(model, CE, batch, GROUPS).rows(),
    "squared norms": lambda model, batch: GroupGradients(
        model, CE, batch, GROUPS, strategy="backward"
    ).squared_norms(),
}  # fmt: skip


@pytest.mark.parametrize("ask", IN_INFERENCE_MODE.values(), ids=IN_INFERENCE_MODE)
def test_inference_mode_around_the_call_changes_nothing(ask):
    torch.manual_seed(0)
    model, (x, y) = mlp().double(), data("features", 0)
    expected = ask(model, (x, y))
    with torch.inference_mode():
        for batch in ((x, y), (x.clone(), y.clone())):
            found = ask(model, batch)
            assert not (isinstance(found, torch.Tensor) and found.is_inference())
            assert relative_error(torch.as_tensor(found), torch.as_tensor(expected)) <= 1e-12
        assert torch.is_inference_mode_enabled()


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.body(x).sum()


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.cdouble))

    def forward(self, x):
        return (x.to(torch.cdouble) @ self.weight).abs()


class Squeezes(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.body(x).squeeze()


def on_meta():
    with torch.device("meta"):
        return mlp()


def in_inference_mode():
    with torch.inference_mode():
        return mlp().double()


class TwoKinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, 3), nn.Linear(3, 3)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.first.weight.data = self.first.weight.data.float()
        return self

    def forward(self, x):
        return self.head(F.linear(x, self.first.weight.double(), self.first.bias))


@pytest.mark.parametrize(
    ("model", "loss", "error", "message"),
    [
        (
            TwoKinds,
            CE,
            ValueError,
            r"'first.weight' is torch.float32 on cpu, .*Choose those of one kind with parameters=",
        ),
        (Scalar, lambda o, y: o, ValueError, r"returned a single number for a batch.*BatchLoss"),
        (Complex, CE, TypeError, r"parameter 'weight' is complex.*view_as_real"),
        (on_meta, CE, ValueError, r"'0.weight' is on the meta device.*load the model first"),
        (in_inference_mode, CE, ValueError, r"'0.weight' was made in torch.inference_mode"),
        (Squeezes, lambda o, y: (o - y).square(), ValueError, r"one example alone cannot be computed.*squeeze\(\)"),
    ],
)
def test_models_that_cannot_be_served_are_named(model, loss, error, message):
    with pytest.raises(error, match=message):
        GroupGradients(model().double() if model is not on_meta else model(), loss, data("features", 0), GROUPS).rows()
