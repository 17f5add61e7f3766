"""Small models with the layers that matter, their data, and ground truth by one backward pass per point."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N, CLASSES = 23, 3


class SharedLayer(nn.Module):
    """One layer called twice, with an in-place activation between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head, self.act = nn.Linear(6, 6), nn.Linear(6, CLASSES), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.shared(self.act(self.shared(x)))))


class TiedWeights(nn.Module):
    """An embedding with padding whose weight is the output layer's too; an output that is overwritten in place."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = (
            nn.Embedding(CLASSES, 4, padding_idx=1),
            nn.Linear(4, 4),
            nn.Linear(4, CLASSES),
        )
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x % CLASSES).mean(1)
        mixed = self.mix(hidden)
        mixed += hidden  # overwrites the output of `mix`
        return self.head(mixed.tanh())


class Transformer(nn.Module):
    """Embeddings with padding, shared position embeddings, normalisation, fused attention, tokens folded in."""

    def __init__(self, vocabulary: int = 11, length: int = 5, width: int = 8) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width, padding_idx=0), nn.Embedding(length, width)
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mlp, self.last = nn.Linear(width, width, bias=False), nn.RMSNorm(width)
        self.head = nn.Linear(width, CLASSES)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        z = self.tokens(x) + self.positions(torch.arange(x.shape[1])[None])
        z = z + F.scaled_dot_product_attention(*self.qkv(self.norm(z)).chunk(3, -1))
        z = z + self.mlp(z.reshape(-1, self.width)).view_as(z).relu()
        return self.head(self.last(z).mean(1))


class UnknownLayers(nn.Module):
    """Parameters outside any known layer: one of the model's own, and those of a PReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.act, self.head = nn.Parameter(torch.rand(6)), nn.PReLU(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(x * self.scale))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, stride=2, groups=2), nn.GroupNorm(2, 6),
        nn.Flatten(1, 2), nn.Conv1d(12, 4, 3, padding="same"), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


def _features(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(N, *shape)


def _tokens() -> Tensor:
    return torch.randint(0, 11, (N, 5))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "logistic": (lambda: nn.Linear(6, CLASSES), _features(6)),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, CLASSES)), _features(6)),
    "cnn": (_cnn, _features(1, 6, 6)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(1, 3, 2), nn.Flatten(), nn.Linear(24, CLASSES)), _features(1, 3, 3, 3)),
    "transformer": (Transformer, _tokens),
    "shared": (SharedLayer, _features(6)),
    "tied": (TiedWeights, _tokens),
    "unknown": (UnknownLayers, _features(6)),
}
NOT_GHOST = {"cnn", "conv3d", "transformer", "tied", "unknown"}
NOT_CAPTURED = {"unknown"}


@dataclass
class Case:
    """A model in eval mode with training data; gradients of every point by autograd are the truth."""

    model: nn.Module
    x: Tensor
    y: Tensor

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    def gradients(self, x: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        """Gradient of every point's loss `[n, p]`, one backward pass per point."""
        return point_rows(self.model, F.cross_entropy, self.data if x is None or y is None else (x, y))


def gradient_rows(values: Iterable[Tensor], parameters: Iterable[Tensor]) -> Tensor:
    """Truth: the gradient of each number as a row `[m, p]`, by plain autograd; zeros where it has none."""
    by, rows = list(parameters), []
    for value in values:
        found = torch.autograd.grad(value, by, retain_graph=True, allow_unused=True)
        dense = [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(by, found, strict=True)]
        rows.append(torch.cat([part.flatten() for part in dense]))
    return torch.stack(rows)


def point_rows(model: nn.Module, loss_fn: Callable[..., Tensor], points: Any) -> Tensor:
    """Truth: the gradient of every point's own loss `[n, p]`, one backward pass per point."""
    losses = (loss_fn(model(x[None]), y[None]) for x, y in zip(*points, strict=True))
    return gradient_rows(losses, model.parameters())


def descend(
    model: nn.Module, loss_fn: Callable[..., Tensor], data: Any, steps: int, rate: float, **options: Any
) -> nn.Module:
    """The model after some steps of Adam on all of its data."""
    optimizer = torch.optim.Adam(model.parameters(), rate, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model(data[0]), data[1]).backward()
        optimizer.step()
    return model


def make_case(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    torch.manual_seed(seed)
    build, inputs = MODELS[name]
    model, x = build().to(dtype), inputs()
    for module in model.modules():  # running statistics and affine parameters away from their defaults
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm):
            module.weight.data.normal_(1, 0.3)
            module.bias.data.normal_(0, 0.3)
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    x = x.to(dtype) if x.is_floating_point() else x
    return Case(model.eval(), x, torch.randint(0, CLASSES, (N,)))


def relative_error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).abs().max() / truth.abs().max())
