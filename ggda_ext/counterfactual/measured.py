"""Properties of a counterfactual model: those of outputs as they are, others to first order.

A refit gives outputs. A property that depends on outputs only, such as a loss, accuracy, F1 or a fairness gap, is
computed from them; it needs no gradient. Any other callable g(model) is linearised along the directions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ggda_ext.data import IndexedData
from ggda_ext.losses import OutputLoss, example_losses
from ggda_ext.properties import LinearProperty, MeanProperty, OutputsProperty, PointProperty, Property

OutputsOf = Callable[[IndexedData], tuple[Tensor, Tensor | None]]
"""The outputs and targets of a data set."""


def of_outputs_only(property: Property) -> bool:
    """Whether a property depends on the model through its outputs only, as far as can be seen."""
    if isinstance(property, LinearProperty):
        return all(of_outputs_only(part) for part in property.properties)
    if isinstance(property, MeanProperty | PointProperty):
        return type(property.loss) is OutputLoss
    return isinstance(property, OutputsProperty)


@torch.no_grad()
def value_of(property: Property, outputs_of: OutputsOf) -> Tensor:
    """A property of outputs, computed from given outputs; a scalar or `[m]`."""
    if isinstance(property, LinearProperty):
        return property.join([value_of(part, outputs_of) for part in property.properties])
    assert isinstance(property, OutputsProperty | MeanProperty | PointProperty)
    outputs, targets = outputs_of(property.data)
    if isinstance(property, OutputsProperty):
        return torch.as_tensor(property.fn(outputs, targets))
    assert isinstance(property.loss, OutputLoss)
    losses = example_losses(property.loss.loss_fn, outputs, targets)
    return losses.mean() if isinstance(property, MeanProperty) else losses
