"""Small data, a network, a loss and a property for the tests of stores, and changes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

N, K = 1_000, 40


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 5, generator=generator), torch.randint(0, 3, (N,), generator=generator)


def make_network(act: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), act(), nn.Linear(4, 3)).eval()


class Weighted(nn.Module):
    """A loss with a buffer and a setting."""

    def __init__(self, weight: float = 1.0, power: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 1.0, weight]), persistent=False)
        self.power = power

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        losses = functional.cross_entropy(output, target, reduction="none") ** self.power
        return (losses * self.weight[target]).mean()


def changed_points() -> tuple[Tensor, Tensor]:
    """All but 32 points of the training data are other ones."""
    x, y = make_data()
    other = x + 1
    kept = np.linspace(0, N - 1, 32).astype(int)
    other[kept] = x[kept]
    return other, y


def one_point() -> tuple[Tensor, Tensor]:
    x, y = make_data()
    x[41, 2] += 1e-3
    return x, y


def margin(at: int, network: nn.Module) -> Tensor:
    return network(make_data()[0][:9])[:, at].mean()


def over(at: Any, reference: nn.Module | None = None) -> Callable[[nn.Module], Tensor]:
    x = make_data()[0][:9]
    return lambda network: (
        (network(x) - (0 if reference is None else reference(x).detach()))[:, int(at)].square().mean()
    )


class Rows(Dataset):
    """A data set of the user's own, in memory or not."""

    def __init__(self, data: tuple[Tensor, Tensor], keep: bool) -> None:
        self.fetch = (lambda i: (data[0][i], data[1][i])) if not keep else None
        if keep:
            self.x, self.y = data

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.fetch(i) if self.fetch is not None else (self.x[i], self.y[i])
