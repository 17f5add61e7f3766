"""`persample`: vmap(grad) for each point, then sums over segments; the reference, and the fallback for small groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from ggda_ext.data import as_batch_of_one, batch_length, pick
from ggda_ext.gradients.layers import segment_sum
from ggda_ext.gradients.plan import Cost, Request, Strategy
from ggda_ext.gradients.proof.findings import Findings
from ggda_ext.gradients.proof.truth import FAILS, Subject, first_line
from ggda_ext.gradients.strategies.rows import merge_pieces, scores_of
from ggda_ext.losses import ExampleLoss
from ggda_ext.model import ParameterSpace, called_with, full_precision


def scores(request: Request, directions: Tensor) -> Tensor:
    """Return the inner products `[m, k]` of directions `[m, p]` with the group-summed gradients."""
    return scores_of(request, blocks(request, request.rows_near_cache), directions)


def blocks(request: Request, max_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield group-summed gradients as `(group ids [b], rows [b, p])`, at most `max_rows` at a time."""

    def pieces() -> Iterator[tuple[Tensor, Tensor, bool]]:
        for groups, batch in request.grouped_batches(most_points=max_rows):
            rows, weights = point_gradients(request.loss, request.space, batch), request.weights_of(groups)
            if weights is not None:
                rows = rows[:, None] * weights.T[:, :, None]
            sums = segment_sum(rows.flatten(1), groups.starts.tolist())
            yield torch.from_numpy(groups.ids), sums.unflatten(1, rows.shape[1:]), groups.complete

    return merge_pieces(pieces(), max_rows)


def point_gradients(loss: ExampleLoss, space: ParameterSpace, batch: Any) -> Tensor:
    """Return the gradient of every example `[b, p]`."""
    parameters = {name: value.detach() for name, value in space.parameters.items()}

    def loss_of_one(values: dict[str, Tensor], example: Any) -> Tensor:
        return called_with(space.model, values, as_batch_of_one(example), function=loss.each).sum()

    def gradient_of_one(values: dict[str, Tensor], example: Any) -> dict[str, Tensor]:
        value, back = vjp(lambda own: loss_of_one(own, example), values)  # type: ignore[misc]  # only with has_aux
        with full_precision(value):
            return back(torch.ones_like(value))[0]

    with space.require_gradients(of_chosen=False):
        gradients = vmap(gradient_of_one, in_dims=(None, 0))(parameters, batch)
    return torch.cat([gradients[name].reshape(len(gradients[name]), -1) for name in parameters], 1)


def compare(subject: Subject, found: Findings) -> str | None:
    """The reason why vmap(grad) does not give autograd's result for some examples, or None."""
    space = subject.space
    if found.hooked:
        return f"{found.alters} changes gradients, which vmap may not see"
    written = [name for name in dict(space.model.named_parameters()) if name in found.changing]
    if written:  # PyTorch may crash under vmap
        return f"the model writes to parameter {written[0]!r} when it runs, which it cannot do under vmap"
    rows: list[list[Tensor]] = []
    try:
        for batch in found.batches:
            for at in range(0, batch_length(batch), 2):  # only two rows at once, because a row has p numbers
                pair = pick(batch, range(at, min(at + 2, batch_length(batch))))
                products = point_gradients(subject.loss, space, pair) * subject.direction
                rows += [[part.double().sum() for part in space.split(row).values()] for row in products]
    except FAILS as error:
        return f"vmap over the model failed: {first_line(error)}"
    wrong = found.truth.differs(torch.stack([torch.stack(row) for row in rows]).cpu(), subject.allowed)
    names = [name for name, is_wrong in zip(space.parameters, wrong.tolist(), strict=True) if is_wrong]
    return f"vmap over the model gives another gradient of parameter {names[0]!r} than autograd" if names else None


STRATEGY = Strategy("persample", scores, Cost(once=2, point_row=30, product=1 / 3), blocks, compare=compare)
