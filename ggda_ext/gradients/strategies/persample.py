"""`persample`: vmap(grad) per point, then summed by segment; the reference, and the fallback for small groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from ggda_ext.data import as_batch_of_one
from ggda_ext.gradients.layers import segment_sum
from ggda_ext.gradients.plan import Request, merge_pieces
from ggda_ext.model import ParameterSpace, called_with


def scores(request: Request, directions: Tensor) -> Tensor:
    """Inner products of directions `[m, p]` with the group-summed gradients `[m, k]`."""
    return request.scores_of(blocks(request, request.rows_near_cache), directions)


def blocks(request: Request, max_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Group-summed gradients as `(group ids [b], rows [b, p])`, at most `max_rows` at a time."""

    def pieces() -> Iterator[tuple[Tensor, Tensor, bool]]:
        for groups, batch in request.grouped_batches(most_points=max_rows):
            rows, weights = point_gradients(request.loss_module, request.space, batch), request.weights_of(groups)
            if weights is not None:
                rows = rows[:, None] * weights.T[:, :, None]
            sums = segment_sum(rows.flatten(1), groups.starts.tolist())
            yield torch.from_numpy(groups.ids), sums.unflatten(1, rows.shape[1:]), groups.complete

    return merge_pieces(pieces(), max_rows)


def point_gradients(loss_module: nn.Module, space: ParameterSpace, batch: Any) -> Tensor:
    """Gradients of every example `[b, p]`."""
    parameters = {f"model.{name}": value.detach() for name, value in space.parameters.items()}

    def loss_of_one(values: dict[str, Tensor], example: Any) -> Tensor:
        return called_with(loss_module, values, (as_batch_of_one(example),)).sum()

    with space.require_gradients(of_chosen=False):
        gradients = vmap(grad(loss_of_one), in_dims=(None, 0))(parameters, batch)
    return torch.cat([gradients[name].reshape(len(gradients[name]), -1) for name in parameters], 1)
