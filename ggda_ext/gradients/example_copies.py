"""Changes to a model while it is observed, for cases in which its layers alone do not show each example separately.

A parameter outside any known layer (a scale, a class token) becomes one copy per example. The scores that an attention
adds for all examples become one copy per example, too. Under `torch.func.vmap` a layer sees only one example, but the
vmap rule of an autograd function sees the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ggda_ext.gradients.layers import Layer, UnknownLayer


@contextmanager
def given_copies(layers: list[Layer], size: int) -> Iterator[list[tuple[Layer, Tensor]]]:
    """Inside this context, give modules `size` copies of a parameter that require a gradient; for `copied` layers."""
    given = []
    try:
        for layer in layers:
            if layer.copied is not None:
                key, shape = layer.copied
                assert layer.weight is not None
                one = layer.weight.detach().reshape(1, *shape)
                copies = one.repeat(size, *[1] * len(shape)).requires_grad_()
                given.append((layer, copies))
                layer.module._parameters[key] = copies  # type: ignore[assignment]
        yield given
    finally:
        for layer, _ in given:
            assert layer.copied is not None
            layer.module._parameters[layer.copied[0]] = layer.weight


@contextmanager
def given_biases(layers: list[Layer], share: Callable[[Layer, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Inside this context, replace the bias that attentions compute from an embedding by the result of `share`."""

    def wrapped(layer: Layer, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def computed(*args: Any, **kwargs: Any) -> Tensor:
            positions: list[Tensor] = []
            handle = layer.module.register_forward_pre_hook(lambda module, inputs: positions.append(inputs[0]))
            try:
                bias = compute(*args, **kwargs)
            finally:
                handle.remove()
            if len(positions) != 1:
                raise UnknownLayer(f"layer {layer.name!r} is called {len(positions)} times for one bias")
            with torch._C.DisableTorchFunction():
                return share(layer, positions[0], bias)

        return computed

    changed = []
    try:
        for layer in layers:
            assert layer.bias_of is not None
            own = vars(layer.bias_of).get("compute_bias")
            changed.append((layer.bias_of, own))
            vars(layer.bias_of)["compute_bias"] = wrapped(layer, layer.bias_of.compute_bias)  # type: ignore[arg-type]
        yield
    finally:
        for attention, own in changed:
            if own is None:
                del vars(attention)["compute_bias"]
            else:
                vars(attention)["compute_bias"] = own


class UnderVmap(torch.autograd.Function):
    """Taps a layer that runs under `torch.func.vmap`, where only the vmap rule sees the whole batch."""

    @staticmethod
    def forward(output: Tensor, a: Tensor, layer: Layer, tap: Callable[..., Tensor]) -> Tensor:
        raise UnknownLayer(f"layer {layer.name!r} does not see the examples")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        raise NotImplementedError  # never reached, because `forward` raises

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], output: Tensor, a: Tensor, layer: Layer, tap: Callable[..., Tensor]
    ) -> tuple[Tensor, int]:
        if in_dims[0] is None or in_dims[1] is None:
            raise UnknownLayer(f"layer {layer.name!r} does not see the examples")
        output, a = output.movedim(in_dims[0], 0), a.movedim(in_dims[1], 0)
        if output.dim() < 3 or output.shape[1] != 1 or layer.rule.rank == output.dim():
            return tap(layer, a, output), 0
        shape = output.shape  # each example is a batch of one
        return tap(layer, a.flatten(0, 1), output.flatten(0, 1)).view(shape), 0
