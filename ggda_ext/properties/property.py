"""What every property has: a checked gradient; a name and a direction, so that a result can say who helps and hurts.

A property is any callable ``g(model) -> Tensor``. Ready ones bring their gradient, name and direction
(`ReadyProperty`); `named` gives the last two to any other.
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

from ggda_ext.gradients.proof.findings import left_as_it_was_by_runs
from ggda_ext.losses import cannot_take
from ggda_ext.model import (
    all_finite,
    left_as_it_was,
    may_change,
    sums_on,
    training_kernels,
    unwrapped,
)
from ggda_ext.sharing import adding_up, agreed

Property = Callable[[nn.Module], Tensor]
Parameters = Mapping[str, nn.Parameter]
HigherIsBetter = bool | None
"""Whether higher is better; None if that is not known."""


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
    """Refuse what is no property: data, a name, or a maker of properties that was not called."""
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
    """Rows `[m, p]` by autograd."""

    def rows() -> Tensor:
        value = checked_value(property(model))
        found = Rows(len(value), parameters)
        for j in range(len(value)):
            found.add(j, value[j], keep=j + 1 < len(value))
        return found.result()

    return agreed(rows)


@contextmanager
def _differentiable(model: nn.Module, parameters: Parameters, *, only_runs: bool) -> Iterator[None]:
    """Let `parameters` require grad, and put back whatever a property may change in the model.

    Args:
        model: the model.
        parameters: of it.
        only_runs: whether the property does nothing but run the model; a user's own may do anything with it.
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
            "smooth quantity, e.g. probabilities instead of predictions (soft_accuracy, soft_f1), or ask WhatIf or "
            "leave_group_out, which need no gradient."
        )
    return finite_values(value.reshape(-1), "component")


def finite_values(values: Tensor, of: str, first: int = 0) -> Tensor:
    """`values [m]`, if all are finite; errors call them `of` number `first`, `first` + 1, …"""
    if not all_finite(values):
        j = int(torch.nonzero(~values.isfinite())[0])
        raise ValueError(
            f"property is not finite: {values[j].item()} at {of} {first + j}. Check the model's outputs "
            "and the test data there."
        )
    return values


def _name_at(position: int, parameters: Parameters) -> str:
    ends = np.cumsum([parameter.numel() for parameter in parameters.values()])
    return list(parameters)[int(np.searchsorted(ends, position, side="right"))]


class ReadyProperty:
    """A property that brings its own gradient, and says what it is called and whether higher is better."""

    name: str = ""
    """What results call it."""
    higher_is_better: bool | None = None
    """Whether a higher value is better; None if that is not known."""

    stacked: Sequence[Property] = ()
    """The properties whose components it has, one after the other; empty for what is no stack."""

    def __call__(self, model: nn.Module) -> Tensor:
        raise NotImplementedError

    def gradient(self, model: nn.Module, parameters: Parameters) -> Tensor:
        """Rows `[m, p]`."""
        raise NotImplementedError


class NamedProperty:
    """A property with a name and a direction; see `named`."""

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
    """A property with a name and a direction, which results show.

    Args:
        property: any property, ready or a callable of your own.
        name: what results call it; by default the name it has.
        higher_is_better: whether a higher value is better; by default what is known.
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
    """The name a property has, or that of its function."""
    name = getattr(property, "name", None) or getattr(property, "__name__", None)
    return name if isinstance(name, str) and name != "<lambda>" else "property"


def names_of(property: Any, m: int) -> list[str]:
    """Names of the m components of a property; `property` may be the names themselves, or None."""
    if isinstance(property, list | tuple):
        if len(property) != m:
            raise ValueError(f"property has {len(property)} names for scores of {m} properties.")
        return [str(name) for name in property]
    if property is None or isinstance(property, str):
        name = property or "property"
        return [name] if m == 1 else [f"{name} {j}" for j in range(m)]
    parts = _parts(property, m)
    if parts is not None:
        return _numbered([name for part, count in parts for name in names_of(part, count)])
    return names_of(default_name(property), m)


def _numbered(names: list[str]) -> list[str]:
    """Names that differ: the second `mean_loss` becomes `mean_loss (2)`."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


def whether_higher_is_better(
    property: Any, m: int, given: HigherIsBetter | Sequence[HigherIsBetter] = None
) -> list[HigherIsBetter]:
    """Whether higher is better, of the m components of a property; `given` goes before what the property says."""
    if given is not None and not isinstance(given, bool):
        found = list(given)
        if len(found) != m:
            raise ValueError(f"higher_is_better has {len(found)} entries for scores of {m} properties.")
        return found
    if given is not None:
        return [given] * m
    parts = _parts(property, m)
    if parts is not None:
        return [one for part, count in parts for one in whether_higher_is_better(part, count)]
    return [getattr(property, "higher_is_better", None)] * m


def _parts(property: Any, m: int) -> list[tuple[Any, int]] | None:
    """The parts of a stack with their numbers of components; None for what is no stack, or where they are not known."""
    stacked: Sequence[Any] = getattr(property, "stacked", ())
    if not stacked:
        return None
    counts = [getattr(part, "components", None) for part in stacked]
    unknown, rest = counts.count(None), m - sum(count or 0 for count in counts)
    if (unknown and (rest < unknown or (unknown > 1 and rest > unknown))) or (not unknown and rest):
        return None
    each = rest if unknown == 1 else 1
    return [(part, each if count is None else count) for part, count in zip(stacked, counts, strict=True)]
