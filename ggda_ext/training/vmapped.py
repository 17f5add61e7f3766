"""Stacks of any small models: gradients of all models at once by `torch.func.vmap` over their parameters.

It works for models without buffers and dropout. It is slower than `ggda_ext.training.stacked`, but takes any layers and
any loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from ggda_ext.checkpoints import State
from ggda_ext.model import called_with
from ggda_ext.training.batch_order import StepBatch
from ggda_ext.training.loop import LossFn

MOST_PARAMETERS = 100_000
"""Models with more parameters do not train faster in a stack."""


class MappedModel:
    """Layout of a stack of any small models: every parameter is a tensor `[models, …]`; made by `of`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = [name for name, _ in model.named_parameters()]
        self.size = sum(parameter.numel() for parameter in model.parameters())

    @staticmethod
    def of(model: nn.Module) -> MappedModel | None:
        """Return the layout of the model; None if the model is large or has buffers, or ties or freezes parameters."""
        parameters = list(model.parameters())
        named = sum(1 for _ in model.named_parameters(remove_duplicate=False))
        tied = named != len(parameters) or len({parameter.dtype for parameter in parameters}) != 1
        frozen = not all(parameter.requires_grad for parameter in parameters)
        if tied or frozen or any(True for _ in model.buffers()):
            return None
        layout = MappedModel(model)
        return layout if layout.size <= MOST_PARAMETERS else None

    def stack(self, models: Sequence[nn.Module]) -> list[Tensor]:
        """Return the parameters of the models as tensors `[models, …]`."""
        parameters = [dict(model.named_parameters()) for model in models]
        return [torch.stack([own[name].detach() for own in parameters]) for name in self.names]

    def state(self, tensors: Sequence[Tensor]) -> State:
        """Return the state dict of one model, given its part of every tensor."""
        return {name: tensor.clone() for name, tensor in zip(self.names, tensors, strict=True)}

    def outputs(self, tensors: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return the outputs of every model in eval mode `[models, n, …]`."""
        weights = dict(zip(self.names, tensors, strict=True))
        self.model.eval()
        return vmap(lambda own: called_with(self.model, own, x))(weights)

    def bytes_at_work(self, batch_size: int) -> int:
        """Return a rough guess of the bytes that one model uses in a training step, with four bytes per number."""
        return 4 * (4 * self.size + 4 * batch_size * math.isqrt(self.size))

    def gradients(self, loss_fn: LossFn, x: Tensor, y: Tensor) -> MappedGradients:
        """Return an object that computes the gradients of a stack on this training set."""
        return MappedGradients(self, loss_fn, x, y)


class MappedGradients:
    """Gradients of the loss of every model on its own batch."""

    def __init__(self, layout: MappedModel, loss_fn: LossFn, x: Tensor, y: Tensor) -> None:
        self.layout, self.x, self.y = layout, x, y

        def loss(weights: State, inputs: Tensor, targets: Tensor) -> Tensor:
            return loss_fn(called_with(layout.model, weights, inputs), targets)

        self._gradient = vmap(grad(loss))

    def write(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], batch: StepBatch) -> None:
        """Write the gradients of a stack into tensors of the same shapes."""
        if isinstance(batch.counts, int):
            for gradient, found in zip(gradients, self._found(tensors, batch.indices), strict=True):
                gradient.copy_(found)
            return
        for count in batch.counts.unique().tolist():  # a loss may depend on the batch size in any way
            rows = (batch.counts == count).nonzero()[:, 0].to(self.x.device)
            part = self._found([tensor[rows] for tensor in tensors], batch.indices[rows.cpu(), :count])
            for gradient, found in zip(gradients, part, strict=True):
                gradient[rows] = found

    def _found(self, tensors: Sequence[Tensor], indices: Tensor) -> list[Tensor]:
        at = indices.to(self.x.device)
        if not self.layout.model.training:  # `outputs` leaves it in eval mode
            self.layout.model.train()
        weights = dict(zip(self.layout.names, tensors, strict=True))
        found: State = self._gradient(weights, self.x[at], self.y[at])
        return [found[name] for name in self.layout.names]
