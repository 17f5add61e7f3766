"""`ghost`: inner products of test and training gradients from their factors, never forming either.

For a Linear layer with one token the gradient of a point is the outer product d aᵀ, so the inner product
of two gradients is ⟨a, a'⟩⟨d, d'⟩: for many test points, (A_test A_trainᵀ)·(D_test D_trainᵀ) summed over layers.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from ggda_ext.data import batch_length, to_device
from ggda_ext.gradients.layers import Layer
from ggda_ext.gradients.observation import Observer
from ggda_ext.gradients.plan import Cost, Request, Strategy

Factors = dict[str, list[tuple[Tensor, Tensor]]]
"""Per layer, one (a, d) for each time it is called."""


def scores(request: Request, tests: Request) -> Tensor:
    """Inner products of the gradients of test points with the group-summed gradients `[m, k]`."""
    factors = _factors_of(tests)
    m = tests.groups.n
    result = request.empty_scores(m)
    for points, batch in request.natural_batches():
        dtype, device = request.space.dtype, request.space.device
        observer = _PairScores(factors, torch.zeros(m, len(points), dtype=dtype, device=device))
        request.observe(batch, observer)
        result.index_add_(1, request.ids_of(points), observer.scores.to(result))
    return result


class _Collect(Observer):
    def __init__(self) -> None:
        self.factors: Factors = defaultdict(list)

    def backward(self, layer: Layer, kept: Tensor, d: Tensor, repeats: int) -> None:
        self.factors[layer.name].append((kept, d))


def collect(request: Request, batch: Any) -> Factors:
    """Factors of the gradients of a batch; zeros for a layer that the loss does not reach."""
    observer = _Collect()
    request.observe(batch, observer)
    for layer in request.layers:
        if layer.name not in observer.factors:
            observer.factors[layer.name].append(_zeros(layer, batch_length(batch)))
    return observer.factors


def _zeros(layer: Layer, size: int) -> tuple[Tensor, Tensor]:
    weight: Tensor = layer.module.weight  # type: ignore[assignment]
    return weight.new_zeros(size, weight.shape[1]), weight.new_zeros(size, weight.shape[0])


def _factors_of(tests: Request) -> Factors:
    found, sizes = [], []
    for _, batch in tests.data.sequential(tests.batch_size):
        batch = to_device(batch, tests.space.device)
        found.append(collect(tests, batch))
        sizes.append(batch_length(batch))
    joined: Factors = {}
    for layer in tests.layers:
        most = max(len(factors[layer.name]) for factors in found)
        padded = [
            factors[layer.name] + [_zeros(layer, size)] * (most - len(factors[layer.name]))
            for factors, size in zip(found, sizes, strict=True)
        ]
        joined[layer.name] = [
            (torch.cat([a for a, _ in calls]), torch.cat([d for _, d in calls])) for calls in zip(*padded, strict=True)
        ]
    return joined


class _PairScores(Observer):
    def __init__(self, tests: Factors, scores: Tensor) -> None:
        self.tests, self.scores = tests, scores

    def backward(self, layer: Layer, kept: Tensor, d: Tensor, repeats: int) -> None:
        for a_test, d_test in self.tests[layer.name]:
            pairs = d_test @ d.T
            if layer.weight is not None:
                inputs = a_test @ kept.T
                pairs *= inputs + 1 if layer.bias is not None else inputs
            self.scores += pairs


STRATEGY = Strategy("ghost", scores, Cost(once=2 / 3, pair=2 / 3), from_layers=True, of_points=True)
