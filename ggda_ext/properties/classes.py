"""The gradient of any property, checked, and the kinds of properties that bring their own.

Those are: of points, of their mean, of all outputs, and sums of these. Gradients are made in shares of the test points
(see `ggda_ext.sharing`); values are computed by each rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from inspect import signature
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.data import DataLike, IndexedData, to_device
from ggda_ext.losses import ExampleLoss, cannot_take, model_output
from ggda_ext.model import left_as_it_was, sums_on, training_kernels, unwrapped
from ggda_ext.sharing import adding_up, agreed, anywhere, in_order, together

Property = Callable[[nn.Module], Tensor]
Parameters = Mapping[str, nn.Parameter]


def property_gradient(property: Property, model: nn.Module, parameters: Parameters) -> Tensor:
    """Gradient of every component of a property, ``∂g_j/∂θ``.

    Args:
        property: a callable ``g(model) -> Tensor``, scalar or `[m]`. If it has a method
            ``gradient(model, parameters) -> [m, p]``, that is used instead of plain autograd.
        model: left as it was: `requires_grad`, `.grad`, train or eval mode, buffers. The property is called with the
            model inside of a DistributedDataParallel.
        parameters: the parameters θ of `model` by name; other parameters count as constants.

    Returns:
        Rows `[m, p]`, detached; p runs over the flattened parameters in the order of the dict.
    """
    check_property(property)
    if not parameters:
        raise ValueError("parameters is empty: pass at least one parameter of the model.")
    model, own = unwrapped(model), getattr(property, "gradient", None)
    with _differentiable(model, parameters):
        rows = own(model, parameters) if callable(own) else _plain_gradient(property, model, parameters)
    p = sum(parameter.numel() for parameter in parameters.values())
    if not isinstance(rows, Tensor) or rows.dim() != 2 or rows.shape[1] != p:
        got = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"property.gradient returned {got}: return a tensor of shape [m, {p}].")
    wrong = torch.nonzero(~rows.isfinite())
    if len(wrong):
        j, at = wrong[0].tolist()
        raise ValueError(
            f"property has a gradient that is not finite: {rows[j, at].item()} at component {j}, in "
            f"parameter {_name_at(at, parameters)!r}. Look for sqrt, log or a division at 0."
        )
    return rows.detach()


def check_property(property: Any) -> None:
    """Refuse what is no property: data, a name, or a maker of properties that was not called."""
    ready = "e.g. properties.mean_loss(test_data, loss), or any callable g(model) -> Tensor"
    if not callable(property) or isinstance(property, type):
        several = "; for several, properties.stack(first, second)" if isinstance(property, list | tuple) else ""
        raise TypeError(f"property is a {type(property).__name__}: pass what is to be explained, {ready}{several}.")
    if isinstance(property, FunctionType) and property.__module__ == "ggda_ext.properties.library":
        raise TypeError(f"property is the function {property.__name__} itself: call it with its data, {ready}.")
    if isinstance(property, FunctionType) and cannot_take(property, 1):
        raise TypeError(f"property takes {signature(property)}, and it is called as property(model): let it take one.")


def _plain_gradient(property: Property, model: nn.Module, parameters: Parameters) -> Tensor:
    """Rows `[m, p]` by autograd."""

    def rows() -> Tensor:
        value = checked_value(property(model))
        found = Rows(len(value), parameters)
        for j in range(len(value)):
            found.add(j, value[j], keep=j + 1 < len(value))
        return found.result()

    return agreed(rows)


@contextmanager
def _differentiable(model: nn.Module, parameters: Parameters) -> Iterator[None]:
    """Let `parameters` require grad, and put back whatever a property may change in the model."""
    with left_as_it_was(model, [name for name, _ in model.named_buffers()]), training_kernels(), torch.enable_grad():
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        yield


class Rows:
    """Gradient rows `[m, p]`, added up from vector-Jacobian products.

    Args:
        m: number of rows.
        parameters: what is differentiated by.
        sums: whether a row is a sum over batches.
    """

    def __init__(self, m: int, parameters: Parameters, sums: bool = False) -> None:
        self.parameters = parameters
        self.tensors = list(parameters.values())
        self.sizes = [tensor.numel() for tensor in self.tensors]
        self.dtype, self.device = reduce(torch.promote_types, (t.dtype for t in self.tensors)), self.tensors[0].device
        # what is added up over many batches is kept in double precision
        dtype, device = (torch.float64, sums_on(self.device)) if sums else (self.dtype, self.device)
        self.rows = torch.zeros(m, sum(self.sizes), dtype=dtype, device=device)
        self.used = torch.tensor(0)
        """How many times there was a gradient."""

    def add(self, j: int, value: Tensor, cotangent: Tensor | None = None, keep: bool = False) -> None:
        """Row j += ``cotangentᵀ · ∂value/∂θ``; `keep` the graph if it is needed again."""
        if not value.requires_grad:  # this batch does not use the parameters; another one may
            return
        grads = torch.autograd.grad(value, self.tensors, cotangent, retain_graph=keep, allow_unused=True)
        self.used += any(grad is not None for grad in grads)
        for piece, grad in zip(torch.split(self.rows[j], self.sizes), grads, strict=True):
            if grad is not None:
                piece.add_((grad.to_dense() if grad.is_sparse else grad).flatten().to(piece))

    def adding_up(self, *also: Tensor) -> AbstractContextManager[None]:
        """Around work that adds our share of the data to these rows: at its end they are those of all data."""
        return adding_up(self.used, self.rows, *also)

    def result(self) -> Tensor:
        if not self.used:
            names = ", ".join(list(self.parameters)[:5]) + ", …" * (len(self.parameters) > 5)
            raise ValueError(
                f"property does not depend on the parameters {names}: compute it from the model it is called "
                "with, without detach or no_grad, or choose parameters that it uses."
            )
        return self.rows.to(self.device, self.dtype)


def checked_value(value: Any) -> Tensor:
    """The value of a property as a vector `[m]`, if it can be differentiated."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"property returned a {type(value).__name__}: return a tensor, one number or a vector [m], "
            "without .item() or .numpy()."
        )
    if value.dim() > 1 or value.numel() == 0:
        raise ValueError(
            f"property returned shape {list(value.shape)}: return one number or a vector [m], m ≥ 1; "
            "reduce or flatten it."
        )
    if not value.requires_grad:
        raise ValueError(
            f"property has no gradient: its value ({value.dtype}) was cut from the parameters by argmax, a "
            "comparison, detach or no_grad, or was not computed from the model it was called with. Use a "
            "smooth quantity, e.g. probabilities instead of predictions."
        )
    return finite_values(value.reshape(-1), "component")


