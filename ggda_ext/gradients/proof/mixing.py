"""Checks that raise an error if a model or a loss mixes the examples of a batch.

If it does, the gradient of a group has no fixed value. A batch must be the sum of its examples, each run alone, and
also the sum of smaller batches of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from ggda_ext.data import batch_length, pick, tensors_in
from ggda_ext.gradients.proof.truth import PlainRun, Subject, Tolerance, Truth, check_same_losses, tolerance


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
        off = _others(mine, expected, largest(found), subject.allowed)
        if bool(off.any()):
            _refuse_mixing(space.model, mine, expected, off, "the data", f"in one of {len(some)}", len(found))


def other_rows(model: nn.Module, rerun: Callable[[], Tensor], mine: Tensor, alone: Tensor, most: float) -> Tensor:
    """Which numbers of some examples differ by more than rounding between a batch and a small batch of them `[b, …]`.

    Args:
        model: the model.
        rerun: runs the small batch.
        mine: the numbers in the batch: losses, or what the model returned.
        alone: the numbers in the small batch.
        most: the largest number of the batch.
    """
    off = _others(mine.double(), alone.double(), most, tolerance(mine.dtype))
    if bool(off.any()):  # perhaps the model rounds more than these numbers show
        with _Rounding(model) as seen:
            rerun()
        far = (mine - alone).double().abs() > seen.error
        off = far & _others(mine.double(), alone.double(), most, tolerance(seen.precision))
    return off


def refuse_rows(
    model: nn.Module,
    rerun: Callable[[], Tensor],
    pair: tuple[Tensor, Tensor],
    off: Tensor,
    size: int,
    name: str,
    what: str,
) -> None:
    """Raise the error for numbers that are `off` between a batch of `size` and a small batch.

    Args:
        model, rerun: as in `other_rows`.
        pair: the numbers in the batch, and in the small batch `[b, …]`.
        off: from `other_rows`.
        size: examples in the batch.
        name: name of the data.
        what: what the numbers are.
    """
    (mine, alone), off = (numbers.cpu().double() for numbers in pair), off.cpu()
    check_same_losses(alone[off], rerun().detach().cpu().double()[off], name, what)
    _refuse_mixing(model, mine[off], alone[off], off[off], name, f"in one of {len(alone)}", size, what)


class _Rounding(TorchFunctionMode):
    """Watches the run of a model, to tell how much it rounds.

    Attributes:
        precision: the coarsest precision of the tensors that functions return.
        error: what rounding of the model's outputs may change in a loss, which may be a small difference of them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.precision, self._size = model, torch.float64, 0.0

    def __enter__(self) -> _Rounding:
        self._hook = self.model.register_forward_hook(self._look)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._hook.remove()

    @property
    def error(self) -> float:
        return 100 * torch.finfo(self.precision).eps * self._size

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        self._size = max([self._size, *(largest(part.detach()) for part in tensors_in(output))])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.is_floating_point():
            self.precision = max(self.precision, found.dtype, key=lambda kind: torch.finfo(kind).eps)
        return found


def largest(values: Tensor) -> float:
    """The largest finite number; 0 if there is none."""
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if len(finite) else 0.0


def _others(mine: Tensor, expected: Tensor, most: float, allowed: Tolerance) -> Tensor:
    """Which numbers of a batch, whose largest is `most`, are not the expected ones; those not finite are left out."""
    return ((mine - expected).abs() > allowed.each * (expected.abs() + most)) & mine.isfinite() & expected.isfinite()


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
    what: str = "loss",
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
        f"the model or the loss mixes the examples of a batch: {name} has an example with a {what} of "
        f"{float(losses[worst]):.6g} in a batch of {size or len(losses)} and of {float(alone[worst]):.6g} {apart}, or "
        f"its gradient differs{who}. So the gradient of a group has no fixed value: use statistics that do not depend "
        "on the batch, and a loss of each example by itself."
    )
