"""Layers that are linear in their parameters: a rule for each kind of layer, and the layers of a model that have one.

With a the input of a layer, d the gradient of the loss at its output, and θ = (weight, bias):

* along a direction v the score of example i is ⟨layer(a_i; v), d_i⟩, because layer(a; θ) is linear in θ;
* the gradient of a group is a sum over its segment, for a Linear layer Σ_i d_i a_iᵀ.

A rule computes both for one kind of layer; to support another kind, add a rule to `_RULES`. Examples are along dim 0.
Segment j holds the examples from ``starts[j]`` up to ``starts[j + 1]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ggda_ext.model import ParameterSpace

Starts = list[int]


class LayerRule:
    """How one kind of layer acts on its input with given parameters, and its segment-summed gradients."""

    rank: int | None = None
    """Number of dimensions that a batched input must have; None if any number is possible."""

    def apply(self, layer: Any, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return layer(a; weight, bias), which is linear in (weight, bias)."""
        raise NotImplementedError

    def add_scores(self, layer: Any, a: Tensor, d: Tensor, weight: Tensor, bias: Tensor | None, scores: Tensor) -> None:
        """Add ⟨layer(a; weight, bias), d⟩ of every example, which may have several rows, to its score `[b]`."""
        scores += self.apply(layer, a, weight, bias).mul_(d).reshape(scores.shape[0], -1).sum(1)

    def arranged(self, weight: Tensor) -> Tensor:
        """Return the same weight, in the memory order that `add_scores` reads fastest."""
        return weight

    def weight_rows(self, layer: Any, a: Tensor, d: Tensor, starts: Starts, out: Tensor) -> None:
        """Write the gradient of the weight, for every segment, to `out` `[s, *weight.shape]`."""
        raise NotImplementedError

    def bias_rows(self, layer: Any, d: Tensor, starts: Starts) -> Tensor:
        """Return the gradient of the bias, for every segment `[s, *bias.shape]`."""
        return segment_sum(d.flatten(2).sum(2) if d.dim() > 2 else d, starts)


_FEW = 16  # outputs of a layer; a matrix product with no more columns than this is slow
_SMALL = 2**18  # numbers in a weight; for a larger weight the memory order does not matter
_NEAR, _ENOUGH = 2**18, 512  # numbers of a product that stay in the cache until they are used; fewest rows of a block


