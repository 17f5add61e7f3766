"""`ghost`: inner products of test and training gradients from their factors, never forming either.

For a Linear layer with one token the gradient of a point is the outer product d aᵀ, so the inner product
of two gradients is ⟨a, a'⟩⟨d, d'⟩: for many test points, (A_test A_trainᵀ)·(D_test D_trainᵀ) summed over layers.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from ggda_ext.data import batch_length
from ggda_ext.gradients.capture import Layer, Observer, observe
from ggda_ext.gradients.job import Job, PointGradients
from ggda_ext.losses import ExampleLoss

Factors = dict[str, list[tuple[Tensor, Tensor]]]
"""Per layer, one (a, d) for each time it is called."""


def scores(job: Job, points: PointGradients) -> Tensor:
    """Inner products of the gradients of test points with the group-summed gradients `[m, k]`."""
    tests = _factors_of(job, points)
    result = job.empty_scores(points.n)
    for labels, batch in job.natural_batches():
        observer = _PairScores(tests, result.new_zeros(points.n, len(labels)))
        observe(job.space, job.layers, job.loss, batch, observer)
        result.index_add_(1, labels, observer.scores)
    return result


class _Collect(Observer):
    def __init__(self) -> None:
        self.factors: Factors = defaultdict(list)

    def backward(self, layer: Layer, kept: Tensor, d: Tensor, repeats: int) -> None:
        self.factors[layer.name].append((kept, d))


def collect(job: Job, loss: ExampleLoss, batch: Any) -> Factors:
    """Factors of the gradients of a batch; zeros for a layer that the loss does not reach."""
    observer = _Collect()
    observe(job.space, job.layers, loss, batch, observer)
    size = batch_length(batch)
    for layer in job.layers:
        if layer.name not in observer.factors:
            weight: Tensor = layer.module.weight  # type: ignore[assignment]
            zeros = weight.new_zeros(size, weight.shape[1]), weight.new_zeros(size, weight.shape[0])
            observer.factors[layer.name].append(zeros)
    return observer.factors


def _factors_of(job: Job, points: PointGradients) -> Factors:
    collected = [collect(job, points.loss, batch) for batch in points.batches(job)]
    return {
        layer.name: [
            (torch.cat([a for a, _ in calls]), torch.cat([d for _, d in calls]))
            for calls in zip(*(factors[layer.name] for factors in collected), strict=True)
        ]
        for layer in job.layers
    }


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
