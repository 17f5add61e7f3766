"""The model that is explained, with its data, its mean test loss, and the results that several methods share.

Each result is computed when it is first needed. Its CPU seconds are kept too, because they are part of the cost of
every method that uses the result.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.sizes import MethodScale
from benchmarks.tasks import LOSS, Lissa, Task
from ggda_ext import GroupGradients, properties
from ggda_ext.curvature import Hessian, lissa
from ggda_ext.curvature.conjugate_gradients import conjugate_gradients
from ggda_ext.data import IndexedData
from ggda_ext.model import ParameterSpace
from ggda_ext.properties import MeanProperty, property_gradient
from ggda_ext.training import Trained

LISSA_BATCH = 128
LARGE_BATCH = 1024  # for tabular data
CG_STEPS = 10  # dattri's default
_TRIES = 4  # attempts of LiSSA; the scale is doubled after each one that diverges
T = TypeVar("T")


@dataclass(frozen=True)
class Timed(Generic[T]):
    """A result and the CPU seconds it took."""

    value: T
    seconds: float


def timed(function: Callable[..., T], *args: Any, **kwargs: Any) -> Timed[T]:
    """Call a function and measure its CPU time."""
    start = time.process_time()
    value = function(*args, **kwargs)
    return Timed(value, time.process_time() - start)


class Subject:
    """The model of one seed, and the property that is explained: its mean test loss.

    Args:
        task: data, model and training.
        methods: settings of the methods.
        seed: seed of the model.
        labels: training labels `[n]` that replace the labels of the data.
        models: where trained models are kept; the cache if left out.
    """

    def __init__(
        self, task: Task, methods: MethodScale, seed: int, labels: Tensor | None = None, models: Path | None = None
    ) -> None:
        self.task, self.methods, self.seed, self.labels, self.models = task, methods, seed, labels, models
        x, y = task.data.train
        self.train = (x, y if labels is None else labels)
        self.test = task.data.test

    @cached_property
    def trained(self) -> Trained:
        """The model trained on all points, with checkpoints and learning rates."""
        return self.task.trained(self.seed, self.labels, self.models)

    @property
    def model(self) -> nn.Module:
        return self.trained.model

    @property
    def property(self) -> MeanProperty:
        """The mean test loss."""
        return properties.mean_loss(self.test, LOSS)

    def first(self, count: int) -> Subject:
        """Return a copy with only the first training points; the model and the results so far are shared."""
        other = copy.copy(self)
        other.train = (self.train[0][:count], self.train[1][:count])
        return other

    @cached_property
    def direction(self) -> Timed[Tensor]:
        """Gradient of the mean test loss `[1, p]`."""
        return timed(property_gradient, self.property, self.model, ParameterSpace(self.model).parameters)

    @cached_property
    def _outputs(self) -> Tensor:
        """Outputs for the test points."""
        model = self.model  # outside of no_grad, because this may train the model
        with torch.no_grad():
            return torch.cat([model(part) for part in self.test[0].split(512)])

    @cached_property
    def accuracy(self) -> float:
        """Test accuracy."""
        return float((self._outputs.argmax(1) == self.test[1]).double().mean())

    @cached_property
    def loss(self) -> float:
        """Mean test loss."""
        return float(LOSS(self._outputs, self.test[1]))

    @cached_property
    def ensemble(self) -> tuple[dict[str, Tensor], ...]:
        """States of models trained on random halves of the points, for TRAK."""
        made = self.task.ensemble(self.methods.trak_models, seed=self.seed, labels=self.labels, folder=self.models)
        return tuple(model.state_dict() for model in made.models)

    @cached_property
    def solved(self) -> tuple[Timed[Tensor], Lissa]:
        """H⁻¹ times the gradient of the mean test loss `[1, p]` by LiSSA, and the settings that were used.

        The scale is doubled until the recursion does not diverge.
        """
        settings, direction = self.task.lissa, self.direction.value
        for attempts_left in reversed(range(_TRIES)):
            try:
                found = timed(
                    lissa, self._hessian, direction, depth=settings.depth, scaling=settings.scale,
                    damping=settings.damping, repeat=settings.repeats, batch_size=LISSA_BATCH, seed=self.seed,
                )  # fmt: skip
                break
            except ValueError:
                if not attempts_left:
                    raise
                settings = replace(settings, scale=2 * settings.scale)
        return found, settings

    @cached_property
    def solved_by_gradients(self) -> Timed[Tensor]:
        """H⁻¹ times the gradient of the mean test loss `[1, p]` by a few steps of conjugate gradients.

        The Hessian is that of all training points, with LiSSA's damping.
        """
        return timed(
            conjugate_gradients, self._hessian, self.direction.value,
            max_iter=CG_STEPS, regularization=self.task.lissa.damping,
        )  # fmt: skip

    @cached_property
    def _hessian(self) -> Hessian:
        """The Hessian of the mean training loss."""
        space, data = ParameterSpace(self.model), IndexedData(self.train, "the training data")
        size = LARGE_BATCH if self.train[0].dim() == 2 else LISSA_BATCH
        return Hessian(space, lambda model, batch: LOSS(model(batch[0]), batch[1]), data, size)

    def gradients(self, groups: Any, per_sample: bool = False) -> GroupGradients:
        """Return the provider for the training points, with the best strategy or vectorised gradients per point."""
        return GroupGradients(self.model, LOSS, self.train, groups, strategy="persample" if per_sample else "auto")
