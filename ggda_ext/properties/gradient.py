"""The gradient of any property, checked: ∇g, one row per component, with the model left as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.distributed import all_reduce_sum, broadcast, together, unwrapped
from ggda_ext.model_lock import only_thread
from ggda_ext.model_state import sums_on, training_kernels

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
    with only_thread(model), _differentiable(model, parameters):
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
        raise TypeError(f"property is a {type(property).__name__}: pass what is to be explained, {ready}.")
    if isinstance(property, FunctionType) and property.__module__ == "ggda_ext.properties.library":
        raise TypeError(f"property is the function {property.__name__} itself: call it with its data, {ready}.")


def _plain_gradient(property: Property, model: nn.Module, parameters: Parameters) -> Tensor:
    """Rows `[m, p]` by autograd; every rank computes them, and those of rank 0 count."""
    with together():
        value = checked_value(property(model))
        found = Rows(len(value), parameters)
        for j in range(len(value)):
            found.add(j, value[j], keep=j + 1 < len(value))
        rows = found.result()
    return broadcast(rows)


@contextmanager
def _differentiable(model: nn.Module, parameters: Parameters) -> Iterator[None]:
    """Let `parameters` require grad, and put back whatever a property may change in the model."""
    required = {name: parameter.requires_grad for name, parameter in parameters.items()}
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with training_kernels(), torch.enable_grad():
            for parameter in parameters.values():
                parameter.requires_grad_(True)
            yield
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(required[name])
        for module, training in modes.items():
            module.training = training
        for buffer, before in buffers:
            buffer.data.copy_(before)


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
        self.used = False

    def add(self, j: int, value: Tensor, cotangent: Tensor | None = None, keep: bool = False) -> None:
        """Row j += ``cotangentᵀ · ∂value/∂θ``; `keep` the graph if it is needed again."""
        if not value.requires_grad:  # this batch does not use the parameters; another one may
            return
        grads = torch.autograd.grad(value, self.tensors, cotangent, retain_graph=keep, allow_unused=True)
        for piece, grad in zip(torch.split(self.rows[j], self.sizes), grads, strict=True):
            if grad is not None:
                self.used = True
                piece.add_((grad.to_dense() if grad.is_sparse else grad).flatten().to(piece))

    def summed(self) -> Rows:
        """These rows added up over ranks, where each has added its share of the data."""
        self.used = int(all_reduce_sum(torch.tensor(int(self.used)))) > 0
        all_reduce_sum(self.rows)
        return self

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
