"""No silent wrong number: unusual models, losses and data, under every strategy, give the truth or an error."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from cases import gradient_rows, point_rows, relative_error
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from unusual_cases import CASES, GROUPS, WIDTH, Encoder, LaterOnly, N, WritesToItself, data, make, mlp, point_gradients
from unusual_rare import (
    JOINED,
    MIXED,
    PLACES,
    DropsGradients,
    FullExperts,
    JoinsExamples,
    KeepsTheLargest,
    MixesExamples,
    MixesLargeBatches,
    Switches,
    TellsPlaces,
)

from ggda_ext import STRATEGIES, GroupGradients, Groups, PointGradients, attribute, properties
from ggda_ext.data import IndexedData
from ggda_ext.gradients.observation import Watch
from ggda_ext.gradients.proof import sample
from ggda_ext.gradients.proof.descent import storage_of
from ggda_ext.losses import BatchLoss, FunctionalLoss, OutputLoss, as_example_loss

CE = nn.CrossEntropyLoss()
BATCH_SIZES = (1, 5, None)
SEEDS = 40
BY_LUCK = ("reordered batch", "unique tokens", "unpadded tokens", "experts by example", "rare expert",
           "experts by token")  # fmt: skip
DENSE = [strategy for strategy in STRATEGIES if strategy != "ghost"]
pytestmark = pytest.mark.filterwarnings("ignore:.*(performance drop|target size|jit).*")


def runs(name: str, strategy: str) -> list[tuple[int, int | None]]:
    """Seeds and batch sizes: a model that mixes up rows of a batch may be right by luck.

    Every seed comes under `auto` and under one of the strategies, every strategy with every batch size.
    """
    first = [(0, size) for size in BATCH_SIZES]
    if name not in BY_LUCK:
        return first
    if strategy == "auto":
        return first + [(seed, BATCH_SIZES[1 + seed % 2]) for seed in range(1, SEEDS)]
    mine = range(STRATEGIES.index(strategy), SEEDS, len(STRATEGIES))
    return first + [(seed, BATCH_SIZES[at % len(BATCH_SIZES)]) for at, seed in enumerate(mine) if seed]


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def asked(name, points, truth, provider, strategy):
    """What to ask a strategy for, and what the answer for every point should be `[m, n]`."""
    if strategy == "ghost":
        tests = tuple(part[-5:] for part in points)
        return PointGradients(as_example_loss(CASES[name].loss), IndexedData(tests)), truth[-5:] @ truth.T
    v = torch.randn(1, provider.p, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return v, v @ truth.T


@cache
def subject(name: str, seed: int):
    """Data and truth of a case, for all strategies."""
    model, points = make(name, seed)
    return points, point_gradients(name, model, points)


@contextmanager
def refusal_by_name(strategy: str):
    """A strategy that was asked for by name may be refused, if the error says so."""
    try:
        yield
    except ValueError as error:
        if strategy == "auto" or "cannot be used here" not in str(error):
            raise


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].refused is None])
def test_every_strategy_gives_the_truth_or_names_the_cause(name, strategy):
    for seed, batch_size in runs(name, strategy):
        model, (points, truth) = make(name, seed)[0], subject(name, seed)
        before, held = state_of(model), list(model.parameters())
        provider = GroupGradients(
            model, CASES[name].loss, points, GROUPS, parameters=CASES[name].parameters, strategy=strategy,
            batch_size=batch_size,
        )  # fmt: skip
        directions, expected = asked(name, points, truth, provider, strategy)
        with refusal_by_name(strategy):
            found = provider.scores(directions)
            assert relative_error(found, Groups(GROUPS).sum(expected)) <= 1e-10, (seed, batch_size)
        if seed == 0 and strategy in ("auto", "segmented", "backward", "persample"):
            with refusal_by_name(strategy):
                assert relative_error(provider.rows(), Groups(GROUPS).sum(truth, 0)) <= 1e-10, batch_size
        after = state_of(model)
        assert all(torch.equal(after[key], value) for key, value in before.items())
        assert all(mine is its for mine, its in zip(held, model.parameters(), strict=True))


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].refused is not None])
def test_what_has_no_answer_is_refused_under_every_strategy(name, strategy):
    model, points = make(name, 0)
    before = state_of(model)
    for batch_size in BATCH_SIZES:
        provider = GroupGradients(model, CASES[name].loss, points, GROUPS, strategy=strategy, batch_size=batch_size)
        with pytest.raises(ValueError, match=CASES[name].refused):
            provider.scores(torch.ones(1, provider.p, dtype=torch.float64))
        after = state_of(model)
        assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", CASES)
def test_two_examples_of_a_heavy_model_tell_as_much(name, monkeypatch):
    monkeypatch.setattr(sample, "HEAVY", -1)
    case, (model, points) = CASES[name], make(name, 0)
    provider = GroupGradients(model, case.loss, points, GROUPS, parameters=case.parameters, batch_size=5)
    if case.refused is not None:
        with pytest.raises(ValueError, match=case.refused):
            provider.plan(1)
        return
    directions, expected = asked(name, points, subject(name, 0)[1], provider, "auto")
    assert relative_error(provider.scores(directions), Groups(GROUPS).sum(expected)) <= 1e-10


@pytest.mark.parametrize("strategy", ["auto", "directional", "forward", "segmented", "backward"])
@pytest.mark.parametrize(
    "mixes",
    [MixesLargeBatches, FullExperts, KeepsTheLargest, lambda: DropsGradients(True), lambda: DropsGradients(False)],
)
def test_examples_that_are_mixed_in_large_batches_only_are_refused_there(mixes, strategy):
    torch.manual_seed(0)
    model, points = mixes().double(), data("features", 0)
    for size in (5, None):
        provider = GroupGradients(model, CE, points, torch.zeros(N), strategy=strategy, batch_size=size)
        v = torch.randn(1, provider.p, dtype=torch.float64)
        if size is None:
            with pytest.raises(ValueError, match=r"mixes the examples|cannot be used here"):
                provider.scores(v)
        else:
            provider.scores(v)


@pytest.mark.parametrize("strategy", ["auto", *DENSE])
@pytest.mark.parametrize(
    ("build", "how"),
    [
        *[(TellsPlaces, how) for how in PLACES],
        *[(JoinsExamples, how) for how in JOINED],
        *[(MixesExamples, how) for how in MIXED],
    ],
)
def test_rows_told_by_their_place_or_by_the_batch_are_right_or_refused(build, how, strategy):
    """A model may compare the number of a row with 13, or add something made of the batch to all rows."""
    torch.manual_seed(0)
    model, points = build(how).double(), data("two rare" if build is MixesExamples else "one rare", 0)
    truth, refused = point_rows(model, CE, points), []
    for labels, size in ((GROUPS, 5), (torch.zeros(N), 5), (GROUPS, None), (torch.zeros(N), None)):
        provider = GroupGradients(model, CE, points, labels, strategy=strategy, batch_size=size)
        v = torch.randn(1, provider.p, dtype=torch.float64)
        told, found = "", None
        try:
            found = provider.scores(v)
        except ValueError as error:
            told = str(error)
            refused.append(size)
        assert found is None or relative_error(found, Groups(labels).sum(v @ truth.T)) <= 1e-10
        assert not told or "mixes the examples" in told or (strategy != "auto" and "cannot be used here" in told)
    assert how == "swapped" or strategy == "persample" or None in refused
    assert build is not TellsPlaces or 5 not in refused


@pytest.mark.parametrize("strategy", ["auto", "directional", "forward", "segmented", "backward"])
@pytest.mark.parametrize("how", ["sums so far", "normalised"])
def test_what_only_large_batches_do_is_followed_there(how, strategy):
    """The first of them holds no rare example, and two that are mixed later are next to each other."""
    torch.manual_seed(0)
    model, n = MixesExamples(how, 15).double(), 60
    x, y = torch.randn(n, WIDTH, dtype=torch.float64), torch.arange(n) % 3
    x[:, 0] = x[:, 0].clamp(max=1.5)
    x[45:47, 0] = 2.5
    provider = GroupGradients(model, CE, (x, y), torch.arange(n) // 20, strategy=strategy, batch_size=20)
    with pytest.raises(ValueError, match=r"mixes the examples|cannot be used here"):
        provider.scores(torch.ones(1, provider.p, dtype=torch.float64))


def test_a_parameter_of_a_lazy_module_is_named():
    with pytest.raises(ValueError, match=r"'weight' of a lazy module has no shape yet: run the model once"):
        GroupGradients(nn.LazyLinear(3).double(), CE, data("features", 0), GROUPS)


@pytest.mark.parametrize("strategy", ["auto", *DENSE])
def test_a_parameter_that_is_written_to_for_rare_examples_only_is_named(strategy):
    torch.manual_seed(0)
    model, points = WritesToItself("rarely").double(), data("one rare", 0)
    with pytest.raises(ValueError, match=r"wrote to 'head.weight'|cannot be used here"):
        GroupGradients(model, CE, points, GROUPS, strategy=strategy, batch_size=5).scores(torch.ones(1, 53).double())


@pytest.mark.parametrize("name", ["label smoothing", "an encoder", "class token", "attention", "scales"])
def test_common_models_are_not_taken_for_ones_that_join_examples(name):
    model, points = make(name)
    provider = GroupGradients(model, CE, points, GROUPS)
    provider.plan(1)
    assert provider._probe._found.joins is None
    assert not provider._probe._found.placed


FAST = {"scales": "directional", "class token": "directional", "embedding bag": "directional", "weight norm": "forward",
        "attention": "forward", "an encoder": "forward", "sparse embedding": "directional"}  # fmt: skip


@pytest.mark.parametrize("name", FAST)
def test_common_layers_go_to_a_fast_strategy(name):
    model, points = make(name)
    assert GroupGradients(model, CE, points, GROUPS).plan(1).strategy == FAST[name]


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


def test_inference_mode_around_the_call_changes_nothing():
    torch.manual_seed(0)
    model, (x, y) = mlp().double(), data("features", 0)
    expected = attribute(model, CE, (x, y), GROUPS, properties.mean_loss((x, y), CE), method="tracin")
    with torch.inference_mode():
        again = (x.clone(), y.clone())
        found = attribute(model, CE, again, GROUPS, properties.mean_loss(again, CE), method="tracin")
    assert relative_error(found, expected) <= 1e-12


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


class Stream(IterableDataset):
    def __init__(self, points, batched):
        self.points, self.batched = points, batched

    def __iter__(self):
        parts = (part.split(6) for part in self.points) if self.batched else self.points
        return zip(*parts, strict=True)


def test_data_of_unusual_form_gives_the_same_scores_or_is_named():
    torch.manual_seed(0)
    model, (x, y) = mlp().double(), data("features", 0)
    v = torch.randn(1, sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    expected = GroupGradients(model, CE, (x, y), GROUPS).scores(v)
    backwards = Subset(TensorDataset(x.flip(0), y.flip(0)), [-1 - i for i in range(N)])
    for points in (backwards, DataLoader(Stream((x, y), True), batch_size=None), Stream((x, y), False)):
        assert relative_error(GroupGradients(model, CE, points, GROUPS).scores(v), expected) <= 1e-12
    with pytest.raises(ValueError, match="batch_size=None whose items hold tensors of lengths"):
        GroupGradients(model, CE, DataLoader(Stream((x, y), False), batch_size=None), GROUPS).scores(v)
    with pytest.raises(IndexError, match="Subset with index 24 of a data set of 24 points"):
        GroupGradients(model, CE, Subset(TensorDataset(x, y), [0, 24]), [0, 1])


class Pools(nn.Module):
    """Takes its examples as a sparse tensor, or as a list of sequences of several lengths."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 4), nn.Linear(4, 3)

    def forward(self, x):
        if isinstance(x, torch.Tensor):
            return self.head(self.body(x.to_dense()).tanh())
        return self.head(torch.stack([self.body(one).tanh().sum(0) for one in x]))


