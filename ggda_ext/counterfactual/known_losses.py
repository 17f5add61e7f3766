"""Find out by evaluating a training loss which known closed form it has, and whether a refit may use it.

The constants of a closed form are read off the loss at outputs of zero and one. The form is taken if it has the same
values and slopes as the loss elsewhere. A loss with negative curvature raises an error, because the problem of a refit
then has more than one solution. A loss without any curvature, such as a loss of log-probabilities, also raises an
error, because nothing would bound the outputs.
"""

from __future__ import annotations

import copy
import math
from contextlib import suppress

import torch
from torch import Tensor, nn

from ggda_ext.counterfactual.convex import (
    AnyLoss,
    ConvexLoss,
    LogisticLoss,
    LossFn,
    SoftmaxLoss,
    SquaredLoss,
    TwoClassLoss,
)
from ggda_ext.losses import ExampleLoss, OutputLoss

_PROBED = 64  # number of points on which convexity is checked
_MOVES = (0.0, 0.5, 3.0)  # how far outputs are moved to compare losses and to check convexity
_FAR = 10.0  # the same in units of 1 + the outputs' root mean square; a Huber loss is not a squared error there


def convex_loss(loss: ExampleLoss, outputs: Tensor, targets: Tensor | None) -> ConvexLoss:
    """Return the training loss, in closed form if it has a known one; raise an error if it is not convex.

    Args:
        loss: ``loss_fn(output, target)`` as an `OutputLoss`.
        outputs: the model's own outputs `[n]` or `[n, C]`.
        targets: the target of every point, or None.
    """
    if not isinstance(loss, OutputLoss):
        raise TypeError(
            f"loss_fn is a {type(loss).__name__}, which does not say how the loss depends on the outputs: pass "
            "loss_fn(output, target)."
        )
    if outputs.dim() > 2:
        raise ValueError(
            f"the model gives outputs of shape {list(outputs.shape)}: what-if needs one number or one row of numbers "
            "for each example, e.g. the logits of its last token."
        )
    z = outputs.detach().double().reshape(len(outputs), -1)
    plain = _computable(loss.loss_fn, outputs, targets)
    try:
        for found in _closed_forms(plain, z):
            if _same(found, plain, z):
                _check_bends(found.bends.reshape(len(z), -1), plain)
                return found
        _check_bends(_lowest_and_highest(plain, z), plain)
    except RuntimeError as error:
        raise ValueError(
            f"loss_fn {_name(loss.loss_fn)} cannot be differentiated twice at outputs that move a little "
            f"({str(error).splitlines()[0]}): what-if needs that. For a model that gives probabilities pass the model "
            "without its last activation, and nn.BCEWithLogitsLoss or nn.CrossEntropyLoss."
        ) from error
    return plain


def _computable(loss_fn: LossFn, outputs: Tensor, targets: Tensor | None) -> AnyLoss:
    """Return the loss in double precision, or in the outputs' precision if double fails (it holds such numbers)."""
    if isinstance(loss_fn, nn.Module):
        loss_fn = copy.deepcopy(loss_fn).double()
    first, some = outputs[:2].detach(), None if targets is None else targets[:2]
    for dtype in (torch.float64, outputs.dtype):
        with suppress(RuntimeError):
            AnyLoss(loss_fn, some, outputs.shape[1:], dtype).slope(first.reshape(len(first), -1, 1))
            break
    return AnyLoss(loss_fn, targets, outputs.shape[1:], dtype)


