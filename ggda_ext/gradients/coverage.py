"""Proof, on two examples, that layer inputs and output gradients give every parameter's gradient.

A rule per layer is not enough: a parameter may be used outside its module (tied by hand, fused
attention), a module may mix examples or put them along another dimension. So the per-example score of
every parameter along a random direction is compared with ordinary autograd once, before any number is
trusted, and what differs is named.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ggda_ext.data import batch_length
from ggda_ext.gradients.capture import Layer, Observer, UnknownLayer, known_layers, observe
from ggda_ext.gradients.parameters import ParameterSpace
from ggda_ext.losses import ExampleLoss


def covered_layers(
    space: ParameterSpace, loss: ExampleLoss, batch: Any, watcher: Observer
) -> tuple[list[Layer], dict[str, str]]:
    """The layers to observe, and the parameters whose gradients they do not give: name → why.

    `watcher` sees the layers' calls too.
    """
    layers, unknown = known_layers(space)
    if unknown:
        return layers, unknown
    direction = random_direction(space)

    def scores() -> dict[int, Tensor]:
        observer = _ParameterScores(space, direction, batch_length(batch), watcher)
        observe(space, layers, loss, batch, observer)
        return observer.scores

    try:
        try:
            found = scores()
        except RuntimeError as error:
            if "in-place" not in str(error):
                raise
            layers = [replace(layer, copies_output=True) for layer in layers]
            found = scores()
    except UnknownLayer as error:
        return layers, dict.fromkeys(space.parameters, str(error))
    return layers, _differences(space, loss, batch, direction, found)


class _ParameterScores(Observer):
    """Scores of every example along one direction, parameter by parameter."""

    def __init__(self, space: ParameterSpace, direction: Tensor, size: int, watcher: Observer) -> None:
        self.space, self.direction, self.size, self.watcher = space, direction, size, watcher
        self.scores = {key: direction.new_zeros(size) for key in space.spans}

    def backward(self, layer: Layer, kept: Tensor, d: Tensor, repeats: int) -> None:
        self.watcher.backward(layer, kept, d, repeats)
        if layer.bias is not None:
            starts = list(range(0, len(d) + 1, repeats))
            rows = layer.rule.bias_rows(layer.module, d, starts).reshape(self.size, -1)
            self.scores[id(layer.bias)] += rows @ self.space.part(self.direction, layer.bias).flatten()
        if layer.weight is not None:
            tangent = layer.apply(kept, self.space.part(self.direction, layer.weight)[0], None)
            self.scores[id(layer.weight)] += (tangent * d).reshape(self.size, -1).sum(1)


def _differences(
    space: ParameterSpace, loss: ExampleLoss, batch: Any, direction: Tensor, scores: dict[int, Tensor]
) -> dict[str, str]:
    expected, norms = reference_scores(space, loss, batch, direction)
    found = torch.stack([scores[id(parameter)] for parameter in space.parameters.values()], 1)
    allowed = tolerance(space) * (norms + 1e-3 * norms.amax(1, keepdim=True))
    wrong = ~((found - expected).abs() <= allowed).all(0)
    return {
        name: f"{name!r} is used in a way its layer alone does not show"
        for name, is_wrong in zip(space.parameters, wrong.tolist(), strict=True)
        if is_wrong
    }


def tolerance(space: ParameterSpace) -> float:
    """Relative difference that rounding may explain; a structural mistake makes one of order 1."""
    return 1e-7 if space.dtype == torch.float64 else 2e-3


def reference_scores(space: ParameterSpace, loss: ExampleLoss, batch: Any, direction: Tensor) -> tuple[Tensor, Tensor]:
    """By one autograd pass per example: scores along a direction `[1, p]`, and gradient norms, `[b, parameters]`."""
    parameters = list(space.parameters.values())
    scores, norms = [], []
    with space.gradients(enabled=True):
        for value in loss.each(space.model, batch):
            gradients = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
            rows = zip(gradients, parameters, strict=True)
            scores += [torch.dot(g.flatten(), space.part(direction, p).flatten()) for g, p in rows]
            norms += [g.norm() for g in gradients]
    shape = (batch_length(batch), len(parameters))
    return torch.stack(scores).view(shape), torch.stack(norms).view(shape)


def random_direction(space: ParameterSpace) -> Tensor:
    """A fixed random direction `[1, p]`, drawn without touching the global random state."""
    generator = torch.Generator(space.device).manual_seed(0)
    return torch.randn(1, space.size, generator=generator, dtype=space.dtype, device=space.device)