COLLATED = {
    "sparse rows": lambda items: (
        torch.stack([x[0] for x, _ in items]).to_sparse(),
        torch.stack([y for _, y in items]),
    ),
    "sequences": lambda items: ([x for x, _ in items], torch.stack([y for _, y in items])),
}


@pytest.mark.parametrize("strategy", ["auto", *DENSE])
@pytest.mark.parametrize("form", COLLATED)
def test_batches_of_sparse_rows_or_of_sequences_give_the_truth(form, strategy):
    torch.manual_seed(0)
    x, y = data("features", 0)
    points = [(x[i : i + 1 + i % 3], y[i]) for i in range(N)]
    model, collate = Pools().double(), COLLATED[form]
    alone = (collate([point]) for point in points)
    rows = gradient_rows((CE(model(one), target) for one, target in alone), model.parameters())
    v = torch.randn(1, len(rows[0]), dtype=torch.float64)
    for batch_size in BATCH_SIZES:
        loader = DataLoader(points, batch_size=6, collate_fn=collate)
        provider = GroupGradients(model, CE, loader, GROUPS, strategy=strategy, batch_size=batch_size)
        with refusal_by_name(strategy):
            assert relative_error(provider.scores(v), Groups(GROUPS).sum(v @ rows.T)) <= 1e-10


