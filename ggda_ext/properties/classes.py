"""Properties that are a function of all outputs of a test set, and linear maps of several properties."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.data import DataLike, IndexedData
from ggda_ext.gradients.proof.findings import Apart, Compared, compared_before
from ggda_ext.losses import OutputLoss, model_output, output_of
from ggda_ext.model import full_precision
from ggda_ext.properties.property import (
    DataProperty,
    Parameters,
    Property,
    ReadyProperty,
    Rows,
    checked_value,
    property_gradient,
)
from ggda_ext.sharing import anywhere, in_order, together

OutputsFn = Callable[[Tensor, Any], Tensor]


class OutputsProperty(DataProperty):
    """The value of ``fn(outputs [N, …], targets [N, …])`` on a whole test set, scalar or `[m]`; see `of_outputs`."""

    def __init__(
        self,
        data: DataLike,
        fn: OutputsFn,
        batch_size: int | None = None,
        *,
        name: str = "property",
        higher_is_better: bool | None = None,
        components: int | None = None,
    ) -> None:
        super().__init__(data, batch_size, "data", name, higher_is_better)
        self.fn, self.components = fn, components
        self.fn_of_points: Callable[[np.ndarray], OutputsFn] | None = None

    def __call__(self, model: nn.Module) -> Tensor:
        _, outputs, targets = zip(*self._outputs(model, self._batches(model)), strict=True)
        return self.fn(torch.cat(outputs), None if targets[0] is None else torch.cat(targets))

    def of_points(self, points: np.ndarray) -> OutputsProperty:
        """Return the property for some of the test points; an `fn` that holds a value per point keeps only theirs."""
        found = copy.copy(self)
        if self.fn_of_points is not None:
            found.fn = self.fn_of_points(points)
        return found

    def gradient(self, model: nn.Module, parameters: Parameters) -> Tensor:
        """Return the gradient rows `[m, p]`, in two passes over the data."""
        outputs, targets = self._all_outputs(model)
        outputs.requires_grad_()
        value = checked_value(self.fn(outputs, targets))
        m = len(value)
        with full_precision(value):
            slopes = [
                torch.autograd.grad(value[j], outputs, retain_graph=j + 1 < m, allow_unused=True)[0] for j in range(m)
            ]
        if any(slope is None for slope in slopes):
            raise ValueError("property does not depend on the outputs: compute it from fn's first argument.")
        found = Rows(m, parameters, sums=True)
        with found.adding_up():
            for indices, batch in self._batches(model, mine=True):
                again, _ = model_output(model, batch)
                run = slice(int(indices[0]), int(indices[-1]) + 1)
                _check_repeats(again.detach(), outputs.detach()[run])
                for j, slope in enumerate(slopes):
                    found.add(j, again, slope[run], keep=j + 1 < m)
        return found.result()

    def _all_outputs(self, model: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Return all outputs `[N, …]` without a graph, and all targets (None if the data has none)."""
        with together(), torch.no_grad():
            compared = compared_before(model, OutputLoss(None), self.data)
            parts = list(self._outputs(model, self._batches(model, mine=True), compared))
        outputs = in_order((places, output) for places, output, _ in parts)
        if not anywhere(any(target is not None for _, _, target in parts)):
            return outputs, None
        return outputs, in_order((places, target) for places, _, target in parts if target is not None)

    def _outputs(
        self, model: nn.Module, batches: Iterator[tuple[np.ndarray, Any]], compared: Compared | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield for every batch its positions in the data, its outputs, and its targets (None if it has none)."""
        shape: torch.Size | None = None
        apart = Apart(model, output_of, self.data.name, compared, "model output")
        for indices, batch in batches:
            if shape is None:
                self._look(model, batch)
            output, target = model_output(model, batch)
            shape = shape or output.shape[1:]
            if output.shape[:1] != (len(indices),) or output.shape[1:] != shape:
                raise ValueError(
                    f"the model returned shape {list(output.shape)} for a batch of {len(indices)} examples: "
                    "a property of all outputs needs one row per example, of the same shape in every batch."
                )
            apart.check(batch, output)
            yield torch.from_numpy(indices), output, target


def _check_repeats(again: Tensor, before: Tensor) -> None:
    if again.shape != before.shape or float((again - before).abs().max()) > 1e-2 * float(before.abs().max()):
        raise ValueError(
            "data gives other outputs in a second pass: use model.eval(), and test data without random augmentation."
        )


class LinearProperty(ReadyProperty):
    """A linear map of several properties, applied to values and gradients alike; see `stack` and `weighted_sum`."""

    def __init__(
        self,
        properties: Sequence[Property],
        join: Callable[[list[Tensor]], Tensor],
        *,
        name: str = "property",
        higher_is_better: bool | None = None,
        is_stack: bool = False,
    ) -> None:
        if not properties:
            raise ValueError("properties is empty: pass at least one property.")
        for part in properties:
            if not callable(part):
                raise TypeError(f"one of the properties is a {type(part).__name__}: pass callables, as in stack(a, b).")
        self.properties, self.join = tuple(properties), join
        self.stacked = self.properties if is_stack else ()
        self.name, self.higher_is_better = name, higher_is_better

    @property
    def components(self) -> int | None:
        """Number of components of the property, or None if it is not known without calling the property."""
        counts = [getattr(part, "components", None) for part in self.properties]
        if not self.stacked:
            return next((count for count in counts if count is not None), None)
        return None if None in counts else sum(count or 0 for count in counts)

    def __call__(self, model: nn.Module) -> Tensor:
        return self.join([part(model) for part in self.properties])

    def gradient(self, model: nn.Module, parameters: Parameters) -> Tensor:
        """Return the gradient rows `[m, p]`."""
        return self.join([property_gradient(part, model, parameters) for part in self.properties])


def data_of(property: Any) -> Iterator[IndexedData]:
    """Yield the test data that a ready property is measured on; a property made of several yields the data of each."""
    if isinstance(property, DataProperty):
        yield property.data
    for part in getattr(property, "properties", ()):
        yield from data_of(part)


def stack(*properties: Property) -> LinearProperty:
    """Join several properties into one with components `[m_1 + m_2 + …]`, one property after the other."""
    return LinearProperty(
        properties,
        lambda parts: torch.cat([part.reshape(-1, *part.shape[1:]) for part in parts]),
        name="property", higher_is_better=_common(properties, [1.0] * len(properties)), is_stack=True,
    )  # fmt: skip


def weighted_sum(
    properties: Sequence[Property], weights: Sequence[float], *, name: str = "weighted sum"
) -> LinearProperty:
    """Return the property ``Σ_i weights[i] · properties[i]``; all parts must have the same number of components.

    Whether higher is better is known if all parts with their weights agree. A negative weight reverses a part.
    """
    weights = [float(weight) for weight in weights]
    if len(properties) != len(weights):
        raise ValueError(f"weights has {len(weights)} entries for {len(properties)} properties.")
    if not all(map(math.isfinite, weights)):
        raise ValueError(f"weights={weights}: pass finite numbers.")

    def join(parts: list[Tensor]) -> Tensor:
        shapes = [list(part.shape) for part in parts]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"properties of shapes {shapes} cannot be added: use stack.")
        return torch.stack([weight * part for weight, part in zip(weights, parts, strict=True)]).sum(0)

    return LinearProperty(properties, join, name=name, higher_is_better=_common(properties, weights))


def _common(properties: Sequence[Property], weights: Sequence[float]) -> bool | None:
    """Whether higher is better for every part with its weight; None if the parts differ or one of them is not known."""
    found: set[bool | None] = set()
    for part, weight in zip(properties, weights, strict=True):
        better = getattr(part, "higher_is_better", None)
        if weight:
            found.add(None if better is None else better == (weight > 0))
    return found.pop() if len(found) == 1 else None
