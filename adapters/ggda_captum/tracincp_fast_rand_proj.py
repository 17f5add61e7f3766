"""TracIn of the last layer's weight W alone, directly or through random projections.

The gradient of point i is d_i a_iᵀ, of a group Σ_{i∈G} d_i a_iᵀ; projected, √η P_dᵀ (Σ_{i∈G} d_i a_iᵀ) P_a.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import captum.influence
import torch
from captum.influence._utils.common import KMostInfluentialResults
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ggda_captum.group_influence import OfProperty
from ggda_captum.nearest_neighbors import ExactNearestNeighbors
from ggda_captum.tracincp import CheckpointInfluence
from ggda_ext import ExampleLoss, PointGradients
from ggda_ext.distributed import in_order, my_share
from ggda_ext.losses import OutputLoss, example_losses, model_output
from ggda_ext.storage.fingerprint import sketch_of

Blocks = Iterable[tuple[Tensor, Tensor]]
Projections = tuple[Tensor, Tensor] | None


class LastLayerLoss(ExampleLoss):
    """The loss as a function of the last layer alone: whatever the model does after it counts as the identity.

    At output f the loss is taken at ``f + (z - stop(z))`` with z the layer's output: the value is that of f, and the
    gradient at z is ∂loss/∂f.
    """

    def __init__(self, loss_fn: Any, layer: nn.Module) -> None:
        self.loss_fn, self.layer = loss_fn, layer

    def each(self, model: nn.Module, batch: Any) -> Tensor:
        """Loss of every example `[b]`."""
        seen: list[Tensor] = []
        handle = self.layer.register_forward_hook(lambda module, args, output: seen.append(output))
        try:
            output, target = model_output(model, batch)
        finally:
            handle.remove()
        if seen and seen[-1] is not output and seen[-1].shape == output.shape:
            output = output.detach() + (seen[-1] - seen[-1].detach())
        return example_losses(self.loss_fn, output, target)


class TracInCPFast(CheckpointInfluence, captum.influence.TracInCPFast):
    """Captum's `TracInCPFast`, with `groups=`, `influence(property=…)`, and DataLoaders as `inputs`.

    Like Captum it leaves out the bias of the last layer, and takes the model's output for the output of that layer;
    where the model goes on after it (a softmax), `property` is explained by true gradients on both sides instead.
    """

    final_fc_layer: Any
    _captum_takes_loaders = False
    _of_outputs = (OutputLoss, LastLayerLoss)

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


class TracInCPFastRandProj(TracInCPFast, captum.influence.TracInCPFastRandProj):
    """Captum's `TracInCPFastRandProj`, with `groups=`, `influence(property=…)` and `self_influence()` of groups.

    Nearest neighbours are exact by default if there are groups, or if the annoy package is missing. Only one row
    per group is kept, `src_intermediate_quantities [groups, projection]`. Difference of the group path: the
    training side uses `loss_fn`, where Captum uses `test_loss_fn` on both sides. With `save_dir` the rows of the groups
    are kept and found again if the projections are the same: call `torch.manual_seed` first, Captum draws them.
    """

    _captum_takes_loaders = True
    src_intermediate_quantities: Tensor
    projection_quantities: Projections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = {name: kwargs.pop(name) for name in ("groups", "strategy", "save_dir", "tag") if name in kwargs}
        bound = inspect.signature(captum.influence.TracInCPFastRandProj).bind(*args, **kwargs)
        exact = own.get("groups") is not None or find_spec("annoy") is None
        if exact and bound.arguments.get("nearest_neighbors") is None:
            bound.arguments["nearest_neighbors"] = ExactNearestNeighbors()
        super().__init__(*bound.args, **bound.kwargs, **own)

    def self_influence(self, *args: Any, **kwargs: Any) -> Tensor:
        """Self influence of every group `[k]`, or of given points `[n]`, from their projections.

        See `TracInCP.self_influence` for what it means. Without groups it raises NotImplementedError, as in Captum.
        """
        if self.groups is None:
            return super().self_influence(*args, **kwargs)
        bound = inspect.signature(captum.influence.TracInCPFastRandProj.self_influence).bind(self, *args, **kwargs)
        points = bound.arguments.get("inputs")
        if points is not None:
            return self.compute_intermediate_quantities(points).square().sum(1)
        return self._in_group_order(self.src_intermediate_quantities.square().sum(1))

    def _by_captum(self, inputs: Any) -> bool:
        return True  # its own code, on the projections below

    def _get_intermediate_quantities_tracincp_fast_rand_proj(
        self, inputs: Any, projection_quantities: Projections, test: bool = False
    ) -> Tensor:
        """Projections `[n, projection]` of points; of groups for the training side, of ∇g for a property."""
        training = not hasattr(self, "src_intermediate_quantities")  # the constructor asks for it first
        if isinstance(inputs, OfProperty) or (self._grouped and test):
            return self._projected(lambda: self._test_blocks(inputs), projection_quantities)
        if self._grouped and training:
            return self._projected_groups(projection_quantities)
        return super()._get_intermediate_quantities_tracincp_fast_rand_proj(inputs, projection_quantities, test)

    def _test_blocks(self, inputs: Any) -> Blocks:
        directions = self._directions(self._provider(inputs=inputs), inputs)
        if isinstance(directions, PointGradients):
            return self._point_provider(directions).small_blocks()
        mine = torch.tensor(my_share(len(directions)), dtype=torch.long)
        return [(mine, directions[mine])]

    def _projected(self, blocks: Callable[[], Blocks], projections: Projections) -> Tensor:
        """√η P_dᵀ G P_a of all rows G, the checkpoints side by side."""

        parts = self._at_checkpoints(lambda number: self._embedded(blocks(), projections))
        return torch.cat([part * rate**0.5 for rate, part in parts], 1)

    def _projected_groups(self, projections: Projections) -> Tensor:
        """The same of all groups, kept in `save_dir`."""
        made_with = {"projections": [] if projections is None else [sketch_of(part) for part in projections]}

        def embedding(number: int) -> Tensor:
            provider = self._provider()
            return kept.array(
                provider, number, "projected", made_with, lambda: self._embedded(provider.small_blocks(), projections)
            )

        with self._keep() as kept:
            return torch.cat([part * rate**0.5 for rate, part in self._at_checkpoints(embedding)], 1)

    def _embedded(self, blocks: Blocks, projections: Projections) -> Tensor:
        shape = self.final_fc_layer.weight.shape
        return in_order((ids, _project(rows.view(-1, *shape), projections)) for ids, rows in blocks)


def _project(rows: Tensor, projections: Projections) -> Tensor:
    if projections is not None:
        of_d, of_a = projections
        rows = of_d.T @ (rows @ of_a)
    return rows.flatten(1)
