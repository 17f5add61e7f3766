"""Properties with a checked gradient, a name, and whether higher is better, so that a result can say who helps.

A property is any callable ``g(model) -> Tensor``. Ready properties (`ReadyProperty`) have a gradient and a name, and
know whether higher is better; `named` adds the last two to any other property. The properties in this module are
computed point by point. Properties of all outputs and sums of properties are in `classes`. For a gradient every rank
takes a share of the test points (see `ggda_ext.sharing`); for a value every rank takes all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from inspect import signature
from types import FunctionType
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.data import DataLike, IndexedData, SomePoints, take, to_device
from ggda_ext.gradients.proof.findings import Apart, compared_before, left_as_it_was_by_runs
from ggda_ext.gradients.proof.mixing import check_reduction
from ggda_ext.gradients.proof.truth import tolerance
from ggda_ext.losses import ExampleLoss, cannot_take, model_output
from ggda_ext.model import (
    all_finite,
    full_precision,
    left_as_it_was,
    may_change,
    sums_on,
    training_kernels,
    unwrapped,
)
from ggda_ext.sharing import adding_up, agreed, together
from ggda_ext.words import check_counts

Property = Callable[[nn.Module], Tensor]
Parameters = Mapping[str, nn.Parameter]
HigherIsBetter = bool | None
"""Whether a higher value is better; None if it is not known."""
BATCH_SIZE = 256
_LOOKED_AT = 2  # examples that `check_graph` looks at
"""Test points per forward pass if neither the caller nor a DataLoader sets a batch size."""


def property_gradient(property: Property, model: nn.Module, parameters: Parameters) -> Tensor:
    """Return the gradient of every component of a property, ``∂g_j/∂θ``.

    Args:
        property: a callable ``g(model) -> Tensor`` that returns a scalar or `[m]`. If it has a method
            ``gradient(model, parameters) -> [m, p]``, this method is used instead of plain autograd.
        model: the model. Its `requires_grad`, `.grad`, train or eval mode and buffers are restored afterwards. If it is
            a DistributedDataParallel, the property is called with the model inside.
        parameters: the parameters θ of `model` by name; other parameters are treated as constants.

    Returns:
        Rows `[m, p]`, detached; p runs over the flattened parameters in the order of the dict.
    """
    check_property(property)
    if not parameters:
        raise ValueError("parameters is empty: pass at least one parameter of the model.")
    model, own = unwrapped(model), getattr(property, "gradient", None)
    with _differentiable(model, parameters, only_runs=getattr(property, "only_runs", False)):
        rows = own(model, parameters) if callable(own) else _plain_gradient(property, model, parameters)
    p = sum(parameter.numel() for parameter in parameters.values())
    if not isinstance(rows, Tensor) or rows.dim() != 2 or rows.shape[1] != p:
        got = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"property.gradient returned {got}: return a tensor of shape [m, {p}].")
    if not all_finite(rows):
        j, at = torch.nonzero(~rows.isfinite())[0].tolist()
        raise ValueError(
            f"property has a gradient that is not finite: {rows[j, at].item()} at component {j}, in "
            f"parameter {_name_at(at, parameters)!r}. Look for sqrt, log or a division at 0."
        )
    return rows.detach()


def check_property(property: Any) -> None:
    """Raise an error if this is no property: data, a name, or a function such as `mean_loss` that was not called."""
    ready = "e.g. properties.mean_loss(test_data, loss), or any callable g(model) -> Tensor"
    if not callable(property) or isinstance(property, type):
        several = "; for several, properties.stack(first, second)" if isinstance(property, list | tuple) else ""
        raise TypeError(f"property is a {type(property).__name__}: pass what is to be explained, {ready}{several}.")
    if type(property).__module__.startswith("torch.nn"):
        raise TypeError(f"property is a {type(property).__name__}, not a function of the model: pass {ready[5:]}.")
    if isinstance(property, FunctionType) and property.__module__ == "ggda_ext.properties.library":
        raise TypeError(f"property is the function {property.__name__} itself: call it with its data, {ready}.")
    if isinstance(property, FunctionType) and cannot_take(property, 1):
        raise TypeError(f"property takes {signature(property)}, and it is called as property(model): let it take one.")


def _plain_gradient(property: Property, model: nn.Module, parameters: Parameters) -> Tensor:
    """Return the gradient rows `[m, p]` by plain autograd."""

    def rows() -> Tensor:
        value = checked_value(property(model))
        found = Rows(len(value), parameters)
        for j in range(len(value)):
            found.add(j, value[j], keep=j + 1 < len(value))
        return found.result()

    return agreed(rows)


@contextmanager
def _differentiable(model: nn.Module, parameters: Parameters, *, only_runs: bool) -> Iterator[None]:
    """Let `parameters` require grad, and afterwards restore everything that a property may change in the model.

    Args:
        model: the model.
        parameters: parameters of the model.
        only_runs: whether the property only runs the model; a user's own property may do anything with it.
    """
    kept = left_as_it_was_by_runs(model) if only_runs else left_as_it_was(model, may_change(model))
    with kept, training_kernels(), torch.enable_grad():
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        yield


class Rows:
    """Gradient rows `[m, p]`, added up from vector-Jacobian products.

    Args:
        m: number of rows.
        parameters: the parameters that the gradients are taken for.
        sums: whether a row is a sum over batches.
    """

    def __init__(self, m: int, parameters: Parameters, sums: bool = False) -> None:
        self.parameters = parameters
        self.tensors = list(parameters.values())
        self.sizes = [tensor.numel() for tensor in self.tensors]
        self.dtype, self.device = reduce(torch.promote_types, (t.dtype for t in self.tensors)), self.tensors[0].device
        # sums over many batches need double precision
        dtype, device = (torch.float64, sums_on(self.device)) if sums else (self.dtype, self.device)
        self.rows = torch.zeros(m, sum(self.sizes), dtype=dtype, device=device)
        self.used = torch.tensor(0)
        """Number of calls of `add` that found a gradient."""

    def add(self, j: int, value: Tensor, cotangent: Tensor | None = None, keep: bool = False) -> None:
        """Add ``cotangentᵀ · ∂value/∂θ`` to row j; `keep` says whether to keep the graph for another call."""
        if not value.requires_grad:  # this batch does not use the parameters; another one may
            return
        with full_precision(value):
            grads = torch.autograd.grad(value, self.tensors, cotangent, retain_graph=keep, allow_unused=True)
        self.used += any(grad is not None for grad in grads)
        for piece, grad in zip(torch.split(self.rows[j], self.sizes), grads, strict=True):
            if grad is not None:
                piece.add_((grad.to_dense() if grad.is_sparse else grad).flatten().to(piece))

    def adding_up(self, *also: Tensor) -> AbstractContextManager[None]:
        """Return a context in which every rank adds its share of the data; at its end the rows sum all shares."""
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
    """Return the value of a property as a vector `[m]`; raise an error if it is not finite or has no gradient."""
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
            "smooth quantity, e.g. probabilities instead of predictions (soft_accuracy, soft_f1), or ask WhatIf or "
            "leave_group_out, which need no gradient."
        )
    return finite_values(value.reshape(-1), "component")


def finite_values(values: Tensor, of: str, places: Sequence[int] | np.ndarray | None = None) -> Tensor:
    """Return `values [m]`; raise an error if one is not finite. Errors call value j of them "`of` `places[j]`"."""
    if not all_finite(values):
        j = int(torch.nonzero(~values.isfinite())[0])
        raise ValueError(
            f"property is not finite: {values[j].item()} at {of} {j if places is None else places[j]}. Check the "
            "model's outputs and the test data there."
        )
    return values


def _name_at(position: int, parameters: Parameters) -> str:
    ends = np.cumsum([parameter.numel() for parameter in parameters.values()])
    return list(parameters)[int(np.searchsorted(ends, position, side="right"))]


class ReadyProperty:
    """A property that has its own gradient and a name, and knows whether higher is better."""

    name: str = ""
    """The name of the property in results."""
    higher_is_better: bool | None = None
    """Whether a higher value is better; None if it is not known."""

    stacked: Sequence[Property] = ()
    """The properties that a stack consists of, in the order of its components; empty if the property is not a stack."""

    def __call__(self, model: nn.Module) -> Tensor:
        raise NotImplementedError

    def gradient(self, model: nn.Module, parameters: Parameters) -> Tensor:
        """Return the gradient rows `[m, p]`."""
        raise NotImplementedError


class NamedProperty:
    """A property with a name, and whether higher is better; see `named`."""

    def __init__(self, property: Property, name: str, higher_is_better: HigherIsBetter) -> None:
        self.property, self.name, self.higher_is_better = property, name, higher_is_better
        if callable(getattr(property, "gradient", None)):
            self.gradient = property.gradient  # type: ignore[attr-defined]

    def __call__(self, model: nn.Module) -> Tensor:
        return self.property(model)


@overload
def named(
    property: ReadyProperty, name: str | None = None, *, higher_is_better: HigherIsBetter = None
) -> ReadyProperty: ...
@overload
def named(property: Property, name: str | None = None, *, higher_is_better: HigherIsBetter = None) -> Property: ...
def named(property: Property, name: str | None = None, *, higher_is_better: HigherIsBetter = None) -> Property:
    """Return the property with a name, and whether higher is better; results show both.

    Args:
        property: any property: a ready one or your own callable.
        name: the name of the property in results; by default the name that it already has.
        higher_is_better: whether a higher value is better; by default what a ready property says.
    """
    if not callable(property):
        raise TypeError(f"property is a {type(property).__name__}: pass a callable g(model) -> Tensor.")
    if not isinstance(name, str | None):
        raise TypeError(f"name={name!r}: pass text, what results call the property.")
    if not isinstance(higher_is_better, bool | None):
        raise TypeError(f"higher_is_better={higher_is_better!r}: pass True, False or None.")
    name = default_name(property) if name is None else name
    if isinstance(property, ReadyProperty):
        found = copy.copy(property)
        found.name = name
        found.higher_is_better = property.higher_is_better if higher_is_better is None else higher_is_better
        return found
    return NamedProperty(property, name, higher_is_better)


def default_name(property: Any) -> str:
    """Return the name of a property or of its function; ``"property"`` if there is none."""
    name = getattr(property, "name", None) or getattr(property, "__name__", None)
    return name if isinstance(name, str) and name != "<lambda>" else "property"


# properties of a test set, batch by batch


class DataProperty(ReadyProperty):
    """A property of a test set, run batch by batch in the order of the data."""

    only_runs = True
    """Whether the property only runs the model."""

    check_graph: Callable[[Tensor], None] | None = None
    """Called with the outputs of a few examples, whose graph tells how the model made them; it may raise an error."""

    def __init__(
        self, data: DataLike, batch_size: int | None, source: str, name: str, higher_is_better: bool | None
    ) -> None:
        check_counts(batch_size=batch_size)
        self.data = data if isinstance(data, IndexedData) else IndexedData(data, source)
        self.batch_size = batch_size or (None if isinstance(data, IndexedData) else self.data.batch_size)
        self.name, self.higher_is_better = name, higher_is_better

    def _batches(
        self, model: nn.Module, *, mine: bool = False, batch_size: int | None = None
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield batches on the model's device: all test points in order, or with `mine` only this rank's share."""
        size = batch_size or self._at_once
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.data.suit(model)
        self.data.check_repeats()
        for indices, batch in self.data.my_share(size) if mine else self.data.sequential(size):
            yield indices, to_device(batch, device)

    def _look(self, model: nn.Module, batch: Any) -> None:
        """Call `check_graph`, if there is one, for the first examples of a batch."""
        if self.check_graph is not None:
            with torch.enable_grad():
                self.check_graph(model_output(model, take(batch, _LOOKED_AT))[0])

    @property
    def _at_once(self) -> int:
        return self.batch_size or BATCH_SIZE

    def _places(self, indices: np.ndarray) -> np.ndarray:
        """Return the positions of test points in the data that the user passed."""
        return self.data.positions[indices] if isinstance(self.data, SomePoints) else indices


