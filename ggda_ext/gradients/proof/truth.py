"""Plain autograd, one example at a time. Every strategy is compared with it before its numbers are trusted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ggda_ext.data import batch_length, pick
from ggda_ext.gradients.layers import Layer
from ggda_ext.gradients.observation import Calls, Observer, Watch, altered_gradients, observe
from ggda_ext.losses import ExampleLoss
from ggda_ext.model import ParameterSpace, left_as_it_was, product


@dataclass(frozen=True)
class Tolerance:
    """Relative differences that rounding may explain; a structural mistake makes a difference of order 1."""

    most: float
    """For at least half of the examples."""
    each: float
    """For every example; larger, because an activation that is 0 up to rounding may switch a unit on or off."""
    rows: float
    """For a row in a second backward pass of the same run, with other weights."""


_TOLERANCES = {
    torch.float64: Tolerance(1e-6, 1e-4, 1e-5),  # some layers compute in float32, such as Llama's normalisation
    torch.float32: Tolerance(3e-4, 2e-2, 1e-3),
    torch.float16: Tolerance(1e-2, 0.1, 3e-2),
    torch.bfloat16: Tolerance(5e-2, 0.3, 0.15),
}


def tolerance(precision: torch.dtype) -> Tolerance:
    """Return the differences to allow for numbers that were computed in this precision."""
    return _TOLERANCES.get(precision, _TOLERANCES[torch.float32])


@dataclass(frozen=True)
class Truth:
    """Losses of examples alone `[b]`; per parameter, their gradients along a direction and gradient norms `[b, q]`."""

    losses: Tensor
    scores: Tensor
    norms: Tensor

    @classmethod
    def of_nothing(cls, parameters: int) -> Truth:
        """The truth about no examples, to start with."""
        return cls(torch.zeros(0).double(), torch.zeros(0, parameters), torch.zeros(0, parameters))

    @cached_property
    def finite(self) -> Tensor:
        """Which examples have only finite numbers `[b]`; the others cannot be compared."""
        return self.losses.isfinite() & self.norms.isfinite().all(1) & self.scores.isfinite().all(1)

    @property
    def touched(self) -> Tensor:
        """Which parameters have a gradient other than zero in some example `[q]`."""
        return (self.norms[self.finite] > 0).any(0)

    def joined(self, other: Truth) -> Truth:
        """Return the truth about these examples and those of `other`."""
        return Truth(*(torch.cat([getattr(self, name), getattr(other, name)]) for name in self.__dataclass_fields__))

    def at(self, positions: slice | list[int]) -> Truth:
        """Return the truth about some of the examples."""
        return Truth(*(getattr(self, name)[positions] for name in self.__dataclass_fields__))

    def other_losses(self, losses: Tensor, allowed: Tolerance) -> Tensor:
        """Which examples have another loss in `losses` `[b]` than alone, if both are finite `[b]`."""
        finite = self.finite & losses.isfinite()
        if not bool(finite.any()):
            return finite
        scale = self.losses.abs() + self.losses[finite].abs().max()
        return ((losses - self.losses).abs() > allowed.most * scale) & finite

    def differs(self, scores: Tensor, allowed: Tolerance) -> Tensor:
        """Which parameters have other `scores` `[b, q]` than the true ones of these examples `[q]`."""
        finite = self.finite
        if not bool(finite.any()):
            return torch.zeros(self.norms.shape[1], dtype=torch.bool)
        found, expected, norms = (values[finite] for values in (scores.to(self.scores), self.scores, self.norms))
        scale = norms + 1e-2 * norms.amax(0) + 1e-3 * norms.amax(1, keepdim=True)
        error = (found - expected).abs() / scale.clamp(min=torch.finfo(scale.dtype).tiny)
        informative = norms > 0
        typical = torch.where(informative, error, torch.nan).nanmedian(0).values
        return ~(error <= allowed.each).all(0) | (typical > allowed.most)


_HELD = 2**20  # numbers in the gradients that are measured at once
_DRAWN = 2**20 + 7  # a prime: numbers drawn for a direction and then repeated, as drawing is slower than a gradient


@dataclass(frozen=True)
class Subject:
    """The subject of a proof: a model with its chosen parameters, the loss of its examples, and the tolerance.

    Attributes:
        space: model and chosen parameters.
        loss: loss of the examples.
        allowed: differences that rounding may explain.
    """

    space: ParameterSpace
    loss: ExampleLoss
    allowed: Tolerance

    @cached_property
    def direction(self) -> Tensor:
        """The direction along which gradients are compared `[1, p]`: random but fixed, drawn by its own generator."""
        size, device = self.space.size, self.space.device
        generator = torch.Generator(device).manual_seed(0)
        drawn = torch.randn(min(size, _DRAWN), generator=generator, dtype=self.space.dtype, device=device)
        return drawn.repeat(-(-size // _DRAWN))[None, :size]

    @cached_property
    def along(self) -> list[Tensor]:
        """The part of the direction for each parameter."""
        return [self.space.part(self.direction, parameter)[0] for parameter in self.space.parameters.values()]

    def truth(self, alone: Sequence[Any]) -> Truth:
        """Return the truth about examples, each given as a batch of one; the error says so if one alone cannot run."""
        try:
            return self._truth(alone)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if len(alone) == 1:
                raise
            raise ValueError(
                f"the loss of one example alone cannot be computed, though that of a batch can: {error} An example has "
                "a gradient of its own only if the model takes a batch of one: look for statistics of the batch, and "
                "for squeeze() without a dimension."
            ) from error

    def truth_of_each(self, batches: Sequence[Any]) -> Truth:
        """Return the truth about every example of some batches, at the current parameters of the model."""
        return self.truth([pick(batch, [at]) for batch in batches for at in range(batch_length(batch))])

    def _truth(self, alone: Sequence[Any]) -> Truth:
        losses, measured, along = [], [], [wide(part).flatten() for part in self.along]
        at_once = 1 if self.space.changing else max(1, _HELD // self.space.size)  # changes are undone after each
        for low in range(0, len(alone), at_once):
            gradients = []
            with self.space.require_gradients(of_chosen=True):
                for one in alone[low : low + at_once]:
                    value = self.loss.total(self.space.model, one)
                    gradients.append(self.space.gradients_of(value))
                    losses.append(_on_cpu(value))
            measured.append(_measured(gradients, along))
        return Truth(torch.stack(losses), *(torch.cat(parts).cpu() for parts in zip(*measured, strict=True)))

    def run(self, batch: Any, along: Sequence[Tensor] | None = None, *, some: Sequence[int] | None = None) -> PlainRun:
        """Run a batch by plain autograd.

        Args:
            batch: the examples.
            along: the parts of a direction, one per parameter; by default `self.along`.
            some: positions of the examples whose gradient is taken; by default all examples.
        """
        space = self.space
        with space.require_gradients(of_chosen=True):
            with Watch(0) as watch:
                losses = self.loss.each(space.model, batch)
            alters = altered_gradients(losses, watch)
            gradients = space.gradients_of((losses if some is None else losses[list(some)]).sum())
        pairs = zip(gradients, (wide(part).flatten() for part in along or self.along), strict=True)
        return PlainRun(_on_cpu(losses), torch.stack([_dot(*pair) for pair in pairs]).cpu(), alters, watch.told)

    def captured(self, layers: list[Layer], batch: Any, watcher: Observer) -> tuple[Tensor, Calls]:
        """Return the scores of every example from the layers, per parameter `[b, q]`, and what happened in the run.

        `watcher` sees the backward calls of the layers, too.
        """
        space, observer = self.space, _ParameterScores(self.space, self.direction, batch_length(batch), watcher)
        calls = observe(space, layers, self.loss, batch, observer, alters=True)
        return torch.stack([observer.scores[id(own)] for own in space.parameters.values()], 1).cpu(), calls


_BESIDE = 1e-3  # size of the change, relative to the usual size of a parameter


@contextmanager
def beside(space: ParameterSpace) -> Iterator[None]:
    """Change all chosen parameters a little inside this context, so that activations are not 0 up to rounding."""
    parameters, generator = list(space.parameters.values()), torch.Generator(space.device).manual_seed(1)
    usual = (sum(float(wide(own.detach()).square().sum()) for own in parameters) / space.size) ** 0.5
    with left_as_it_was(space.model, list(space.parameters)):
        with torch.no_grad():
            for own in parameters:
                drawn = torch.randn(own.shape, generator=generator, dtype=own.dtype, device=own.device)
                own.add_(drawn, alpha=_BESIDE * usual)
        yield


@dataclass(frozen=True)
class PlainRun:
    """A batch run by plain autograd.

    Attributes:
        losses: losses of the examples `[b]`.
        total: gradient of the sum of all losses, or of some of them, along a direction, per parameter `[q]`.
        alters: what makes gradients differ from derivatives, or None.
        told: `Watch.told`, a hash of the functions that were called and the numbers that Python read.
    """

    losses: Tensor
    total: Tensor
    alters: str | None
    told: int


def _on_cpu(values: Tensor) -> Tensor:
    return values.detach().cpu().double()


def _dot(gradient: Tensor | None, direction: Tensor) -> Tensor:
    return direction.new_zeros(()) if gradient is None else torch.dot(gradient.flatten().to(direction), direction)


def _measured(gradients: list[list[Tensor | None]], directions: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Products of gradients with a direction, and gradient norms, by parameter `[b, q]`; None counts as zeros."""
    along, norms = [], []
    for own, direction in zip(zip(*gradients, strict=True), directions, strict=True):
        rows = torch.stack([torch.zeros_like(direction) if one is None else one.flatten().to(direction) for one in own])
        along.append(product(rows, direction))
        norms.append(torch.linalg.vector_norm(rows, dim=1))
    return torch.stack(along, 1), torch.stack(norms, 1)


def wide(values: Tensor) -> Tensor:
    """Convert to at least float32, because dot products of half-precision numbers would add their own rounding."""
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


FAILS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError, AssertionError)
"""Errors of a model that a strategy cannot run, although the model runs without the strategy."""


def check_same_losses(losses: Tensor, again: Tensor, data_name: str, what: str = "loss") -> None:
    """Raise an error if a loss, or `what` else it was, gave two different results for the same examples."""
    if not torch.allclose(losses, again, rtol=1e-4, equal_nan=True):
        raise ValueError(
            f"the {what} of the same examples came out as {losses.tolist()}, then as {again.tolist()}: switch off "
            f"what is random in the model (functional dropout?), the loss, or {data_name} (augmentation?)."
        )


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, or the name of the error if it has no message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
