"""Data, models and trainings to their optimum for the tests of what-if."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

N, DECAY = 120, 0.02
NAMES = ["web", "books", "forum", "news"]
SOURCES = [NAMES[j % 4] for j in range(N)]
LOSS = nn.CrossEntropyLoss()


def points(outputs: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 5, generator=generator, dtype=torch.float64)
    noisy = x @ torch.randn(5, outputs, generator=generator, dtype=torch.float64)
    noisy += 1.5 * torch.randn(N, outputs, generator=generator, dtype=torch.float64)
    return x.to(dtype), noisy.argmax(1)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def fitted(model: nn.Module, loss_fn: Callable[..., Tensor], data: Any, weights: Tensor | None = None) -> nn.Module:
    """The model trained to the optimum of its weighted mean loss with weight decay, by L-BFGS."""
    x, y = data
    weights = torch.ones(len(x), dtype=x.dtype) if weights is None else weights

    def penalised() -> Tensor:
        each = torch.stack([loss_fn(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))])
        penalty = sum(value.square().sum() for value in model.parameters())
        return (weights * each).sum() / weights.sum() + DECAY / 2 * penalty

    minimise(model.parameters(), penalised)
    return model.eval()


def minimise(values: Iterable[Tensor], objective: Callable[[], Tensor]) -> None:
    """Move values to where an objective has its minimum, by L-BFGS."""
    optimizer = torch.optim.LBFGS(
        values, max_iter=2000, tolerance_grad=1e-13, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective()
        loss.backward()
        return loss

    optimizer.step(closure)


def kept_rows() -> np.ndarray:
    return np.array([[1, 0, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 0], [1, 1, 0, 0.5]])


def make_other() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
