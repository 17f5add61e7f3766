"""One forward pass and an activation-only backward pass, observed layer by layer.

Hooks hand the input a of every known layer to an observer on the way forward, and the gradient d of the
loss at its output on the way back. No parameter requires a gradient meanwhile, so the backward pass
costs half of an ordinary one. Hooks on tensors see the gradient at the value the layer returned, also
when an in-place activation overwrites it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ggda_ext.data import batch_length
from ggda_ext.gradients.layers import LayerRule, rule_for
from ggda_ext.gradients.parameters import ParameterSpace
from ggda_ext.losses import ExampleLoss


class UnknownLayer(ValueError):
    """A parameter whose gradient cannot be had from layer inputs and output gradients."""


@dataclass(frozen=True)
class Layer:
    """A module of the model with chosen parameters and a rule for them."""

    name: str
    module: nn.Module
    rule: LayerRule
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    copies_output: bool = False
    """Whether the model overwrites the layer's output in place and nothing before it requires a gradient."""

    def apply(self, a: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """layer(a; weight, bias), with zeros for a parameter that was not chosen."""
        if weight is None:
            weight = torch.zeros_like(self.module.weight)  # type: ignore[arg-type]
        return self.rule.apply(self.module, a, weight, bias)


class Observer:
    """Sees every call of a known layer, first forward, then (in reverse order) backward."""

    def forward(self, layer: Layer, a: Tensor) -> Any:
        """Keep what `backward` will need of the layer's input a `[b·r, …]`; by default a itself."""
        return a

    def backward(self, layer: Layer, kept: Any, d: Tensor, repeats: int) -> None:
        """Use the gradient at the layer's output d `[b·r, …]`; each example has r = `repeats` rows."""
        raise NotImplementedError


def known_layers(space: ParameterSpace) -> tuple[list[Layer], dict[str, str]]:
    """The layers that own the chosen parameters, and the parameters with no rule: name → why."""
    layers: list[Layer] = []
    unknown: dict[str, str] = {}
    names = {id(value): name for name, value in space.parameters.items()}
    for name, module in space.model.named_modules():
        own = {key: value for key, value in module.named_parameters(recurse=False) if value in space}
        if not own:
            continue
        rule = rule_for(module)
        if rule is None or not set(own) <= {"weight", "bias"}:
            why = f"{type(module).__name__} {name or '(the model itself)'!r} is not a layer known to be linear"
            unknown |= {names[id(value)]: why for value in own.values()}
            continue
        layers.append(Layer(name, module, rule, own.get("weight"), own.get("bias")))
    return layers, unknown


def observe(space: ParameterSpace, layers: list[Layer], loss: ExampleLoss, batch: Any, observer: Observer) -> None:
    """Run the summed loss of a batch forward and backward, telling `observer` about every layer call."""
    size = batch_length(batch)
    leaves: list[Tensor] = []

    def tap(layer: Layer, a: Tensor, output: Tensor) -> Tensor:
        a = a.detach()
        if len(output) != size and len(output) == 1:  # shared by the batch, as position embeddings are
            a, output = a.expand(size, *a.shape[1:]), output.expand(size, *output.shape[1:])
        repeats, remainder = divmod(len(output), size)
        if remainder:
            raise UnknownLayer(
                f"layer {layer.name!r} returned {list(output.shape)} for a batch of {size} examples, "
                "so its rows cannot be told apart by example"
            )
        kept = observer.forward(layer, a)
        tapped = output
        if not output.requires_grad:
            tapped = output.detach().requires_grad_()
            leaves.append(tapped)
            output = tapped.clone() if layer.copies_output else tapped
        tapped.register_hook(lambda d: observer.backward(layer, kept, d.detach(), repeats))
        return output

    def hook(layer: Layer) -> Callable[..., Tensor]:
        def on_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            a = args[0] if args else kwargs["input"]
            return _UnderVmap.apply(output, a, layer, tap) if loss.vectorized else tap(layer, a, output)

        return on_forward

    handles = [layer.module.register_forward_hook(hook(layer), with_kwargs=True) for layer in layers]
    try:
        with space.gradients(enabled=False):
            total = loss.total(space.model, batch)
            if leaves and total.requires_grad:
                torch.autograd.grad(total, leaves, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()


class _UnderVmap(torch.autograd.Function):
    """Taps a layer that runs under `torch.func.vmap`, where only a vmap rule meets the whole batch."""

    @staticmethod
    def forward(output: Tensor, a: Tensor, layer: Layer, tap: Callable[..., Tensor]) -> Tensor:
        raise UnknownLayer(f"layer {layer.name!r} does not see the examples")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        raise NotImplementedError  # never reached: `forward` refuses

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], output: Tensor, a: Tensor, layer: Layer, tap: Callable[..., Tensor]
    ) -> tuple[Tensor, int]:
        if in_dims[0] is None or in_dims[1] is None:
            raise UnknownLayer(f"layer {layer.name!r} does not see the examples")
        output, a = output.movedim(in_dims[0], 0), a.movedim(in_dims[1], 0)
        if output.dim() < 3 or output.shape[1] != 1 or layer.rule.rank == output.dim():
            return tap(layer, a, output), 0
        shape = output.shape  # examples came as batches of one
        return tap(layer, a.flatten(0, 1), output.flatten(0, 1)).view(shape), 0
