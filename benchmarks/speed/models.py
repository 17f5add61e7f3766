"""The models of the paper, at the sizes it uses, and data of the right shape for them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers of the given widths with ReLU between them."""
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def logistic_regression() -> nn.Module:
    """HELOC's logistic regression: 23 features, two classes."""
    return mlp(23, 2)


def ann_s() -> nn.Module:
    """HELOC's small network, 23-50-50-2."""
    return mlp(23, 50, 50, 2)


def ann_m() -> nn.Module:
    """HELOC's medium network, 23-200-50-2."""
    return mlp(23, 200, 50, 2)


def ann_l() -> nn.Module:
    """MNIST's network, 784-150-150-150-10."""
    return mlp(784, 150, 150, 150, 10)


def tabular(n: int, features: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Made data of the shape of a tabular or flattened image set: normal features, uniform labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=generator)
    return x, torch.randint(0, classes, (n,), generator=generator)
