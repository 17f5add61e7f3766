"""`ghost`: inner products of test and training gradients from their factors, without forming the gradients.

For a Linear layer with one token the gradient of a point is the outer product d aᵀ. So the inner product of two
gradients is ⟨a, a'⟩⟨d, d'⟩, and for many test points (A_test A_trainᵀ)·(D_test D_trainᵀ), summed over layers. The
squared norm of a group's gradient is the sum over all pairs within the group. A bias is one more input that is
always 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ggda_ext.data import batch_length, to_device
from ggda_ext.gradients.layers import Layer
from ggda_ext.gradients.observation import Observer
from ggda_ext.gradients.plan import Cost, Request, Strategy
from ggda_ext.model import product

Factors = dict[str, list[tuple[Tensor, Tensor]]]
"""For each layer, by name, one (a, d) for each call of the layer."""


def scores(request: Request, tests: Request) -> Tensor:
    """Return the inner products `[m, k]` of the gradients of test points with the group-summed gradients."""
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
    """Return the factors of the gradients of a batch; zeros for a layer that the loss does not depend on."""
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
            self.scores += _inner_products(layer, (a_test, d_test), (kept, d))


def _inner_products(layer: Layer, some: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> Tensor:
    """Inner products of a layer's gradients for `some` points with its gradients for `others`, from their (a, d)."""
    (a, d), (a_other, d_other) = some, others
    pairs = product(d, d_other.T)
    if layer.weight is not None:
        inputs = product(a, a_other.T)
        pairs *= inputs + 1 if layer.bias is not None else inputs
    return pairs


# squared norms from the same factors

PAIRED = 64  # most points for which all pairs are formed; for a larger group the sum of outer products is cheaper


def squared_norms(request: Request) -> Tensor:
    """Return the squared norm of every group's summed gradient `[k]`; every group must fit into a batch."""
    result = request.empty_scores(1)[0]
    for groups, batch in request.grouped_batches():
        factors = collect(request, batch)
        norms = _of_points(request.layers, factors) if len(groups.ids) == len(groups) else None
        if norms is None:
            norms = torch.cat([_of_run(request.layers, factors, starts) for starts in _runs(groups.starts)])
        result[torch.from_numpy(groups.ids).to(result.device)] = norms.to(result)
    return result.clamp_(min=0)  # rounding may give a negative number where gradients cancel


def _of_points(layers: list[Layer], factors: Factors) -> Tensor | None:
    """Squared norm of every point's gradient `[b]`; None if a layer is called more than once."""
    if any(len(calls) > 1 for calls in factors.values()):
        return None
    parts = []
    for layer in layers:
        for a, d in factors[layer.name]:
            inputs = a.square().sum(1) if layer.weight is not None else torch.zeros_like(d[:, 0])
            parts.append((inputs + 1 if layer.bias is not None else inputs) * d.square().sum(1))
    return torch.stack(parts).sum(0)


def _runs(starts: np.ndarray) -> Iterator[list[int]]:
    """Yield runs of segments with at most `PAIRED` points, as their starts and the last end; larger segments alone."""
    low = 0
    while low < len(starts) - 1:
        high = int(np.searchsorted(starts, starts[low] + PAIRED, side="right")) - 1
        high = max(high, low + 1)
        yield starts[low : high + 1].tolist()
        low = high


def _of_run(layers: list[Layer], factors: Factors, starts: list[int]) -> Tensor:
    """Squared norms `[s]` of neighbouring segments, summed over layers; each call of a layer adds its own points."""
    parts = []
    for layer in layers:
        calls = [(a[starts[0] : starts[-1]], d[starts[0] : starts[-1]]) for a, d in factors[layer.name]]
        a, d = (torch.cat(values) if len(calls) > 1 else values[0] for values in zip(*calls, strict=True))
        parts.append(_by_sum(layer, a, d) if len(starts) == 2 else _by_pairs(layer, a, d, starts, len(calls)))
    return torch.stack(parts).sum(0)


def _by_sum(layer: Layer, a: Tensor, d: Tensor) -> Tensor:
    norm = d.new_zeros(1)
    if layer.weight is not None:
        norm += product(d.T, a).square().sum()
    if layer.bias is not None:
        norm += d.sum(0).square().sum()
    return norm


def _by_pairs(layer: Layer, a: Tensor, d: Tensor, starts: list[int], calls: int) -> Tensor:
    lengths = torch.tensor([high - low for low, high in pairwise(starts)], device=d.device)
    ids = torch.repeat_interleave(lengths).repeat(calls)
    pairs = _inner_products(layer, (a, d), (a, d))
    pairs.masked_fill_(ids[:, None] != ids, 0)
    return d.new_zeros(len(lengths)).index_add_(0, ids, pairs.sum(1))


STRATEGY = Strategy("ghost", scores, Cost(once=2 / 3, pair=2 / 3), from_layers=True, of_points=True)
