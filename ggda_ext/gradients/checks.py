"""What must hold before a number can be trusted: a deterministic loss that does not mix examples, finite numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ggda_ext.gradients.parameters import ParameterSpace
from ggda_ext.gradients.truth import Tolerance, Truth, total_scores, truth_of
from ggda_ext.groups.partition import Groups
from ggda_ext.losses import ExampleLoss

FAILS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError, AssertionError)
"""How a model fails that a strategy cannot run, though it runs by itself."""


def check_deterministic_modules(model: nn.Module) -> None:
    """Refuse a model with active dropout or batch statistics, naming the module and the fix."""
    for name, module in model.named_modules():
        mixes = isinstance(module, _BatchNorm)
        random = isinstance(module, _DropoutNd) and module.p > 0
        if module.training and (mixes or random):
            what = "mixes the examples of a batch" if mixes else "is random"
            raise ValueError(
                f"the model is in train mode, where {type(module).__name__} {name!r} {what}, so the gradient of "
                "a group has no fixed value: call model.eval() first."
            )


def check_same_losses(losses: Tensor, again: Tensor, data_name: str) -> None:
    """Refuse a loss that gave two answers for the same examples."""
    if not torch.allclose(losses, again, rtol=1e-4, equal_nan=True):
        raise ValueError(
            f"the loss of the same examples came out as {losses.tolist()}, then as {again.tolist()}: switch off "
            f"what is random in the model (functional dropout?), the loss, or {data_name} (augmentation?)."
        )


def truth_alone(space: ParameterSpace, loss: ExampleLoss, alone: Sequence[Any], direction: Tensor) -> Truth:
    """The truth about examples by plain autograd, or an error that says why an example alone has none."""
    try:
        return truth_of(space, loss, alone, direction)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if len(alone) == 1:
            raise
        raise ValueError(
            f"the loss of one example alone cannot be computed, though that of a batch can: {error} An example has "
            "a gradient of its own only if the model takes a batch of one: look for statistics of the batch, and "
            "for squeeze() without a dimension."
        ) from error


def check_batch(
    space: ParameterSpace, loss: ExampleLoss, batch: Any, truth: Truth, direction: Tensor, allowed: Tolerance, name: str
) -> None:
    """Refuse a model or a loss for which a batch is not the sum of its examples alone.

    Args:
        space: model and chosen parameters.
        loss: of the examples.
        batch: some examples.
        truth: about these examples, each alone.
        direction: along which their gradients are compared `[1, p]`.
        allowed: differences that rounding may explain.
        name: of the data.
    """
    with space.gradients(enabled=False), torch.no_grad():
        losses = loss.each(space.model, batch).cpu().double()
        reduced = loss.reduced(space.model, batch)
    if losses.shape != truth.losses.shape:
        raise ValueError(f"the loss gave {list(losses.shape)} values for a batch of {len(truth.losses)} examples.")
    finite = truth.finite & losses.isfinite()
    if len(losses) < 2 or not bool(finite.any()):
        return
    scale = truth.losses.abs() + truth.losses[finite].abs().max()
    off = ((losses - truth.losses).abs() > allowed.most * scale) & finite
    same = not bool(off.any()) and bool(finite.all()) and _same_sum(space, loss, batch, truth, direction, allowed)
    # a loss near 0 is a difference of larger numbers, so only gradients can tell rounding from mixing
    if not same and not _alike_in_batch(space, loss, batch, truth, direction, allowed):
        _refuse_mixing(space.model, losses, truth.losses, off, name)
    if reduced is not None and bool(finite.all()):
        _check_reduction(float(reduced), truth.losses, allowed)


def _same_sum(
    space: ParameterSpace, loss: ExampleLoss, batch: Any, truth: Truth, direction: Tensor, allowed: Tolerance
) -> bool:
    """Whether the gradient of a batch is the sum of those of its examples."""
    total = total_scores(space, loss, batch, direction)
    room = truth.norms.sum(0) + 1e-3 * truth.norms.sum()
    return bool(((total - truth.scores.sum(0)).abs() <= 10 * allowed.most * room).all())


def _alike_in_batch(
    space: ParameterSpace, loss: ExampleLoss, batch: Any, truth: Truth, direction: Tensor, allowed: Tolerance
) -> bool:
    """Whether every example has the gradient in a batch that it has alone."""
    found = [total_scores(space, _OneOf(loss, at), batch, direction) for at in range(len(truth.losses))]
    return not bool(truth.differs(torch.stack(found), allowed).any())


class _OneOf(ExampleLoss):
    """The loss of one example of a batch."""

    def __init__(self, loss: ExampleLoss, at: int) -> None:
        self.loss, self.at = loss, at

    def each(self, model: nn.Module, batch: Any) -> Tensor:
        return self.loss.each(model, batch)[self.at : self.at + 1]


def _refuse_mixing(model: nn.Module, losses: Tensor, alone: Tensor, off: Tensor, name: str) -> None:
    worst = int(torch.where(off, (losses - alone).abs(), -1.0).argmax())
    who = next(
        (
            f" ({type(module).__name__} {path!r} has no running statistics and takes those of the batch)"
            for path, module in model.named_modules()
            if isinstance(module, _BatchNorm) and module.running_mean is None
        ),
        "",
    )
    raise ValueError(
        f"the model or the loss mixes the examples of a batch: {name} has an example with a loss of "
        f"{float(losses[worst]):.6g} in a batch of {len(losses)} and of {float(alone[worst]):.6g} alone, or its "
        f"gradient differs{who}. So the gradient of a group has no fixed value: use statistics that do not depend on "
        "the batch, and a loss of each example by itself."
    )


def _check_reduction(whole: float, alone: Tensor, allowed: Tolerance) -> None:
    """Refuse a loss function whose value for a batch is neither the sum nor the mean of its examples' losses."""
    room = allowed.most * float(alone.abs().max() + alone.abs().mean())
    if abs(whole - float(alone.mean())) <= room or abs(whole - float(alone.sum())) <= room * len(alone):
        return
    raise ValueError(
        f"loss_fn gives {whole:.6g} for a batch of {len(alone)} examples whose losses alone have the mean "
        f"{float(alone.mean()):.6g}: neither their mean nor their sum, so what an example adds depends on who "
        "shares the batch (a weighted or masked mean, a broadcast of target against output, a comparison of "
        "examples). Let loss_fn return one loss per example [b], or their sum."
    )


