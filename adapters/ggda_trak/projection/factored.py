"""A projection with two factors per weight, computed directly from captured layer inputs a and output gradients d.

    P_outᵀ (Σ_{i∈G} w_i d_i a_iᵀ) P_in = Σ_{i∈G} w_i (P_outᵀ d_i)(P_inᵀ a_i)ᵀ

So the p-sized gradient of a group is never formed (the idea of LoGra). Parameters that are not the weight of a Linear,
Conv or Embedding layer (biases, norms) are small, and their gradients go through a CountSketch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from trak.projectors import AbstractProjector
from trak.utils import vectorize

from ggda_ext import GroupGradients
from ggda_ext.gradients.layers import Layer, LayerRule, known_layers, rule_for
from ggda_ext.gradients.observation import Observer
from ggda_ext.gradients.sketch import count_sketch, draw_sketch
from ggda_ext.groups import GroupBatch
from ggda_ext.model import ParameterSpace

_OUTER: LayerRule | None = rule_for(nn.Linear(1, 1))


@dataclass(frozen=True)
class _Slot:
    """The place of one weight's projection `[rows, cols]` in a projected gradient."""

    low: int
    rows: int
    cols: int

    @property
    def span(self) -> slice:
        return slice(self.low, self.low + self.rows * self.cols)


