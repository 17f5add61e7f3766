"""One answer of a `WhatIf`: the model as it would be with other weights of the groups, and its properties."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ggda_ext.counterfactual.property_values import of_outputs_only
from ggda_ext.data import DataLike
from ggda_ext.properties import Property
from ggda_ext.results.named_scores import default_name

if TYPE_CHECKING:
    from ggda_ext.counterfactual.what_if import WhatIf


class Counterfactual:
    """The model as it would be with other weights of the groups.

    Attributes:
        weights: the weight of every group `[k]`.
    """

    def __init__(self, what_if: WhatIf, weights: Tensor) -> None:
        self.what_if, self.weights = what_if, weights
        self._solved: dict[tuple[float, ...], list[list[Tensor]]] = {}
        self._to_first_order: list[str] = []
        _ = self._coefficients  # solves at once, so that a refit without an optimum raises its error here

    def __repr__(self) -> str:
        changed = {n: float(w) for n, w in zip(self.what_if.names, self.weights, strict=True) if w != 1}
        told = f", predicted to first order: {', '.join(self._to_first_order)}" if self._to_first_order else ""
        return f"Counterfactual(weights {changed}, others 1{told})"

    @property
    def _coefficients(self) -> list[list[Tensor]]:
        """The answers d `[1, r]` of every model and its copies; solved again if `verify` has changed a ridge."""
        ridges = tuple(model.ridge for model in self.what_if.linearized)
        if ridges not in self._solved:
            self._solved = {ridges: [one.solve(self.weights[None]) for one in self.what_if.models]}
        return self._solved[ridges]

    def value(self, property: Property) -> Tensor:
        """Predict a property, a scalar or `[m]`: the mean over models, calibrated if `verify` was called for it."""
        return self.what_if.calibrated(property, self.weights[None], self._predicted(property))[0]

    def _predicted(self, property: Property) -> Tensor:
        """Predicted value of a property before calibration `[1]` or `[1, m]`."""
        models = zip(self.what_if.models, self._coefficients, strict=True)
        found = torch.stack([one.values(property, solved) for one, solved in models]).mean(0)
        if self.is_linearised(property) and (name := default_name(property)) not in self._to_first_order:
            self._to_first_order.append(name)
        return found

    def change(self, property: Property) -> Tensor:
        """Predict how much a property rises compared with the model as it is."""
        full = Counterfactual(self.what_if, torch.ones_like(self.weights))
        return self.value(property) - full.value(property)

    def error(self, property: Property) -> float | None:
        """Standard error of `value`, from the retrainings of `verify`; None if `verify` was not called for it."""
        found = self._value_and_error(property)
        return None if found is None else found[1]

    def interval(self, property: Property, confidence: float = 0.95) -> tuple[float, float] | None:
        """Interval for the value of a retrained model, from the retrainings of `verify`.

        None if `verify` was not called for the property.
        """
        found, both = self.what_if.calibration_of(property), self._value_and_error(property)
        if found is None or both is None:
            return None
        value, width = both[0], found.width(confidence, both[1])
        return value - width, value + width

    def _value_and_error(self, property: Property) -> tuple[float, float] | None:
        """The value and its standard error, from one prediction; None if `verify` was not called for the property."""
        found = self.what_if.calibration_of(property)
        if found is None:
            return None
        predicted = self._predicted(property)
        value = self.what_if.calibrated(property, self.weights[None], predicted)[0]
        return float(value), found.error * float(found.spread(predicted[0] - self.what_if.value_of_all(property)))

    def outputs(self, data: DataLike, model: int = 0) -> Tensor:
        """Predict the outputs on any data `[N]` or `[N, C]`, for one of the models."""
        return self.what_if.models[model].features(data)[0].moved(self._coefficients[model][0][0])

    def is_linearised(self, property: Property) -> bool:
        """Whether a property is predicted to first order, because it is not known to depend on outputs only."""
        return not of_outputs_only(property)
