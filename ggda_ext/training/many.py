"""Training many models of one shape at once, with different seeds and training subsets.

Small models stand in a stack, one row of parameters each, and take every step together: the same batches, the same
Adam and the same schedules as `train_one` gives each of them alone, up to rounding. Large models take turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from tqdm.auto import tqdm

from ggda_ext.training.loop import LossFn, MakeModel, State, initial_model, state_on_cpu, train_one
from ggda_ext.training.mapped import MappedModel
from ggda_ext.training.order import StepBatch, batches, by_falling_steps, walks
from ggda_ext.training.recipe import BETA2, EPS, Recipe, checked_data, checked_subset
from ggda_ext.training.stacked import StackedLayers

WORKING_SET = 8 * 2**20
"""Bytes that the models of one stack touch in a step: about what stays in a processor's cache."""


class Gradients(Protocol):
    """Computes the gradients of a stack."""

    def write(self, flat: Tensor, gradient: Tensor, batch: StepBatch) -> None:
        """Write the gradients of the first models into `gradient`, of the shape `[models, p]` of `flat`."""


class Layout(Protocol):
    """How a model is laid out as a row of parameters `[p]`."""

    def row(self, model: nn.Module) -> Tensor:
        """The parameters of a model as a row `[p]`."""

    def state(self, row: Tensor) -> State:
        """The state dict of the model with these parameters `[p]`."""

    def outputs(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs of every model `[models, n, …]`."""

    def bytes_at_work(self, batch_size: int) -> int:
        """Memory one model touches in a training step, for numbers of four bytes."""

    def gradients(self, loss_fn: LossFn, x: Tensor, y: Tensor) -> Gradients:
        """What computes the gradients of a stack on this training set."""


class TrainedModels:
    """Models trained by `train_many`.

    Args:
        make_model: builds a model of their shape.
        layout: how their parameters are laid out, None for models trained one after the other.
        rows: parameters `[models, p]` in that layout, or state dicts.
    """

    def __init__(self, make_model: MakeModel, layout: Layout | None, rows: Tensor | list[State]) -> None:
        self._make_model, self._layout, self._rows = make_model, layout, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[nn.Module]:
        return (self.model(j) for j in range(len(self)))

    @property
    def batched(self) -> bool:
        """Whether the models were trained, and can be run, together."""
        return self._layout is not None

    def state(self, j: int) -> State:
        """The state dict of one model."""
        if not -len(self) <= j < len(self):
            raise IndexError(f"model {j} is out of range: there are {len(self)} models.")
        row = self._rows[j]
        return self._layout.state(row) if self._layout is not None else row  # type: ignore[arg-type,return-value]

    def model(self, j: int) -> nn.Module:
        """One model, in eval mode."""
        state = self.state(j)
        model = initial_model(self._make_model, 0)
        model.load_state_dict(state)
        return model.to(next(iter(state.values())).device).eval()

    @torch.no_grad()
    def outputs(self, x: Tensor, batch_size: int = 1024) -> Tensor:
        """Outputs of every model `[models, n, …]`."""
        if self._layout is None:
            return torch.stack([_outputs_of(model.to(x.device), x, batch_size) for model in self])
        parts = [
            torch.cat([self._layout.outputs(some, points) for points in x.split(batch_size)], 1)
            for some in torch.as_tensor(self._rows).split(64)
        ]
        return torch.cat(parts)


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

    Model j is what ``train_one(initial_model(make_model, seeds[j]), …, seed=seeds[j], subset=subsets[j])`` gives, up
    to rounding.

    Args:
        make_model: builds a model; its initial weights come from torch's global random state.
        loss_fn: ``loss_fn(model(x), y)``, a mean over the batch.
        data: the training set ``(x, y)``.
        recipe: epochs, learning rate, batch size, weight decay, schedule.
        seeds: one per model, for initial weights and batch order.
        subsets: one per model: training indices, a mask `[n]`, or None for all points; all points if left out.
        at_once: models per stack, 1 to train one after the other; chosen by size if left out.
        show_progress: show a progress bar.
    """
    x, y = checked_data(data)
    given = [None] * len(seeds) if subsets is None else list(subsets)
    if len(given) != len(seeds) or not given:
        raise ValueError(f"subsets has {len(given)} entries, seeds {len(seeds)}: pass one of each per model.")
    points = [checked_subset(subset, len(x), f"subsets[{j}]") for j, subset in enumerate(given)]
    layout = None if at_once == 1 else layout_of(make_model, loss_fn, (x, y))
    if layout is None:
        states = []
        for seed, subset in zip(tqdm(seeds, "training", unit="model", disable=not show_progress), points, strict=True):
            model = initial_model(make_model, seed)
            train_one(model, loss_fn, (x, y), recipe, seed=seed, subset=subset)
            states.append(state_on_cpu(model))
        return TrainedModels(make_model, None, states)
    together = at_once or models_at_once(layout, recipe)
    order = by_falling_steps(points, recipe)
    rows: list[Tensor] = []
    total = sum(recipe.steps(len(subset)) for subset in points)
    with tqdm(total=total, desc="training", unit="step", unit_scale=True, disable=not show_progress) as progress:
        for chosen in np.array_split(order, -(-len(order) // together)):
            some = [int(j) for j in chosen]
            flat = torch.stack([layout.row(initial_model(make_model, seeds[j])) for j in some]).to(x.device)
            walking = walks([points[j] for j in some], [seeds[j] for j in some], recipe, len(x))
            _train(flat, layout.gradients(loss_fn, x, y), walking, recipe.weight_decay, progress)
            rows.append(flat)
    return TrainedModels(make_model, layout, torch.cat(rows)[torch.from_numpy(np.argsort(order))])


def layout_of(make_model: MakeModel, loss_fn: LossFn, data: tuple[Tensor, Tensor]) -> Layout | None:
    """How models of this shape are laid out in a stack; None for those that are trained one after the other."""
    model = initial_model(make_model, 0).to(data[0].device).train()
    return StackedLayers.of(model, loss_fn, *data) or MappedModel.of(model, loss_fn, *data)


def models_at_once(layout: Layout, recipe: Recipe) -> int:
    """How many models a stack should hold to be fastest."""
    return max(4, WORKING_SET // layout.bytes_at_work(recipe.batch_size))


@torch.no_grad()
def _train(flat: Tensor, gradients: Gradients, walking: list[Any], weight_decay: float, progress: tqdm) -> None:
    """Train the models whose parameters are the rows of `flat`, in place, with PyTorch's fused Adam."""
    gradient, mean, square = (torch.zeros_like(flat) for _ in range(3))
    counters = [torch.zeros((), device=flat.device) for _ in walking]
    for step, active, batch in batches(walking):
        gradients.write(flat, gradient, batch)
        start = 0
        for walk, counter in zip(active, counters, strict=False):
            part = slice(start, start + len(walk))
            start = part.stop
            adam(
                [flat[part]], [gradient[part]], [mean[part]], [square[part]], [], [counter],
                fused=True, amsgrad=False, maximize=False, beta2=BETA2, eps=EPS, weight_decay=weight_decay,
                lr=float(walk.rates[0][step]), beta1=float(walk.rates[1][step]),
            )  # fmt: skip
        progress.update(start)


def _outputs_of(model: nn.Module, x: Tensor, batch_size: int) -> Tensor:
    return torch.cat([model(points) for points in x.split(batch_size)])