def finite_values(values: Tensor, of: str, first: int = 0) -> Tensor:
    """`values [m]`, if all are finite; errors call them `of` number `first`, `first` + 1, …"""
    wrong = torch.nonzero(~values.isfinite())
    if len(wrong):
        j = int(wrong[0])
        raise ValueError(
            f"property is not finite: {values[j].item()} at {of} {first + j}. Check the model's outputs "
            "and the test data there."
        )
    return values


def _name_at(position: int, parameters: Parameters) -> str:
    ends = np.cumsum([parameter.numel() for parameter in parameters.values()])
    return list(parameters)[int(np.searchsorted(ends, position, side="right"))]


OutputsFn = Callable[[Tensor, Any], Tensor]
BATCH_SIZE = 256
"""Test points per forward pass, where neither the caller nor a DataLoader says."""


class ReadyProperty:
    """A property that brings its own gradient, and says what it is called and whether higher is better."""

    name: str = ""
    """What results call it."""
    higher_is_better: bool | None = None
    """Whether a higher value is better; None if that is not known."""

    def __call__(self, model: nn.Module) -> Tensor:
        raise NotImplementedError

    def gradient(self, model: nn.Module, parameters: Parameters) -> Tensor:
        """Rows `[m, p]`."""
        raise NotImplementedError


