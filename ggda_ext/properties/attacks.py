"""Attacks on the inputs of a batch, for properties that measure robustness.

An attack moves the first input x of every example inside the box ``|x' - x| ≤ eps``, in the direction in which the
example's loss rises at the current parameters: ``x' ← clip(x' + step · sign ∂loss/∂x')``. The start is not random, so
the same parameters give the same x'. After the attack x' is held fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ggda_ext.losses import LABEL_KEYS, ExampleLoss
from ggda_ext.model import full_precision

Attack = Callable[[nn.Module, ExampleLoss, Any], Any]
"""``attack(model, loss, batch)`` returns the attacked batch, without a graph."""


def fgsm(eps: float, clamp: tuple[float, float] | None = None) -> Attack:
    """Return the fast gradient sign attack: one step of size `eps`, ``x' = x + eps · sign ∂loss/∂x``.

    Args:
        eps: largest change of an entry of x.
        clamp: lowest and highest valid value of an entry, e.g. (0, 1) for images.
    """
    return pgd(eps, step=eps, steps=1, clamp=clamp)


def pgd(eps: float, step: float, steps: int, clamp: tuple[float, float] | None = None) -> Attack:
    """Return an attack by projected gradient descent on the negative loss: `steps` steps of size `step` inside the box.

    Args:
        eps: largest change of an entry of x.
        step: size of a step.
        steps: number of steps, at least 1.
        clamp: lowest and highest valid value of an entry, e.g. (0, 1) for images.
    """
    if not eps >= 0 or not step >= 0:
        raise ValueError(f"eps={eps} and step={step}: pass numbers that are not negative.")
    if steps < 1:
        raise ValueError(f"steps={steps}: an attack takes at least 1 step.")
    if clamp is not None and not clamp[0] < clamp[1]:
        raise ValueError(f"clamp={clamp}: pass (lowest, highest).")

    def attack(model: nn.Module, loss: ExampleLoss, batch: Any) -> Any:
        clean, with_input = _first_input(batch)
        moved = clean.detach()
        for _ in range(steps):
            moved.requires_grad_()
            total = loss.total(model, with_input(moved))
            with full_precision(total):
                (slope,) = torch.autograd.grad(total, moved)
            moved = (moved.detach() + step * slope.sign()).clamp(clean - eps, clean + eps)
            if clamp is not None:
                moved = moved.clamp(*clamp)
        return with_input(moved)

    return attack


class AttackedLoss(ExampleLoss):
    """The `loss` of the examples after the `attack`; gradients do not pass through the attack itself.

    It runs the model several times for one batch, so it is not suitable for providers that observe the layers.
    """

    def __init__(self, loss: ExampleLoss, attack: Attack) -> None:
        if not callable(attack) or attack in (fgsm, pgd):
            strange = f"{attack.__name__} itself" if callable(attack) else f"a {type(attack).__name__}"
            raise TypeError(f"attack is {strange}: pass fgsm(eps) or pgd(eps, step, steps).")
        self.loss, self.attack = loss, attack

    def each(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            attacked = self.attack(model, self.loss, batch)
        return self.loss.each(model, attacked)


def _first_input(batch: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return the first input of a batch, and a function that returns the batch with another first input."""
    value: Any
    put: Callable[[Tensor], Any]
    if isinstance(batch, Mapping):
        key = next((key for key in batch if key not in LABEL_KEYS), None)
        value, put = batch.get(key), lambda new: {**batch, key: new}
    elif isinstance(batch, tuple | list):
        value, put = batch[0], lambda new: (new, *batch[1:])
    else:
        value, put = batch, lambda new: new
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"the first input of a batch is {kind}: an attack needs a tensor of floats to move.")
    return value, put
