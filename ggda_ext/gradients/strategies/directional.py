"""`directional`: the score of every point along a few directions, at the price of one training pass.

If layers are linear in their parameters, the score of point i along v is Σ_layers ⟨layer(a_i; v), d_i⟩. This takes a
forward pass, an activation-only backward pass, and one more forward product per direction. No row of length p is
formed, so groups of 1 point cost as much as groups of 1024 points.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ggda_ext.data import batch_length
from ggda_ext.gradients.layers import Layer
from ggda_ext.gradients.observation import Observer
from ggda_ext.gradients.plan import Cost, Indices, Request, Strategy, joined


def scores(request: Request, directions: Tensor) -> Tensor:
    """Return the inner products `[m, k]` of directions `[m, p]` with the group-summed gradients."""
    directions = _in_fast_precision(directions)
    m, sums = len(directions), _Sums(request, directions)
    parts = {id(value): request.space.part(directions, value) for value in request.space.parameters.values()}
    along = {id(layer): _along(layer, parts, m) for layer in request.layers}
    with request.captured.held(request.data.tensors is not None):
        for points, batch in request.natural_batches():
            observer = _PointScores(along, directions.new_zeros(m, batch_length(batch)))
            request.observe(batch, observer)
            sums.add(points, observer.scores)
    return sums.result()


_TOGETHER = 2**17  # scores of points that are added up at once, because adding up has a fixed cost


class _Sums:
    """Adds up scores of points by group `[m, k]`, for several batches at once."""

    def __init__(self, request: Request, directions: Tensor) -> None:
        self.request, self.waiting = request, list[tuple[Indices, Tensor]]()
        self.count, (m, k) = 0, (len(directions), len(request.groups))
        self.alone = request.groups.are_singletons  # nothing to add up
        self.scores = directions.new_zeros(m, k) if self.alone else request.empty_scores(m)

    def add(self, points: Indices, scores: Tensor) -> None:
        """Add scores of points `[m, b]`."""
        self.waiting.append((points, scores))
        self.count += scores.numel()
        if self.count >= _TOGETHER:
            self._add_up()

    def _add_up(self) -> None:
        ids = joined([self.request.ids_of(points) for points, _ in self.waiting])
        found = joined([scores for _, scores in self.waiting], 1)
        self.waiting, self.count = [], 0
        if self.alone:
            self.scores.scatter_(1, ids.expand(len(found), -1), found)
        else:
            self.scores.index_add_(1, ids, found.to(self.scores))

    def result(self) -> Tensor:
        """Return the sums of all scores that were added."""
        if self.waiting:
            self._add_up()
        return self.scores


Along = list[tuple[Tensor | None, Tensor | None]]
"""For every direction, the parts for a layer's weight and for its bias; None for a parameter that is not chosen."""


def _along(layer: Layer, parts: dict[int, Tensor], m: int) -> Along:
    weights, biases = (parts.get(id(value)) for value in (layer.weight, layer.bias))
    nothing = [None] * m
    return list(zip(
        nothing if weights is None else [layer.rule.arranged(weight) for weight in weights],
        nothing if biases is None else biases,
        strict=True,
    ))  # fmt: skip


class _PointScores(Observer):
    def __init__(self, along: dict[int, Along], scores: Tensor) -> None:
        self.along, self.scores, self.dtype, self.rows = along, scores, scores.dtype, scores.unbind()

    def backward(self, layer: Layer, kept: Tensor, d: Tensor, repeats: int) -> None:
        if d.dtype != self.dtype:
            kept, d = kept.to(self.dtype) if kept.is_floating_point() else kept, d.to(self.dtype)
        for row, (weight, bias) in zip(self.rows, self.along[id(layer)], strict=True):
            layer.add_scores(kept, d, weight, bias, row)


def _in_fast_precision(directions: Tensor) -> Tensor:
    """Convert half precision to float32 on a CPU that emulates it: float32 is many times faster and more exact."""
    emulated = directions.device.type == "cpu" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return directions.float() if emulated and directions.dtype.itemsize < 4 else directions


STRATEGY = Strategy("directional", scores, Cost(once=2 / 3, direction=1 / 3), from_layers=True)
