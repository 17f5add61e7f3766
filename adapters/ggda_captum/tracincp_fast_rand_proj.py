"""TracIn of the last layer's weight W alone, directly or through random projections.

The gradient of point i is d_i a_iᵀ. The gradient of a group is Σ_{i∈G} d_i a_iᵀ, and its projection is
√η P_dᵀ (Σ_{i∈G} d_i a_iᵀ) P_a.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack, closing
from importlib.util import find_spec
from typing import Any

import captum.influence
import torch
from captum.influence._utils.common import KMostInfluentialResults
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ggda_captum.arguments import WORDS
from ggda_captum.group_influence import OfProperty
from ggda_captum.last_layer import Asked, versions
from ggda_captum.nearest_neighbors import ExactNearestNeighbors
from ggda_captum.tracincp import CheckpointInfluence
from ggda_ext import ExampleLoss, PointGradients
from ggda_ext.attribution import property_directions
from ggda_ext.drop_in import KEYWORDS
from ggda_ext.losses import example_losses, model_output
from ggda_ext.storage.fingerprint import sums_of
from ggda_ext.words import refuse_words

Projections = tuple[Tensor, Tensor] | None


class TracInCPFast(CheckpointInfluence, captum.influence.TracInCPFast):
    """Captum's `TracInCPFast`, with `groups=`, `influence(property=…)`, and DataLoaders as `inputs`.

    Like Captum, it leaves out the bias of the last layer and assumes that the model's output is the output of this
    layer. If the model does more after the layer (a softmax), `property` is explained with the true gradients of the
    training points and of the property instead. Unlike Captum, the group path does not divide scores by batch sizes if
    a mean loss has no `reduction` attribute (a lambda); Captum takes it for a sum.
    """

    final_fc_layer: Any
    _captum_takes_loaders = False

    def _parameters(self) -> list[nn.Parameter]:
        return [self.final_fc_layer.weight]

    def _example_loss(self, loss_fn: Any, inputs: Any) -> ExampleLoss:
        if isinstance(inputs, OfProperty):
            return super()._example_loss(loss_fn, inputs)
        return LastLayerLoss(loss_fn, self.final_fc_layer)

    def _influence(self, inputs: Any, **options: Any) -> Tensor:
        if self._one_by_one(inputs):
            return torch.cat([super(TracInCPFast, self)._influence(batch, **options) for batch in inputs])
        return super()._influence(inputs, **options)

    def _get_k_most_influential(self, inputs: Any, *args: Any, **options: Any) -> KMostInfluentialResults:
        if not self._one_by_one(inputs):
            return super()._get_k_most_influential(inputs, *args, **options)
        found = [super(TracInCPFast, self)._get_k_most_influential(batch, *args, **options) for batch in inputs]
        return KMostInfluentialResults(*map(torch.cat, zip(*found, strict=True)))

    def _one_by_one(self, inputs: Any) -> bool:
        return isinstance(inputs, DataLoader) and self._by_captum(inputs) and not self._captum_takes_loaders


class LastLayerLoss(ExampleLoss):
    """The loss as a function of the last layer alone. Anything the model does after this layer counts as the identity.

    With f the model's output and z the layer's output, the loss is computed at ``f + (z - stop(z))``. This has the
    value of f, and the gradient at z is ∂loss/∂f. As in Captum, the layer's input counts as constant, and z is what the
    layer itself returns, before hooks and before the model overwrites it.
    """

    def __init__(self, loss_fn: Any, layer: nn.Module) -> None:
        self.loss_fn, self.layer = loss_fn, layer
        self._first = bool(layer._forward_hooks)  # the user's hooks; the core's, which come later, must run before ours

    def each(self, model: nn.Module, batch: Any) -> Tensor:
        """Loss of every example `[b]`."""
        seen: list[tuple[Tensor, list[int], Tensor]] = []

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            seen.append((output, versions(output), output.clone()))

        with ExitStack() as hooks:
            hooks.callback(self.layer.register_forward_pre_hook(_as_constants).remove)
            hooks.callback(self.layer.register_forward_hook(keep, prepend=self._first).remove)
            output, target = model_output(model, batch)
        if seen:
            given, before, own = seen[-1]
            changed = given is not output or versions(given) != before
            if changed and own.shape == output.shape:
                output = output.detach() + (own - own.detach())
        return example_losses(self.loss_fn, output, target)


def _as_constants(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value.detach() for value in args)


class TracInCPFastRandProj(TracInCPFast, captum.influence.TracInCPFastRandProj):
    """Captum's `TracInCPFastRandProj`, with `groups=`, `influence(property=…)` and `self_influence()` of groups.

    By default, nearest neighbours are exact if there are groups, or if the annoy package is missing. Only one row per
    group is kept, in `src_intermediate_quantities [groups, projection]`. In the group path the training side uses
    `loss_fn`; Captum uses `test_loss_fn` on both sides. `save_dir` keeps the rows of the groups, and they are used
    again if the projections are the same. Captum draws the projections at random: call `torch.manual_seed` first.
    """

    _captum_takes_loaders = True
    src_intermediate_quantities: Tensor
    projection_quantities: Projections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = {word: kwargs.pop(word) for word in KEYWORDS if word in kwargs}
        refuse_words(kwargs, WORDS, captum.influence.TracInCPFastRandProj, type(self).__name__)
        bound = inspect.signature(captum.influence.TracInCPFastRandProj).bind(*args, **kwargs)
        exact = own.get("groups") is not None or find_spec("annoy") is None
        if exact and bound.arguments.get("nearest_neighbors") is None:
            bound.arguments["nearest_neighbors"] = ExactNearestNeighbors()
        super().__init__(*bound.args, **bound.kwargs, **own)

    def self_influence(self, *args: Any, **kwargs: Any) -> Tensor:
        """Self influence of every group `[k]`, or of the given points `[n]`, computed from projections.

        `TracInCP.self_influence` explains its meaning. Without groups it raises NotImplementedError, as in Captum.
        """
        if self.groups is None:
            return super().self_influence(*args, **kwargs)
        bound = inspect.signature(captum.influence.TracInCPFastRandProj.self_influence).bind(self, *args, **kwargs)
        points = bound.arguments.get("inputs")
        if points is not None:
            return self.compute_intermediate_quantities(points).square().sum(1)
        return self._drop_in.in_group_order(self.src_intermediate_quantities.square().sum(1))

    def _by_captum(self, inputs: Any) -> bool:
        return True  # Captum's code runs on the projections that the methods below return

    def _get_intermediate_quantities_tracincp_fast_rand_proj(
        self, inputs: Any, projection_quantities: Projections, test: bool = False
    ) -> Tensor:
        """Projections `[n, projection]` of the gradients of points, of groups (training side), or of a property."""
        grouped = not self._drop_in.by_toolkit
        if isinstance(inputs, OfProperty) or (grouped and test):
            return self._projected_tests(self._asked(inputs), projection_quantities)
        if grouped and not hasattr(self, "src_intermediate_quantities"):  # the constructor asks for the training side
            return self._projected_groups(self._asked(None), projection_quantities)
        return super()._get_intermediate_quantities_tracincp_fast_rand_proj(inputs, projection_quantities, test)

    def _projected_tests(self, asked: Asked, projections: Projections) -> Tensor:
        """√η P_dᵀ G P_a for the gradients G of test points or of a property, with the checkpoints side by side."""
        provider, explained, _ = asked
        parts = []
        with closing(self._loaded_checkpoints()) as loaded:
            for _, rate in loaded:
                if isinstance(explained, PointGradients):
                    part = provider.tests(explained).map_rows(lambda rows: self._project(rows, projections))
                else:
                    part = self._project(property_directions(provider, explained), projections)
                parts.append(part * rate**0.5)
        return torch.cat(parts, 1)

    def _projected_groups(self, asked: Asked, projections: Projections) -> Tensor:
        """√η P_dᵀ G P_a for the summed gradients G of all groups, kept in `save_dir`."""
        provider, _, kept = asked
        made_with = {"projections": [] if projections is None else [sums_of(part) for part in projections]}

        def project_all() -> Tensor:
            return provider.map_rows(lambda rows: self._project(rows, projections))

        with kept, closing(self._loaded_checkpoints()) as loaded:
            return torch.cat(
                [kept.array(provider, at, "projected", made_with, project_all) * rate**0.5 for at, rate in loaded], 1
            )

    def _project(self, rows: Tensor, projections: Projections) -> Tensor:
        rows = rows.view(-1, *self.final_fc_layer.weight.shape)
        if projections is not None:
            of_d, of_a = projections
            rows = of_d.T @ (rows @ of_a)
        return rows.flatten(1)
