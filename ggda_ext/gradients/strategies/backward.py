"""`backward`: one batched backward pass per group, as in the paper; it works for any model and any layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ggda_ext.gradients.observation import Watch
from ggda_ext.gradients.plan import Cost, Request, Strategy
from ggda_ext.gradients.strategies.rows import merge_pieces, scores_of
from ggda_ext.model import product


def scores(request: Request, directions: Tensor) -> Tensor:
    """Return the inner products `[m, k]` of directions `[m, p]` with the group-summed gradients."""
    return scores_of(request, blocks(request, request.rows_near_cache), directions)


def blocks(request: Request, max_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield group-summed gradients as `(group ids [b], rows [b, p])`, at most `max_rows` at a time."""

    def pieces() -> Iterator[tuple[Tensor, Tensor, bool]]:
        for groups, batch in request.grouped_batches(most_groups=1):
            weights = request.weights_of(groups)
            with request.space.require_gradients(of_chosen=True):
                with Watch(len(groups)) as watch:
                    losses = request.loss.each(request.space.model, batch)
                totals = [losses.sum()] if weights is None else list(product(weights, losses.to(weights)))
                found = [
                    request.space.gradients_of(total, keep_graph=number + 1 < len(totals))
                    for number, total in enumerate(totals)
                ]
            request.captured.check_apart(batch, losses, watch)
            rows = torch.empty(len(found), request.space.size, dtype=request.space.dtype, device=request.space.device)
            for row, gradients in zip(rows, found, strict=True):
                request.space.flatten(gradients, row)
            yield torch.from_numpy(groups.ids), rows if weights is None else rows[None], groups.complete

    return merge_pieces(pieces(), max_rows)


STRATEGY = Strategy("backward", scores, Cost(once=1, row=100, product=1 / 3, call=2e6), blocks)
