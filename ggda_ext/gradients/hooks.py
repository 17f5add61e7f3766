"""One forward pass and an activation-only backward pass, observed layer by layer.

Hooks hand the input a of every known layer to an observer on the way forward, and the gradient d of the
loss at its output on the way back. No parameter requires a gradient meanwhile, so the backward pass
costs half of an ordinary one. Hooks on tensors see the gradient at the value the layer returned, also
when an in-place activation overwrites it afterwards. A parameter outside any known layer (a scale, a class token)
may be given to the model as one copy per example; then the gradient at the copies is what is observed.

A layer is called with detached parameters, while the parameters themselves require a gradient. So where the loss has a
gradient of a parameter, something else uses it (a functional call, a penalty), and layers alone do not tell the score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ggda_ext.data import batch_length
from ggda_ext.gradients.layer_rules import COPIES, LayerRule, rule_for
from ggda_ext.gradients.parameters import ParameterSpace
from ggda_ext.losses import ExampleLoss
from ggda_ext.model_state import full_precision

MOST_COPIED = 2**18  # numbers in a parameter that is copied for every example


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
    copied: tuple[str, tuple[int, ...]] | None = None
    """A parameter that is given to the module as copies, one per example: its name there, and the shape of a copy."""

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


@dataclass
class Calls:
    """What happened in one run: how often each layer was called, with how many rows per example."""

    rows: list[tuple[str, int]] = field(default_factory=list)
    touched: list[nn.Parameter] = field(default_factory=list)
    """Those of the parameters asked about that had a gradient other than zero."""
    strayed: list[nn.Parameter] = field(default_factory=list)
    """Parameters that had a gradient outside of their layers."""

    @property
    def signature(self) -> tuple[tuple[str, int], ...]:
        """The same for runs that call the same layers equally often with as many rows per example."""
        return tuple(sorted(self.rows))


def known_layers(space: ParameterSpace, copies_output: bool = False) -> tuple[list[Layer], dict[str, str]]:
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
        layers.append(Layer(name, module, rule, own.get("weight"), own.get("bias"), copies_output))
    return layers, unknown


def copied_parameter(name: str, module: nn.Module, key: str, parameter: nn.Parameter, output_dim: int) -> Layer | None:
    """A parameter outside any known layer, to be given to its module as copies; None if no shape would fit.

    Args:
        name: of the module.
        module: that owns the parameter.
        key: the parameter's name in the module.
        parameter: a scale, a shift, a token: something that meets the examples by broadcasting.
        output_dim: number of dimensions of what the module returns for a batch.
    """
    if parameter.dim() == output_dim and len(parameter) == 1:
        shape = tuple(parameter.shape[1:])  # [1, t, h] meets [b, t, h]
    elif parameter.dim() < output_dim:
        shape = (1,) * (output_dim - 1 - parameter.dim()) + tuple(parameter.shape)  # [h] meets [b, t, h]
    else:
        return None
    if parameter.numel() > MOST_COPIED:
        return None
    return copied_layer(name, module, key, parameter, shape)


def copied_layer(name: str, module: nn.Module, key: str, parameter: nn.Parameter, shape: tuple[int, ...]) -> Layer:
    """A parameter that its module is given as copies of a shape."""
    return Layer(name, module, COPIES, parameter, None, copied=(key, shape))


def observe(
    space: ParameterSpace,
    layers: list[Layer],
    loss: ExampleLoss,
    batch: Any,
    observer: Observer,
    unseen: Iterable[nn.Parameter] = (),
) -> Calls:
    """Run the summed loss of a batch forward and backward, telling `observer` about every layer call.

    Args:
        space: model and chosen parameters.
        layers: what to observe.
        loss: of the examples.
        batch: examples along dim 0.
        observer: is told.
        unseen: parameters to look after: whether the loss depends on them.
    """
    size = batch_length(batch)
    leaves: list[Tensor] = []
    unseen = list(unseen)
    watched = _watched(layers, unseen)
    calls = Calls()

    def tap(layer: Layer, a: Tensor, output: Tensor) -> Tensor:
        a = a.detach()
        if len(output) != size and len(output) == 1:  # shared by the batch, as position embeddings are
            a, output = a.expand(size, *a.shape[1:]), output.expand(size, *output.shape[1:])
        repeats, remainder = divmod(len(output), size)
        if remainder or not repeats:
            raise UnknownLayer(
                f"layer {layer.name!r} returned {list(output.shape)} for a batch of {size} examples, "
                "so its rows cannot be told apart by example"
            )
        calls.rows.append((layer.name, repeats))
        kept = _told(observer.forward, layer, _in_full(a, space))
        tapped = output
        if not output.requires_grad:
            tapped = output.detach().requires_grad_()
            leaves.append(tapped)
            output = tapped.clone() if layer.copies_output else tapped
        tapped.register_hook(_backward(observer, layer, kept, repeats, space))
        return output

    def hook(layer: Layer) -> Callable[..., Tensor]:
        def on_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            a = args[0] if args else kwargs["input"]
            return _UnderVmap.apply(output, a, layer, tap) if loss.vectorized else tap(layer, a, output)

        return on_forward

    with (
        space.gradients(enabled=False, also=[*unseen, *watched]),
        _copies(layers, size) as copied,
        _detached_inside(layers, watched),
    ):
        for layer, copies in copied:
            leaves.append(copies)
            kept = observer.forward(layer, copies.detach().view(size, *_of(layer.weight).shape))
            copies.register_hook(_backward(observer, layer, kept, 1, space))
        handles = [
            layer.module.register_forward_hook(hook(layer), with_kwargs=True)
            for layer in layers
            if layer.copied is None
        ]
        try:
            total = loss.total(space.model, batch)
        finally:
            for handle in handles:
                handle.remove()
        if total.requires_grad:
            found = torch.autograd.grad(total, [*leaves, *unseen, *watched], allow_unused=True)[len(leaves) :]
            pairs = zip([*unseen, *watched], found, strict=True)
            used = [parameter for parameter, d in pairs if d is not None and bool(_dense(d).any())]
            seen = {id(parameter) for parameter in watched}
            calls.touched = [parameter for parameter in used if id(parameter) not in seen]
            calls.strayed = [parameter for parameter in used if id(parameter) in seen]
    return calls


def _watched(layers: list[Layer], unseen: list[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters of the layers, but for copies and those that are looked after already."""
    left_out = {id(parameter) for parameter in unseen}
    left_out |= {id(layer.weight) for layer in layers if layer.copied is not None}
    own = [value for layer in layers for value in (layer.weight, layer.bias) if value is not None]
    return list({id(value): value for value in own if id(value) not in left_out}.values())


