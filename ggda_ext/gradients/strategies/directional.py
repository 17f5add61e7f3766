"""`directional`: the score of every point along a few directions, at the price of one training pass.

Layers that are linear in their parameters give the score of point i along v as Σ_layers ⟨layer(a_i; v), d_i⟩:
a forward pass, an activation-only backward pass, and one more forward product per direction. No row of
length p is ever formed, so group size 1 costs what group size 1024 costs.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from ggda_ext.gradients.layers import Layer
from ggda_ext.gradients.observation import Observer
from ggda_ext.gradients.plan import Cost, Request, Strategy


def scores(request: Request, directions: Tensor) -> Tensor:
    """Inner products of directions `[m, p]` with the group-summed gradients `[m, k]`."""
    alone = request.groups.are_singletons  # nothing to add up
    directions = _in_fast_precision(directions)
    m, k = len(directions), len(request.groups)
    result = directions.new_zeros(m, k) if alone else request.empty_scores(m)
    nothing: list[Tensor | None] = [None] * len(directions)
    parts: Parts = defaultdict(lambda: nothing)
    parts |= {id(value): list(request.space.part(directions, value)) for value in request.space.parameters.values()}
    for layer in request.layers:
        if layer.weight is not None:
            parts[id(layer.weight)] = [
                layer.rule.arranged(part) for part in parts[id(layer.weight)] if part is not None
            ]
    with request.captured.held(request.data.tensors is not None):
        for labels, batch in request.natural_batches():
            observer = _PointScores(parts, directions.new_zeros(len(directions), labels.shape[0]))
            request.observe(batch, observer)
            if alone:
                result.scatter_(1, labels.expand(m, -1), observer.scores)
            else:
                result.index_add_(1, labels, observer.scores.to(result))
    return result


Parts = defaultdict[int, list[Tensor | None]]
"""By id of a parameter, its part of every direction."""


class _PointScores(Observer):
    def __init__(self, parts: Parts, scores: Tensor) -> None:
        self.parts, self.scores = parts, scores
        self.rows = list(scores)

    def backward(self, layer: Layer, kept: Tensor, d: Tensor, repeats: int) -> None:
        weights, biases = self.parts[id(layer.weight)], self.parts[id(layer.bias)]
        kept, d = kept.to(self.scores) if kept.is_floating_point() else kept, d.to(self.scores)
        for row, weight, bias in zip(self.rows, weights, biases, strict=True):
            found = layer.row_scores(kept, d, weight, bias)
            row += found if repeats == 1 else found.reshape(row.shape[0], -1).sum(1)


def _in_fast_precision(directions: Tensor) -> Tensor:
    """Half precision as float32 on a processor that has to emulate it: many times faster there, and more exact."""
    emulated = directions.device.type == "cpu" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return directions.float() if emulated and directions.dtype.itemsize < 4 else directions


STRATEGY = Strategy("directional", scores, Cost(once=2 / 3, direction=1 / 3), from_layers=True)
