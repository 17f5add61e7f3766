"""Layers that are linear in their parameters: a rule for each kind, and a pass that observes them.

With a the input of a layer, d the gradient of the loss at its output, and θ = (weight, bias):

* along a direction v the score of example i is ⟨layer(a_i; v), d_i⟩, because layer(a; θ) is linear in θ;
* the gradient of a group is a sum over its segment, for a Linear layer Σ_i d_i a_iᵀ.

A rule states both for one kind of layer; add one to `_RULES`. It takes examples along dim 0; a segment is given by its
bounds in `starts`.

`observe` runs one forward pass and an activation-only backward pass. Hooks hand the input a of every known layer to an
observer on the way forward, and the gradient d at its output on the way back. The gradients of parameters are left out
meanwhile, so the backward pass costs half of an ordinary one. Hooks on tensors see the gradient at the value the layer
returned, also when an in-place activation overwrites it afterwards. A parameter outside any known layer (a scale, a
class token) may be given to the model as one copy per example; then the gradient at the copies is what is observed.

A layer is called with detached parameters, while the parameters themselves require a gradient. So where the loss has a
gradient of a parameter, something else uses it (a functional call, a penalty), and layers alone do not tell the score.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from ggda_ext.data import batch_length
from ggda_ext.gradients.watch import Watch, altered_gradients
from ggda_ext.losses import ExampleLoss
from ggda_ext.model import ParameterSpace, full_precision

Starts = list[int]
Signature = tuple[tuple[tuple[str, int], ...], int]


class LayerRule:
    """How one kind of layer acts on its input with given parameters, and its segment-summed gradients."""

    rank: int | None = None
    """Number of dimensions of a batched input, if only that many will do."""

    def apply(self, layer: Any, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """layer(a; weight, bias), linear in (weight, bias)."""
        raise NotImplementedError

    def row_scores(self, layer: Any, a: Tensor, d: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """⟨layer(a; weight, bias), d⟩ of every row `[b]`."""
        return self.apply(layer, a, weight, bias).mul_(d).reshape(len(d), -1).sum(1)

    def arranged(self, weight: Tensor) -> Tensor:
        """The same numbers, in the order in memory in which `row_scores` reads them fastest."""
        return weight

    def weight_rows(self, layer: Any, a: Tensor, d: Tensor, starts: Starts, out: Tensor) -> None:
        """Write the weight's gradient of every segment to `out` `[s, *weight.shape]`."""
        raise NotImplementedError

    def bias_rows(self, layer: Any, d: Tensor, starts: Starts) -> Tensor:
        """The bias's gradient of every segment `[s, *bias.shape]`."""
        return segment_sum(d.flatten(2).sum(2) if d.dim() > 2 else d, starts)


_FEW, _NARROW = 16, 64  # outputs or inputs of a layer, as matrix products go
_SMALL = 2**18  # numbers in a weight from which on its order in memory does not matter


