"""Stacks of small perceptrons: forward and backward of all models at once by batched matrix products.

Weights have the shape `[models, outside, inside]`. For cross-entropy ∂loss/∂logits = (softmax − onehot) / batch size,
so no graph is recorded. The first layer's bias is a column of its weight. The table of the training set has a column of
ones for this bias, and the labels as one-hot columns, so that one gather fetches the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ggda_ext.checkpoints import State
from ggda_ext.training.batch_order import StepBatch

_aten = torch.ops.aten
Activate = Callable[[Tensor], Tensor]
Backward = Callable[[Tensor, Tensor], Any]
# For each activation its forward, and its backward given the activation's output; both work in place
ACTIVATIONS: dict[type[nn.Module], tuple[Activate, Backward]] = {
    nn.ReLU: (Tensor.relu_, lambda grad, out: _aten.threshold_backward.grad_input(grad, out, 0, grad_input=grad)),
    nn.Tanh: (Tensor.tanh_, lambda grad, out: _aten.tanh_backward.grad_input(grad, out, grad_input=grad)),
    nn.Sigmoid: (Tensor.sigmoid_, lambda grad, out: _aten.sigmoid_backward.grad_input(grad, out, grad_input=grad)),
    nn.Identity: (lambda values: values, lambda grad, out: grad),
}


_ALIGNED = 8  # matrix products are up to twice as fast if the batch has a multiple of eight columns


@dataclass(frozen=True)
class LinearLayer:
    """A Linear layer and the activation after it.

    Attributes:
        name: prefix of the layer's parameter names, e.g. ``"0."``.
        inside, outside: widths of the layer's input and output.
        bias: whether the layer has a bias.
        activation: a key of `ACTIVATIONS`.
    """

    name: str
    inside: int
    outside: int
    bias: bool
    activation: type[nn.Module]


class StackedLayers:
    """Layout of a stack of models that consist of Linear layers and activations; made by `of`.

    The tensors of a stack are ``[W | b | 0]`` of the first layer `[models, outside, columns]`, then the weight and, if
    there is one, the bias of every other layer.
    """

    def __init__(self, layers: list[LinearLayer]) -> None:
        self.layers = layers
        self.columns = _rounded_up(layers[0].inside + layers[0].bias)

    @staticmethod
    def of(model: nn.Module, loss_fn: Any, x: Tensor, y: Tensor) -> StackedLayers | None:
        """Return the layout of the model; None if the model, its loss or its data is not supported here."""
        layers = _layers(model)
        if not layers or not _is_plain_cross_entropy(loss_fn):
            return None
        weights = dict(model.named_parameters())
        names = {layer.name + part for layer in layers for part in (("weight", "bias") if layer.bias else ("weight",))}
        if weights.keys() != names or any(map(_is_changed, model.modules())):  # a weight is tied, or made of others
            return None
        fits = x.dim() == 2 and x.shape[1] == layers[0].inside and all(w.dtype == x.dtype for w in weights.values())
        labels = y.dim() == 1 and not y.is_floating_point() and 0 <= int(y.min()) <= int(y.max()) < layers[-1].outside
        trained = all(weight.requires_grad for weight in weights.values())
        return StackedLayers(layers) if fits and labels and trained else None

    def stack(self, models: Sequence[nn.Module]) -> list[Tensor]:
        """Return the parameters of the models as tensors `[models, …]`."""
        states = [model.state_dict() for model in models]
        first, *others = self.layers
        joint = torch.stack([state[first.name + "weight"] for state in states])
        if first.bias:
            joint = torch.cat([joint, torch.stack([state[first.name + "bias"] for state in states])[:, :, None]], 2)
        found = [F.pad(joint, (0, self.columns - joint.shape[2])).contiguous()]
        for layer in others:
            for part in ("weight", "bias") if layer.bias else ("weight",):
                found.append(torch.stack([state[layer.name + part] for state in states]))
        return found

    def state(self, tensors: Sequence[Tensor]) -> State:
        """Return the state dict of one model, given its part of every tensor."""
        found = {}
        for layer, (weight, bias) in zip(self.layers, self.split(tensors), strict=True):
            found[layer.name + "weight"] = weight[:, : layer.inside].clone()
            if layer is self.layers[0] and layer.bias:
                found[layer.name + "bias"] = weight[:, layer.inside].clone()
            elif bias is not None:
                found[layer.name + "bias"] = bias.clone()
        return found

    def split(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight and bias of every layer; the first layer's bias is a column of its weight (None here)."""
        first, *others = tensors
        parts: list[tuple[Tensor, Tensor | None]] = [(first, None)]
        rest = iter(others)
        parts += [(next(rest), next(rest) if layer.bias else None) for layer in self.layers[1:]]
        return parts

    def outputs(self, tensors: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return the outputs of every model `[models, n, classes]`."""
        if x.dtype != tensors[0].dtype:
            raise TypeError(f"the models are {tensors[0].dtype}, and the inputs are {x.dtype}: convert the inputs.")
        values = self.inputs(x).expand(len(tensors[0]), -1, -1)
        for layer, (weight, bias) in zip(self.layers, self.split(tensors), strict=True):
            values = ACTIVATIONS[layer.activation][0](_linear(values, weight, bias))
        return values

    def inputs(self, x: Tensor) -> Tensor:
        """Return the input for the first layer's tensor: x, a one if there is a bias, and zeros up to `columns`."""
        if x.dim() != 2 or x.shape[1] != self.layers[0].inside:
            raise ValueError(
                f"the models take inputs of shape [n, {self.layers[0].inside}], and these have shape {list(x.shape)}: "
                "pass points with the columns that the models were trained on."
            )
        ones = [torch.ones_like(x[:, :1])] if self.layers[0].bias else []
        joint = torch.cat([x, *ones], 1)
        return F.pad(joint, (0, self.columns - joint.shape[1]))

    def bytes_at_work(self, batch_size: int) -> int:
        """Return the bytes of memory that one model uses in a training step, with four bytes per number."""
        weights = sum(layer.outside * (layer.inside + 1) for layer in self.layers)
        activations = self.columns + 2 * sum(layer.outside for layer in self.layers)
        return 4 * (4 * weights + batch_size * activations)

    def gradients(self, loss_fn: Any, x: Tensor, y: Tensor) -> LayerGradients:
        """Return an object that computes the gradients of a stack on this training set."""
        return LayerGradients(self, x, y)


class LayerGradients:
    """Gradients of the mean cross-entropy of every model on its own batch; the buffers are reused at every step."""

    def __init__(self, layout: StackedLayers, x: Tensor, y: Tensor) -> None:
        self.layout, self.layers = layout, layout.layers
        labels = F.one_hot(y.long(), self.layers[-1].outside).to(x.dtype)
        table = torch.cat([layout.inputs(x), labels], 1)
        # Padding to whole cache lines, and a last row for "no point"
        self.table = F.pad(table, (0, _rounded_up(table.shape[1]) - table.shape[1], 0, 1))
        self._buffers: dict[tuple[int, int], list[Tensor]] = {}

    def write(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], batch: StepBatch) -> None:
        """Write the gradients of a stack into tensors of the same shapes."""
        models, b = batch.indices.shape
        weights, slopes = self.layout.split(tensors), self.layout.split(gradients)
        rows, *buffers = self._buffers_for(models, b)
        hidden, back = buffers[: len(self.layers) - 1], buffers[len(self.layers) - 1 :]
        torch.index_select(self.table, 0, batch.indices.reshape(-1).to(self.table.device), out=rows.flatten(0, 1))
        columns = self.layout.columns
        inputs = [rows[:, :, :columns], *hidden]
        for at, layer in enumerate(self.layers[:-1]):
            _linear(inputs[at], *weights[at], out=hidden[at])
            ACTIVATIONS[layer.activation][0](hidden[at])
        # Logits are [models, classes, b], because softmax over a dimension that is not the last is vectorised
        weight, bias = weights[-1]
        logits = torch.bmm(weight, inputs[-1].transpose(1, 2))
        slope = torch.softmax(logits if bias is None else logits.add_(bias[:, :, None]), 1)
        slope -= rows[:, :, columns : columns + self.layers[-1].outside].transpose(1, 2)
        slope *= self._share(batch, b)
        for at in range(len(self.layers) - 1, -1, -1):
            weight_slope, bias_slope = slopes[at]
            torch.bmm(slope, inputs[at], out=weight_slope)
            if bias_slope is not None:
                torch.sum(slope, 2, out=bias_slope)
            if at:
                torch.bmm(slope.transpose(1, 2), weights[at][0], out=back[at - 1])
                ACTIVATIONS[self.layers[at - 1].activation][1](back[at - 1], hidden[at - 1])
                slope = back[at - 1].transpose(1, 2)

    def _share(self, batch: StepBatch, b: int) -> Tensor | float:
        """Return 1 / batch size, and 0 at positions without a point, as a number or `[models, 1, b]`."""
        if isinstance(batch.counts, int):
            return 1 / batch.counts
        counts = batch.counts.to(self.table.device)[:, None, None]
        return (torch.arange(b, device=counts.device) < counts) / counts.to(self.table.dtype)

    def _buffers_for(self, models: int, b: int) -> list[Tensor]:
        """Return buffers for rows of the table, for the output of every hidden layer, and for its gradient."""
        if (models, b) not in self._buffers:
            self._buffers = {key: kept for key, kept in self._buffers.items() if key[0] == models}
            widths = [layer.outside for layer in self.layers[:-1]]
            self._buffers[models, b] = [
                self.table.new_empty(models, b, width) for width in (self.table.shape[1], *widths, *widths)
            ]
        return self._buffers[models, b]


