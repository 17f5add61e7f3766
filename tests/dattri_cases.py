"""A tiny task for the dattri tests: model, checkpoints, loaders, uneven groups, and every attributor's settings."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import dattri.algorithm as upstream
import ggda_dattri
import torch
from dattri.task import AttributionTask
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ggda_ext import Groups

N, TESTS = 23, 7
GROUPS = Groups([0, 3, 1, 1, 0, 2, 3, 3, 3, 4, 0, 1, 1, 3, 3, 2, 2, 0, 3, 3, 1, 4, 3])
INFLUENCE = ("Explicit", "CG", "Arnoldi", "LiSSA", "DataInf", "EKFAC")
SETTINGS: dict[str, dict[str, Any]] = {
    "Explicit": {"regularization": 1.0},
    "CG": {"regularization": 1.0, "max_iter": 4},
    "Arnoldi": {"regularization": 2.0, "proj_dim": 8, "max_iter": 12},
    "LiSSA": {"batch_size": N, "recursion_depth": 4, "scaling": 5.0, "damping": 0.01},
    "DataInf": {"regularization": 0.2},
    "EKFAC": {"damping": 0.2},
}


@dataclass
class Case:
    """A model with checkpoints, and the same losses in dattri's two conventions."""

    model: nn.Module
    checkpoints: list[dict[str, Tensor]]
    train: TensorDataset
    test: TensorDataset

    def task(self, checkpoints: int = 1, unbatched: bool = False, own_target: bool = False) -> AttributionTask:
        """A task whose losses see a batch, or (`unbatched`) one example without a batch dimension."""

        def outputs(parameters: dict[str, Tensor], data: Any) -> tuple[Tensor, Tensor]:
            x, y = (value.unsqueeze(0) for value in data) if unbatched else data
            return functional_call(self.model, parameters, (x.to(next(self.model.parameters()).dtype),)), y.long()

        def loss(parameters: dict[str, Tensor], data: Any) -> Tensor:
            return cross_entropy(*outputs(parameters, data))

        def target(parameters: dict[str, Tensor], data: Any) -> Tensor:
            logits, labels = outputs(parameters, data)
            return logits.gather(1, labels[:, None]).mean() + 0.1 * logits.square().mean()

        return AttributionTask(loss, self.model, self.checkpoints[:checkpoints], target if own_target else None)

    def probability(self, parameters: dict[str, Tensor], data: Any) -> Tensor:
        """TRAK's probability of the correct class of one example."""
        x, y = data
        return functional_call(self.model, parameters, (x.unsqueeze(0),)).softmax(1).gather(1, y.view(1, 1)).squeeze()

    def train_loader(self, batch_size: int = 12) -> DataLoader:
        return DataLoader(self.train, batch_size=batch_size)

    def test_loader(self, batch_size: int = 4) -> DataLoader:
        return DataLoader(self.test, batch_size=batch_size)

    def full_loader(self, batch_size: int = N) -> DataLoader:
        return DataLoader(self.train, batch_size=batch_size)


def make_case(checkpoints: int = 2) -> Case:
    """A fresh case in the current default dtype, always the same."""
    generator = torch.Generator().manual_seed(0)

    def data(n: int) -> TensorDataset:
        x = torch.randn(n, 4, generator=generator)
        return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))

    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    states = []
    for _ in range(checkpoints):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        states.append(copy.deepcopy(model.state_dict()))
    return Case(model.eval(), states, data(N), data(TESTS))


def influence(name: str, package: Any, task: AttributionTask, layer: Any = None, **extra: Any) -> Any:
    """An influence function of dattri (`package` is dattri.algorithm) or of ours (ggda_dattri)."""
    names = {"module_name" if name == "EKFAC" else "layer_name": layer}
    return getattr(package, f"IFAttributor{name}")(task, **names, **SETTINGS[name] | extra)


def theirs(name: str, task: AttributionTask, layer: Any = None) -> Any:
    return influence(name, upstream, task, layer)


def ours(name: str, task: AttributionTask, layer: Any = None, **extra: Any) -> Any:
    return influence(name, ggda_dattri, task, layer, **extra)


def close(found: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Relative to the largest entry: 1e-5 in float32, 1e-10 in float64, or `tolerance`."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    limit = tolerance or (1e-10 if found.dtype == torch.float64 else 1e-5)
    difference = float((found - expected.detach()).abs().max() / expected.detach().abs().max())
    assert difference <= limit, f"differs by {difference:.3g} of the largest entry"
