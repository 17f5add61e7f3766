"""How a model is trained: Adam with a schedule for the learning rate, and a batch order determined by a seed."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ggda_ext.words import check_required_counts

Schedule = Literal["onecycle", "linear", "constant"]

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
"""Adam's defaults in PyTorch."""

_UP, _START_DIVISOR, _END_DIVISOR = 0.3, 25.0, 1e4  # the defaults of OneCycleLR
_LOW_BETA1, _HIGH_BETA1 = 0.85, 0.95


@dataclass(frozen=True)
class Recipe:
    """Settings of a training with Adam on the mean loss of shuffled batches; an epoch's last batch may be smaller.

    Attributes:
        epochs: number of passes over the training points.
        learning_rate: the largest learning rate of the schedule.
        batch_size: points per step.
        weight_decay: Adam's L2 penalty, added to the gradient.
        schedule: ``"onecycle"`` (PyTorch's `OneCycleLR` with its defaults, which also changes Adam's beta1),
            ``"linear"`` (falls to zero) or ``"constant"``.

    >>> Recipe(epochs=2, learning_rate=0.1, batch_size=4).steps(10)
    6
    """

    epochs: int
    learning_rate: float
    batch_size: int
    weight_decay: float = 0.0
    schedule: Schedule = "onecycle"

    def __post_init__(self) -> None:
        check_required_counts(epochs=self.epochs, batch_size=self.batch_size)
        for name in ("learning_rate", "weight_decay"):
            if not isinstance(getattr(self, name), Real):
                raise TypeError(f"{name}={getattr(self, name)!r}: pass a number.")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate}: pass a positive number.")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay={self.weight_decay}: pass 0 or more.")
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"schedule={self.schedule!r} is not one of {', '.join(map(repr, get_args(Schedule)))}.")

    def steps_per_epoch(self, n: int) -> int:
        """Return the number of batches in an epoch over `n` points."""
        return -(-n // self.batch_size)

    def steps(self, n: int) -> int:
        """Return the number of steps of a training on `n` points."""
        return self.epochs * self.steps_per_epoch(n)

    def rates(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the learning rate and Adam's beta1 at every step `[steps]` of a training with `steps` steps."""
        at = np.arange(steps)
        if self.schedule == "constant":
            return np.full(steps, self.learning_rate), np.full(steps, BETA1)
        if self.schedule == "linear":
            return self.learning_rate * (1 - at / steps), np.full(steps, BETA1)
        low = self.learning_rate / _START_DIVISOR
        top = _UP * steps - 1
        rising = at <= top
        share = np.where(rising, at / top, (at - top) / (steps - 1 - top))
        falling = (1 + np.cos(np.pi * share)) / 2  # from 1 to 0 within each of the two phases
        goal = np.where(rising, self.learning_rate, low / _END_DIVISOR)
        start = np.where(rising, low, self.learning_rate)
        beta_start = np.where(rising, _HIGH_BETA1, _LOW_BETA1)
        beta_goal = np.where(rising, _LOW_BETA1, _HIGH_BETA1)
        return goal + (start - goal) * falling, beta_goal + (beta_start - beta_goal) * falling


def check_recipe(recipe: Any) -> None:
    """Raise an error if `recipe` is no `Recipe`."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is a {type(recipe).__name__}: pass a ggda_ext.training.Recipe.")


def order_generator(seed: int) -> torch.Generator:
    """Return the random generator of a training's batch order, the same for `train_one` and `train_many`."""
    if not isinstance(seed, Integral):
        raise TypeError(f"seed={seed!r}: pass a whole number.")
    return torch.Generator().manual_seed(int(seed))


def check_seeds(seeds: Any, *, once: bool = True) -> None:
    """Raise an error if `seeds` is no list of whole numbers, or is empty; with `once`, also if a seed occurs twice."""
    if isinstance(seeds, int):
        raise TypeError(f"seeds={seeds}: pass the seeds themselves, e.g. range({seeds}).")
    strange = [seed for seed in seeds if isinstance(seed, bool) or not isinstance(seed, Integral)]
    if strange:
        raise TypeError(f"seeds holds {strange[0]!r}: pass whole numbers, e.g. range(5).")
    if len(seeds) == 0:
        raise ValueError("seeds is empty: pass at least one.")
    if once and len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={list(seeds)} holds a seed twice: the same training again tells nothing about chance.")


def shuffled(points: Tensor, generator: torch.Generator) -> Tensor:
    """Return the training indices of one epoch in random order."""
    return points.index_select(0, torch.randperm(len(points), generator=generator))


def checked_subset(subset: Any, n: int, name: str = "subset") -> Tensor:
    """Return training indices `[r]` from indices, a mask `[n]`, or None for all points; raise an error if invalid."""
    if subset is None:
        return torch.arange(n)
    values = subset if isinstance(subset, Tensor) else np.array(subset)
    if isinstance(values, np.ndarray) and values.dtype.kind not in "biufc":
        raise TypeError(f"{name} holds {values.dtype}: pass whole numbers or a mask.")
    found = torch.as_tensor(values).detach().cpu()
    if found.dim() != 1:
        raise ValueError(f"{name} has shape {list(found.shape)}: pass indices or a mask, one-dimensional.")
    if len(found) == 0:
        raise ValueError(f"{name} is empty: a model needs at least one training point.")
    if found.dtype == torch.bool:
        if len(found) != n:
            raise ValueError(f"{name} is a mask of {len(found)} entries for {n} training points.")
        found = found.nonzero()[:, 0]
        if len(found) == 0:
            raise ValueError(f"{name} is a mask of no point: a model needs at least one.")
    elif found.is_floating_point() or found.is_complex():
        raise TypeError(f"{name} holds {found.dtype}: pass whole numbers or a mask.")
    found = found.long()
    outside = found[(found < 0) | (found >= n)]
    if len(outside):
        raise ValueError(f"{name} holds {len(outside)} indices outside 0 … {n - 1}, first {int(outside[0])}.")
    return found


def checked_data(data: Any, name: str = "data") -> tuple[Tensor, Tensor]:
    """Return the data as a pair of tensors ``(x, y)``; raise an error if it is not one."""
    if not (isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)):
        strange = (
            next((part for part in data if not isinstance(part, Tensor)), data) if isinstance(data, tuple) else data
        )
        if hasattr(strange, "to_numpy"):
            raise TypeError(
                f"{name} holds a {type(strange).__name__}: pass tensors, e.g. torch.tensor(df.to_numpy(), "
                "dtype=torch.float32) and torch.tensor(df['y'].to_numpy()), also as torch.float32 if y is no class."
            )
        raise TypeError(f"{name} is a {type(data).__name__}: pass a pair of tensors (x, y).")
    x, y = data
    if len(x) != len(y) or len(x) == 0:
        raise ValueError(f"{name} holds {len(x)} inputs and {len(y)} targets: pass as many of both, at least one.")
    return x, y
