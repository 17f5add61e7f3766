"""Stacks of any small models: gradients of all models at once by `torch.func.vmap` over their parameters.

For models without buffers and dropout; slower than `ggda_ext.training.stacked`, but it asks nothing of the layers
and the loss.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from ggda_ext.training.loop import LossFn, State
from ggda_ext.training.order import StepBatch

MOST_PARAMETERS = 100_000
"""Larger models gain nothing from standing in a stack."""


class MappedModel:
    """How a small model is laid out as a row `[p]`: its parameters one after the other; see `of`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.size = sum(math.prod(shape) for shape in self.shapes.values())

    @staticmethod
    def of(model: nn.Module, loss_fn: LossFn, x: Tensor, y: Tensor) -> MappedModel | None:
        """The layout of the model; None if it is large, or cannot run under `vmap`."""
        parameters = list(model.parameters())
        named = sum(1 for _ in model.named_parameters(remove_duplicate=False))
        tied = named != len(parameters) or len({parameter.dtype for parameter in parameters}) != 1
        frozen = not all(parameter.requires_grad for parameter in parameters)
        if tied or frozen or any(True for _ in model.buffers()):
            return None
        layout = MappedModel(model)
        if layout.size > MOST_PARAMETERS:
            return None
        flat = layout.row(model)[None].expand(2, -1)
        try:
            layout.gradients(loss_fn, x, y).write(flat, flat.clone(), StepBatch(torch.zeros(2, 2).long(), 2))
        except RuntimeError:  # what vmap raises for random numbers, and for code that looks at values
            return None
        return layout

    def row(self, model: nn.Module) -> Tensor:
        """The parameters of a model as a row `[p]`."""
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    def state(self, row: Tensor) -> State:
        """The state dict of the model with these parameters `[p]`."""
        return {name: value[0].clone() for name, value in self.split(row[None]).items()}

    def split(self, flat: Tensor) -> State:
        """Parameters by name, `[models, …]`, views of `flat`."""
        parts = flat.split([math.prod(shape) for shape in self.shapes.values()], 1)
        return {
            name: part.unflatten(1, shape) if shape else part[:, 0]
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def outputs(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs of every model `[models, n, …]`."""
        with torch.no_grad():
            return vmap(lambda weights: functional_call(self.model, weights, (x,)))(self.split(flat))

    def bytes_at_work(self, batch_size: int) -> int:
        """Memory one model touches in a training step, for numbers of four bytes: a rough guess."""
        return 4 * (4 * self.size + 4 * batch_size * math.isqrt(self.size))

    def gradients(self, loss_fn: LossFn, x: Tensor, y: Tensor) -> MappedGradients:
        """What computes the gradients of a stack on this training set."""
        return MappedGradients(self, loss_fn, x, y)


class MappedGradients:
    """Gradients of the loss of every model on its own batch."""

    def __init__(self, layout: MappedModel, loss_fn: LossFn, x: Tensor, y: Tensor) -> None:
        self.layout, self.x, self.y = layout, x, y

        def loss(weights: State, inputs: Tensor, targets: Tensor) -> Tensor:
            return loss_fn(functional_call(layout.model, weights, (inputs,)), targets)

        self._gradient = vmap(grad(loss))

    def write(self, flat: Tensor, gradient: Tensor, batch: StepBatch) -> None:
        """Write the gradients of the first models into `gradient`, of the shape `[models, p]` of `flat`."""
        models = len(batch.indices)
        if isinstance(batch.counts, int):
            self._write(flat[:models], gradient[:models], batch.indices)
            return
        for count in batch.counts.unique().tolist():  # a loss may depend on the batch size in any way
            rows = (batch.counts == count).nonzero()[:, 0]
            part = gradient[rows]
            self._write(flat[rows], part, batch.indices[rows, :count])
            gradient[rows] = part

    def _write(self, flat: Tensor, gradient: Tensor, indices: Tensor) -> None:
        at = indices.to(self.x.device)
        found: Any = self._gradient(self.layout.split(flat), self.x[at], self.y[at])
        for name, part in self.layout.split(gradient).items():
            part.copy_(found[name])