class _DataProperty(ReadyProperty):
    """A property of a test set, run batch by batch in the order of the data."""

    def __init__(
        self, data: DataLike, batch_size: int | None, source: str, name: str, higher_is_better: bool | None
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: pass at least 1.")
        self.data = data if isinstance(data, IndexedData) else IndexedData(data, source)
        self.batch_size = batch_size or (None if isinstance(data, IndexedData) else self.data.batch_size)
        self.name, self.higher_is_better = name, higher_is_better

    def _batches(self, model: nn.Module) -> Iterator[tuple[np.ndarray, Any]]:
        return self._on_device(model, self.data.sequential(self._at_once))

    def _my_batches(self, model: nn.Module, batch_size: int | None = None) -> Iterator[tuple[np.ndarray, Any]]:
        """This rank's share of the test points."""
        return self._on_device(model, self.data.my_share(batch_size or self._at_once))

    @property
    def _at_once(self) -> int:
        return self.batch_size or BATCH_SIZE

    def _on_device(self, model: nn.Module, batches: Iterator[Any]) -> Iterator[tuple[np.ndarray, Any]]:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.data.suit(model)
        for indices, batch in batches:
            yield indices, to_device(batch, device)


class _LossProperty(_DataProperty):
    """A property made of what `loss.each` gives for every test point."""

    def __init__(
        self,
        data: DataLike,
        loss: ExampleLoss,
        batch_size: int | None = None,
        source: str = "data",
        *,
        name: str = "loss",
        higher_is_better: bool | None = None,
    ) -> None:
        super().__init__(data, batch_size, source, name, higher_is_better)
        self.loss = loss


class PointProperty(_LossProperty):
    """One component for each test point `[N]`: its loss, or another number that `loss.each` gives.

    Providers may recognise it and use `loss` and `data` directly.
    """

    def __call__(self, model: nn.Module) -> Tensor:
        return torch.cat([self.loss.each(model, batch) for _, batch in self._batches(model)])

    def gradient(self, model: nn.Module, parameters: Parameters) -> Tensor:
        """A row for each point `[N, p]`; point by point, as a row costs a backward of its whole batch."""
        with together():
            n = self.data.n or sum(len(indices) for indices, _ in self.data.sequential(self._at_once))
        found = Rows(n, parameters)
        with found.adding_up():
            for indices, batch in self._my_batches(model, batch_size=1):
                values = finite_values(self.loss.each(model, batch), "test point", int(indices[0]))
                for j in range(len(indices)):
                    found.add(int(indices[j]), values[j], keep=j + 1 < len(indices))
        return found.result()

    def mean(self) -> MeanProperty:
        """The mean over the test points, a scalar property."""
        return MeanProperty(
            self.data, self.loss, self.batch_size, name=f"mean of {self.name}", higher_is_better=self.higher_is_better
        )


class MeanProperty(_LossProperty):
    """Mean over the test points of what `loss.each` gives: one pass, as it decomposes."""

    components = 1

    def __call__(self, model: nn.Module) -> Tensor:
        losses = [self.loss.each(model, batch) for _, batch in self._batches(model)]
        return torch.cat(losses).mean()

    def gradient(self, model: nn.Module, parameters: Parameters) -> Tensor:
        """The row `[1, p]`."""
        found, n = Rows(1, parameters, sums=True), torch.tensor(0)
        with found.adding_up(n):
            for indices, batch in self._my_batches(model):
                values = finite_values(self.loss.each(model, batch), "test point", int(indices[0]))
                found.add(0, values.sum())
                n += len(indices)
        return found.result() / int(n)


class OutputsProperty(_DataProperty):
    """``fn(outputs [N, …], targets [N, …])`` of the whole test set, scalar or `[m]`; see `of_outputs`."""

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
        """The property with an `fn` for some of the test points, where `fn` knows something about each of them."""
        found = copy.copy(self)
        if self.fn_of_points is not None:
            found.fn = self.fn_of_points(points)
        return found

    def gradient(self, model: nn.Module, parameters: Parameters) -> Tensor:
        """Rows `[m, p]` in two passes over the data."""
        outputs, targets = self._all_outputs(model)
        outputs.requires_grad_()
        value = checked_value(self.fn(outputs, targets))
        m = len(value)
        slopes = [
            torch.autograd.grad(value[j], outputs, retain_graph=j + 1 < m, allow_unused=True)[0] for j in range(m)
        ]
        if any(slope is None for slope in slopes):
            raise ValueError("property does not depend on the outputs: compute it from fn's first argument.")
        found = Rows(m, parameters, sums=True)
        with found.adding_up():
            for indices, batch in self._my_batches(model):
                again, _ = model_output(model, batch)
                run = slice(int(indices[0]), int(indices[-1]) + 1)
                _check_repeats(again.detach(), outputs.detach()[run])
                for j, slope in enumerate(slopes):
                    found.add(j, again, slope[run], keep=j + 1 < m)
        return found.result()

    def _all_outputs(self, model: nn.Module) -> tuple[Tensor, Tensor | None]:
        """All outputs `[N, …]` without a graph, and all targets, or None."""
        with together(), torch.no_grad():
            parts = list(self._outputs(model, self._my_batches(model)))
        outputs = in_order((places, output) for places, output, _ in parts)
        if not anywhere(any(target is not None for _, _, target in parts)):
            return outputs, None
        return outputs, in_order((places, target) for places, _, target in parts if target is not None)

    def _outputs(
        self, model: nn.Module, batches: Iterator[tuple[np.ndarray, Any]]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Of every batch: places in the data, outputs, and targets, or None."""
        shape: torch.Size | None = None
        for indices, batch in batches:
            output, target = model_output(model, batch)
            shape = shape or output.shape[1:]
            if output.shape[:1] != (len(indices),) or output.shape[1:] != shape:
                raise ValueError(
                    f"the model returned shape {list(output.shape)} for a batch of {len(indices)} examples: "
                    "a property of all outputs needs one row per example, of the same shape in every batch."
                )
            yield torch.from_numpy(indices), output, target


def _check_repeats(again: Tensor, before: Tensor) -> None:
    if again.shape != before.shape or float((again - before).abs().max()) > 1e-2 * float(before.abs().max()):
        raise ValueError(
            "data gives other outputs in a second pass: use model.eval(), and test data without random augmentation."
        )


class LinearProperty(ReadyProperty):
    """A linear map of several properties, the same for values and gradients; see `stack`, `weighted_sum`."""

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
        self.properties, self.join, self.is_stack = tuple(properties), join, is_stack
        self.name, self.higher_is_better = name, higher_is_better

    def __call__(self, model: nn.Module) -> Tensor:
        return self.join([part(model) for part in self.properties])

    def gradient(self, model: nn.Module, parameters: Parameters) -> Tensor:
        """Rows `[m, p]`."""
        return self.join([property_gradient(part, model, parameters) for part in self.properties])


def stack(*properties: Property) -> LinearProperty:
    """Several properties as one vector `[m_1 + m_2 + …]`, component after component."""
    return LinearProperty(
        properties,
        lambda parts: torch.cat([part.reshape(-1, *part.shape[1:]) for part in parts]),
        name="property", higher_is_better=_common(properties, [1.0] * len(properties)), is_stack=True,
    )  # fmt: skip


def weighted_sum(
    properties: Sequence[Property], weights: Sequence[float], *, name: str = "weighted sum"
) -> LinearProperty:
    """``Σ_i weights[i] · properties[i]``, for properties with the same number of components.

    Higher is better where that holds for every part, with the sign of its weight.
    """
    if len(properties) != len(weights):
        raise ValueError(f"weights has {len(weights)} entries for {len(properties)} properties.")

    def join(parts: list[Tensor]) -> Tensor:
        shapes = [list(part.shape) for part in parts]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"properties of shapes {shapes} cannot be added: use stack.")
        return torch.stack([weight * part for weight, part in zip(weights, parts, strict=True)]).sum(0)

    return LinearProperty(properties, join, name=name, higher_is_better=_common(properties, weights))


def _common(properties: Sequence[Property], weights: Sequence[float]) -> bool | None:
    """Whether higher is better for all weighted parts alike; None if they differ, or one is not known."""
    found: set[bool | None] = set()
    for part, weight in zip(properties, weights, strict=True):
        better = getattr(part, "higher_is_better", None)
        if weight:
            found.add(None if better is None else better == (weight > 0))
    return found.pop() if len(found) == 1 else None
