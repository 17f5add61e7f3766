"""The arguments of `TRAKer` that TRAK itself does not have, checked once."""

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
from ggda_ext.words import check_counts, whole_bytes
from ggda_trak.savers import CheckedSaver

STRATEGIES = ("segmented", "backward", "persample")
MEMORY_BUDGET = 512 * 2**20


@dataclass(eq=False)
class GroupOptions:
    """The arguments that `TRAKer` adds to TRAK's; `TRAKer` explains them."""

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
        check_counts(batch_size=self.batch_size)
        self.memory_budget = whole_bytes(self.memory_budget)
        self._listed = [] if self.checkpoints is None else listed_checkpoints(self.checkpoints)

    def drop_in(self, groups: GroupsLike, n: int) -> DropIn:
        """The `DropIn` for groups of n points. It has no `save_dir`, because the folder is TRAK's own."""
        asked_for = self.fisher == "paper" or self.damping != "auto"
        return DropIn(groups, n=n, strategy=self.strategy, memory_budget=self.memory_budget, by_core=asked_for)

    def for_trak(self, given: dict[str, Any], groups: Groups | None) -> dict[str, Any]:
        """Change TRAK's own arguments so that TRAK's code works with them.

        Args:
            given: TRAK's arguments by name.
            groups: the groups whose rows TRAK's code gets instead of points; None if it gets points.
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
            given["lambda_reg"] = 0.0  # the Fisher that TRAK's code gets already contains it
        given.setdefault("saver", CheckedSaver)
        return given

    def made_with(self, given: dict[str, Any], drop_in: DropIn) -> dict[str, Any]:
        """The settings that the content of a folder depends on, from these options and TRAK's own arguments."""
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
        """The checkpoints over which Q is averaged; empty if there is only one checkpoint."""
        return self._listed if self.models > 1 else []

    def refuse_without_groups(self) -> None:
        """Raise an error if an option is given that has no effect on TRAK's own code."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not field.default and value != field.default:
                given = f"{field.name}={value!r}" if isinstance(value, str | int | float) else field.name
                raise ValueError(
                    f"{given} is given without groups, where TRAK's own code runs: pass groups=, or leave it out."
                )
