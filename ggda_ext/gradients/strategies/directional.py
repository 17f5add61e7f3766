"""`directional`: the score of every point along a few directions, at the price of one training pass.

Layers that are linear in their parameters give the score of point i along v as Σ_layers ⟨layer(a_i; v), d_i⟩:
a forward pass, an activation-only backward pass, and one more forward product per direction. No row of
length p is ever formed, so group size 1 costs what group size 1024 costs.
"""

from __future__ import annotations

from torch import Tensor

from ggda_ext.gradients.layers import Layer, Observer
from ggda_ext.gradients.plan import Request


def scores(request: Request, directions: Tensor) -> Tensor:
    """Inner products of directions `[m, p]` with the group-summed gradients `[m, k]`."""
    result = request.empty_scores(len(directions))
    parts = {id(value): request.space.part(directions, value) for value in request.space.parameters.values()}
    for labels, batch in request.natural_batches():
        observer = _PointScores(parts, directions.new_zeros(len(directions), len(labels)))
        request.observe(batch, observer)
        result.index_add_(1, labels, observer.scores.to(result))
    return result


class _PointScores(Observer):
    def __init__(self, parts: dict[int, Tensor], scores: Tensor) -> None:
        self.parts, self.scores = parts, scores

    def backward(self, layer: Layer, kept: Tensor, d: Tensor, repeats: int) -> None:
        weights = self.parts[id(layer.weight)] if layer.weight is not None else [None] * len(self.scores)
        biases = self.parts[id(layer.bias)] if layer.bias is not None else [None] * len(self.scores)
        for row, weight, bias in zip(self.scores, weights, biases, strict=True):
            found = layer.row_scores(kept, d, weight, bias)
            row += found if repeats == 1 else found.reshape(len(row), -1).sum(1)
