"""Properties of a counterfactual model: computed from its outputs if possible, otherwise to first order.

A refit gives outputs. A property that depends on outputs only, such as a loss, accuracy, F1 or a fairness gap, is
computed from them; it needs no gradient. Any other callable g(model) is linearised along the directions.

For a model that has settled (see `linearized`) and for copies `nearby`, the change from the settled model is computed
and added to the model's own value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ggda_ext.counterfactual.features import Features
from ggda_ext.data import DataLike, IndexedData
from ggda_ext.losses import OutputLoss, example_losses
from ggda_ext.model import version
from ggda_ext.properties import LinearProperty, MeanProperty, OutputsProperty, PointProperty, Property
from ggda_ext.properties.property import check_property
from ggda_ext.tables import check_columns

if TYPE_CHECKING:
    from ggda_ext.counterfactual.linearized import LinearizedModel


OutputsOf = Callable[[IndexedData], tuple[Tensor, Tensor | None]]
"""A function that returns the outputs and targets of a data set."""


def of_outputs_only(property: Property) -> bool:
    """Whether a property is known to depend on the model through its outputs only."""
    if isinstance(property, LinearProperty):
        return all(of_outputs_only(part) for part in property.properties)
    if isinstance(property, MeanProperty | PointProperty):
        return type(property.loss) is OutputLoss
    return isinstance(property, OutputsProperty)


@torch.no_grad()
def value_of(property: Property, outputs_of: OutputsOf) -> Tensor:
    """Compute a property of outputs, a scalar or `[m]`, from given outputs."""
    if isinstance(property, LinearProperty):
        return property.join([value_of(part, outputs_of) for part in property.properties])
    assert isinstance(property, OutputsProperty | MeanProperty | PointProperty)
    outputs, targets = outputs_of(property.data)
    if isinstance(property, OutputsProperty):
        return torch.as_tensor(property.fn(outputs, targets))
    assert isinstance(property.loss, OutputLoss)
    losses = example_losses(property.loss.loss_fn, outputs, targets)
    return losses.mean() if isinstance(property, MeanProperty) else losses


class Explained:
    """A model and its copies nearby: refits all of them, and averages properties over them.

    It computes the outputs and tangents of every data set, and the slopes of every property, once, and keeps them.

    Args:
        own: the model itself, linearised.

    Attributes:
        models: the model itself first, then its copies. From a copy only the change of a property is used.
    """

    def __init__(self, own: LinearizedModel) -> None:
        self.models = [own]
        self._features: dict[Any, tuple[IndexedData, list[Features]]] = {}
        self._slopes: dict[tuple[int, int], tuple[Property, Tensor, Tensor]] = {}

    def solve(self, weights: Tensor, factor: float = 1.0) -> list[Tensor]:
        """Return coefficients d `[s, r]` of every model for group weights `[s, k]`; `factor` multiplies the ridges."""
        return [model.solve(weights, factor) for model in self.models]

    def values(self, property: Property, coefficients: Sequence[Tensor]) -> Tensor:
        """Return the values `[s]` or `[s, m]` of a property for coefficients `[s, r]` of every model: their mean."""
        check_property(property)
        found = self._of_outputs if of_outputs_only(property) else self._to_first_order
        return torch.stack([found(j, property, d) for j, d in enumerate(coefficients)]).mean(0)

    def _of_outputs(self, j: int, property: Property, coefficients: Tensor) -> Tensor:
        settled = self.models[j].settled

        def value_at(d: Tensor, of: int = j) -> Tensor:
            return value_of(property, lambda data: self._moved(of, data, d)).double()

        values = torch.stack([value_at(settled + d) for d in coefficients])
        if j or bool(settled.any()):
            values = values - value_at(settled) + value_at(torch.zeros_like(self.models[0].settled), 0)
        return values

    def _to_first_order(self, j: int, property: Property, coefficients: Tensor) -> Tensor:
        value, slopes = self._linearised(j, property)
        if j:
            value, _ = self._linearised(0, property)
        moved = value + coefficients @ slopes.T
        return moved[:, 0] if moved.shape[1] == 1 else moved

    def _linearised(self, j: int, property: Property) -> tuple[Tensor, Tensor]:
        key, why = (j, id(property)), "its slope along the refit's directions is zero"
        if key in self._slopes:
            return self._slopes[key][1:]
        self.models[j].check_unchanged()  # here, because its error is not one of the property
        try:
            value, slopes = self.models[j].linearised(property)
            if bool(slopes.any()):
                self._slopes[key] = (property, value, slopes)
                return value, slopes
        except ValueError as error:
            why = str(error)
        name = getattr(property, "__name__", type(property).__name__)
        raise ValueError(
            f"property {name} is not known to be a function of outputs, and cannot be linearised: {why} "
            "If it is one of outputs, pass ggda_ext.properties.of_outputs(data, fn)."
        )

    def _moved(self, j: int, data: IndexedData, coefficients: Tensor) -> tuple[Tensor, Tensor | None]:
        features = self.features(data)[j]
        return features.moved(coefficients), features.targets

    def features(self, data: DataLike) -> list[Features]:
        """Return the outputs and tangents of a data set for every model."""
        indexed = data if isinstance(data, IndexedData) else IndexedData(data, "data")
        key = identity_of(indexed)
        if key not in self._features:
            check_columns(indexed.columns, indexed.name, self.models[0].provider.data.columns)
            self._features[key] = (indexed, [model.features(indexed) for model in self.models])
        return self._features[key][1]


def identity_of(data: IndexedData) -> Any:
    """A key that is equal for data sets that hold the same tensors under the same names, not written to in between."""
    source = data._source
    parts = source if isinstance(source, Mapping | tuple | list) else [source]
    named = parts.items() if isinstance(parts, Mapping) else enumerate(parts)
    held = ((name, id(part), version(part) if isinstance(part, Tensor) else None) for name, part in named)
    return (*held, id(data._loader))
