"""Plain autograd, one example at a time: what every strategy is compared with before its numbers are trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ggda_ext.data import batch_length
from ggda_ext.gradients.hooks import Calls, Layer, Observer, observe
from ggda_ext.gradients.parameters import ParameterSpace
from ggda_ext.losses import ExampleLoss


@dataclass(frozen=True)
class Tolerance:
    """Relative differences that rounding may explain; a structural mistake makes one of order 1."""

    most: float
    """For at least half of the examples."""
    each: float
    """For every example: an activation that is 0 but for rounding may switch a unit on or off."""


_TOLERANCES = {
    torch.float64: Tolerance(1e-6, 1e-4),  # some layers go through float32, such as Llama's normalisation
    torch.float32: Tolerance(3e-4, 2e-2),
    torch.float16: Tolerance(1e-2, 0.1),
    torch.bfloat16: Tolerance(5e-2, 0.3),
}


def tolerance(precision: torch.dtype) -> Tolerance:
    """What to allow for numbers that were computed in a precision."""
    return _TOLERANCES.get(precision, _TOLERANCES[torch.float32])


@dataclass(frozen=True)
class Truth:
    """Losses of examples alone `[b]`; per parameter their gradients along a direction, and gradient norms `[b, q]`."""

    losses: Tensor
    scores: Tensor
    norms: Tensor

    @classmethod
    def of_nothing(cls, parameters: int) -> Truth:
        """No examples yet."""
        return cls(torch.zeros(0).double(), torch.zeros(0, parameters), torch.zeros(0, parameters))

    @property
    def finite(self) -> Tensor:
        """Which examples can tell anything `[b]`."""
        return self.losses.isfinite() & self.norms.isfinite().all(1) & self.scores.isfinite().all(1)

    @property
    def touched(self) -> Tensor:
        """Which parameters have a gradient other than zero in some example `[q]`."""
        return (self.norms[self.finite] > 0).any(0)

    def joined(self, other: Truth) -> Truth:
        """These examples and others."""
        return Truth(*(torch.cat([getattr(self, name), getattr(other, name)]) for name in self.__dataclass_fields__))

    def differs(self, scores: Tensor, allowed: Tolerance) -> Tensor:
        """Which parameters have other scores `[b, q]` than these examples should have `[q]`."""
        finite = self.finite
        if not bool(finite.any()):
            return torch.zeros(self.norms.shape[1], dtype=torch.bool)
        found, expected, norms = (values[finite] for values in (scores.to(self.scores), self.scores, self.norms))
        scale = norms + 1e-2 * norms.amax(0) + 1e-3 * norms.amax(1, keepdim=True)
        error = (found - expected).abs() / scale.clamp(min=torch.finfo(scale.dtype).tiny)
        informative = norms > 0
        typical = torch.where(informative, error, torch.nan).nanmedian(0).values
        return ~(error <= allowed.each).all(0) | (typical > allowed.most)


def random_direction(space: ParameterSpace) -> Tensor:
    """A fixed random direction `[1, p]`, drawn without touching the global random state."""
    generator = torch.Generator(space.device).manual_seed(0)
    return torch.randn(1, space.size, generator=generator, dtype=space.dtype, device=space.device)


def truth_of(space: ParameterSpace, loss: ExampleLoss, alone: Sequence[Any], direction: Tensor) -> Truth:
    """The truth about examples, each given as a batch of one, along a direction `[1, p]`."""
    losses, scores, norms = [], [], []
    directions = [wide(space.part(direction, parameter)).flatten() for parameter in space.parameters.values()]
    for one in alone:
        value, gradients = _gradients(space, loss, one)
        losses.append(value)
        scores.append(torch.stack([_dot(*pair) for pair in zip(gradients, directions, strict=True)]))
        norms.append(torch.stack([_norm(*pair) for pair in zip(gradients, directions, strict=True)]))
    return Truth(torch.stack(losses), torch.stack(scores).cpu(), torch.stack(norms).cpu())


def total_scores(space: ParameterSpace, loss: ExampleLoss, batch: Any, direction: Tensor) -> Tensor:
    """Gradient of the summed loss of a batch along a direction, per parameter `[q]`."""
    _, gradients = _gradients(space, loss, batch)
    parts = (wide(space.part(direction, parameter)).flatten() for parameter in space.parameters.values())
    return torch.stack([_dot(*pair) for pair in zip(gradients, parts, strict=True)]).cpu()


def captured_scores(
    space: ParameterSpace, layers: list[Layer], loss: ExampleLoss, batch: Any, direction: Tensor, watcher: Observer
) -> tuple[Tensor, Calls]:
    """Scores of every example along a direction from layer inputs and output gradients, per parameter `[b, q]`.

    `watcher` sees the layers' calls too.
    """
    observer = _ParameterScores(space, direction, batch_length(batch), watcher)
    calls = observe(space, layers, loss, batch, observer)
    return torch.stack([observer.scores[id(parameter)] for parameter in space.parameters.values()], 1).cpu(), calls


def _gradients(space: ParameterSpace, loss: ExampleLoss, batch: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The summed loss of a batch, and its gradient by parameter; None where it does not depend on it."""
    parameters = list(space.parameters.values())
    with space.gradients(enabled=True):
        value = loss.total(space.model, batch)
        found: Sequence[Tensor | None] = [None] * len(parameters)
        if value.requires_grad:
            found = torch.autograd.grad(value, parameters, allow_unused=True)
    return value.detach().cpu().double(), [g.to_dense() if g is not None and g.is_sparse else g for g in found]


def _dot(gradient: Tensor | None, direction: Tensor) -> Tensor:
    return direction.new_zeros(()) if gradient is None else torch.dot(gradient.flatten().to(direction), direction)


def _norm(gradient: Tensor | None, direction: Tensor) -> Tensor:
    return direction.new_zeros(()) if gradient is None else gradient.flatten().to(direction).norm()


def wide(values: Tensor) -> Tensor:
    """At least float32: dot products of half-precision numbers would add their own rounding."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class _ParameterScores(Observer):
    """Scores of every example along one direction, parameter by parameter."""

    def __init__(self, space: ParameterSpace, direction: Tensor, size: int, watcher: Observer) -> None:
        self.space, self.direction, self.size, self.watcher = space, wide(direction), size, watcher
        self.scores = {key: self.direction.new_zeros(size) for key in space.spans}

    def backward(self, layer: Layer, kept: Tensor, d: Tensor, repeats: int) -> None:
        self.watcher.backward(layer, kept, d, repeats)
        kept, d = wide(kept) if kept.is_floating_point() else kept, wide(d)
        if layer.bias is not None:
            starts = list(range(0, len(d) + 1, repeats))
            rows = layer.rule.bias_rows(layer.module, d, starts).reshape(self.size, -1)
            self.scores[id(layer.bias)] += rows @ self.space.part(self.direction, layer.bias).flatten()
        if layer.weight is not None:
            tangent = layer.apply(kept, self.space.part(self.direction, layer.weight)[0], None)
            self.scores[id(layer.weight)] += (tangent * d).reshape(self.size, -1).sum(1)
