"""Projected gradients φ = Pᵀ∇f / √d of single points, and of properties of the model: the target side of a score."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ggda_ext import GroupGradients
from ggda_ext.distributed import all_reduce_sum, together
from ggda_ext.properties import PointProperty, Property, property_gradient
from ggda_trak.factored import FactoredProjector
from ggda_trak.projection import Projection


def point_rows(gradients: GroupGradients, projection: Projection, model_id: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Projected gradients of single points, as `(positions [b], rows [b, proj_dim])`; of this rank's share."""
    projector = projection.projector
    if isinstance(projector, FactoredProjector) and projector.captures(gradients):
        ones = torch.ones(1, gradients.groups.n)
        for at, projected in projector.blocks(gradients, ones, model_id):
            yield at, projected[0] / projection.scale
        return
    for at, rows in gradients.blocks():
        yield at, projection(rows, model_id)


def all_point_rows(gradients: GroupGradients, projection: Projection, model_id: int) -> Tensor:
    """The same for all points at once `[m, proj_dim]`, from all ranks."""
    space = projection.space
    rows = torch.zeros(len(gradients.groups), projection.dim, dtype=space.dtype, device=space.device)
    with together():
        for at, block in point_rows(gradients, projection, model_id):
            rows[at.to(rows.device)] = block
    return all_reduce_sum(rows)


def property_rows(model: nn.Module, property: Property, projection: Projection, model_id: int) -> Tensor:
    """Projected gradients of the components of a property `[m, proj_dim]`."""
    parameters = projection.space.parameters
    if not isinstance(property, PointProperty):
        return projection(property_gradient(property, model, parameters), model_id)
    gradients = GroupGradients(model, property.loss, property.data, parameters=parameters.values())
    return all_point_rows(gradients, projection, model_id)
