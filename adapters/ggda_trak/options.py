"""What `TRAKer` takes beyond TRAK's own arguments, checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from ggda_ext.checkpoints import Checkpoints, listed_checkpoints, state_of
from ggda_ext.curvature.fisher import Damping, FisherKind, check_damping, check_fisher
from ggda_ext.drop_in import DropIn
from ggda_ext.gradients.plan import check_strategy
from ggda_ext.groups import Groups, GroupsLike
from ggda_ext.model import ParameterChoice, ParameterSpace, inner_name, inner_names, unwrapped
from ggda_ext.storage.fingerprint import of_groups, of_state, of_structure, of_value
from ggda_ext.words import check_counts
from ggda_trak.savers import CheckedSaver

STRATEGIES = ("segmented", "backward", "persample")
MEMORY_BUDGET = 512 * 2**20


@dataclass(eq=False)
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
        self.damping = check_damping(self.damping)
        check_strategy(self.strategy, STRATEGIES)
        check_counts(memory_budget=self.memory_budget, batch_size=self.batch_size)
        self._listed = [] if self.checkpoints is None else listed_checkpoints(self.checkpoints)

    def drop_in(self, groups: GroupsLike, n: int) -> DropIn:
        """Who answers for groups of n points; the folder is TRAK's own, for groups of one as well."""
        asked_for = self.fisher == "paper" or self.damping != "auto"
        return DropIn(groups, n=n, strategy=self.strategy, memory_budget=self.memory_budget, by_core=asked_for)

    def for_trak(self, given: dict[str, Any], groups: Groups | None) -> dict[str, Any]:
        """TRAK's own arguments, as they have to be for its code to work.

        Args:
            given: by name.
            groups: those whose rows its code is given in place of points; None where it is given points.
        """
        if self.parameters is not None:
            if given.get("grad_wrt") is not None:
                raise ValueError("parameters and grad_wrt are both given, and mean the same: pass one of them.")
            given["grad_wrt"] = list(ParameterSpace(given["model"], self.parameters).parameters)
        if given.get("grad_wrt") is not None:
            given["grad_wrt"] = [inner_name(name, given["model"]) for name in given["grad_wrt"]]
        given["model"] = unwrapped(given["model"])
        if isinstance(given.get("device"), torch.device):
            given["device"] = str(given["device"])
        if groups is not None:
            given = {"use_half_precision": False} | given | {"train_set_size": len(groups)}
            given["lambda_reg"] = 0.0  # it is in the Fisher that TRAK's code is given
        given.setdefault("saver", CheckedSaver)
        return given

    def made_with(self, given: dict[str, Any], drop_in: DropIn) -> dict[str, Any]:
        """What a folder is made with, from these options and TRAK's own arguments."""
        model, grouped = given["model"], not drop_in.by_toolkit
        assert drop_in.groups is not None
        return {
            "groups": of_groups(drop_in.groups),
            "fisher": self.fisher if grouped else "TRAK's",
            "checkpoints": self.models if grouped else None,
            "parameters": sorted(given["grad_wrt"]) if given.get("grad_wrt") else "all",
            "half_precision": given.get("use_half_precision", True),
            "task": of_value(given["task"], "task", None),
            "model": of_structure(model, None),
            "values of the checkpoints": [of_state(inner_names(state_of(one), model)) for one in self.several],
            "tag": self.tag,
        }

    @property
    def models(self) -> int:
        """Number of checkpoints."""
        return max(1, len(self._listed))

    @property
    def several(self) -> list[Any]:
        """The checkpoints over which Q is averaged; none if there is only one."""
        return self._listed if self.models > 1 else []

    def refuse_without_groups(self) -> None:
        """Refuse what would have no effect on TRAK's own code."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not field.default and value != field.default:
                given = f"{field.name}={value!r}" if isinstance(value, str | int | float) else field.name
                raise ValueError(
                    f"{given} is given without groups, where TRAK's own code runs: pass groups=, or leave it out."
                )