class FactoredProjector(AbstractProjector):
    """A projector that rotates both sides of every weight at random and keeps a few dimensions of each.

    It does not use TRAK's matrix: it is the same estimator with other numbers. It is scaled so that projected gradients
    have the same lengths as with TRAK's projectors.

    Args:
        model: the model whose gradients are projected.
        proj_dim: largest length of a projected gradient. The weights share it evenly, so the length may be smaller.
        seed: seed of the rotations; every model id has its own rotations.
        grad_wrt: names of the parameters that gradients are taken for, as for `TRAKer`; by default all.
    """

    def __init__(self, model: nn.Module, proj_dim: int, seed: int = 0, grad_wrt: Iterable[str] | None = None) -> None:
        space = ParameterSpace(model, list(grad_wrt or dict(model.named_parameters())))
        self.space = space
        weights = {id(layer.weight): layer.weight for layer in known_layers(space)[0] if _is_factored(layer)}
        rest = [value for value in space.parameters.values() if id(value) not in weights]
        self._rest_spans: dict[int, tuple[int, int]] = {}
        for parameter in rest:
            low = self._rest_size
            self._rest_spans[id(parameter)] = (low, low + parameter.numel())
        self._rest_dim = min(self._rest_size, max(1, proj_dim // 8)) if rest else 0
        share = (proj_dim - self._rest_dim) // max(len(weights), 1)
        if share < 1:
            raise ValueError(
                f"proj_dim={proj_dim} is too small for {len(weights)} weights in two factors each: "
                f"pass at least {2 * len(weights) + 1}."
            )
        self._slots: dict[int, _Slot] = {}
        end = 0
        for weight in weights.values():
            assert weight is not None
            self._slots[id(weight)] = slot = _Slot(end, *_split(share, len(weight), weight[0].numel()))
            end = slot.span.stop
        self._rest = slice(end, end + self._rest_dim)
        super().__init__(space.size, end + self._rest_dim, seed, "factored", space.device)
        self._model_id: int | None = None
        self._factors: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def _rest_size(self) -> int:
        return max((high for _, high in self._rest_spans.values()), default=0)

    def project(self, grads: dict[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """Project existing gradients `[b, grad_dim]` to `[b, proj_dim]`."""
        rows = vectorize(grads, device=self.device) if isinstance(grads, dict) else grads
        self._draw(model_id)
        projected = rows.new_zeros(len(rows), self.proj_dim)
        rest = rows.new_zeros(len(rows), self._rest_size)
        for parameter in self.space.parameters.values():
            part = self.space.part(rows, parameter)
            slot = self._slots.get(id(parameter))
            if slot is None:
                rest[:, slice(*self._rest_spans[id(parameter)])] = part.reshape(len(rows), -1)
                continue
            left, right = self._factors[id(parameter)]
            projected[:, slot.span] = (left.T @ part.flatten(2) @ right).flatten(1)
        self._add_rest(rest, projected)
        return projected

    def captures(self, provider: GroupGradients) -> bool:
        """Whether every gradient follows from layer inputs and output gradients, and the model is the projector's."""
        own = self.space.spans.keys() == provider.space.spans.keys()
        return own and not provider.plan(None).facts.uncovered

    def blocks(
        self, provider: GroupGradients, model_id: int, weights: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield projected group sums of w_i ∇f_i as `(group ids [s], projections [s, proj_dim])`.

        A large group comes in several pieces, which the caller adds up.

        Args:
            provider: the provider, which knows model, outputs f, data and groups.
            model_id: selects the rotations.
            weights: weightings of the points `[w, n]`. Projections are then `[s, w, proj_dim]`.
        """
        self._draw(model_id)
        watched: list[_Projections] = []
        given = torch.ones(1, provider.groups.n) if weights is None else weights

        def watch(groups: GroupBatch) -> Observer:
            watched.append(_Projections(self, groups, given))
            return watched[-1]

        for groups in provider.observe(watch):
            projected = watched.pop().finished()
            yield torch.from_numpy(groups.ids), projected[:, 0] if weights is None else projected

    def free_memory(self) -> None:
        """Delete the rotations; they are drawn again when they are needed."""
        self._model_id = None
        self._factors = {}

    def _add_rest(self, rest: Tensor, projected: Tensor) -> None:
        projected *= self.proj_dim**0.5
        if self._rest_dim:
            scaled = self._signs * self.proj_dim**0.5
            projected[:, self._rest] += count_sketch(rest, self._places, scaled, self._rest_dim)

    def _draw(self, model_id: int) -> None:
        if model_id == self._model_id:
            return
        generator = torch.Generator().manual_seed(self.seed + 10**6 * model_id)
        self._factors = {}
        for parameter in self.space.parameters.values():
            slot = self._slots.get(id(parameter))
            if slot is not None:
                left = _rotation(len(parameter), slot.rows, generator)
                right = _rotation(parameter[0].numel(), slot.cols, generator)
                self._factors[id(parameter)] = (left.to(parameter), right.to(parameter))
        if self._rest_dim:
            places, signs = draw_sketch(self._rest_size, self._rest_dim, generator)
            self._places, self._signs = places.to(self.space.device), signs.to(self.space.device)
        self._model_id = model_id


class _Projections(Observer):
    """Collects for one batch and every weighting: projections of factored weights, and rows of the other parameters."""

    def __init__(self, projector: FactoredProjector, groups: GroupBatch, weights: Tensor) -> None:
        self.projector, self.starts = projector, groups.starts.tolist()
        at = torch.from_numpy(groups.indices.astype("int64"))
        self.weights = weights[:, at].to(projector.space.device, projector.space.dtype)
        segments = len(groups.ids)
        self.projected = self.weights.new_zeros(len(weights), segments, projector.proj_dim)
        self.rest = self.weights.new_zeros(len(weights), segments, projector._rest_size)

    def finished(self) -> Tensor:
        """The projections `[s, w, proj_dim]`, including the parameters that are not factored."""
        for rest, projected in zip(self.rest, self.projected, strict=True):
            self.projector._add_rest(rest, projected)
        return self.projected.transpose(0, 1)

    def forward(self, layer: Layer, a: Tensor) -> Tensor:
        """The part of the input that is needed later: its projection if the layer's weight is factored, else all."""
        factors = self.projector._factors.get(id(layer.weight))
        if factors is None:
            return a
        if _input_first(layer):
            return layer.rule.apply(layer.module, a, factors[0], None)
        weight = factors[1].T
        assert layer.weight is not None
        return _channels_last(
            layer, layer.rule.apply(layer.module, a, weight.unflatten(1, layer.weight.shape[1:]), None)
        )

    def backward(self, layer: Layer, kept: Tensor, d: Tensor, repeats: int) -> None:
        starts = [start * repeats for start in self.starts]
        slot = self.projector._slots.get(id(layer.weight))
        if slot is not None:
            left, right = self.projector._factors[id(layer.weight)]
            mine = _channels_last(layer, d) @ (right if _input_first(layer) else left)
        for weights, projected, rest in zip(self.weights, self.projected, self.rest, strict=True):
            by_row = weights.repeat_interleave(repeats)
            if slot is not None:
                weighted = mine * by_row.view(-1, *[1] * (mine.dim() - 1))
                a, own = (weighted, kept) if _input_first(layer) else (kept, weighted)
                out = d.new_empty(len(starts) - 1, slot.rows, slot.cols)
                assert _OUTER is not None
                _OUTER.weight_rows(None, a, own, starts, out)
                projected[:, slot.span] += out.flatten(1)
            self._add_small(layer, kept, d * by_row.view(-1, *[1] * (d.dim() - 1)), starts, rest)

    def _add_small(self, layer: Layer, a: Tensor, d: Tensor, starts: list[int], rest: Tensor) -> None:
        spans = self.projector._rest_spans
        if layer.bias is not None:
            rest[:, slice(*spans[id(layer.bias)])] += layer.rule.bias_rows(layer.module, d, starts).flatten(1)
        if layer.weight is not None and id(layer.weight) in spans:
            out = d.new_empty(len(starts) - 1, *layer.weight.shape)
            layer.rule.weight_rows(layer.module, a, d, starts, out)
            rest[:, slice(*spans[id(layer.weight)])] += out.reshape(len(out), -1)


def _is_factored(layer: Layer) -> bool:
    if layer.weight is None or layer.weight.dim() < 2:
        return False
    return not (isinstance(layer.module, _ConvNd) and layer.module.groups > 1)


def _input_first(layer: Layer) -> bool:
    """Whether the weight's first dimension is the input dimension, as in an Embedding or a Conv1D of GPT-2."""
    return not isinstance(layer.module, nn.Linear | _ConvNd)


def _channels_last(layer: Layer, values: Tensor) -> Tensor:
    return values.flatten(2).transpose(1, 2) if isinstance(layer.module, _ConvNd) else values


def _split(share: int, rows: int, cols: int) -> tuple[int, int]:
    """Two dimensions of about equal size whose product is at most `share`."""
    left = max(1, min(rows, int(share**0.5)))
    right = min(cols, share // left)
    return max(1, min(rows, share // right)), right


def _rotation(size: int, dim: int, generator: torch.Generator) -> Tensor:
    """Orthonormal columns `[size, dim]`, scaled so that projected vectors keep their length on average."""
    columns, _ = torch.linalg.qr(torch.randn(size, dim, generator=generator))
    return columns * (size / dim) ** 0.5
