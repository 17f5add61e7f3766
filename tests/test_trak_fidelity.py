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
def folder(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    digits, labels = draw.integers(0, 256, (300, 28, 28)).astype(np.uint8), draw.integers(0, 10, 300)
    np.savez(
        tmp_path / "mnist.npz", x_train=digits[:200], y_train=labels[:200], x_test=digits[200:], y_test=labels[200:]
    )
    x = draw.normal(size=(300, 23)).astype(np.float32)
    np.savez(tmp_path / "heloc.npz", X=x, y=(x[:, 0] > 0).astype(int), is_test=np.arange(300) >= 200)
    return tmp_path


SCALE = fidelity.Scale(points=120, tests=6, proj_dim=16, sizes=(4,), subsets=4, seeds=(0,))


def test_exact_fisher_without_ridge_agrees_with_itself(folder: Path) -> None:
    problem = fidelity.Problem("HELOC", lambda: mlp(23, 6, 2), 3, 1e-2, fidelity.heloc)
    cells = list(fidelity.measured(problem, 0, SCALE, folder))
    assert {cell.grouping for cell in cells} == {"Random", "Grad-K-Means"}
    exact = [cell for cell in cells if cell.fisher == "exact" and cell.damping == "0.0"]
    assert [cell.agreement for cell in exact] == pytest.approx([1.0, 1.0])
    auto = next(cell for cell in cells if cell.fisher == "batched" and cell.damping == "auto")
    assert auto.chosen == pytest.approx(0.3 * 16 / auto.groups)
    assert len(list(fidelity.table(cells))) == 1 + 2 * 3


@pytest.mark.parametrize("fisher", ["batched", "loss", "exact"])
def test_scores_are_those_of_the_traker(fisher: str, folder: Path) -> None:
    train, test = fidelity.heloc(folder)
    train, test = (train[0][:120], train[1][:120]), (test[0][:6], test[1][:6])
    torch.manual_seed(0)
    model, groups = mlp(23, 6, 2), Groups(np.arange(120) % 17)
    rows, weights, targets = fidelity.features(model, train, test, 16)
    sizes = torch.from_numpy(groups.sizes.copy())[:, None]
    numerators = groups.sum(rows * weights, 0)
    of = {"exact": rows, "batched": groups.sum(rows, 0) / sizes.sqrt(), "loss": numerators}[fisher]
    expected = fidelity.scores(of, numerators, targets, 0.0 if fisher == "exact" else 0.2)[0]
    ridge = {} if fisher == "exact" else {"lambda_reg": 0.2}
    traker = TRAKer(model, "image_classification", 120, save_dir=folder / "store", device="cpu", proj_dim=16,
                    groups=groups, fisher=fisher, logging_level=100, **ridge)  # fmt: skip
    traker.load_checkpoint(model.state_dict(), 0)
    traker.featurize(train, num_samples=120)
    traker.finalize_features()
    traker.start_scoring_checkpoint("test", model.state_dict(), 0, num_targets=6)
    traker.score(test, num_samples=6)
    found = torch.from_numpy(np.array(traker.finalize_scores("test"))).double()
    assert torch.allclose(found / found.norm(), expected / expected.norm(), atol=2e-4)


def test_digits_are_scaled_and_margins_are_log_odds(folder: Path) -> None:
    (x, y), _ = fidelity.mnist(folder)
    assert x.shape == (200, 784)
    assert 0 <= float(x.min()) < float(x.max()) <= 1
    assert y.dtype == torch.int64
    model = mlp(784, 3)
    probability = model(x[:5]).softmax(1).gather(1, y[:5, None] % 3)[:, 0].double()
    expected = (probability / (1 - probability)).log()
    torch.testing.assert_close(fidelity.margin(model, (x[:5], y[:5] % 3)), expected, rtol=1e-4, atol=1e-5)


def test_missing_data_says_what_to_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GGDA_DATA_DIR", raising=False)
    for given in (None, tmp_path):
        with pytest.raises(SystemExit, match="pass --data-dir"):
            fidelity.data_folder(given)
