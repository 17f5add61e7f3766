"""Projected gradients φ = Pᵀ∇f / √d of the targets, one row each: test points, or components of a property."""

from __future__ import annotations

from torch import Tensor, nn

from ggda_ext import GroupGradients
from ggda_ext.properties import PointProperty, Property, property_gradient
from ggda_ext.sharing import in_order
from ggda_trak.projection import Projection


def point_rows(gradients: GroupGradients, projection: Projection, model_id: int) -> Tensor:
    """Projected gradients of the points of a provider `[m, dim]`."""
    return in_order(projection.blocks(gradients, model_id))


def property_rows(
    model: nn.Module, property: Property, projection: Projection, model_id: int, known: GroupGradients | None = None
) -> Tensor:
    """Projected gradients of the components of a property `[m, dim]`.

    Args:
        model: at the parameters of the checkpoint.
        property: what is explained.
        projection: projects gradients.
        model_id: chooses the matrix.
        known: a provider that has looked into the model; it serves points of the same loss.
    """
    parameters = projection.space.parameters
    if not isinstance(property, PointProperty):
        return projection(property_gradient(property, model, parameters), model_id)
    if known is not None and known.loss is property.loss:
        return point_rows(known.on(property.data), projection, model_id)
    gradients = GroupGradients(model, property.loss, property.data, parameters=parameters.values())
    return point_rows(gradients, projection, model_id)
