"""No silent wrong number: unusual models, losses and data, under every strategy, give the truth or an error."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from cases import point_rows, relative_error
from torch import nn
from unusual_cases import CASES, GROUPS, WIDTH, N, WritesToItself, data, make, point_gradients
from unusual_checks import BATCH_SIZES, CE, DENSE, refusal_by_name, state_of
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
    TellsPlaces,
)

from ggda_ext import STRATEGIES, GroupGradients, Groups, PointGradients
from ggda_ext.data import IndexedData
from ggda_ext.gradients.proof import sample
from ggda_ext.losses import as_example_loss

SEEDS = 40
BY_LUCK = ("reordered batch", "unique tokens", "unpadded tokens", "experts by example", "rare expert",
           "experts by token")  # fmt: skip
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
    assert provider._captured.found.joins is None
    assert not provider._captured.found.placed


FAST = {"scales": "directional", "class token": "directional", "embedding bag": "directional", "weight norm": "forward",
        "attention": "forward", "an encoder": "forward", "sparse embedding": "directional"}  # fmt: skip


@pytest.mark.parametrize("name", FAST)
def test_common_layers_go_to_a_fast_strategy(name):
    model, points = make(name)
    assert GroupGradients(model, CE, points, GROUPS).plan(1).strategy == FAST[name]