def first_line(error: BaseException) -> str:
    """An error in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def check_finite_scores(scores: Tensor, groups: Groups) -> None:
    """Refuse scores `[m, k]` that are not finite, naming the groups."""
    if not bool(torch.isfinite(scores.sum())):
        _refuse(~torch.isfinite(scores).all(0), groups, "scores")


def check_finite_rows(rows: Tensor, ids: Tensor, groups: Groups) -> None:
    """Refuse gradient rows `[b, p]` or `[b, w, p]` of the groups `ids` that are not finite, naming the groups."""
    if not bool(torch.isfinite(rows.sum())):
        bad = torch.zeros(len(groups), dtype=torch.bool, device=rows.device)
        bad[ids.to(rows.device)] = ~torch.isfinite(rows).flatten(1).all(1)
        _refuse(bad, groups, "gradients")


def _refuse(bad: Tensor, groups: Groups, what: str) -> None:
    ids = bad.nonzero().flatten().tolist()
    if ids:
        raise NonFinite(ids, groups, what)


class NonFinite(ValueError):
    """Some groups have gradients or scores that are not finite.

    Args:
        ids: their group ids.
        groups: all groups.
        what: ``"gradients"`` or ``"scores"``.
    """

    def __init__(self, ids: list[int], groups: Groups, what: str) -> None:
        self.ids, self.what = ids, what
        first = ids[0]
        super().__init__(
            f"{len(ids)} of {len(groups)} groups have non-finite {what}, first group {groups.name(first)!r} (training "
            f"points {groups[first][:5].tolist()}{', …' if groups.sizes[first] > 5 else ''}): look for NaN or infinite "
            "inputs there, or a loss that overflows in this dtype."
        )
