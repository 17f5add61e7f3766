"""Gradients ∇f of a task's outputs, and projected gradients φ = Pᵀ∇f / √d of targets: test points or a property."""

from __future__ import annotations

import trak
from torch import Tensor, nn
from trak.gradient_computers import IterativeGradientComputer

from ggda_ext import GroupGradients
from ggda_ext.model import ParameterSpace
from ggda_ext.properties import PointProperty, Property, property_gradient
from ggda_ext.sharing import in_order
from ggda_trak.batches import Batch
from ggda_trak.options import GroupOptions
from ggda_trak.projection import Projection
from ggda_trak.task_outputs import TaskOutputs


class TaskGradients:
    """The gradients of a TRAKer's task at the model's current parameters.

    Args:
        traker: the TRAKer, which knows the model, the task and the projector.
        options: the options of the group path.
    """

    def __init__(self, traker: trak.TRAKer, options: GroupOptions) -> None:
        self.model, self.task, self.options = traker.model, traker.task, options
        self.is_batched = isinstance(traker.gradient_computer, IterativeGradientComputer)
        space = ParameterSpace(self.model, list(traker.grad_wrt or dict(self.model.named_parameters())))
        budget = options.memory_budget // 4
        self.projection = Projection(traker.projector, space, float(traker.normalize_factor), budget)
        self._provider: GroupGradients | None = None

    def of(self, batch: Batch) -> GroupGradients:
        """The provider for points like the batch's. It is made once, so that it examines the model only once."""
        if self._provider is None:
            self._provider = GroupGradients(
                self.model, TaskOutputs(self.task, self.is_batched, self.model, batch), batch,
                parameters=list(self.projection.space.parameters), strategy=self.options.strategy,
                batch_size=self.options.batch_size, memory_budget=max(1, self.options.memory_budget // 2),
                show_progress=self.options.show_progress,
            )  # fmt: skip
        return self._provider

    def rows(self, targets: Batch | Property, model_id: int) -> Tensor:
        """Projected gradients of targets `[m, dim]`: of a batch of points, or of a property."""
        if isinstance(targets, tuple):
            return point_rows(self.of(targets).on(targets), self.projection, model_id)
        return property_rows(self.model, targets, self.projection, model_id)


def point_rows(gradients: GroupGradients, projection: Projection, model_id: int) -> Tensor:
    """Projected gradients of the points of a provider `[m, dim]`."""
    return in_order(projection.blocks(gradients, model_id))


def property_rows(
    model: nn.Module, property: Property, projection: Projection, model_id: int, known: GroupGradients | None = None
) -> Tensor:
    """Projected gradients of the components of a property `[m, dim]`.

    Args:
        model: the model, with the parameters of the checkpoint.
        property: the property to explain.
        projection: projects gradients.
        model_id: selects the projection matrix.
        known: a provider that has examined the model; it is used again for points of the same loss.
    """
    parameters = projection.space.parameters
    if not isinstance(property, PointProperty):
        return projection(property_gradient(property, model, parameters), model_id)
    if known is not None and known.loss is property.loss:
        return point_rows(known.on(property.data), projection, model_id)
    gradients = GroupGradients(model, property.loss, property.data, parameters=parameters.values())
    return point_rows(gradients, projection, model_id)
