"""What every drop-in adds to its toolkit's class: a few keywords, and one rule for who answers a call.

| groups | who answers |
|---|---|
| None | the toolkit's own code; the core for a property, which the toolkit does not know |
| of one point each | the toolkit's own code, with its results put in the order of the groups |
| other | the core |

Groups of one go to the core, too, if a setting of the group path was chosen: `strategy`, `save_dir`, or one of the
adapter's own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.attribution import KeptScores, keep_scores
from ggda_ext.data import IndexedData
from ggda_ext.gradients import STRATEGIES, GroupGradients
from ggda_ext.gradients.plan import check_strategy
from ggda_ext.groups import Groups, GroupsLike
from ggda_ext.losses import ExampleLoss
from ggda_ext.model import ParameterChoice
from ggda_ext.words import check_counts

KEYWORDS = ("groups", "strategy", "save_dir", "tag", "memory_budget")
"""What every drop-in takes beside its toolkit's own arguments."""
MEMORY_BUDGET = 256 * 2**20
"""Bytes for one batch's activations and for one block of rows, where the user does not say."""


class DropIn:
    """The keywords of a drop-in, checked, and who answers.

    Args:
        groups: a `Groups` or anything it accepts; None for the toolkit itself, point by point.
        n: number of training points, where it is known.
        strategy: how group gradients are computed, see `ggda_ext.STRATEGIES`. ``"auto"`` leaves groups of one to the
            toolkit; any other name computes them as groups, too.
        save_dir: a folder that keeps what is finished, see `ggda_ext.attribute`: after a kill the same calls go on with
            what is missing, and scores are memory maps on the CPU. Groups of one are computed as groups then.
        tag: with `save_dir`, a name for the version of the data and of what else cannot be checked; another is refused.
        memory_budget: bytes for one batch's activations and for one block of rows of the group path.
        show_progress: whether the group path shows progress bars; by default on passes over 5 seconds.
        by_core: whether another setting was chosen that only the group path knows.
    """

    def __init__(
        self,
        groups: GroupsLike | None = None,
        *,
        n: int | None = None,
        strategy: str = "auto",
        save_dir: str | Path | None = None,
        tag: str | None = None,
        memory_budget: int | None = None,
        show_progress: bool | None = None,
        by_core: bool = False,
    ) -> None:
        check_strategy(strategy, STRATEGIES)
        if groups is None and save_dir is not None:
            raise ValueError(f"save_dir={str(save_dir)!r} is given without groups: it keeps scores of groups.")
        check_counts(memory_budget=memory_budget)
        keep_scores(save_dir, tag)  # refuses a tag without a folder
        self.groups = None if groups is None else Groups.of(groups, n)
        self.strategy, self.save_dir, self.tag = strategy, save_dir, tag
        self.memory_budget, self.show_progress = memory_budget or MEMORY_BUDGET, show_progress
        self.by_core = by_core

    @property
    def by_toolkit(self) -> bool:
        """Whether the toolkit's own code answers for test points."""
        chosen = self.by_core or self.strategy != "auto" or self.save_dir is not None
        return self.groups is None or (self.groups.are_singletons and not chosen)

    def groups_of(self, n: int) -> Groups:
        """The groups of n training points; of one point each if there are none."""
        return Groups.singletons(n) if self.groups is None else Groups.of(self.groups, n)

    def in_group_order(self, values: Tensor, dim: int = -1) -> Tensor:
        """The toolkit's values `[…, n, …]` in the order of groups of one, along `dim`; as they are without groups."""
        if self.groups is None or not self.by_toolkit:
            return values
        return values.index_select(dim, torch.from_numpy(self.groups.order.astype(np.int64)).to(values.device))

    def group_ids(self, points: Tensor) -> Tensor:
        """Ids of the groups of one that training points are, of any shape; the points themselves without groups."""
        if self.groups is None or not self.by_toolkit:
            return points
        return torch.from_numpy(self.groups.labels.astype(np.int64)).to(points.device)[points]

    def keep(self, part: str = "") -> KeptScores:
        """Where scores are kept: in a part of `save_dir`, or nowhere."""
        return keep_scores(None if self.save_dir is None else Path(self.save_dir) / part, self.tag)

    def provider(
        self,
        model: nn.Module,
        loss: ExampleLoss,
        data: IndexedData,
        *,
        parameters: ParameterChoice,
        groups: Groups | None = None,
        show_progress: bool | None = None,
    ) -> GroupGradients:
        """The gradients of the training loss, summed by these groups, or by others."""
        return GroupGradients(
            model, loss, data, self.groups if groups is None else groups, parameters=parameters,
            strategy=self.strategy, memory_budget=self.memory_budget,
            show_progress=self.show_progress if show_progress is None else show_progress,
        )  # fmt: skip
