"""One forward pass and an activation-only backward pass, observed layer by layer.

Hooks hand the input a of every known layer to an observer on the way forward, and the gradient d of the
loss at its output on the way back. No parameter requires a gradient meanwhile, so the backward pass
costs half of an ordinary one. Hooks on tensors see the gradient at the value the layer returned, also
when an in-place activation overwrites it afterwards. A parameter outside any known layer (a scale, a class token)
may be given to the model as one copy per example; then the gradient at the copies is what is observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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
    bias_of: nn.Module | None = None
    """The attention that adds this embedding's rows to the scores of all examples alike, as T5's does."""

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
        bias_of = _attention_of(space.model, name, module)
        layers.append(Layer(name, module, rule, own.get("weight"), own.get("bias"), copies_output, bias_of=bias_of))
    return layers, unknown


def _attention_of(model: nn.Module, name: str, module: nn.Module) -> nn.Module | None:
    """The attention whose `compute_bias` turns an embedding of relative positions into scores `[1, h, q, k]`."""
    parent, _, own = name.rpartition(".")
    if own != "relative_attention_bias" or not isinstance(module, nn.Embedding):
        return None
    attention = model.get_submodule(parent)
    return attention if callable(getattr(attention, "compute_bias", None)) else None


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

    def share(layer: Layer, positions: Tensor, bias: Tensor) -> Tensor:
        """Scores `[1, h, q, k]` that all examples get, as one copy for each, so that each has a gradient of its own."""
        if bias.dim() != 4 or len(bias) != 1 or bias.shape[2:] != positions.shape:
            raise UnknownLayer(f"layer {layer.name!r} gives scores {list(bias.shape)}, which are not [1, h, q, k]")
        calls.rows.append((layer.name, 1))
        kept = _told(observer.forward, layer, positions.expand(size, *positions.shape))
        copies = bias.detach().expand(size, *bias.shape[1:]).requires_grad_()
        leaves.append(copies)
        back = _backward(observer, layer, kept, 1, space)
        copies.register_hook(lambda d: back(d.permute(0, 2, 3, 1)))
        return copies

    with (
        space.gradients(enabled=False, also=unseen),
        _copies(layers, size) as copied,
        _shared([layer for layer in layers if layer.bias_of is not None], share),
    ):
        for layer, copies in copied:
            leaves.append(copies)
            kept = observer.forward(layer, copies.detach().view(size, *_of(layer.weight).shape))
            copies.register_hook(_backward(observer, layer, kept, 1, space))
        handles = [
            layer.module.register_forward_hook(hook(layer), with_kwargs=True)
            for layer in layers
            if layer.copied is None and layer.bias_of is None
        ]
        try:
            total = loss.total(space.model, batch)
        finally:
            for handle in handles:
                handle.remove()
        if (leaves or unseen) and total.requires_grad:
            found = torch.autograd.grad(total, [*leaves, *unseen], allow_unused=True)[len(leaves) :]
            pairs = zip(unseen, found, strict=True)
            calls.touched = [parameter for parameter, d in pairs if d is not None and bool(_dense(d).any())]
    return calls


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


@contextmanager
def _shared(layers: list[Layer], share: Callable[[Layer, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Let attentions that add an embedding's rows to the scores of all examples add what `share` makes of them."""

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
