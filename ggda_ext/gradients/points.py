"""Test points as directions: a provider that knows the points need not form their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from ggda_ext.data import DataLike, IndexedData
from ggda_ext.groups.partition import Groups, GroupsLike
from ggda_ext.losses import ExampleLoss, as_example_loss
from ggda_ext.model import ParameterChoice

if TYPE_CHECKING:
    from ggda_ext.gradients.provider import GroupGradients


@dataclass(frozen=True, init=False)
class PointGradients:
    """The gradients of single test points as directions, given by the points and their loss.

    A provider that knows the points, not only their gradients `[m, p]`, can compute scores without forming the
    gradients.

    Args:
        loss_fn: as in `GroupGradients`: ``loss_fn(output, target)`` of any reduction, or an `ExampleLoss`.
        data: the test points, in any form that `GroupGradients` accepts for training points.
        batch_size: most points to run at once; by default the batch size of a DataLoader, otherwise as many as fit.
    """

    loss: ExampleLoss
    data: IndexedData
    batch_size: int | None

    def __init__(self, loss_fn: Any, data: DataLike, batch_size: int | None = None) -> None:
        object.__setattr__(self, "loss", as_example_loss(loss_fn))
        loaded = data.batch_size if isinstance(data, DataLoader) else None
        object.__setattr__(self, "batch_size", batch_size or loaded)
        object.__setattr__(self, "data", data if isinstance(data, IndexedData) else IndexedData(data, "the test data"))

    @property
    def n(self) -> int:
        """Number of test points."""
        if self.data.n is None:
            raise TypeError(f"{self.data.name} has no length: pass test points with a known number.")
        return self.data.n

    def provider(
        self,
        model: nn.Module,
        groups: GroupsLike | None = None,
        *,
        parameters: ParameterChoice = None,
        batch_size: int | None = None,
        at_most: int | None = None,
        memory_budget: int = 256 * 2**20,
    ) -> GroupGradients:
        """Return a provider of the gradients of the points at a model, one row per point or summed by `groups`.

        Args:
            model: the model.
            groups: groups of the points; None for groups of one.
            parameters, batch_size, memory_budget: as in `GroupGradients`.
            at_most: most points to run at once, if neither these points nor `batch_size` set a number.
        """
        from ggda_ext.gradients.provider import GroupGradients  # imports this module

        provider = GroupGradients(
            model, self.loss, self.data, Groups.singletons(self.n) if groups is None else groups,
            parameters=parameters, batch_size=batch_size, memory_budget=memory_budget, show_progress=False,
        )  # fmt: skip
        provider._at_most = self.batch_size or at_most
        return provider


Directions = Tensor | PointGradients
