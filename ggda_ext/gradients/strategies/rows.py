"""Functions for all strategies that form rows: rows of groups from pieces, and scores from rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ggda_ext.gradients.plan import Request, joined
from ggda_ext.model import inner_products, sums_on


def scores_of(request: Request, blocks: Iterable[tuple[Tensor, Tensor]], directions: Tensor) -> Tensor:
    """Return the inner products `[m, k]` of directions `[m, p]` with streamed rows."""
    scores = request.empty_scores(len(directions))
    for ids, rows in blocks:
        scores[:, ids.to(scores.device)] = inner_products(directions, rows).to(scores)
    return scores


def merge_pieces(pieces: Iterator[tuple[Tensor, Tensor, bool]], max_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of at most `max_rows` finished rows from pieces `(ids, rows, whether the group is complete)`.

    The pieces of a group are added up in double precision.
    """
    ids: list[Tensor] = []
    rows: list[Tensor] = []
    begun: Tensor | None = None
    for piece_ids, piece_rows, complete in pieces:
        if begun is not None or not complete:
            wide = piece_rows.to(sums_on(piece_rows.device), torch.float64)
            begun = wide if begun is None else begun.add_(wide)
        if not complete:
            continue
        if begun is not None:
            piece_rows, begun = begun.to(piece_rows), None
        if rows and sum(map(len, rows)) + len(piece_rows) > max_rows:
            yield joined(ids), joined(rows)
            ids, rows = [], []
        ids.append(piece_ids)
        rows.append(piece_rows)
    if rows:
        yield joined(ids), joined(rows)
