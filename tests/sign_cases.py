"""A logistic regression trained to its optimum with and without every group: the truth for the sign of every score.

The loss is the sum over points plus `DECAY` / 2 · ‖θ‖², so that leaving a group out changes nothing else. Some groups
have many wrong labels, so that effects are large and of both signs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from ggda_ext import Groups

N, K, TESTS, DECAY = 240, 40, 30, 2.0


@dataclass(frozen=True)
class Truth:
    """The data, the model at its optimum, and what removing each group really does.

    Attributes:
        train, test: inputs and labels.
        groups: of the training points; `noisy` marks those with a wrong label.
        model: trained on all points.
        losses, margins: rise of every test point's loss and margin when a group is removed `[TESTS, K]`.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    groups: Groups
    noisy: np.ndarray
    model: nn.Sequential
    losses: Tensor
    margins: Tensor


def margins_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-odds of the label `[b]`."""
    right = labels[:, None]
    return (logits.gather(1, right) - logits.gather(1, 1 - right))[:, 0]


def optimum(x: Tensor, y: Tensor) -> Tensor:
    """Weights and bias `[2, d + 1]` by Newton's method, in float64."""
    x = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], 1)
    weights = torch.zeros(2, x.shape[1], dtype=torch.float64)

    def loss(flat: Tensor) -> Tensor:
        return cross_entropy(x @ flat.view_as(weights).T, y, reduction="sum") + DECAY / 2 * flat.square().sum()

    flat = weights.flatten()
    for _ in range(12):
        flat = flat - torch.linalg.solve(torch.func.hessian(loss)(flat), torch.func.grad(loss)(flat))
    assert float(torch.func.grad(loss)(flat).norm()) < 1e-9
    return flat.view_as(weights)


def measured(weights: Tensor, test: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Losses and margins of test points `[TESTS]`."""
    logits = linear(test[0].double(), weights[:, :-1], weights[:, -1])
    return cross_entropy(logits, test[1], reduction="none"), margins_of(logits, test[1])


def retrained_losses(subsets: Sequence[np.ndarray]) -> np.ndarray:
    """Mean test loss of the model trained on every subset `[subsets, 1]`."""
    x, y = truth().train
    kept = [torch.from_numpy(subset) for subset in subsets]
    return np.array([[float(measured(optimum(x[at], y[at]), truth().test)[0].mean())] for at in kept])


@cache
def truth(seed: int = 0) -> Truth:
    """The case, made once."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(N + TESTS, 4, generator=draw)
    clean = (x @ torch.tensor([1.0, -1.0, 0.5, 0.0]) + 0.5 * torch.randn(N + TESTS, generator=draw) > 0).long()
    labels = torch.arange(N) % K
    wrong = torch.rand(N, generator=draw) < (labels % 4 == 0) * 0.7
    y = clean.clone()
    y[:N][wrong] = 1 - y[:N][wrong]
    test = x[N:], clean[N:]
    full = optimum(x[:N], y[:N])
    without = [measured(optimum(x[:N][labels != j], y[:N][labels != j]), test) for j in range(K)]
    losses, margins = (
        torch.stack([values[kind] for values in without], 1) - measured(full, test)[kind][:, None] for kind in (0, 1)
    )
    layer = nn.Linear(4, 2)
    with torch.no_grad():
        layer.weight.copy_(full[:, :-1])
        layer.bias.copy_(full[:, -1])
    model = nn.Sequential(layer).eval()
    return Truth((x[:N], y[:N]), test, Groups(labels), wrong.numpy(), model, losses, margins)
