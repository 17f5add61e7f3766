"""Where scores go: to the caller, or into a folder (`ggda_ext.storage.scores`) that has the same methods.

This is the one place where the in-memory path knows that scores can be stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ggda_ext.gradients import Directions, GroupGradients

if TYPE_CHECKING:
    from ggda_ext.storage.scores import ScoreStore

Weight = float | Tensor


class ScoresInMemory:
    """What `ScoreStore` does, without a folder: nothing is kept."""

    def __enter__(self) -> ScoresInMemory:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def scores(
        self, provider: GroupGradients, directions: Directions, checkpoint: int = 0, property: Any = None
    ) -> Any:
        """``provider.scores(directions)``."""
        return provider.scores(directions)

    def array(
        self, provider: GroupGradients, checkpoint: int, name: str, settings: dict[str, Any], make: Callable[[], Tensor]
    ) -> Tensor:
        """``make()``."""
        return make()

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


def keep_scores(save_dir: str | Path | None, tag: str | None = None) -> KeptScores:
    """A store of scores, or one that keeps nothing where `save_dir` is None.

    Args:
        save_dir: the folder.
        tag: names what a fingerprint cannot see, such as the version of the data; another tag is refused.
    """
    if save_dir is not None:
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