def _closed_forms(plain: AnyLoss, z: Tensor) -> list[ConvexLoss]:
    """Return known forms that agree with the loss at outputs of zero and one; elsewhere they may still differ."""
    zero, one = (torch.full_like(z, at)[:, :, None] for at in (0.0, 1.0))
    try:
        value, low, high = plain.value(zero)[:, 0], plain.slope(zero)[:, :, 0], plain.slope(one)[:, :, 0]
    except RuntimeError:  # no gradient, or a loss that is not defined there
        return []
    forms: list[ConvexLoss] = []
    classes = z.shape[1]
    if classes > 1:
        w = value / math.log(classes)
        q = w[:, None] / classes - low
        forms.append(TwoClassLoss(q[:, 1:], q[:, :1]) if classes == 2 else SoftmaxLoss(w, q))
    # From the slopes at 0 and 1: s₀ = (a + b)/2 − a, s₁ = (a + b) σ(1) − a
    total = (high - low) / (1 / (1 + math.exp(-1.0)) - 0.5)
    forms.append(LogisticLoss(total / 2 - low, total / 2 + low))
    w = high - low
    y = torch.where(w > 0, -low / w.clamp_min(1e-300), torch.zeros_like(w))
    forms.append(SquaredLoss(w, y, value - (w / 2 * y.square()).sum(1)))
    return forms


def _moves(z: Tensor) -> tuple[float, ...]:
    """How far outputs `[n, C]` are moved, a little and far."""
    return (*_MOVES, _FAR * (1 + float(z.square().mean().sqrt())))


def _same(form: ConvexLoss, plain: AnyLoss, z: Tensor) -> bool:
    """Whether a closed form has the values and slopes of the loss, at and around the outputs of every point."""
    generator = torch.Generator().manual_seed(0)
    relative, absolute = (1e-6, 1e-9) if plain.dtype == torch.float64 else (1e-4, 1e-5)
    for size in _moves(z):
        moved = z + size * torch.randn(z.shape, generator=generator, dtype=z.dtype).to(z.device)
        columns = form.columns(moved)[:, :, None]
        slope = form.of_columns(form.slope(form.state(columns))[:, :, 0])
        for found, real in (
            (form.value(columns)[:, 0], plain.value(moved[:, :, None])[:, 0]),
            (slope, plain.slope(moved[:, :, None])[:, :, 0]),
        ):
            if not torch.allclose(found, real, rtol=relative, atol=absolute):
                return False
    return True


def _lowest_and_highest(plain: AnyLoss, z: Tensor) -> Tensor:
    """Return the lowest and highest second derivative `[m, 2]` at and around the outputs of some of the points."""
    some = torch.linspace(0, len(z) - 1, min(_PROBED, len(z)), dtype=torch.float64).long()
    part, generator, found = plain.take(some), torch.Generator().manual_seed(0), []
    for size in _moves(z):
        moved = z[some] + size * torch.randn(z[some].shape, generator=generator, dtype=z.dtype).to(z.device)
        curvature = part.curvature(moved[:, :, None])
        if not bool(torch.isfinite(curvature).all()):
            if size not in _MOVES:  # an exponential is too large for numbers there, and convex before
                continue
            raise ValueError("loss_fn has no finite second derivatives in the outputs: a refit needs them.")
        found.append(torch.linalg.eigvalsh((curvature + curvature.transpose(1, 2)) / 2)[:, [0, -1]])
    return torch.cat(found)


def _check_bends(bends: Tensor, plain: AnyLoss) -> None:
    """Raise an error if second derivatives of the points `[n, m]` are negative, or if all of them are zero."""
    name, rounding = _name(plain.loss_fn), 1e-12 if plain.dtype == torch.float64 else 1e-5
    if bool((bends.amin(1) < -1e-6 * bends.abs().amax(1) - rounding).any()):
        raise ValueError(
            f"loss_fn {name} is not convex in the outputs (its curvature there is "
            f"{float(bends.min()):.3g}), so a refit has no single answer: use cross-entropy, a squared error or "
            "another convex loss."
        )
    if not bool((bends > rounding).any()):
        raise ValueError(
            f"loss_fn {name} has no curvature in the outputs, so nothing bounds a refit: for a model that "
            "gives log-probabilities pass the model without its last layer, and nn.CrossEntropyLoss; in place of an "
            "absolute error or a margin pass nn.HuberLoss or another smooth loss."
        )


def _name(loss_fn: LossFn) -> str:
    return getattr(loss_fn, "__name__", type(loss_fn).__name__)