@contextmanager
def _detached_inside(layers: list[Layer], watched: list[nn.Parameter]) -> Iterator[None]:
    """Let layers compute with detached parameters, in their own calls only; also when a checkpoint calls them again."""
    wanted = {id(parameter) for parameter in watched}
    handles: list[RemovableHandle] = []
    try:
        for layer in layers:
            own = {"weight": layer.weight, "bias": layer.bias}
            mine = {key: value for key, value in own.items() if value is not None and id(value) in wanted}
            if layer.copied is None and mine:
                swap, back = _swaps(layer.module._parameters, mine)
                handles.append(layer.module.register_forward_pre_hook(swap))
                handles.append(layer.module.register_forward_hook(back, prepend=True, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _swaps(held: dict[str, Any], own: dict[str, nn.Parameter]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Hooks that put detached parameters into a module's own, unless others are there, and put the parameters back."""
    given: dict[str, Tensor] = {}

    def swap(*_: Any) -> None:
        for key, parameter in own.items():
            if held[key] is parameter:
                held[key] = given[key] = parameter.detach()

    def back(*_: Any) -> None:
        for key in given:
            held[key] = own[key]
        given.clear()

    return swap, back


def _backward(observer: Observer, layer: Layer, kept: Any, repeats: int, space: ParameterSpace) -> Callable[..., None]:
    def on_gradient(d: Tensor) -> None:
        d = d.detach()
        if layer.copied is not None:
            d = d.view(len(d), *_of(layer.weight).shape)
        _told(observer.backward, layer, kept, _in_full(d, space), repeats)

    return on_gradient


def _told(observer: Callable[..., Any], layer: Layer, *values: Any) -> Any:
    """What an observer answers; its arithmetic is not for autocast to round."""
    device = values[0].device if isinstance(values[0], Tensor) else values[1].device
    if not torch.is_autocast_enabled(device.type):
        return observer(layer, *values)
    with full_precision(device):
        return observer(layer, *values)


@contextmanager
def _copies(layers: list[Layer], size: int) -> Iterator[list[tuple[Layer, Tensor]]]:
    """Give modules their parameters as `size` copies that require a gradient, where a layer asks for it."""
    given = []
    try:
        for layer in layers:
            if layer.copied is not None:
                key, shape = layer.copied
                one = _of(layer.weight).detach().reshape(1, *shape)
                copies = one.repeat(size, *[1] * len(shape)).requires_grad_()
                given.append((layer, copies))
                layer.module._parameters[key] = copies  # type: ignore[assignment]
        yield given
    finally:
        for layer, _ in given:
            assert layer.copied is not None
            layer.module._parameters[layer.copied[0]] = layer.weight


def _of(parameter: nn.Parameter | None) -> nn.Parameter:
    assert parameter is not None
    return parameter


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _in_full(values: Tensor, space: ParameterSpace) -> Tensor:
    """Activations in the precision of the parameters; autocast makes them smaller."""
    return values.to(space.dtype) if values.is_floating_point() and values.dtype != space.dtype else values


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
