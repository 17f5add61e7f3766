"""Stacks of small perceptrons: forward and backward of all models at once by batched matrix products.

The parameters of model j are row j of one matrix `[models, p]`, in which a layer's weight and bias stand as one
block ``[W | b]``, so one product with the activations and a column of ones gives both gradients. For cross-entropy
∂loss/∂logits = (softmax − onehot) / batch size, so no graph is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ggda_ext.training.loop import State
from ggda_ext.training.order import StepBatch

_aten = torch.ops.aten
Activate = Callable[[Tensor], Tensor]
Backward = Callable[[Tensor, Tensor], Any]
# What an activation does in place, and to a gradient in place given the activation's output
ACTIVATIONS: dict[type[nn.Module], tuple[Activate, Backward]] = {
    nn.ReLU: (Tensor.relu_, lambda grad, out: _aten.threshold_backward.grad_input(grad, out, 0, grad_input=grad)),
    nn.Tanh: (Tensor.tanh_, lambda grad, out: _aten.tanh_backward.grad_input(grad, out, grad_input=grad)),
    nn.Sigmoid: (Tensor.sigmoid_, lambda grad, out: _aten.sigmoid_backward.grad_input(grad, out, grad_input=grad)),
    nn.Identity: (lambda values: values, lambda grad, out: grad),
}


@dataclass(frozen=True)
class Layer:
    """A Linear layer and the activation after it.

    Attributes:
        name: prefix of its parameters' names, e.g. ``"0."``.
        start: where its block starts in a row of parameters.
        inside, outside: its widths.
        bias: whether it has one.
        activation: a key of `ACTIVATIONS`.
    """

    name: str
    start: int
    inside: int
    outside: int
    bias: bool
    activation: type[nn.Module]

    @property
    def columns(self) -> int:
        """Columns of the block ``[W | b]``."""
        return self.inside + self.bias

    def block(self, flat: Tensor) -> Tensor:
        """``[W | b]`` of every model `[models, outside, columns]`, a view."""
        return flat[:, self.start : self.start + self.outside * self.columns].unflatten(1, (self.outside, -1))


class StackedLayers:
    """How models made of Linear layers and activations are laid out as rows `[p]`; see `of`."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers
        self.size = layers[-1].start + layers[-1].outside * layers[-1].columns

    @staticmethod
    def of(model: nn.Module, loss_fn: Any, x: Tensor, y: Tensor) -> StackedLayers | None:
        """The layout of the model; None if it, its loss or its data is not of the kind treated here."""
        layers = _layers(model)
        if not layers or not _is_plain_cross_entropy(loss_fn):
            return None
        weights = list(model.parameters())
        fits = x.dim() == 2 and x.shape[1] == layers[0].inside and all(w.dtype == x.dtype for w in weights)
        labels = y.dim() == 1 and not y.is_floating_point() and 0 <= int(y.min()) <= int(y.max()) < layers[-1].outside
        trained = all(weight.requires_grad for weight in weights)
        return StackedLayers(layers) if fits and labels and trained else None

    def row(self, model: nn.Module) -> Tensor:
        """The parameters of a model as a row `[p]`."""
        state, blocks = model.state_dict(), []
        for layer in self.layers:
            weight = state[layer.name + "weight"]
            bias = [state[layer.name + "bias"][:, None]] if layer.bias else []
            blocks.append(torch.cat([weight, *bias], 1).flatten())
        return torch.cat(blocks)

    def state(self, row: Tensor) -> State:
        """The state dict of the model with these parameters `[p]`."""
        found = {}
        for layer in self.layers:
            block = layer.block(row[None])[0]
            found[layer.name + "weight"] = block[:, : layer.inside].contiguous()
            if layer.bias:
                found[layer.name + "bias"] = block[:, -1].contiguous()
        return found

    def outputs(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs of every model `[models, n, classes]`."""
        values = x.expand(len(flat), *x.shape)
        for layer in self.layers:
            block = layer.block(flat)
            weight = block[:, :, : layer.inside].transpose(1, 2)
            values = torch.baddbmm(block[:, None, :, -1], values, weight) if layer.bias else values.bmm(weight)
            values = ACTIVATIONS[layer.activation][0](values)
        return values

    def bytes_at_work(self, batch_size: int) -> int:
        """Memory one model touches in a training step, for numbers of four bytes."""
        activations = self.layers[0].columns + 2 * sum(layer.outside for layer in self.layers)
        return 4 * (4 * self.size + batch_size * activations)

    def gradients(self, loss_fn: Any, x: Tensor, y: Tensor) -> LayerGradients:
        """What computes the gradients of a stack on this training set."""
        return LayerGradients(self.layers, x, y)


class LayerGradients:
    """Gradients of the mean cross-entropy of every model on its own batch, in buffers used again at every step."""

    def __init__(self, layers: list[Layer], x: Tensor, y: Tensor) -> None:
        self.layers = layers
        columns = [x, torch.ones_like(x[:, :1]), F.one_hot(y, layers[-1].outside).to(x.dtype)]
        table = torch.cat(columns, 1)
        self.table = torch.cat([table, torch.zeros_like(table[:1])])  # the last row: no point
        self._buffers: dict[tuple[int, int], list[Tensor]] = {}

    def write(self, flat: Tensor, gradient: Tensor, batch: StepBatch) -> None:
        """Write the gradients of the first models into `gradient`, of the shape `[models, p]` of `flat`."""
        models, b = batch.indices.shape
        flat, gradient = flat[:models], gradient[:models]
        joint, *values = self._buffers_for(models, b)
        torch.index_select(self.table, 0, batch.indices.reshape(-1).to(self.table.device), out=joint.flatten(0, 1))
        inputs = joint
        for layer, output in zip(self.layers[:-1], values, strict=True):
            torch.bmm(inputs[:, :, : layer.columns], layer.block(flat).transpose(1, 2), out=output[:, :, :-1])
            ACTIVATIONS[layer.activation][0](output[:, :, :-1])
            inputs = output
        last = self.layers[-1]
        logits = torch.bmm(last.block(flat), inputs[:, :, : last.columns].transpose(1, 2))
        slope = torch.softmax(logits, 1)
        slope -= joint[:, :, self.layers[0].inside + 1 :].transpose(1, 2)
        slope *= self._weights(batch, b)
        back = slope.transpose(1, 2)
        for at in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[at]
            inputs = values[at - 1] if at else joint
            torch.bmm(back.transpose(1, 2), inputs[:, :, : layer.columns], out=layer.block(gradient))
            if at:
                back = back.bmm(layer.block(flat)[:, :, : layer.inside])
                ACTIVATIONS[self.layers[at - 1].activation][1](back, inputs[:, :, :-1])

    def _weights(self, batch: StepBatch, b: int) -> Tensor | float:
        """One divided by the batch size, 0 where there is no point: a number, or `[models, 1, b]`."""
        if isinstance(batch.counts, int):
            return 1 / batch.counts
        counts = batch.counts.to(self.table.device)[:, None, None]
        return (torch.arange(b, device=counts.device) < counts) / counts.to(self.table.dtype)

    def _buffers_for(self, models: int, b: int) -> list[Tensor]:
        """The batch with its columns of ones and one-hot labels, and every hidden layer's output with ones."""
        if (models, b) not in self._buffers:
            self._buffers = {key: kept for key, kept in self._buffers.items() if key[0] == models}
            widths = [self.table.shape[1], *(layer.outside + 1 for layer in self.layers[:-1])]
            self._buffers[models, b] = [self.table.new_ones(models, b, width) for width in widths]
        return self._buffers[models, b]


def _layers(model: nn.Module) -> list[Layer]:
    """The model's Linear layers with the activations between them; empty if it holds anything else."""
    named = [("", model)] if isinstance(model, nn.Linear) else list(_flattened(model, ""))
    layers: list[Layer] = []
    start, seen = 0, set()
    for name, module in named:
        if type(module) is nn.Linear and id(module) not in seen:
            seen.add(id(module))
            bias = module.bias is not None
            layers.append(Layer(name, start, module.in_features, module.out_features, bias, nn.Identity))
            start += module.out_features * (module.in_features + bias)
        elif type(module) in ACTIVATIONS and layers and layers[-1].activation is nn.Identity:
            last = layers.pop()
            layers.append(Layer(last.name, last.start, last.inside, last.outside, last.bias, type(module)))
        elif type(module) is not nn.Identity:
            return []
    return layers if layers and layers[-1].activation is nn.Identity else []


def _flattened(module: nn.Module, prefix: str) -> Any:
    """Modules of nested Sequentials in the order they run, with the prefix of their parameters' names."""
    if type(module) is not nn.Sequential:
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from _flattened(child, f"{prefix}{name}.")


def _is_plain_cross_entropy(loss_fn: Any) -> bool:
    if loss_fn is F.cross_entropy:
        return True
    return (
        type(loss_fn) is nn.CrossEntropyLoss
        and loss_fn.weight is None
        and loss_fn.reduction == "mean"
        and loss_fn.label_smoothing == 0
        and loss_fn.ignore_index < 0
    )