def _linear(values: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Apply a Linear layer of every model; `out` must be contiguous, else the products are computed one by one."""
    if bias is None:
        return torch.bmm(values, weight.transpose(1, 2), out=out)
    return torch.baddbmm(bias[:, None], values, weight.transpose(1, 2), out=out)


def _rounded_up(columns: int) -> int:
    return -(-columns // _ALIGNED) * _ALIGNED


def _layers(model: nn.Module) -> list[LinearLayer]:
    """Return the model's Linear layers with the activations between them; empty if the model has anything else."""
    named = [("", model)] if isinstance(model, nn.Linear) else list(_flattened(model, ""))
    layers: list[LinearLayer] = []
    seen = set()
    for name, module in named:
        if type(module) is nn.Linear and id(module) not in seen:
            seen.add(id(module))
            bias = module.bias is not None
            layers.append(LinearLayer(name, module.in_features, module.out_features, bias, nn.Identity))
        elif type(module) in ACTIVATIONS and layers and layers[-1].activation is nn.Identity:
            layers[-1] = replace(layers[-1], activation=type(module))
        elif type(module) is not nn.Identity:
            return []
    return layers if layers and layers[-1].activation is nn.Identity else []


def _flattened(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of nested Sequentials in the order they run, with the prefix of their parameter names."""
    if type(module) is not nn.Sequential:
        yield prefix, module
        return
    for name, child in module._modules.items():  # named_children leaves out a module that is used again
        assert child is not None
        yield from _flattened(child, f"{prefix}{name}.")


def _is_changed(module: nn.Module) -> bool:
    """Whether a hook, or a forward of its own, may change what a module does."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


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
