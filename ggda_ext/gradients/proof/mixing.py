"""Checks that raise an error if a model or a loss mixes the examples of a batch.

If it does, the gradient of a group has no fixed value. A batch must be the sum of its examples, each run alone, and
also the sum of smaller batches of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ggda_ext.data import batch_length, pick
from ggda_ext.gradients.proof.truth import PlainRun, Subject, Tolerance, Truth


class Mixed(ValueError):
    """The examples of a batch are mixed."""


_PIECE = 4  # examples in a small part of a batch, at most half of it, which is compared with the whole batch
_MOST_PIECES, _SAMPLED = 32, 8  # most parts that a batch is cut into; small parts that are drawn from a large batch


def check_batch(subject: Subject, batch: Any, truth: Truth, name: str) -> PlainRun:
    """Raise an error if a batch is not the sum of its examples, each run alone; return the run of the batch.

    Args:
        subject: the model and its loss.
        batch: some examples.
        truth: the truth about these examples, each alone.
        name: name of the data.
    """
    run = subject.run(batch)
    told = truth.finite.nonzero()[:, 0].tolist()
    if 0 < len(told) < len(truth.losses):  # infinite numbers of one example may spoil the gradients of the others
        check_batch(subject, pick(batch, told), truth.at(told), name)
        return run
    losses = run.losses
    if len(losses) < 2 or not bool((truth.finite & losses.isfinite()).any()):
        return run
    off = truth.other_losses(losses, subject.allowed)
    same = not bool(off.any()) and _same_sum(run.total, truth, subject.allowed)
    # a loss near 0 is a difference of larger numbers, so only gradients can distinguish rounding from mixing
    if not same and not _alike_in_batch(subject, batch, run.total, truth):
        _refuse_mixing(subject.space.model, losses, truth.losses, off, name)
    return run


def check_reduction(whole: float, alone: Tensor, allowed: Tolerance) -> None:
    """Raise an error if a loss function's value for a batch is neither the sum nor the mean of its examples' losses.

    Args:
        whole: the value of the loss function for a batch.
        alone: the losses of the examples, each alone `[b]`.
        allowed: differences that rounding may explain.
    """
    alone = alone[alone.isfinite()]  # an example whose targets are all ignored has a mean over nothing
    if not len(alone) or not isfinite(whole):
        return
    room = allowed.most * float(alone.abs().max() + alone.abs().mean())
    if abs(whole - float(alone.mean())) <= room or abs(whole - float(alone.sum())) <= room * len(alone):
        return
    raise ValueError(
        f"loss_fn gives {whole:.6g} for a batch of {len(alone)} examples whose losses alone have the mean "
        f"{float(alone.mean()):.6g}: neither their mean nor their sum, so what an example adds depends on who "
        "shares the batch (a weighted or masked mean, a broadcast of target against output, a comparison of "
        "examples). Let loss_fn return one loss per example [b], or their sum."
    )


def check_losses(subject: Subject, batch: Any, losses: Tensor, parts: Parts) -> None:
    """Raise an error if examples have other losses in a batch than in parts of the batch.

    Args:
        subject: the model and its loss.
        batch: the examples.
        losses: losses of the examples in this batch `[b]`.
        parts: for each part, the positions of the examples that are run together.
    """
    space, found = subject.space, losses.detach().cpu().double()
    for some in parts:
        with space.require_gradients(of_chosen=True):  # restores what the model changes
            expected = subject.loss.each(space.model, pick(batch, some)).detach().cpu().double()
        mine = found[list(some)]
        finite = mine.isfinite() & expected.isfinite()
        room = expected.abs() + found[found.isfinite()].abs().max() if bool(finite.any()) else expected
        off = ((mine - expected).abs() > subject.allowed.each * room) & finite
        if bool(off.any()):
            _refuse_mixing(space.model, mine, expected, off, "the data", f"in one of {len(some)}", len(found))


def check_sum(subject: Subject, batch: Any, parts: Parts) -> None:
    """Raise an error if the gradient of some examples in a batch is not the sum of the gradients of parts.

    Args:
        subject, batch: as in `check_losses`.
        parts: for each part, the positions of the examples that are run together; no example is in two parts.
    """
    parts = list(parts)
    whole = subject.run(batch, some=[at for some in parts for at in some]).total
    found = torch.stack([subject.run(pick(batch, some)).total for some in parts])
    room = found.abs().sum(0) + 1e-3 * found.abs().sum()
    if bool(((whole - found.sum(0)).abs() > 10 * subject.allowed.most * room).any()):  # false for NaN
        raise ValueError(
            f"the model or the loss mixes the examples of a batch: the gradient of a batch of {batch_length(batch)} is "
            f"not the sum of those of batches of {len(parts[0])} with the same examples. So the gradient of a group "
            "has no fixed value: pass a batch_size that the model does not treat otherwise, or mend the model."
        )


Parts = Iterable[Sequence[int]]


def halves(size: int) -> Parts:
    """Cut a batch into two halves."""
    return _pieces(size, -(-size // 2))


def splits(size: int) -> Parts:
    """Cut a batch in two in several ways, such that any two examples are in different parts at least once."""
    for bit in range((size - 1).bit_length()):
        for side in (0, 1):
            yield [at for at in range(size) if (at >> bit) & 1 == side]


def cuts(size: int) -> Iterator[Parts]:
    """Cut a batch into parts of four examples, or of half the batch if that is less.

    A large batch is cut into larger parts; then some parts of four from all over the batch follow.
    """
    few = min(_PIECE, max(1, size // 2))
    step = max(few, size // _MOST_PIECES)
    yield _pieces(size, step)
    if step > few:
        every = _pieces(size, few)
        yield every[:: -(-len(every) // _SAMPLED)]


def _pieces(size: int, step: int) -> list[range]:
    return [range(low, min(low + step, size)) for low in range(0, size, step)]


def _same_sum(total: Tensor, truth: Truth, allowed: Tolerance) -> bool:
    """Whether the gradient of a batch `[q]` is the sum of the gradients of its examples."""
    room = truth.norms.sum(0) + 1e-3 * truth.norms.sum()
    return bool(((total - truth.scores.sum(0)).abs() <= 10 * allowed.most * room).all())


def _alike_in_batch(subject: Subject, batch: Any, total: Tensor, truth: Truth) -> bool:
    """Whether every example has the same gradient in a batch as alone, and the batch's gradient `[q]` is their sum."""
    found = torch.stack([subject.run(batch, some=[at]).total for at in range(len(truth.losses))])
    room = truth.norms.sum(0) + 1e-3 * truth.norms.sum()
    if bool(((total - found.sum(0)).abs() > subject.allowed.each * room).any()):
        return False
    return not bool(truth.differs(found, subject.allowed).any())


def _refuse_mixing(
    model: nn.Module,
    losses: Tensor,
    alone: Tensor,
    off: Tensor,
    name: str,
    apart: str = "alone",
    size: int | None = None,
) -> None:
    worst = int(torch.where(off, (losses - alone).abs(), -1.0).argmax())
    who = next(
        (
            f" ({type(module).__name__} {path!r} has no running statistics and takes those of the batch)"
            for path, module in model.named_modules()
            if isinstance(module, _BatchNorm) and module.running_mean is None
        ),
        "",
    )
    raise Mixed(
        f"the model or the loss mixes the examples of a batch: {name} has an example with a loss of "
        f"{float(losses[worst]):.6g} in a batch of {size or len(losses)} and of {float(alone[worst]):.6g} {apart}, or "
        f"its gradient differs{who}. So the gradient of a group has no fixed value: use statistics that do not depend "
        "on the batch, and a loss of each example by itself."
    )
