"""A look at two examples before the work starts: what the strategies can see, and what they will cost."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ggda_ext.data import IndexedData, batch_length, to_device
from ggda_ext.gradients import forward, persample
from ggda_ext.gradients.capture import Layer, Observer
from ggda_ext.gradients.checks import check_same_losses
from ggda_ext.gradients.coverage import covered_layers, random_direction, reference_scores, tolerance
from ggda_ext.gradients.job import LossModule
from ggda_ext.gradients.parameters import ParameterSpace
from ggda_ext.gradients.plan import Facts
from ggda_ext.groups import Groups
from ggda_ext.losses import ExampleLoss

LARGEST_BATCH = 16_384
CACHED_BYTES = 13 * 2**20  # a batch whose activations stay near the cache; more makes small models slower
ENOUGH_POINTS = 1024  # but no fewer points than this, if the budget allows
_BYTES_PER_ACTIVATION = 4  # an activation, its gradient, what autograd keeps of it, and a tangent


class Survey:
    """The layers to observe and the facts the choice of a strategy depends on."""

    def __init__(
        self,
        space: ParameterSpace,
        loss: ExampleLoss,
        data: IndexedData,
        groups: Groups,
        batch_size: int | None,
        memory_budget: int,
        strategy: str,
    ) -> None:
        batch, again = (to_device(data.first(2), space.device) for _ in range(2))
        losses, activation_bytes = _losses_and_bytes(space.model, loss, batch)
        with torch.no_grad():
            check_same_losses(losses, loss.each(space.model, again), data.name)
        work = _Work(batch_length(batch))
        self.layers, uncovered = covered_layers(space, loss, batch, work)
        bytes_per_point = _BYTES_PER_ACTIVATION * activation_bytes
        points = int(groups.sizes.sum())
        self._bytes_per_point = bytes_per_point
        self._most_points = batch_size or _batch_size(bytes_per_point, memory_budget)
        size = min(self._most_points, points)
        self.facts = Facts(
            points=points,
            groups=len(groups),
            parameters=space.size,
            work_per_point=float(space.size) if uncovered else max(work.forward_pass, 1.0),
            uncovered=uncovered,
            not_ghost=work.not_ghost or _shared_parameter(self.layers),
            ghost_work=work.pairs,
            no_forward_mode=_no_forward_mode(space, loss, batch) if uncovered or strategy == "forward" else None,
            no_vmap=_no_vmap(space, loss, batch) if uncovered or strategy == "persample" else None,
            batch_size=size,
            working_bytes=bytes_per_point * size,
        )

    def on(self, groups: Groups) -> Survey:
        """The same model with other groups of more data of the same kind."""
        other = copy.copy(self)
        points = int(groups.sizes.sum())
        size = min(self._most_points, points)
        working_bytes = self._bytes_per_point * size
        other.facts = replace(
            self.facts, points=points, groups=len(groups), batch_size=size, working_bytes=working_bytes
        )
        return other


def _batch_size(bytes_per_point: int, memory_budget: int) -> int:
    wanted = max(CACHED_BYTES // bytes_per_point, ENOUGH_POINTS)
    size = int(max(1, min(wanted, memory_budget // bytes_per_point, LARGEST_BATCH)))
    return size - size % 16 if size > 16 else size


class _Work(Observer):
    """Multiplications per example, of a forward pass and of a pair of examples in `ghost`."""

    def __init__(self, size: int) -> None:
        self.size, self.forward_pass, self.pairs = size, 0.0, 0.0
        self.not_ghost: str | None = None

    def backward(self, layer: Layer, kept: Tensor, d: Tensor, repeats: int) -> None:
        if isinstance(layer.module, nn.Embedding) or layer.weight is None or layer.weight.dim() < 2:
            self.forward_pass += d.numel() / self.size
        else:
            channels = d.shape[-1] if isinstance(layer.module, nn.Linear) else d.shape[1]
            self.forward_pass += layer.weight.numel() * d.numel() / channels / self.size
        self.pairs += (kept.numel() + d.numel()) / self.size
        if not isinstance(layer.module, nn.Linear):
            self.not_ghost = f"{type(layer.module).__name__} {layer.name!r} is not a Linear layer"
        elif kept.dim() != 2 or repeats != 1:
            self.not_ghost = f"Linear {layer.name!r} sees more than one token per example"


def _shared_parameter(layers: list[Layer]) -> str | None:
    seen = [id(value) for layer in layers for value in (layer.weight, layer.bias) if value is not None]
    return "two layers share a parameter" if len(set(seen)) < len(seen) else None


def _no_forward_mode(space: ParameterSpace, loss: ExampleLoss, batch: Any) -> str | None:
    """Why forward-mode differentiation does not give the gradients of these examples, or None."""
    direction = random_direction(space)
    try:
        scores = forward.point_scores(
            LossModule(space.model, loss), space, forward.tangents(space, direction)[0], batch
        )
    except (RuntimeError, NotImplementedError) as error:
        return f"forward-mode differentiation of the model failed: {str(error).splitlines()[0]}"
    expected, norms = reference_scores(space, loss, batch, direction)
    if bool(((scores - expected.sum(1)).abs() <= tolerance(space) * norms.norm(dim=1)).all()):
        return None
    return "forward-mode differentiation of the model disagrees with its gradient"


def _no_vmap(space: ParameterSpace, loss: ExampleLoss, batch: Any) -> str | None:
    """Why vmap(grad) fails on these examples, or None."""
    try:
        persample.point_gradients(LossModule(space.model, loss), space, batch)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"vmap over the model failed: {str(error).splitlines()[0]}"
    return None


def _losses_and_bytes(model: nn.Module, loss: ExampleLoss, batch: Any) -> tuple[Tensor, int]:
    """Losses of the examples, and the bytes of the outputs of all leaf modules per example."""
    seen = 0

    def count(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal seen
        if isinstance(output, Tensor):
            seen += output.numel() * output.element_size()

    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    handles = [module.register_forward_hook(count) for module in leaves]
    try:
        with torch.no_grad():
            losses = loss.each(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return losses, max(1, seen // batch_length(batch))
