"""The fidelity benchmark on made data: its numbers mean what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ggda_trak import TRAKer

from benchmarks import fidelity
from benchmarks.models import mlp
from ggda_ext import Groups


@pytest.fixture
def points() -> tuple[fidelity.Pair, fidelity.Pair]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(300, 23, generator=draw)
    y = (x[:, 0] > 0).long()
    return (x[:200], y[:200]), (x[200:], y[200:])


Points = tuple[fidelity.Pair, fidelity.Pair]
SCALE = fidelity.Scale(points=120, tests=6, proj_dim=16, sizes=(4,), subsets=4, seeds=(0,))


def test_exact_fisher_without_ridge_agrees_with_itself(points: Points) -> None:
    problem = fidelity.Problem("HELOC", lambda: mlp(23, 6, 2), 3, 1e-2, "heloc")
    cells = list(fidelity.measured(problem, 0, SCALE, *points))
    assert {cell.grouping for cell in cells} == {"Random", "Grad-K-Means"}
    exact = [cell for cell in cells if cell.fisher == "exact" and cell.damping == "0.0"]
    assert [cell.agreement for cell in exact] == pytest.approx([1.0, 1.0])
    auto = next(cell for cell in cells if cell.fisher == "batched" and cell.damping == "auto")
    assert auto.chosen == pytest.approx(0.3 * 16 / auto.groups)
    assert len(list(fidelity.table(cells))) == 1 + 2 * 3


@pytest.mark.parametrize("fisher", ["batched", "paper", "exact"])
def test_scores_are_those_of_the_traker(fisher: str, points: Points, tmp_path: Path) -> None:
    train, test = points
    train, test = (train[0][:120], train[1][:120]), (test[0][:6], test[1][:6])
    torch.manual_seed(0)
    model, groups = mlp(23, 6, 2), Groups(np.arange(120) % 17)
    rows, weights, targets = fidelity.features(model, train, test, 16)
    sizes = torch.from_numpy(groups.sizes.copy())[:, None]
    numerators = groups.sum(rows * weights, 0)
    of = {"exact": rows, "batched": groups.sum(rows, 0) / sizes.sqrt(), "paper": numerators}[fisher]
    expected = fidelity.scores(of, numerators, targets, 0.0 if fisher == "exact" else 0.2)[0]
    ridge = {} if fisher == "exact" else {"damping": 0.2}
    traker = TRAKer(model, "image_classification", 120, save_dir=tmp_path / "store", device="cpu", proj_dim=16,
                    groups=groups, fisher=fisher, logging_level=100, **ridge)  # fmt: skip
    traker.load_checkpoint(model.state_dict(), 0)
    traker.featurize(train, num_samples=120)
    traker.finalize_features()
    traker.start_scoring_checkpoint("test", model.state_dict(), 0, num_targets=6)
    traker.score(test, num_samples=6)
    found = torch.from_numpy(np.array(traker.finalize_scores("test"))).double()
    assert torch.allclose(found / found.norm(), expected / expected.norm(), atol=2e-4)


def test_margins_are_log_odds() -> None:
    torch.manual_seed(0)
    model, x, y = mlp(7, 3), torch.randn(5, 7), torch.arange(5) % 3
    probability = model(x).softmax(1).gather(1, y[:, None])[:, 0].double()
    expected = (probability / (1 - probability)).log()
    torch.testing.assert_close(fidelity.margin(model, (x, y)), expected, rtol=1e-4, atol=1e-5)


def test_data_comes_from_the_benchmarks_loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGDA_OFFLINE", "1")
    monkeypatch.setenv("GGDA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("GGDA_DATA_DIR", raising=False)
    problem = next(problem for problem in fidelity.PROBLEMS if problem.data == "heloc")
    dataset, (x, y), (x_test, _) = fidelity.loaded(problem, None)
    assert dataset.stand_in
    assert len(x) == len(y)
    torch.testing.assert_close(x.mean(0), torch.zeros(x.shape[1]), atol=1e-3, rtol=0)
    torch.testing.assert_close(x_test[0] * dataset.train[0].std(0) + dataset.train[0].mean(0), dataset.test[0][0])