def test_batches_of_objects_are_named():
    @dataclass
    class Batch:
        x: torch.Tensor

    loader = DataLoader(
        TensorDataset(*data("features", 0)), collate_fn=lambda items: Batch(torch.stack([x for x, _ in items]))
    )
    loss = BatchLoss(lambda model, batch: model(batch.x).sum(1))
    with pytest.raises(TypeError, match=r"a batch of type Batch holds no tensor.*dataclasses\.asdict"):
        GroupGradients(mlp().double(), loss, loader, GROUPS).rows()


def test_batches_that_join_examples_are_named():
    points = [(torch.randn(1 + i % 3, WIDTH), i % 3) for i in range(N)]
    joined = DataLoader(
        points, batch_size=6, collate_fn=lambda items: (torch.cat([x for x, _ in items]), torch.ones(6))
    )
    with pytest.raises(ValueError, match=r"a batch whose first tensor has \d+ rows of \d+ examples .a collate_fn"):
        GroupGradients(mlp(), CE, joined, GROUPS).scores(torch.ones(1, 58))


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        (pd.Series(["a", pd.NA] * 12), "12 of 24 points are in no group"),
        (["a", pd.NA] * 12, "12 of 24 points are in no group"),
        (pd.Series([1, pd.NA] * 12, dtype="Int64"), "12 of 24 points are in no group"),
        ({}, "groups is empty"),
        ({"a": 3}, "must hold one list of indices per group, not 3"),
        ("clinic", "not 'clinic', which is one value: pass one label per training point"),
        ({"a": set(range(12)), "b": set(range(12, 24))}, 2),
        ([set(range(12)), set(range(12, 24))], 2),
    ],
)
def test_groups_of_unusual_form_are_taken_or_named(groups, found):
    if isinstance(found, int):
        assert len(Groups(groups, 24)) == found
        return
    with pytest.raises((ValueError, TypeError), match=found):
        Groups(groups, 24)