class LossProperty(DataProperty):
    """A property computed from the numbers that `loss.each` returns, one for every test point."""

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
        self._looked = self._sums_up = False

    def _losses(
        self, model: nn.Module, *, mine: bool = False, batch_size: int | None = None
    ) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Yield the indices and the numbers `[b]` of the test points of every batch; for the options see `_batches`."""
        compared = compared_before(model, self.loss, self.data) if mine else None
        apart = Apart(model, self.loss.each, self.data.name, compared)
        for indices, batch in self._batches(model, mine=mine, batch_size=batch_size):
            values = self._each(model, batch)
            apart.check(batch, values)
            yield indices, values

    def _each(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the number of every test point `[b]`; raise an error if the loss of a batch is made otherwise."""
        if not self._looked:
            self._look(model, batch)
            self._looked = True
        values = self.loss.each(model, batch)
        if not self._sums_up and len(values) > 1:
            with torch.no_grad():
                whole = self.loss.reduced(model, batch)
            if whole is not None:
                check_reduction(float(whole), values.detach().cpu().double(), tolerance(values.dtype))
            self._sums_up = True
        return values


class PointProperty(LossProperty):
    """A property with one component per test point `[N]`: its loss, or another number that `loss.each` returns.

    Providers may use `loss` and `data` directly instead of calling the property.
    """

    @property
    def components(self) -> int | None:
        """Number of test points; None for a stream."""
        return self.data.n

    def __call__(self, model: nn.Module) -> Tensor:
        return torch.cat([values for _, values in self._losses(model)])

    def gradient(self, model: nn.Module, parameters: Parameters) -> Tensor:
        """Return a row for each point `[N, p]`; batches have one point, as a row needs a backward of all its batch."""
        with together():
            n = self.data.n or sum(len(indices) for indices, _ in self.data.sequential(self._at_once))
        found = Rows(n, parameters)
        with found.adding_up():
            for indices, values in self._losses(model, mine=True, batch_size=1):
                finite_values(values, "test point", self._places(indices))
                for j in range(len(indices)):
                    found.add(int(indices[j]), values[j], keep=j + 1 < len(indices))
        return found.result()

    def mean(self) -> MeanProperty:
        """Return the mean over the test points as a property with one component."""
        found = MeanProperty(
            self.data, self.loss, self.batch_size, name=f"mean of {self.name}", higher_is_better=self.higher_is_better
        )
        found.check_graph = self.check_graph
        return found


class MeanProperty(LossProperty):
    """Mean over the test points of the numbers that `loss.each` returns; as a mean of points it needs only one pass."""

    components = 1

    def __call__(self, model: nn.Module) -> Tensor:
        return torch.cat([values for _, values in self._losses(model)]).mean()

    def gradient(self, model: nn.Module, parameters: Parameters) -> Tensor:
        """Return the gradient row `[1, p]`."""
        found, n = Rows(1, parameters, sums=True), torch.tensor(0)
        with found.adding_up(n):
            for indices, values in self._losses(model, mine=True):
                finite_values(values, "test point", self._places(indices))
                found.add(0, values.sum())
                n += len(indices)
        return found.result() / int(n)
