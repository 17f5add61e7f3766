"""Squared norms of group-summed gradients from layer inputs a and output gradients d, without the gradients.

For Linear layers with one token the gradient of a point is d aᵀ, so ‖Σ_i d_i a_iᵀ‖² = Σ_ij ⟨a_i, a_j⟩⟨d_i, d_j⟩
over the pairs within a group, and ‖a‖²‖d‖² for a single point. A bias counts as one more input, always 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ggda_ext.gradients.layers import Layer
from ggda_ext.gradients.plan import Request
from ggda_ext.gradients.strategies.ghost import Factors, collect

PAIRED = 64  # points whose pairs are all formed; for a larger group the sum of products is cheaper


def squared_norms(request: Request) -> Tensor:
    """Squared norm of every group's summed gradient `[k]`; groups must fit into a batch."""
    result = request.empty_scores(1)[0]
    for groups, batch in request.grouped_batches():
        factors = collect(request, batch)
        norms = _of_points(request.layers, factors) if len(groups.ids) == len(groups) else None
        if norms is None:
            norms = torch.cat([_of_run(request.layers, factors, starts) for starts in _runs(groups.starts)])
        result[torch.from_numpy(groups.ids).to(result.device)] = norms.to(result)
    return result.clamp_(min=0)  # rounding, where gradients cancel


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
    """The segments in runs of at most `PAIRED` points, a larger segment alone: their starts, and the last end."""
    low = 0
    while low < len(starts) - 1:
        high = int(np.searchsorted(starts, starts[low] + PAIRED, side="right")) - 1
        high = max(high, low + 1)
        yield starts[low : high + 1].tolist()
        low = high


def _of_run(layers: list[Layer], factors: Factors, starts: list[int]) -> Tensor:
    """Squared norms `[s]` of neighbouring segments, summed over layers; calls of one layer count as points."""
    parts = []
    for layer in layers:
        calls = [(a[starts[0] : starts[-1]], d[starts[0] : starts[-1]]) for a, d in factors[layer.name]]
        a, d = (torch.cat(values) if len(calls) > 1 else values[0] for values in zip(*calls, strict=True))
        parts.append(_by_sum(layer, a, d) if len(starts) == 2 else _by_pairs(layer, a, d, starts, len(calls)))
    return torch.stack(parts).sum(0)


def _by_sum(layer: Layer, a: Tensor, d: Tensor) -> Tensor:
    norm = d.new_zeros(1)
    if layer.weight is not None:
        norm += (d.T @ a).square().sum()
    if layer.bias is not None:
        norm += d.sum(0).square().sum()
    return norm


def _by_pairs(layer: Layer, a: Tensor, d: Tensor, starts: list[int], calls: int) -> Tensor:
    lengths = torch.tensor([high - low for low, high in pairwise(starts)], device=d.device)
    ids = torch.repeat_interleave(lengths).repeat(calls)
    pairs = d @ d.T
    if layer.weight is not None:
        inputs = a @ a.T
        pairs *= inputs + 1 if layer.bias is not None else inputs
    pairs.masked_fill_(ids[:, None] != ids, 0)
    return d.new_zeros(len(lengths)).index_add_(0, ids, pairs.sum(1))
