"""Keywords that every drop-in adds to its toolkit's class, and one rule that decides which code answers a call.

| groups | which code answers |
|---|---|
| None | the toolkit's own code, or the core if a property is asked for (the toolkit does not know properties) |
| groups of one point each | the toolkit's own code; its results are put in the order of the groups |
| other groups | the core |

The core also answers for groups of one point if the user chose a setting of the group path: `strategy`, `save_dir`, or
a setting of the adapter itself.
"""

from __future__ import annotations

from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any

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
from ggda_ext.words import whole_bytes

KEYWORDS = ("groups", "strategy", "save_dir", "tag", "memory_budget")
"""Keywords that every drop-in takes in addition to its toolkit's own arguments."""
MEMORY_BUDGET = 256 * 2**20
"""Default number of bytes for the activations of one batch and for one block of rows."""


class FullSignature:
    """A mixin for drop-in classes: `help` and `inspect.signature` show the toolkit's arguments, and then ours."""

    __signature__: Signature

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        found: dict[str, Parameter] = {}
        for base in cls.__mro__:
            if "__init__" in vars(base):
                own = list(signature(vars(base)["__init__"]).parameters.values())[1:]
                passes_on = bool(own) and own[0].kind is Parameter.VAR_POSITIONAL
                named = [one for one in own if one.kind is Parameter.KEYWORD_ONLY] if passes_on else own
                found = {one.name: one for one in named} | found
                if not passes_on:
                    break
        cls.__signature__ = Signature(sorted(found.values(), key=lambda one: one.kind))


class DropIn:
    """The checked keywords of a drop-in, and the rule that decides which code answers.

    Args:
        groups: a `Groups` or anything that `Groups` accepts; None lets the toolkit itself answer, point by point.
        n: number of training points, if it is known.
        strategy: how group gradients are computed, see `ggda_ext.STRATEGIES`. ``"auto"`` leaves groups of one point to
            the toolkit; with any other name the core computes them as well.
        save_dir: a folder that keeps finished work, see `ggda_ext.attribute`. After a kill, the same calls compute only
            what is missing. Scores are on the CPU, as in `attribute`. The core also computes groups of one point then.
        tag: with `save_dir`, a name for the version of the data and of anything else that cannot be checked. A folder
            that was made with another tag is refused.
        memory_budget: bytes for the activations of one batch and for one block of rows of the group path.
        show_progress: whether the group path shows progress bars; by default only for passes longer than 5 seconds.
        by_core: whether the user chose another setting that only the group path knows.
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
        keep_scores(save_dir, tag)  # raises an error for a tag without a folder
        self.groups = None if groups is None else Groups.of(groups, n)
        self.strategy, self.save_dir, self.tag = strategy, save_dir, tag
        self.memory_budget = whole_bytes(MEMORY_BUDGET if memory_budget is None else memory_budget)
        self.show_progress = show_progress
        self.by_core = by_core

    @property
    def by_toolkit(self) -> bool:
        """Whether the toolkit's own code answers for test points."""
        chosen = self.by_core or self.strategy != "auto" or self.save_dir is not None
        return self.groups is None or (self.groups.are_singletons and not chosen)

    def groups_of(self, n: int) -> Groups:
        """The groups of `n` training points; without groups, every point is a group of its own."""
        return Groups.singletons(n) if self.groups is None else Groups.of(self.groups, n)

    def in_group_order(self, values: Tensor, dim: int = -1) -> Tensor:
        """Put the toolkit's values `[…, n, …]` in the order of the groups of one point, along `dim`.

        The values are returned unchanged if there are no groups or if the core answers.
        """
        if self.groups is None or not self.by_toolkit:
            return values
        return values.index_select(dim, torch.from_numpy(self.groups.order.astype(np.int64)).to(values.device))

    def group_ids(self, points: Tensor) -> Tensor:
        """Replace training points (of any shape) by the ids of their groups of one point.

        The points are returned unchanged if there are no groups or if the core answers.
        """
        if self.groups is None or not self.by_toolkit:
            return points
        return torch.from_numpy(self.groups.labels.astype(np.int64)).to(points.device)[points]

    def keep(self, part: str = "") -> KeptScores:
        """The place where scores are kept: the subfolder `part` of `save_dir`, or nowhere without `save_dir`."""
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
        """The provider of the gradients of the training loss, summed by `groups` (by default the drop-in's own)."""
        return GroupGradients(
            model, loss, data, self.groups if groups is None else groups, parameters=parameters,
            strategy=self.strategy, memory_budget=self.memory_budget,
            show_progress=self.show_progress if show_progress is None else show_progress,
        )  # fmt: skip
