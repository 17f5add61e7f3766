"""Train many models of one shape at once, with different seeds and training subsets.

Small models form a stack and take every step together. Each model gets the same batches, the same Adam and the same
schedule as in `train_one`; results are the same up to rounding. Large models are trained one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from ggda_ext.checkpoints import State, load_state, state_on_cpu
from ggda_ext.losses import check_not_broadcast, has_class_outside, training_loss
from ggda_ext.model import SavedState
from ggda_ext.sharing import ProgressBar
from ggda_ext.training.batch_order import StepBatch, Walk, batches, by_falling_steps, walks
from ggda_ext.training.denormals import denormals_flushed
from ggda_ext.training.loop import (
    LossFn,
    MakeModel,
    check_finite,
    initial_model,
    new_model,
    one_number,
    run_model,
    seeded,
    train_one,
)
from ggda_ext.training.recipe import BETA2, EPS, Recipe, check_recipe, check_seeds, checked_data, checked_subset
from ggda_ext.training.stacked import LayerGradients, StackedLayers
from ggda_ext.training.vmapped import MappedGradients, MappedModel
from ggda_ext.words import check_counts

WORKING_SET = 16 * 2**20
"""Bytes that the models of one stack use in a step: about the size of a processor's cache."""

MODELS_AT_ONCE = 64
"""Number of models whose outputs are computed together."""

FEW = 8
"""Number of points on which a stack is compared with a model of its own before it is used."""


Layout = StackedLayers | MappedModel
"""Layout of a stack: how models are stored as tensors whose first dimension is the model."""


class TrainedModels:
    """The models trained by `train_many`, which can be iterated over; `outputs` runs all of them at once.

    Args:
        make_model: builds a model of the same shape.
        stack: layout and tensors `[models, …]` of the models, or the state dicts of models trained one after the other.
    """

    def __init__(self, make_model: MakeModel, stack: tuple[Layout, list[Tensor]] | list[State]) -> None:
        self._make_model, self._stack = make_model, stack

    def __len__(self) -> int:
        return len(self._stack) if isinstance(self._stack, list) else len(self._stack[1][0])

    def __iter__(self) -> Iterator[nn.Module]:
        return (self.model(j) for j in range(len(self)))

    def state(self, j: int) -> State:
        """Return the state dict of model j."""
        if not -len(self) <= j < len(self):
            raise IndexError(f"model {j} is out of range: there are {len(self)} models.")
        if isinstance(self._stack, list):
            return self._stack[j]
        layout, tensors = self._stack
        return layout.state([tensor[j] for tensor in tensors])

    def model(self, j: int) -> nn.Module:
        """Return model j, in eval mode."""
        state = self.state(j)
        model = initial_model(self._make_model, 0)
        load_state(model, state)
        return model.to(next(iter(state.values())).device).eval()

    @torch.no_grad()
    def outputs(self, x: Tensor, batch_size: int = 1024) -> Tensor:
        """Return the outputs of every model `[models, n, …]`."""
        if not isinstance(x, Tensor):
            raise TypeError(f"x is a {type(x).__name__}: pass a tensor, the inputs without their targets.")
        batches = x.split(batch_size)
        if isinstance(self._stack, list):
            models = (model.to(x.device) for model in self)
            return torch.stack([torch.cat([run_model(model, points) for points in batches]) for model in models])
        layout, tensors = self._stack
        parts = zip(*(tensor.split(MODELS_AT_ONCE) for tensor in tensors), strict=True)
        return torch.cat([torch.cat([layout.outputs(part, points) for points in batches], 1) for part in parts])