def test_findings_are_kept_for_the_next_call_and_dropped_when_the_model_changes():
    class Counted(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.body = nn.Linear(WIDTH, 3)

        def forward(self, x):
            type(self).calls += 1
            return self.body(x)

    model, points = Counted().double(), data("features", 0)

    def calls_of() -> int:
        before = Counted.calls
        GroupGradients(model, CE, points, GROUPS).scores(torch.ones(1, 21))
        return Counted.calls - before

    first, second = calls_of(), calls_of()
    assert second < first / 3
    assert calls_of() == 1
    model.body.register_forward_hook(lambda module, args, output: output * 2)
    assert calls_of() > 3


def test_findings_are_kept_for_an_equal_loss_and_a_new_loader_of_the_same_data():
    """Toolkits make a loader and users a loss for every call; another setting of the loss is another loss."""

    class Counted(nn.Module):
        calls = 0

        def forward(self, x):
            type(self).calls += 1
            return x

    model, points = nn.Sequential(Counted(), nn.Linear(WIDTH, 3)).double(), TensorDataset(*data("features", 0))

    def calls_of(**settings) -> int:
        before = Counted.calls
        loss, loader = nn.CrossEntropyLoss(**settings), DataLoader(points, batch_size=N)
        GroupGradients(model, loss, loader, GROUPS).scores(torch.ones(1, 21))
        return Counted.calls - before

    first, again = calls_of(), calls_of()
    assert again < first / 3
    other = calls_of(label_smoothing=0.1)
    assert other > again
    assert calls_of(weight=torch.ones(3).double(), reduction="sum") > again
    assert calls_of(label_smoothing=0.1) < other


def test_findings_are_kept_for_the_same_function_of_parameters_and_an_example():
    """A toolkit wraps it anew for every call, and a bound method is another object each time it is named."""
    calls: list[int] = []

    class Task:
        def loss(self, parameters, example):
            calls.append(1)
            x, y = example
            return CE(torch.func.functional_call(model, parameters, (x.reshape(1, -1),)), y.reshape(1))

    def calls_of(task: Task, **settings) -> int:
        calls.clear()
        GroupGradients(model, FunctionalLoss(task.loss, **settings), points, GROUPS).scores(torch.ones(1, 21))
        return len(calls)

    model, points = nn.Sequential(nn.Linear(WIDTH, 3)).double(), data("features", 0)
    one, other = Task(), Task()
    first, again = calls_of(one), calls_of(one)
    assert again < first / 3
    assert calls_of(other) == first
    assert calls_of(one, batch_of_one=True) > again


def test_findings_of_other_parameters_are_not_the_truth_of_these():
    """A strategy that is compared with autograd later is compared at the parameters of that moment."""
    model, points = mlp().double(), data("features", 0)
    GroupGradients(model, CE, points, GROUPS).plan(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    v = torch.randn(1, sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    found = [GroupGradients(model, CE, points, GROUPS, strategy=strategy).scores(v) for strategy in DENSE]
    assert all(relative_error(scores, found[0]) <= 1e-10 for scores in found)


@pytest.mark.parametrize("flag", ["twice", "reordered", "settings"])
def test_findings_are_dropped_when_a_flag_of_the_model_changes(flag):
    """A plain attribute may change what the model does; here also one that no parameter or module shows."""
    torch.manual_seed(0)
    model, points = Switches().double(), data("features", 0)
    provider = GroupGradients(model, CE, points, GROUPS)
    v = torch.randn(1, provider.p, dtype=torch.float64)
    provider.scores(v)
    model.switch(flag)
    expected = GroupGradients(model, CE, points, GROUPS, strategy="backward").scores(v)
    for strategy in ("auto", *DENSE):
        with refusal_by_name(strategy):
            assert (
                relative_error(GroupGradients(model, CE, points, GROUPS, strategy=strategy).scores(v), expected)
                <= 1e-10
            )


ROWS = torch.arange(N)
INDICES = {
    "a mask of transformers": ((ROWS[:, None, None, None], torch.arange(WIDTH)[None, None, None]), False),
    "a column for each row": ((ROWS, torch.zeros(N, dtype=torch.long)), False),
    "one column": ((ROWS, 2), False),
    "other rows": ((ROWS.tolist()[::-1], slice(None)), True),
    "other rows, with columns": ((torch.tensor([*range(1, N), 0])[:, None], torch.arange(WIDTH)[None]), True),
    "rows along the second dimension": ((ROWS[None], torch.arange(WIDTH)[:, None]), True),
    "columns with more dimensions": ((ROWS, torch.zeros(N, N, dtype=torch.long)), True),
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_that_may_move_rows_is_told_from_one_that_does_not(name):
    index, moves = INDICES[name]
    x = data("features", 0)[0]
    with Watch(N) as watch:
        x[index]
    assert (watch.moves is not None) == moves


def test_where_numbers_lie_is_not_told_under_vmap():
    found = []
    torch.vmap(lambda row: found.append(storage_of(row)) or row)(torch.randn(3, 2))
    assert found == [None]
    whole = torch.randn(4)
    assert storage_of(whole) == storage_of(whole[2:]) is not None
