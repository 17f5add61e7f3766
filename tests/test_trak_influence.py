"""`FisherInfluence` against its formula, and its laws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import descend, gradient_rows
from ggda_trak import FactoredProjector, FisherInfluence, SketchProjector
from ggda_trak.projectors import BasicProjector
from torch import Tensor, nn

from ggda_ext import Groups, properties

N, TESTS = 90, 4
X, Y = torch.randn(N + TESTS, 6, generator=torch.Generator().manual_seed(0)), torch.arange(N + TESTS) % 3
TRAIN, TEST = (X[:N], Y[:N]), (X[N:], Y[N:])
LABELS = np.random.default_rng(0).integers(0, 12, N)


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def data(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].double(), pair[1]


def influence(model: nn.Module, groups: Any = LABELS, **options: Any) -> FisherInfluence:
    return FisherInfluence(model, data(TRAIN), F.cross_entropy, groups, **options)


def rows(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    return gradient_rows(F.cross_entropy(model(pair[0]), pair[1], reduction="none"), model.parameters())


def formula(model: nn.Module, fisher: str, damping: float, proj_dim: int | None, model_id: int = 0) -> Tensor:
    train, test = rows(model, data(TRAIN)), rows(model, data(TEST))
    if proj_dim is not None:
        projector = BasicProjector(train.shape[1], proj_dim, 0, "normal", "cpu", dtype=torch.float64)
        train, test = projector.project(train, model_id), projector.project(test, model_id)
    sums = Groups(LABELS).sum(train, 0)
    sizes = torch.from_numpy(Groups(LABELS).sizes.astype(float))[:, None]
    of = {"exact": train, "batched": sums / sizes.sqrt(), "paper": sums}[fisher]
    matrix = of.T @ of
    matrix += damping * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=matrix.dtype)
    return test @ torch.linalg.solve(matrix, sums.T)


@pytest.mark.parametrize("fisher", ["batched", "exact", "paper"])
@pytest.mark.parametrize("proj_dim", [16, 32, 64, None])
def test_scores_are_those_of_the_formula(fisher: str, proj_dim: int | None) -> None:
    model = network()
    found = influence(model, fisher=fisher, damping=0.2, proj_dim=proj_dim or 512).influence(data(TEST))
    torch.testing.assert_close(found, formula(model, fisher, 0.2, proj_dim), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fisher", ["batched", "exact", "paper"])
def test_checkpoints_are_averaged_and_the_model_left_as_it_was(fisher: str, tmp_path: Path) -> None:
    model = network()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    states = [start, {name: value + 0.2 for name, value in start.items()}]
    torch.save(states[1], tmp_path / "last.pt")
    scorer = influence(model, fisher=fisher, damping=0.2, proj_dim=16, checkpoints=[states[0], tmp_path / "last.pt"])
    found = scorer.influence(data(TEST))
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    expected = []
    for model_id, state in enumerate(states):
        model.load_state_dict(state)
        expected.append(formula(model, fisher, 0.2, 16, model_id))
    torch.testing.assert_close(found, (expected[0] + expected[1]) / 2, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(scorer.influence(data(TEST)), found)
    assert scorer.chosen_damping == {0: 0.2, 1: 0.2}


def test_additivity_with_the_exact_fisher() -> None:
    model = network()
    single = influence(model, None, fisher="exact", proj_dim=32).influence(data(TEST))
    found = influence(model, fisher="exact", proj_dim=32).influence(data(TEST))
    torch.testing.assert_close(found, Groups(LABELS).sum(single), rtol=1e-8, atol=1e-10)


def test_singletons_every_fisher_is_the_exact_one() -> None:
    model = network()
    exact = influence(model, None, fisher="exact", proj_dim=32).influence(data(TEST))
    for name in ("batched", "paper"):
        found = influence(model, None, fisher=name, proj_dim=32).influence(data(TEST))
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)


def test_property_gives_the_scores_of_test_points_and_their_sum() -> None:
    scorer = influence(network(), proj_dim=32)
    expected = scorer.influence(data(TEST))
    losses = properties.point_losses(data(TEST), F.cross_entropy)
    torch.testing.assert_close(scorer.influence(property=losses), expected)
    total = scorer.influence(property=lambda model: losses(model).sum())
    torch.testing.assert_close(total, expected.sum(0, keepdim=True), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("fisher", ["batched", "exact", "paper"])
@pytest.mark.parametrize("kind", ["sketch", "factored"])
def test_projector_captured_or_formed_gives_the_same_scores(kind: str, fisher: str) -> None:
    model, other = network(), network()
    size = sum(parameter.numel() for parameter in model.parameters())
    makers: dict[str, Any] = {
        "sketch": lambda _: SketchProjector(size, 30),
        "factored": lambda made_for: FactoredProjector(made_for, 30),
    }
    found = [
        influence(model, fisher=fisher, damping=0.3, projector=makers[kind](made_for)).influence(data(TEST))
        for made_for in (model, other)
    ]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_left_out_points_do_not_count() -> None:
    model, labels = network(), np.where(np.arange(N) % 4 == 0, -1, LABELS)
    kept = labels >= 0
    for fisher in ("batched", "exact", "paper"):
        found = influence(model, Groups(labels, rest="drop"), fisher=fisher, damping=0.2).influence(data(TEST))
        part = (data(TRAIN)[0][kept], TRAIN[1][kept])
        expected = FisherInfluence(model, part, F.cross_entropy, labels[kept], fisher=fisher, damping=0.2)
        torch.testing.assert_close(found, expected.influence(data(TEST)), rtol=1e-9, atol=1e-12)


def test_removing_the_best_group_raises_the_loss() -> None:
    """Sign: a positive score means that training on the group lowers the loss."""
    model, labels = network(), Y[:N].numpy()
    descend(model, F.cross_entropy, data(TRAIN), 100, 0.02)
    found = influence(model, labels, damping=0.5).influence((data(TRAIN)[0][:3], TRAIN[1][:3]))
    assert found.argmax(1).tolist() == TRAIN[1][:3].tolist()


def test_bad_arguments_name_the_fix() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"fisher": "loss"}, "fisher='loss' is not one of"),
        ({"proj_dim": 0}, "proj_dim=0"),
        ({"damping": -1}, "damping=-1"),
        ({"checkpoints": []}, "checkpoints is empty"),
        ({"projector": SketchProjector(5, 3)}, "for gradients of length 5"),
        ({"groups": [0, 1]}, "labels for 2 points"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            influence(network(), **options)
    scorer = influence(network())
    for arguments in ({}, {"inputs": data(TEST), "property": lambda model: model(X.double()).sum()}):
        with pytest.raises(ValueError, match="either inputs"):
            scorer.influence(**arguments)
    with pytest.raises(ValueError, match="singular"):
        influence(network(), damping=0).influence(data(TEST))
