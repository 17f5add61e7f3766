"""What `TRAKer` takes beyond TRAK's own arguments, checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ggda_ext.checkpoints import Checkpoints, listed_checkpoints
from ggda_ext.curvature.fisher import Damping, FisherKind, check_damping, check_fisher
from ggda_ext.drop_in import DropIn
from ggda_ext.groups import GroupsLike
from ggda_ext.model import ParameterChoice

STRATEGIES = ("auto", "segmented", "backward", "persample")
MEMORY_BUDGET = 512 * 2**20


@dataclass(frozen=True, eq=False)
class GroupOptions:
    """See `TRAKer` for their meaning."""

    fisher: FisherKind = "batched"
    damping: Damping = "auto"
    strategy: str = "auto"
    checkpoints: Checkpoints | None = None
    parameters: ParameterChoice = None
    batch_size: int | None = None
    memory_budget: int = MEMORY_BUDGET
    show_progress: bool | None = None
    tag: str | None = None

    def __post_init__(self) -> None:
        check_fisher(self.fisher)
        if self.damping != "auto":
            object.__setattr__(self, "damping", check_damping(self.damping))
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy={self.strategy!r} is not one of {', '.join(map(repr, STRATEGIES))}.")
        for name, value in (("memory_budget", self.memory_budget), ("batch_size", self.batch_size)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: pass a positive number, or leave it out.")
        if self.checkpoints is not None:
            object.__setattr__(self, "checkpoints", listed_checkpoints(self.checkpoints))

    def drop_in(self, groups: GroupsLike, n: int) -> DropIn:
        """Who answers for groups of n points; the folder is TRAK's own, for groups of one as well."""
        asked_for = self.fisher == "paper" or self.damping != "auto"
        return DropIn(groups, n=n, strategy=self.strategy, memory_budget=self.memory_budget, by_core=asked_for)

    @property
    def models(self) -> int:
        """Number of checkpoints."""
        return 1 if self.checkpoints is None else len(listed_checkpoints(self.checkpoints))

    @property
    def several(self) -> list[Any]:
        """The checkpoints over which Q is averaged; none if there is only one."""
        return [] if self.checkpoints is None or self.models == 1 else listed_checkpoints(self.checkpoints)

    def refuse_without_groups(self) -> None:
        """Refuse what would have no effect on TRAK's own code."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not field.default and value != field.default:
                given = f"{field.name}={value!r}" if isinstance(value, str | int | float) else field.name
                raise ValueError(
                    f"{given} is given without groups, where TRAK's own code runs: pass groups=, or leave it out."
                )