@torch.inference_mode(False)
@torch.enable_grad()
def train_many(
    make_model: MakeModel,
    loss_fn: LossFn,
    data: tuple[Tensor, Tensor],
    recipe: Recipe,
    *,
    seeds: Sequence[int],
    subsets: Sequence[Any] | None = None,
    at_once: int | None = None,
    show_progress: bool = False,
) -> TrainedModels:
    """Train a model for every seed, each on its own subset of the training points.

    Up to rounding, model j is the model that ``train_one(initial_model(make_model, seeds[j]), …, seed=seeds[j],
    subset=subsets[j])`` returns.

    Args:
        make_model: builds a model; its initial weights come from torch's global random state.
        loss_fn: ``loss_fn(model(x), y)`` returns a mean over the batch.
        data: the training set ``(x, y)``.
        recipe: epochs, learning rate, batch size, weight decay, schedule.
        seeds: one per model, for initial weights and batch order.
        subsets: one per model: training indices, a mask `[n]`, or None for all points; all points if left out.
        at_once: models per stack; 1 trains one model after the other. If left out, it is chosen by the model's size.
        show_progress: whether to show a progress bar.
    """
    x, y = checked_data(data)
    check_recipe(recipe)
    check_seeds(seeds, once=False)
    check_counts(at_once=at_once)
    given = [None] * len(seeds) if subsets is None else list(subsets)
    if len(given) != len(seeds) or not given:
        raise ValueError(f"subsets has {len(given)} entries, seeds {len(seeds)}: pass one of each per model.")
    points = [checked_subset(subset, len(x), f"subsets[{j}]") for j, subset in enumerate(given)]
    if at_once == 1:
        new_model(make_model)  # for its check, which is a part of `layout_of`
    layout = None if at_once == 1 else layout_of(make_model, loss_fn, (x, y))
    if layout is None:
        states = []
        for seed, subset in zip(
            ProgressBar(seeds, "training", unit="model", disable=not show_progress), points, strict=True
        ):
            model = initial_model(make_model, seed)
            train_one(model, loss_fn, (x, y), recipe, seed=seed, subset=subset)
            states.append(state_on_cpu(model))
        return TrainedModels(make_model, states)
    together = at_once or models_at_once(layout, recipe)
    order = by_falling_steps(points, recipe)
    done: list[list[Tensor]] = []
    total = sum(recipe.steps(len(subset)) for subset in points)
    gradients = layout.gradients(training_loss(loss_fn), x, y)
    with (
        denormals_flushed(),
        ProgressBar(total=total, desc="training", unit="step", unit_scale=True, disable=not show_progress) as progress,
    ):
        for chosen in np.array_split(order, -(-len(order) // together)):
            some = [int(j) for j in chosen]
            tensors = layout.stack([initial_model(make_model, seeds[j]).to(x.device) for j in some])
            walking = walks([points[j] for j in some], [seeds[j] for j in some], recipe, len(x))
            _train(tensors, gradients, walking, recipe.weight_decay, progress)
            finite = torch.stack([tensor.isfinite().reshape(len(some), -1).all(1) for tensor in tensors]).all(0)
            for at in (~finite).nonzero()[:, 0].tolist():
                state = layout.state([tensor[at] for tensor in tensors])
                check_finite(state, seeds[some[at]], len(points[some[at]]), recipe, x)
            done.append(tensors)
    back = torch.from_numpy(np.argsort(order)).to(x.device)
    return TrainedModels(make_model, (layout, [torch.cat(parts)[back] for parts in zip(*done, strict=True)]))


@torch.inference_mode(False)
@torch.enable_grad()
def layout_of(make_model: MakeModel, loss_fn: LossFn, data: tuple[Tensor, Tensor]) -> Layout | None:
    """Return the layout of models of this shape in a stack; None if they have to be trained one after the other."""
    model = new_model(make_model).to(data[0].device).train()
    for layout in (StackedLayers.of(model, loss_fn, *data), MappedModel.of(model)):
        if layout is not None and _is_faithful(layout, model, loss_fn, *data):
            return layout
    return None


def _is_faithful(layout: Layout, model: nn.Module, loss_fn: LossFn, x: Tensor, y: Tensor) -> bool:
    """Whether a stack of one model has the gradients, the outputs and the state dict of the model, on a few points.

    A model that writes to its parameters when it runs has not: a stack gives it copies.
    """
    at, targets = torch.arange(min(len(x), FEW)), y
    x, y = x[at.to(x.device)], y[at.to(y.device)]
    tensors = layout.stack([model])
    slopes, before = [torch.empty_like(tensor) for tensor in tensors], SavedState(model)
    with seeded(0, x.device):
        try:
            layout.gradients(training_loss(loss_fn), x, y).write(tensors, slopes, StepBatch(at[None], len(at)))
            outputs = layout.outputs(tensors, x)
            model.zero_grad(set_to_none=True)
            output = model.train()(x)
            one_number(training_loss(loss_fn)(output, y)).backward()
            own_outputs = model.eval()(x)
        except (RuntimeError, IndexError, TypeError, ValueError):
            # vmap raises RuntimeError for random numbers, and for code that reads values; a model or a loss that does
            # not fit the data fails alone too, with an error that says what to do
            return False
    if before.changed() or has_class_outside(loss_fn, output, targets):
        return False
    check_not_broadcast(loss_fn, output, y)
    found = layout.state([slope[0] for slope in slopes])
    own = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    if not found.keys() == own.keys() == model.state_dict().keys():  # Adam skips parameters without a gradient
        return False
    scale = max(map(_largest, own.values()))
    same_outputs = not isinstance(outputs, Tensor) or _is_close(outputs[0], own_outputs, 0)
    return same_outputs and all(_is_close(found[name], gradient, scale) for name, gradient in own.items())


def _is_close(found: Tensor, expected: Tensor, scale: float) -> bool:
    """Whether two tensors are equal up to rounding, of their own size or, where terms cancel, of a larger `scale`."""
    if found.shape != expected.shape or not expected.is_floating_point():
        return torch.equal(found, expected)
    eps = torch.finfo(expected.dtype).eps
    return _largest(found - expected) <= eps ** (1 / 3) * _largest(expected) + 100 * eps * scale


def _largest(values: Tensor) -> float:
    return float(values.detach().abs().max()) if values.numel() else 0.0


def models_at_once(layout: Layout, recipe: Recipe) -> int:
    """Return the number of models for which a stack is fastest."""
    return max(8, WORKING_SET // layout.bytes_at_work(recipe.batch_size))


@torch.no_grad()
def _train(
    tensors: list[Tensor],
    gradients: LayerGradients | MappedGradients,
    walking: list[Walk],
    weight_decay: float,
    progress: ProgressBar,
) -> None:
    """Train the models of a stack in place, with PyTorch's fused Adam."""
    slopes, means, squares = ([torch.zeros_like(tensor) for tensor in tensors] for _ in range(3))
    starts = np.cumsum([0, *map(len, walking)])
    parts = [
        [[tensor[start:end] for tensor in some] for some in (tensors, slopes, means, squares)]
        for start, end in pairwise(starts.tolist())
    ]
    counters = [[torch.zeros((), device=tensor.device) for tensor in tensors] for _ in walking]
    models = 0
    for step, active, batch in batches(walking):
        if len(batch.indices) != models:
            models = len(batch.indices)
            training, slope = ([tensor[:models] for tensor in some] for some in (tensors, slopes))
        gradients.write(training, slope, batch)
        for walk, (own, slope_part, mean, square), counter in zip(active, parts, counters, strict=False):
            adam(
                own, slope_part, mean, square, [], counter,
                fused=True, amsgrad=False, maximize=False, weight_decay=weight_decay,
                lr=float(walk.rates[0][step]), beta1=float(walk.rates[1][step]), beta2=BETA2, eps=EPS,
            )  # fmt: skip
        progress.update(models)
