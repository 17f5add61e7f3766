"""A store of a model whose rare points its layers were not proven for: the strategy changes, the scores do not."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import relative_error
from torch import Tensor, nn

from ggda_ext import GradientStore, GroupGradients, attribute, properties

LOSS, RARE, POINTS = nn.CrossEntropyLoss(), 0.625, 400


class Rare(nn.Module):
    """Uses a weight outside of its layer for one point, which no probe has reason to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if bool((x[:, 0] == RARE).any()):
            hidden = hidden + (x[:, :1] == RARE) * (2 * x @ self.first.weight.T).tanh()
        return self.last(hidden)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    monkeypatch.setattr("ggda_ext.storage.jobs.BATCHES_PER_BLOCK", 2)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(POINTS, 4, generator=generator), torch.randint(0, 3, (POINTS,), generator=generator)
    x[277, 0] = RARE
    torch.manual_seed(0)
    return Rare().double().eval(), (x.double(), y)


def test_scores_go_on_by_another_strategy(given: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path) -> None:
    model, data = given
    asked = properties.mean_loss((data[0][:9], data[1][:9]), LOSS)

    def scores(model: nn.Module, **options: object) -> Tensor:
        labels = np.arange(POINTS) // 10
        return attribute(model, LOSS, data, labels, asked, method="tracin", batch_size=20, **options).scores  # type: ignore[arg-type]

    truth = scores(copy.deepcopy(model), strategy="backward")
    kept = scores(copy.deepcopy(model), save_dir=tmp_path / "kept")
    assert relative_error(kept, truth) < 1e-12
    for path in (tmp_path / "kept").glob("*-scores-001+*.npy"):  # of the strategy that was gone on with
        path.unlink()
        assert torch.equal(scores(copy.deepcopy(model), save_dir=tmp_path / "kept"), kept)
        break
    else:
        raise AssertionError("there was no need of another strategy")
    with pytest.raises(ValueError, match="strategy='directional' cannot be used here"):
        scores(copy.deepcopy(model), save_dir=tmp_path / "by name", strategy="directional")


def test_gradients_go_on_by_another_strategy(given: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path) -> None:
    model, data = given
    labels = np.arange(POINTS) // 10

    def rows(model: nn.Module) -> Tensor:
        provider = GroupGradients(model, LOSS, data, labels, batch_size=20)
        return torch.cat([block.clone() for _, block in GradientStore(provider, tmp_path).blocks()])

    found = rows(copy.deepcopy(model))
    truth = GroupGradients(copy.deepcopy(model), LOSS, data, labels, strategy="backward").rows()
    assert relative_error(found, truth) < 1e-12
    assert torch.equal(rows(copy.deepcopy(model)), found)