class _Linear(LayerRule):
    def apply(self, layer: nn.Linear, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(a, weight, bias)

    def add_scores(
        self, layer: nn.Linear, a: Tensor, d: Tensor, weight: Tensor, bias: Tensor | None, scores: Tensor
    ) -> None:
        """Add the scores by W a or by Wᵀ d, whichever is faster, in blocks of rows whose products stay in the cache."""
        out, into = weight.shape
        if d.dim() > 2:
            a, d = a.reshape(-1, into), d.reshape(-1, out)
        rows, back = d.shape[0], out > max(into, _FEW)
        found = scores if rows == scores.shape[0] else scores.new_zeros(rows)
        step = max(_NEAR // max(into, out), _ENOUGH)
        if rows <= step or weight.numel() > _SMALL:  # a large weight would be fetched again for each block
            _add_dots(a, d, weight, bias, back, found)
        else:
            for block in zip(a.split(step), d.split(step), found.split(step), strict=True):
                _add_dots(*block[:2], weight, bias, back, block[2])
        if found is not scores:
            scores += found.view(scores.shape[0], -1).sum(1)

    def arranged(self, weight: Tensor) -> Tensor:
        """Return the weight stored by columns, if `add_scores` multiplies inputs by it and it is small."""
        out, into = weight.shape
        turned = _FEW < out <= into and weight.numel() <= _SMALL
        return weight.T.contiguous().T if turned else weight

    def weight_rows(self, layer: nn.Linear, a: Tensor, d: Tensor, starts: Starts, out: Tensor) -> None:
        _outer_products(d, a, starts, out)

    def bias_rows(self, layer: nn.Linear, d: Tensor, starts: Starts) -> Tensor:
        return segment_sum(d.flatten(1, -2).sum(1) if d.dim() > 2 else d, starts)


def _add_dots(a: Tensor, d: Tensor, weight: Tensor, bias: Tensor | None, back: bool, scores: Tensor) -> None:
    """Add ⟨W a + b, d⟩ of every row to `scores`.

    It uses products with vectors, which are faster than `sum`, and faster than adding a wide bias to W a.
    """
    if back:
        products = torch.mm(d, weight).mul_(a)
    elif weight.shape[0] > _FEW:
        products = torch.mm(a, weight.T).mul_(d)
    else:  # a product with few columns is slow, a product with few rows is not
        turned = torch.mm(weight, a.T) if bias is None else torch.addmm(bias[:, None], weight, a.T)
        products, bias = turned.mul_(d.T).T, None
    scores.addmv_(products, products.new_ones(products.shape[1]))
    if bias is not None:
        scores.addmv_(d, bias)


class _TransposedLinear(_Linear):
    """The `Conv1D` of Hugging Face's GPT-2: a Linear layer with its weight stored [in, out]."""

    def apply(self, layer: nn.Module, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(a, weight.T, bias)

    def add_scores(self, layer: Any, a: Tensor, d: Tensor, weight: Tensor, bias: Tensor | None, scores: Tensor) -> None:
        super().add_scores(layer, a, d, weight.T, bias, scores)

    def arranged(self, weight: Tensor) -> Tensor:
        """Return the weight unchanged, because it is stored by columns already."""
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
    """A parameter that the module is given as one copy per example; d is then its gradient for each example."""

    def apply(self, layer: nn.Module, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return weight.expand_as(a).clone()

    def weight_rows(self, layer: nn.Module, a: Tensor, d: Tensor, starts: Starts, out: Tensor) -> None:
        out.copy_(segment_sum(d, starts))


class _Norm(LayerRule):
    """Layers that normalise their input, then scale and shift it; the parameters act on the normalised input."""

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
    """Return the rule of a layer, or None if this kind of layer (or its settings) is not known to be linear."""
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
    """Return the sums of rows `[b, …]` over segments `[s, …]`."""
    segments = len(starts) - 1
    if segments == len(values):
        return values
    if segments == 1:
        return values.sum(0, keepdim=True)
    lengths = [high - low for low, high in itertools.pairwise(starts)]
    ids = torch.repeat_interleave(torch.tensor(lengths, device=values.device))
    return values.new_zeros(segments, *values.shape[1:]).index_add_(0, ids, values)


def _outer_products(left: Tensor, right: Tensor, starts: Starts, out: Tensor) -> None:
    """Write Σ leftᵀ right of every segment to `out` `[s, l, r]`; the sum is over examples and their tokens."""
    tokens = left[0].numel() // left.shape[-1]
    left, right = left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
    lengths = [(high - low) * tokens for low, high in itertools.pairwise(starts)]
    runs = [(length, sum(1 for _ in equal)) for length, equal in itertools.groupby(lengths)]
    if 2 * len(runs) > len(lengths):  # hardly two neighbours of the same length
        for row, some, others in zip(out, left.split(lengths), right.split(lengths), strict=True):
            torch.mm(some.T, others, out=row)
        return
    parts = (side.split([length * count for length, count in runs]) for side in (left, right))
    rows = out.split([count for _, count in runs])
    for (length, count), into, some, others in zip(runs, rows, *parts, strict=True):
        if length == 1:  # a matrix product does not pay off
            torch.mul(some[:, :, None], others[:, None, :], out=into)
        else:
            shape = count, length, -1
            torch.bmm(some.view(shape).transpose(1, 2), others.view(shape), out=into)


def _padded(layer: _ConvNd, a: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the input and the padding, in numbers, of a convolution.

    Padding that is not by zeros, or is given as a string, is applied to the input here.
    """
    if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        return a, layer.padding
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(a, layer._reversed_padding_repeated_twice, mode=mode), (0,) * len(layer.stride)


MOST_COPIED = 2**18  # most numbers in a parameter that is copied for every example


class UnknownLayer(ValueError):
    """The gradient of a parameter cannot be computed from layer inputs and output gradients."""


@dataclass(frozen=True)
class Layer:
    """A module of the model that has chosen parameters, with the rule for them."""

    name: str
    module: nn.Module
    rule: LayerRule
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    copies_output: bool = False
    """Whether the model overwrites the layer's output in place and nothing before the layer requires a gradient."""
    copied: tuple[str, tuple[int, ...]] | None = None
    """If the module is given its parameter as one copy per example: the parameter's name there, shape of a copy."""
    bias_of: nn.Module | None = None
    """The attention module that adds this embedding's rows to the attention scores of all examples, as in T5."""

    def apply(self, a: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return layer(a; weight, bias), with zeros for a parameter that was not chosen."""
        if weight is None:
            weight = torch.zeros_like(self.module.weight)  # type: ignore[arg-type]
        return self.rule.apply(self.module, a, weight, bias)

    def add_scores(self, a: Tensor, d: Tensor, weight: Tensor | None, bias: Tensor | None, scores: Tensor) -> None:
        """Add ⟨layer(a; weight, bias), d⟩ of every example to its score `[b]`; parameters not chosen count as zeros."""
        if weight is None:
            weight = torch.zeros_like(self.module.weight)  # type: ignore[arg-type]
        self.rule.add_scores(self.module, a, d, weight, bias, scores)


def known_layers(space: ParameterSpace, copies_output: bool = False) -> tuple[list[Layer], dict[str, str]]:
    """Return the layers that own the chosen parameters, and the parameters that have no rule: name → why."""
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
    """The attention whose `compute_bias` turns this embedding of relative positions into scores `[1, h, q, k]`.

    None if the module is not such an embedding.
    """
    parent, _, own = name.rpartition(".")
    if own != "relative_attention_bias" or not isinstance(module, nn.Embedding):
        return None
    attention = model.get_submodule(parent)
    return attention if callable(getattr(attention, "compute_bias", None)) else None


def copied_parameter(name: str, module: nn.Module, key: str, parameter: nn.Parameter, output_dim: int) -> Layer | None:
    """Return a layer for a parameter outside any known layer, which its module is given as one copy per example.

    None if no shape of the copies fits, or if the parameter is too large.

    Args:
        name: name of the module.
        module: the module that owns the parameter.
        key: the parameter's name in the module.
        parameter: a scale, a shift or a token, which is broadcast over the examples.
        output_dim: number of dimensions of the module's output for a batch.
    """
    if parameter.dim() == output_dim and len(parameter) == 1:
        shape = tuple(parameter.shape[1:])  # [1, t, h] is broadcast to [b, t, h]
    elif parameter.dim() < output_dim:
        shape = (1,) * (output_dim - 1 - parameter.dim()) + tuple(parameter.shape)  # [h] is broadcast to [b, t, h]
    else:
        return None
    if parameter.numel() > MOST_COPIED:
        return None
    return copied_layer(name, module, key, parameter, shape)


def copied_layer(name: str, module: nn.Module, key: str, parameter: nn.Parameter, shape: tuple[int, ...]) -> Layer:
    """Return a layer for a parameter that its module is given as copies of this shape, one per example."""
    return Layer(name, module, COPIES, parameter, None, copied=(key, shape))