class _Linear(LayerRule):
    def apply(self, layer: nn.Linear, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(a, weight, bias)

    def row_scores(self, layer: nn.Linear, a: Tensor, d: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """By W a or by Wᵀ d, as matrix products are faster; rows are added up by a product with ones, not by `sum`."""
        size, (out, into) = d.shape[0], weight.shape
        a, d = a.reshape(-1, into), d.reshape(-1, out)
        back = out > into >= _NARROW
        if back:
            products = torch.mm(d, weight).mul_(a)
        elif out > _FEW:
            products = (torch.mm(a, weight.T) if bias is None else torch.addmm(bias, a, weight.T)).mul_(d)
        else:  # a product with few columns is slow, one with few rows is not
            turned = torch.mm(weight, a.T) if bias is None else torch.addmm(bias[:, None], weight, a.T)
            products = turned.mul_(d.T).T
        scores = torch.mv(products, products.new_ones(products.shape[1]))
        if bias is not None and back:
            scores = torch.addmv(scores, d, bias)
        return scores if scores.shape[0] == size else scores.reshape(size, -1).sum(1)

    def arranged(self, weight: Tensor) -> Tensor:
        """By columns, where `row_scores` multiplies inputs by a small weight."""
        out, into = weight.shape
        turned = out > _FEW and not out > into >= _NARROW and weight.numel() <= _SMALL
        return weight.T.contiguous().T if turned else weight

    def weight_rows(self, layer: nn.Linear, a: Tensor, d: Tensor, starts: Starts, out: Tensor) -> None:
        _outer_products(d, a, starts, out)

    def bias_rows(self, layer: nn.Linear, d: Tensor, starts: Starts) -> Tensor:
        return segment_sum(d.flatten(1, -2).sum(1) if d.dim() > 2 else d, starts)


class _TransposedLinear(_Linear):
    """The `Conv1D` of Hugging Face's GPT-2: a Linear layer with its weight stored [in, out]."""

    def apply(self, layer: nn.Module, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(a, weight.T, bias)

    def row_scores(self, layer: Any, a: Tensor, d: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super().row_scores(layer, a, d, weight.T, bias)

    def arranged(self, weight: Tensor) -> Tensor:
        """As it is: by columns already."""
        return weight

    def weight_rows(self, layer: nn.Module, a: Tensor, d: Tensor, starts: Starts, out: Tensor) -> None:
        _outer_products(a, d, starts, out)


class _Conv(LayerRule):
    def __init__(self, space_dims: int) -> None:
        self.rank = space_dims + 2

    def apply(self, layer: _ConvNd, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        a, padding = _padded(layer, a)
        return torch.convolution(
            a, weight, bias, layer.stride, padding, layer.dilation, False, (0,) * len(padding), layer.groups
        )

    def weight_rows(self, layer: _ConvNd, a: Tensor, d: Tensor, starts: Starts, out: Tensor) -> None:
        a, padding = _padded(layer, a)
        for row, (low, high) in enumerate(itertools.pairwise(starts)):
            _, gradient, _ = torch.ops.aten.convolution_backward(
                d[low:high], a[low:high], layer.weight, None, layer.stride, padding, layer.dilation,
                False, (0,) * len(padding), layer.groups, (False, True, False),
            )  # fmt: skip
            out[row] = gradient


class _Embedding(LayerRule):
    def apply(self, layer: nn.Embedding, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = F.embedding(a, weight)
        if layer.padding_idx is None:
            return rows
        return rows.masked_fill((a == layer.padding_idx).unsqueeze(-1), 0)

    def weight_rows(self, layer: nn.Embedding, a: Tensor, d: Tensor, starts: Starts, out: Tensor) -> None:
        out.zero_()
        for row, (low, high) in enumerate(itertools.pairwise(starts)):
            tokens, gradient = a[low:high].reshape(-1), d[low:high].reshape(-1, d.shape[-1])
            if layer.padding_idx is not None:
                kept = tokens != layer.padding_idx
                tokens, gradient = tokens[kept], gradient[kept]
            out[row].index_add_(0, tokens, gradient)


class _EmbeddingBag(LayerRule):
    """Sums or means of embeddings, for bags of equal length `[b, l]`."""

    def apply(self, layer: nn.EmbeddingBag, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.embedding_bag(a, weight, mode=layer.mode, padding_idx=layer.padding_idx)

    def weight_rows(self, layer: nn.EmbeddingBag, a: Tensor, d: Tensor, starts: Starts, out: Tensor) -> None:
        counted = torch.ones_like(a, dtype=d.dtype) if layer.padding_idx is None else (a != layer.padding_idx).to(d)
        if layer.mode == "mean":
            counted = counted / counted.sum(1, keepdim=True).clamp(min=1)
        out.zero_()
        for row, (low, high) in enumerate(itertools.pairwise(starts)):
            gradient = counted[low:high, :, None] * d[low:high, None]
            out[row].index_add_(0, a[low:high].reshape(-1), gradient.flatten(0, 1))


class _Copies(LayerRule):
    """A parameter that the module was given as one copy per example: d is its gradient, example by example."""

    def apply(self, layer: nn.Module, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return weight.expand_as(a).clone()

    def weight_rows(self, layer: nn.Module, a: Tensor, d: Tensor, starts: Starts, out: Tensor) -> None:
        out.copy_(segment_sum(d, starts))


class _Norm(LayerRule):
    """Layers that normalise, then scale and shift: their parameters act on the normalised input."""

    def __init__(self, normalise: Callable[..., Tensor], channels_last: bool) -> None:
        self.normalise, self.channels_last = normalise, channels_last

    def apply(self, layer: Any, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.normalise(layer, a, weight, bias)

    def weight_rows(self, layer: Any, a: Tensor, d: Tensor, starts: Starts, out: Tensor) -> None:
        out.copy_(self.bias_rows(layer, self.normalise(layer, a, None, None) * d, starts))

    def bias_rows(self, layer: Any, d: Tensor, starts: Starts) -> Tensor:
        if not self.channels_last:
            return super().bias_rows(layer, d, starts)
        own = layer.weight.dim()
        return segment_sum(d.flatten(1, d.dim() - own - 1).sum(1) if d.dim() > own + 1 else d, starts)


def _batch_norm(layer: _BatchNorm, a: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.batch_norm(a, layer.running_mean, layer.running_var, weight, bias, False, 0.0, layer.eps)


_RULES: list[tuple[type[nn.Module], LayerRule]] = [
    (nn.Linear, _Linear()),
    (nn.Conv1d, _Conv(1)),
    (nn.Conv2d, _Conv(2)),
    (nn.Conv3d, _Conv(3)),
    (nn.Embedding, _Embedding()),
    (nn.EmbeddingBag, _EmbeddingBag()),
    (nn.LayerNorm, _Norm(lambda m, a, w, b: F.layer_norm(a, m.normalized_shape, w, b, m.eps), True)),
    (nn.RMSNorm, _Norm(lambda m, a, w, b: F.rms_norm(a, m.normalized_shape, w, m.eps), True)),
    (nn.GroupNorm, _Norm(lambda m, a, w, b: F.group_norm(a, m.num_groups, w, b, m.eps), False)),
    (nn.BatchNorm1d, _Norm(_batch_norm, False)),
    (nn.BatchNorm2d, _Norm(_batch_norm, False)),
    (nn.BatchNorm3d, _Norm(_batch_norm, False)),
]

COPIES: LayerRule = _Copies()


def rule_for(layer: nn.Module) -> LayerRule | None:
    """The rule of a layer, or None for a kind of layer (or a use of it) that is not known to be linear."""
    embeds = isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    if embeds and (layer.max_norm is not None or layer.scale_grad_by_freq):
        return None
    if isinstance(layer, nn.EmbeddingBag) and layer.mode == "max":
        return None
    if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
        return None
    if type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils":
        return _TransposedLinear()
    for kind, rule in _RULES:
        if isinstance(layer, kind) and type(layer).forward is kind.forward:  # not a subclass with its own maths
            return rule
    return None


def segment_sum(values: Tensor, starts: Starts) -> Tensor:
    """Sum rows `[b, …]` over segments `[s, …]`."""
    segments = len(starts) - 1
    if segments == len(values):
        return values
    if segments == 1:
        return values.sum(0, keepdim=True)
    lengths = [high - low for low, high in itertools.pairwise(starts)]
    ids = torch.repeat_interleave(torch.tensor(lengths, device=values.device))
    return values.new_zeros(segments, *values.shape[1:]).index_add_(0, ids, values)


def _outer_products(left: Tensor, right: Tensor, starts: Starts, out: Tensor) -> None:
    """Σ leftᵀ right over every segment, written to `out` `[s, l, r]`; tokens count as examples."""
    tokens = left[0].numel() // left.shape[-1]
    left, right = left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
    length = starts[1] - starts[0]
    if len(left) == len(starts) - 1:  # every segment is one example: not worth a matrix product
        torch.mul(left[:, :, None], right[:, None, :], out=out)
        return
    if starts[-1] == length * (len(starts) - 1) and starts == list(range(0, starts[-1] + 1, length)):
        shape = (len(starts) - 1, length * tokens, -1)
        torch.bmm(left.view(shape).transpose(1, 2), right.view(shape), out=out)
        return
    for row, (low, high) in enumerate(itertools.pairwise(starts)):
        torch.mm(left[low * tokens : high * tokens].T, right[low * tokens : high * tokens], out=out[row])


def _padded(layer: _ConvNd, a: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Input and numeric padding of a convolution: other paddings than zeros are carried out here."""
    if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        return a, layer.padding
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(a, layer._reversed_padding_repeated_twice, mode=mode), (0,) * len(layer.stride)


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

    def row_scores(self, a: Tensor, d: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """⟨layer(a; weight, bias), d⟩ of every row `[b]`, with zeros for a parameter that was not chosen."""
        if weight is None:
            weight = torch.zeros_like(self.module.weight)  # type: ignore[arg-type]
        return self.rule.row_scores(self.module, a, d, weight, bias)


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
    called: int = 0
    """Stands for the functions that were called, in their order."""
    moves: str | None = None
    """A function that may have moved rows of the batch from one place to another."""
    hooks: str | None = None
    """A function that may have put a hook on a gradient: layers may see what it was before."""
    alters: str | None = None
    """What makes gradients other than derivatives, where that was asked for."""
    misplaced: str | None = None
    """A layer whose rows turned out not to be those of the examples in their order."""
    losses: Tensor | None = None
    """Of the examples `[b]`."""

    @property
    def suspicious(self) -> bool:
        """Whether something was seen that layers may not tell."""
        return bool(self.strayed) or self.moves is not None or self.hooks is not None or self.misplaced is not None

    @property
    def signature(self) -> Signature:
        """The same for runs that call the same functions, and layers equally often with as many rows per example."""
        return tuple(sorted(self.rows)), self.called


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


class Observation:
    """The layers of a model with hooks on them that tell an observer what a batch does, for one batch or many.

    Meanwhile no parameter but `unseen` and those of the layers requires a gradient.

    Args:
        space: model and chosen parameters.
        layers: what to observe.
        loss: of the examples.
        unseen: parameters to look after: whether the loss depends on them.
    """

    def __init__(
        self, space: ParameterSpace, layers: list[Layer], loss: ExampleLoss, unseen: Iterable[nn.Parameter] = ()
    ) -> None:
        self._space, self._loss, self._unseen = space, loss, list(unseen)
        self._watched = _watched(layers, self._unseen)
        self._copied = [layer for layer in layers if layer.copied is not None]
        self._biases = [layer for layer in layers if layer.bias_of is not None]
        self._tapped = [layer for layer in layers if layer.copied is None and layer.bias_of is None]
        self._run: _Run | None = None

    @contextmanager
    def on(self) -> Iterator[Observation]:
        """With the hooks on the layers."""
        handles: list[RemovableHandle] = []
        own = {id(parameter) for parameter in self._watched}
        with self._space.require_gradients(of_chosen=False, also=[*self._unseen, *self._watched]):
            try:
                for layer in [*self._tapped, *self._biases]:
                    handles += _detached_inside(layer, own)
                for layer in self._tapped:
                    handles.append(layer.module.register_forward_hook(self._hook(layer), with_kwargs=True))
                yield self
            finally:
                for handle in handles:
                    handle.remove()

    def _hook(self, layer: Layer) -> Callable[..., Tensor | None]:
        def on_forward(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
        ) -> Tensor | None:
            if self._run is None:
                return None
            a = args[0] if args else kwargs["input"]
            with torch._C.DisableTorchFunction():  # what is done here is not the model's
                if self._loss.vectorized:
                    return _UnderVmap.apply(output, a, layer, self._run.tap)
                return self._run.tap(layer, a, output)

        return on_forward

    def run(
        self, batch: Any, observer: Observer, closely: bool = False, allowed: float = 1e-3, alters: bool = False
    ) -> Calls:
        """Run the summed loss of a batch forward and backward, telling `observer` about every layer call.

        Where rows may have been moved, a second backward pass looks whose they are (`_Order`).

        Args:
            batch: examples along dim 0.
            observer: is told.
            closely: whether to look whose rows are whose in any case.
            allowed: relative differences that rounding may explain.
            alters: whether to look for what makes gradients other than derivatives.
        """
        run = _Run(self._space, batch_length(batch), observer, allowed)
        calls = run.calls
        with _copies(self._copied, run.size) as copied, _shared(self._biases, run.share):
            for layer, copies in copied:
                run.tell_of_copies(layer, copies)
            self._run = run
            try:
                with Watch(run.size) as watch:
                    losses = self._loss.each(self._space.model, batch)
            finally:
                self._run = None  # a checkpoint calls layers again on the way back
            calls.losses, calls.called = losses.detach(), watch.called
            calls.moves, calls.hooks = watch.moves, watch.hooks
            calls.alters = altered_gradients(losses, watch) if alters else None
            if losses.requires_grad:
                run.order.wanted = run.size > 1 and bool(run.leaves) and (calls.moves is not None or closely)
                self._go_back(run, losses)
        return calls

    def _go_back(self, run: _Run, losses: Tensor) -> None:
        """The backward pass, and a second one if that is wanted; parameters that have a gradient are kept."""
        calls, order, leaves, others = run.calls, run.order, run.leaves, [*self._unseen, *self._watched]
        found = torch.autograd.grad(losses.sum(), [*leaves, *others], allow_unused=True, retain_graph=order.wanted)
        if order.wanted:
            weights = order.weights(run.size, losses)
            torch.autograd.grad((losses * weights).sum(), leaves, allow_unused=True)
            calls.misplaced = order.misplaced
        for at, d in enumerate(found[len(leaves) :]):
            if d is not None and bool(_dense(d).any()):
                (calls.touched if at < len(self._unseen) else calls.strayed).append(others[at])


def observe(
    space: ParameterSpace,
    layers: list[Layer],
    loss: ExampleLoss,
    batch: Any,
    observer: Observer,
    unseen: Iterable[nn.Parameter] = (),
    **looking: Any,
) -> Calls:
    """Run one batch under observation; see `Observation.run`."""
    with Observation(space, layers, loss, unseen).on() as observation:
        return observation.run(batch, observer, **looking)


class _Run:
    """One batch under observation: what happened so far."""

    def __init__(self, space: ParameterSpace, size: int, observer: Observer, allowed: float) -> None:
        self.space, self.size, self.observer = space, size, observer
        self.calls, self.order = Calls(), _Order(allowed)
        self.leaves: list[Tensor] = []

    def tell_of_copies(self, layer: Layer, copies: Tensor) -> None:
        """Tell of a parameter's copies, and of their gradient."""
        self.leaves.append(copies)
        kept = self.observer.forward(layer, copies.detach().view(self.size, *_of(layer.weight).shape))
        copies.register_hook(self.order.of(layer, _backward(self.observer, layer, kept, 1, self.space), 1))

    def tap(self, layer: Layer, a: Tensor, output: Tensor) -> Tensor:
        """Tell of a layer's input; what goes on in place of its output tells of its gradient."""
        a, rows, size = a.detach(), output.shape[0], self.size
        if rows != size and rows == 1:  # shared by the batch, as position embeddings are
            a, output, rows = a.expand(size, *a.shape[1:]), output.expand(size, *output.shape[1:]), size
        repeats, remainder = divmod(rows, size)
        if remainder or not repeats:
            raise UnknownLayer(
                f"layer {layer.name!r} returned {list(output.shape)} for a batch of {size} examples, "
                "so its rows cannot be told apart by example"
            )
        self.calls.rows.append((layer.name, repeats))
        kept = _told(self.observer.forward, layer, _in_full(a, self.space))
        tapped = output
        if not output.requires_grad:
            tapped = output.detach().requires_grad_()
            self.leaves.append(tapped)
            output = tapped.clone() if layer.copies_output else tapped
        told = _backward(self.observer, layer, kept, repeats, self.space)
        tapped.register_hook(self.order.of(layer, told, repeats))
        return output

    def share(self, layer: Layer, positions: Tensor, bias: Tensor) -> Tensor:
        """Scores `[1, h, q, k]` that all examples get, as one copy for each, so that each has a gradient of its own."""
        if bias.dim() != 4 or len(bias) != 1 or bias.shape[2:] != positions.shape:
            raise UnknownLayer(f"layer {layer.name!r} gives scores {list(bias.shape)}, which are not [1, h, q, k]")
        self.calls.rows.append((layer.name, 1))
        kept = _told(self.observer.forward, layer, positions.expand(self.size, *positions.shape))
        copies = bias.detach().expand(self.size, *bias.shape[1:]).requires_grad_()
        self.leaves.append(copies)
        back = self.order.of(layer, _backward(self.observer, layer, kept, 1, self.space), 1)
        copies.register_hook(lambda d: back(d.permute(0, 2, 3, 1)))
        return copies


class _Order:
    """Tells whose row is whose by a second backward pass, in which the loss of every example has a weight of its own.

    The gradient at a row of example i is then w_i times what it was. Where it is not, the row belongs to another
    example, or to several.

    Args:
        allowed: relative differences that rounding may explain.
    """

    def __init__(self, allowed: float) -> None:
        self.allowed, self.wanted = allowed, False
        self.misplaced: str | None = None
        self._weights: Tensor | None = None
        self._first: list[tuple[Layer, Tensor]] = []

    def weights(self, size: int, losses: Tensor) -> Tensor:
        """One for every example `[b]`; from now on gradients are compared, not told."""
        drawn = torch.rand(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) + 1
        self._weights = drawn.to(losses)
        self._first.reverse()
        return self._weights

    def of(self, layer: Layer, told: Callable[[Tensor], None], repeats: int) -> Callable[[Tensor], None]:
        """What is done with a gradient at the output of a layer."""

        def on_gradient(d: Tensor) -> None:
            if self._weights is not None:
                self._compare(layer, d.detach(), repeats)
                return
            if self.wanted:
                self._first.append((layer, d.detach().clone()))
            told(d)

        return on_gradient

    def _compare(self, layer: Layer, d: Tensor, repeats: int) -> None:
        before, first = self._first.pop() if self._first else (None, d)
        if before is not layer or first.shape != d.shape:
            self.misplaced = self.misplaced or layer.name
            return
        assert self._weights is not None
        precision = torch.promote_types(d.dtype, torch.float32)
        rows, expected = (values.reshape(len(d), -1).to(precision) for values in (d, first))
        error = (rows - expected * self._weights.to(precision).repeat_interleave(repeats)[:, None]).norm(dim=1)
        norms = expected.norm(dim=1)
        if bool((error > self.allowed * (norms + 0.01 * norms.mean())).any()):  # never so for NaN
            self.misplaced = self.misplaced or layer.name


def _watched(layers: list[Layer], unseen: list[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters of the layers, but for copies and those that are looked after already."""
    left_out = {id(parameter) for parameter in unseen}
    left_out |= {id(layer.weight) for layer in layers if layer.copied is not None}
    own = [value for layer in layers for value in (layer.weight, layer.bias) if value is not None]
    return list({id(value): value for value in own if id(value) not in left_out}.values())


def _detached_inside(layer: Layer, watched: set[int]) -> list[RemovableHandle]:
    """Let a layer compute with detached parameters, in its own calls only; also when a checkpoint calls it again."""
    own = {"weight": layer.weight, "bias": layer.bias}
    mine = {key: value for key, value in own.items() if value is not None and id(value) in watched}
    if not mine:
        return []
    swap, back = _swaps(layer.module._parameters, mine)
    return [
        layer.module.register_forward_pre_hook(swap),
        layer.module.register_forward_hook(back, prepend=True, always_call=True),
    ]


def _swaps(held: dict[str, Any], own: dict[str, nn.Parameter]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Hooks that put detached parameters into a module's own, unless others are there, and put the parameters back."""
    detached = {key: parameter.detach() for key, parameter in own.items()}
    given: list[str] = []

    def swap(*_: Any) -> None:
        for key, parameter in own.items():
            if held[key] is parameter:
                held[key] = detached[key]
                given.append(key)

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
