"""Scores of a property by a method, at the model's current parameters: prepare the property's side, then one pass.

`attribute` and adapters call it once for every checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ggda_ext.gradients import Directions, GroupGradients
from ggda_ext.methods.keeping import KeptScores, ScoresInMemory
from ggda_ext.methods.method import Method, Preconditioned
from ggda_ext.results.method import MethodFacts, Setting


@dataclass
class Account:
    """What a method did so far: over blocks of test points, and over checkpoints."""

    settings: dict[str, Setting] = field(default_factory=dict)
    passes: float = 0.0
    notes: list[str] = field(default_factory=list)

    def add(self, done: Preconditioned, passes: float) -> None:
        """Add a block: of numbers the largest is kept, of words the first."""
        for name, value in done.settings.items():
            before = self.settings.get(name)
            numbers = isinstance(value, int | float) and isinstance(before, int | float)
            self.settings[name] = max(value, before) if numbers else value if before is None else before  # type: ignore
        self.passes += done.passes + passes
        self.notes += [note for note in done.notes if note not in self.notes]

    def facts(self, method: Method, checkpoints: int, seconds: float) -> MethodFacts:
        """All of it, for the result."""
        several = {"checkpoints": checkpoints} if checkpoints > 1 or not self.settings else {}
        return MethodFacts(method.name, method.unit, self.settings | several, self.passes, seconds)


def scores_by(
    method: Method,
    provider: GroupGradients,
    directions: Directions,
    account: Account,
    kept: KeptScores | None = None,
    checkpoint: int = 0,
    property: Any = None,
) -> Any:
    """Scores `[m, k]` of directions by a method; what `kept.scores` gives, where there is a folder.

    Args:
        method: one of `ggda_ext.methods`.
        provider: the training side, at the parameters in question.
        directions: gradients of the property `[m, p]`, or the test points themselves.
        account: is told what was done.
        kept: where scores and solves are kept.
        checkpoint: its number.
        property: where the directions come from.
    """
    kept = ScoresInMemory() if kept is None else kept
    if isinstance(directions, Tensor):
        return _scored(method, provider, directions, account, kept, checkpoint, property)
    if not method.needs_rows:
        account.add(Preconditioned(torch.empty(0)), provider.plan(directions).passes)
        return kept.scores(provider, directions, checkpoint, property)
    return kept.stacked(
        [
            (ids, _scored(method, provider, rows, account, kept, checkpoint, (property, int(ids[0]))))
            for ids, rows in provider.tests(directions).all_blocks()
        ]
    )


def _scored(
    method: Method,
    provider: GroupGradients,
    rows: Tensor,
    account: Account,
    kept: KeptScores,
    checkpoint: int,
    property: Any,
) -> Any:
    done = _kept_solve(method, provider, rows, kept, checkpoint) if method.needs_rows else Preconditioned(rows)
    account.add(done, provider.plan(done.directions).passes)
    return kept.scores(provider, done.directions, checkpoint, property)


def _kept_solve(
    method: Method, provider: GroupGradients, rows: Tensor, kept: KeptScores, checkpoint: int
) -> Preconditioned:
    """``method.precondition``, or what it gave before."""
    if isinstance(kept, ScoresInMemory):
        return method.precondition(provider, rows)
    made_with = {"method": repr(method)}
    content = rows.detach().to("cpu", torch.promote_types(rows.dtype, torch.float32)).contiguous().numpy()
    name = f"solve-{hashlib.blake2b(content.data, key=repr(method).encode()[:64], digest_size=8).hexdigest()}"

    @lru_cache(maxsize=1)
    def done() -> Preconditioned:
        return method.precondition(provider, rows)

    solved = kept.array(provider, checkpoint, name, made_with, lambda: done().directions)
    told = kept.array(provider, checkpoint, f"{name}-facts", made_with, lambda: _told(done()))
    settings, passes, notes = json.loads(bytes(told.cpu().tolist()))
    return Preconditioned(solved.to(rows), settings, passes, tuple(notes))


def _told(done: Preconditioned) -> Tensor:
    text = json.dumps([dict(done.settings), done.passes, done.notes])
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())
