"""`segmented`: one pass over batches of many groups; group gradients are products of a and d over segments.

The rows of one layer are formed for a few groups at a time in a small buffer, used, and overwritten. Large temporaries
would page-fault and be three times slower.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ggda_ext.gradients.layers import Layer
from ggda_ext.gradients.observation import Observer
from ggda_ext.gradients.plan import Cost, Request, Strategy
from ggda_ext.gradients.strategies.rows import merge_pieces
from ggda_ext.model import inner_products

BUFFER_BYTES = 8 * 2**20


def scores(request: Request, directions: Tensor) -> Tensor:
    """Return the inner products `[m, k]` of directions `[m, p]` with the group-summed gradients."""
    result = request.empty_scores(len(directions))
    request = request.of_groups(len(directions))  # all directions are read once for each batch
    buffer = _Buffer(request.space.dtype, request.space.device)
    for groups, batch in request.grouped_batches():
        ids = torch.from_numpy(groups.ids).to(result.device)
        observer = _SegmentScores(request, directions, groups.starts.tolist(), ids, result, buffer)
        request.observe(batch, observer)
    return result


def blocks(request: Request, max_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield group-summed gradients as `(group ids [b], rows [b, p])`, at most `max_rows` at a time."""

    def pieces() -> Iterator[tuple[Tensor, Tensor, bool]]:
        for groups, batch in request.grouped_batches(most_groups=max_rows):
            observer = _WeightedRows(request, groups.starts.tolist(), request.weights_of(groups))
            request.observe(batch, observer)
            yield torch.from_numpy(groups.ids), observer.finished(), groups.complete

    return merge_pieces(pieces(), max_rows)


class _Buffer:
    """A flat piece of memory that is reused for the rows of each layer."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=dtype, device=device)

    def rows(self, count: int, parameter: nn.Parameter) -> Tensor:
        if self.memory.numel() < count * parameter.numel():
            self.memory = self.memory.new_empty(count * parameter.numel())
        return self.memory[: count * parameter.numel()].view(count, *parameter.shape)


class _SegmentScores(Observer):
    def __init__(
        self, request: Request, directions: Tensor, starts: list[int], ids: Tensor, scores: Tensor, buffer: _Buffer
    ) -> None:
        self.space, self.directions, self.buffer = request.space, directions, buffer
        self.starts, self.ids, self.scores = starts, ids, scores
        self.budget, self.many = request.memory_budget // 4, len(directions)

    def _at_once(self, weight: nn.Parameter) -> int:
        """Number of groups whose rows are formed together: a few, but more if there are many directions to read."""
        row = weight.numel() * weight.element_size()
        return max(1, BUFFER_BYTES // row, min(self.many, self.budget // row))

    def backward(self, layer: Layer, kept: Tensor, d: Tensor, repeats: int) -> None:
        starts = [start * repeats for start in self.starts]
        if layer.bias is not None:
            rows = layer.rule.bias_rows(layer.module, d, starts)
            self._add(self.ids, rows, layer.bias)
        if layer.weight is None:
            return
        if isinstance(layer.module, nn.Embedding | nn.EmbeddingBag):
            self._embedding(layer, kept, d)
            return
        step = self._at_once(layer.weight)
        for low in range(0, len(self.ids), step):
            bounds = starts[low : low + step + 1]
            rows = self.buffer.rows(len(bounds) - 1, layer.weight)
            cut = slice(bounds[0], bounds[-1])
            layer.rule.weight_rows(layer.module, kept[cut], d[cut], [b - bounds[0] for b in bounds], rows)
            self._add(self.ids[low : low + step], rows, layer.weight)

    def _embedding(self, layer: Layer, tokens: Tensor, d: Tensor) -> None:
        """Add the scores of an embedding without rows, which would be vocabulary x width numbers, nearly all zeros."""
        lengths = torch.tensor(self.starts, device=d.device).diff()
        labels = torch.repeat_interleave(self.ids, lengths)
        assert layer.weight is not None
        for row, direction in zip(self.scores, self.space.part(self.directions, layer.weight), strict=True):
            tangent = layer.apply(tokens, direction, None)
            row.index_add_(0, labels, (tangent * d).reshape(len(labels), -1).sum(1).to(row))

    def _add(self, ids: Tensor, rows: Tensor, parameter: nn.Parameter) -> None:
        low, high = self.space.spans[id(parameter)]
        products = inner_products(self.directions[:, low:high], rows.reshape(len(rows), -1))
        self.scores.index_add_(1, ids, products.to(self.scores))


class _WeightedRows(Observer):
    """Rows `[s, p]` of the segments of a batch, or `[s, w, p]` for weightings `[w, b]`, from one backward pass."""

    def __init__(self, request: Request, starts: list[int], weights: Tensor | None) -> None:
        space = request.space
        leading = [len(starts) - 1] if weights is None else [len(starts) - 1, len(weights)]
        self.rows = torch.empty(*leading, space.size, dtype=space.dtype, device=space.device)
        self.weights = weights
        parts = [self.rows] if weights is None else self.rows.unbind(1)
        self.parts = [_SegmentRows(request, starts, part) for part in parts]

    def backward(self, layer: Layer, kept: Tensor, d: Tensor, repeats: int) -> None:
        for number, part in enumerate(self.parts):
            weighted = d
            if self.weights is not None:
                own = self.weights[number].repeat_interleave(repeats)
                weighted = d * own.view(-1, *[1] * (d.dim() - 1))
            part.backward(layer, kept, weighted, repeats)

    def finished(self) -> Tensor:
        """Return the rows, with zeros for parameters that were not used."""
        for part in self.parts:
            part.fill_unused()
        return self.rows


class _SegmentRows(Observer):
    """Writes the segment gradients of every layer into rows `[s, p]`; adds them if a parameter is used again."""

    def __init__(self, request: Request, starts: list[int], rows: Tensor) -> None:
        self.space, self.starts, self.rows = request.space, starts, rows
        self.written: set[int] = set()

    def backward(self, layer: Layer, kept: Tensor, d: Tensor, repeats: int) -> None:
        starts = [start * repeats for start in self.starts]
        if layer.bias is not None:
            part, again = self._part(layer.bias)
            gradients = layer.rule.bias_rows(layer.module, d, starts)
            part.add_(gradients) if again else part.copy_(gradients)
        if layer.weight is not None:
            part, again = self._part(layer.weight)
            out = torch.empty_like(part, memory_format=torch.contiguous_format) if again else part
            layer.rule.weight_rows(layer.module, kept, d, starts, out)
            if again:
                part.add_(out)

    def _part(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        again = id(parameter) in self.written
        self.written.add(id(parameter))
        return self.space.part(self.rows, parameter), again

    def fill_unused(self) -> None:
        """Write zeros for parameters that were not used."""
        for parameter in self.space.parameters.values():
            if id(parameter) not in self.written:
                self.space.part(self.rows, parameter).zero_()


STRATEGY = Strategy("segmented", scores, Cost(once=1, row=6, product=1 / 3), blocks, from_layers=True)
