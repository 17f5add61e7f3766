"""`backward`: one batched backward pass per group, the paper's way; for any model and any layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ggda_ext.gradients.job import Job, merge_pieces


def scores(job: Job, directions: Tensor) -> Tensor:
    """Inner products of directions `[m, p]` with the group-summed gradients `[m, k]`."""
    return job.scores_of(blocks(job, job.rows_near_cache), directions)


def blocks(job: Job, max_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Group-summed gradients as `(group ids [b], rows [b, p])`, at most `max_rows` at a time."""

    def pieces() -> Iterator[tuple[Tensor, Tensor, bool]]:
        parameters = list(job.space.parameters.values())
        for groups, batch in job.grouped_batches(most_groups=1):
            with job.space.gradients(enabled=True):
                gradients = torch.autograd.grad(job.loss.total(job.space.model, batch), parameters, allow_unused=True)
            row = torch.empty(job.space.size, dtype=job.space.dtype, device=job.space.device)
            yield torch.from_numpy(groups.ids), job.space.flatten(gradients, row)[None], groups.complete

    return merge_pieces(pieces(), max_rows)
