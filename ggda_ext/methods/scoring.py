"""Scores of a property by a method, at the model's current parameters: prepare the property's side, then one pass.

`attribute` and adapters call `scores_by` once for every checkpoint. The scores go to the caller, or into a folder
(`ggda_ext.storage.scores`, which has the methods of `ScoresInMemory`): `keep_scores` is the one place where the
in-memory path knows of folders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ggda_ext.data import to_device
from ggda_ext.gradients import Directions, GroupGradients, Plan
from ggda_ext.methods.method import Method, Preconditioned
from ggda_ext.results.method import MethodFacts, Setting

if TYPE_CHECKING:
    from ggda_ext.storage.scores import ScoreStore

Weight = float | Tensor


@dataclass
class Account:
    """What a method did so far: over blocks of test points, and over checkpoints."""

    settings: dict[str, Setting] = field(default_factory=dict)
    passes: float = 0.0
    notes: list[str] = field(default_factory=list)

    def add(self, done: Preconditioned, passes: float) -> None:
        """Add what was done for a block of test points: the largest of a number is kept, the first of a text."""
        for name, value in done.settings.items():
            before = self.settings.get(name)
            numbers = isinstance(value, int | float) and isinstance(before, int | float)
            self.settings[name] = max(value, before) if numbers else value if before is None else before  # type: ignore
        self.passes += done.passes + passes
        self.notes += [note for note in done.notes if note not in self.notes]

    def facts(self, method: Method, checkpoints: int, seconds: float) -> MethodFacts:
        """The facts that the result shows."""
        several = {"checkpoints": checkpoints} if checkpoints > 1 or not self.settings else {}
        return MethodFacts(method.name, method.unit, self.settings | several, self.passes, seconds)


class ScoresInMemory:
    """What `ScoreStore` does, without a folder: nothing is kept."""

    notes: tuple[str, ...] = ()

    def __enter__(self) -> ScoresInMemory:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def scores(
        self,
        provider: GroupGradients,
        directions: Directions,
        checkpoint: int = 0,
        property: Any = None,
        plan: Plan | None = None,
    ) -> Any:
        """``provider.scores(directions)``."""
        return provider.scores(directions)

    def array(
        self, provider: GroupGradients, checkpoint: int, name: str, settings: dict[str, Any], make: Callable[[], Tensor]
    ) -> Tensor:
        """``make()``."""
        return make()

    def solve(self, method: Method, provider: GroupGradients, rows: Tensor, checkpoint: int) -> Preconditioned:
        """``method.precondition(provider, rows)``."""
        return method.precondition(provider, rows)

    def stacked(self, parts: Sequence[tuple[Tensor, Any]]) -> Any:
        """Scores of some test points after others, from `(their positions, scores)`."""
        return torch.cat([block for _, block in parts])[torch.cat([ids for ids, _ in parts]).argsort()]

    def total(self, parts: Iterable[tuple[Weight, Any]]) -> Tensor:
        """Weighted sum of scores `[m, k]`."""
        return sum_scores(parts)

    def write(self, made_of: str, m: int, k: int, dtype: torch.dtype, rows: Callable[[int, int], Tensor]) -> Tensor:
        """``rows(0, m)``."""
        return rows(0, m)


KeptScores: TypeAlias = "ScoreStore | ScoresInMemory"
"""Either of the two; both have the methods of `ScoresInMemory`."""


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
    store = ScoresInMemory() if kept is None else kept

    def of_rows(rows: Tensor) -> Any:
        try:
            done = store.solve(method, provider, rows, checkpoint) if method.needs_rows else Preconditioned(rows)
        except (ValueError, RuntimeError):
            finite_losses(provider)  # curvature that cannot be solved with may come from a single point, which is named
            raise
        plan = provider.plan(done.directions)
        account.add(done, plan.passes)
        return store.scores(provider, done.directions, checkpoint, property, plan)

    if isinstance(directions, Tensor):
        return of_rows(directions)
    if not method.needs_rows:
        plan = provider.plan(directions)
        account.add(Preconditioned(torch.empty(0)), plan.passes)
        return store.scores(provider, directions, checkpoint, property, plan)
    return store.stacked([(ids, of_rows(rows)) for ids, rows in provider.tests(directions).all_blocks()])


def finite_losses(points: GroupGradients, batch_size: int | None = None) -> Tensor:
    """Loss of every point `[n]`; one that is not finite, which spoils everything else, is refused by its number.

    Args:
        points: the model, its loss, and the data.
        batch_size: points per batch; by default those of a DataLoader, else 256.
    """
    batch_size = batch_size or points.data.batch_size or 256
    with torch.no_grad():
        found = [
            points.loss.each(points.model, to_device(batch, points.space.device)).detach()
            for _, batch in points.data.sequential(batch_size)
        ]
    losses = torch.cat(found).to(torch.promote_types(found[0].dtype, torch.float32))
    wrong = torch.nonzero(~losses.isfinite())
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(f"the loss of point {at} of {points.data.name} is {float(losses[at])}: look at that point.")
    return losses


def keep_scores(save_dir: str | Path | None, tag: str | None = None) -> KeptScores:
    """A store of scores, or one that keeps nothing where `save_dir` is None.

    Args:
        save_dir: the folder.
        tag: names what a fingerprint cannot see, such as the version of the data; another tag is refused.
    """
    if save_dir is not None:
        if not isinstance(save_dir, str | PathLike):
            raise TypeError(f"save_dir is a {type(save_dir).__name__}: pass the path of a folder.")
        if tag is not None and not isinstance(tag, str):
            raise TypeError(f"tag is a {type(tag).__name__}: pass text, such as the version of the data.")
        from ggda_ext.storage.scores import ScoreStore  # only who stores something needs it

        return ScoreStore(save_dir, tag)
    if tag is not None:
        raise ValueError(f"tag={tag!r} is given without save_dir: pass the folder it is for, or leave it out.")
    return ScoresInMemory()


def sum_scores(parts: Iterable[tuple[Weight, Tensor]]) -> Tensor:
    """Sum of weighted scores, added up as they come."""
    total: Tensor | None = None
    for weight, part in parts:
        weighted = part if isinstance(weight, float) and weight == 1 else weight * part
        total = weighted if total is None else total.add_(weighted)
    assert total is not None
    return total
