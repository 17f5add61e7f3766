"""A small model, test points and gradients by plain autograd for the tests of properties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cases import gradient_rows
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from ggda_ext.properties import (
    property_gradient,
)

N, D = 11, 4
CE = nn.CrossEntropyLoss()


class Net(nn.Module):
    """A small MLP; `outputs` is 1 with `squeeze` for the outputs [N] of a binary model."""

    def __init__(self, outputs: int, squeeze: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.squeeze = nn.Linear(D, 5), nn.Linear(5, outputs), squeeze

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(self.first(x).tanh())
        return out.squeeze(-1) if self.squeeze else out


def build(outputs: int = 3, squeeze: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(outputs, squeeze).double().eval()


def points(classes: int = 3, seed: int = 1, n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(n, D, generator=generator, dtype=torch.float64)
    return x, torch.arange(n) * 2 % 3 % classes


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def gradient(property: Callable[[nn.Module], Tensor], model: nn.Module) -> Tensor:
    return property_gradient(property, model, parameters_of(model))


def plain(function: Callable[[nn.Module], Tensor], model: nn.Module) -> Tensor:
    """Ground truth: `function(model)` on the whole test set in one graph, differentiated row by row."""
    return gradient_rows(function(model).reshape(-1), model.parameters())


def given(logits: list[Any]) -> nn.Module:
    """A model that gives its inputs plus a parameter of zeros: crafted outputs for data (logits, y)."""

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(len(logits[0]), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    return Given()


X, Y = points()
X2, Y2 = points(seed=2, n=7)
GROUP = np.array(["a", "b", "c"])[np.arange(N) // 3 % 3]
"""Three sensitive groups; each has points of class 1 and of other classes."""


def z(model: nn.Module) -> Tensor:
    return model(X)


DATA = (X, Y)


class Dicts(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return N

    def __getitem__(self, j: int) -> dict[str, Tensor]:
        return {"x": X[j], "labels": Y[j]}


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))
