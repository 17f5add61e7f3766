"""Plain autograd, one example at a time: what every strategy is compared with before its numbers are trusted.

Before that, the question itself must have an answer: a deterministic loss that does not mix examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ggda_ext.data import batch_length, pick
from ggda_ext.gradients.layers import Layer
from ggda_ext.gradients.observation import Calls, Observer, observe
from ggda_ext.gradients.watch import Watch, altered_gradients
from ggda_ext.losses import ExampleLoss
from ggda_ext.model import ParameterSpace


@dataclass(frozen=True)
class Tolerance:
    """Relative differences that rounding may explain; a structural mistake makes one of order 1."""

    most: float
    """For at least half of the examples."""
    each: float
    """For every example: an activation that is 0 but for rounding may switch a unit on or off."""
    rows: float
    """For a row of the same run, weighted otherwise on the way back."""


_TOLERANCES = {
    torch.float64: Tolerance(1e-6, 1e-4, 1e-5),  # some layers go through float32, such as Llama's normalisation
    torch.float32: Tolerance(3e-4, 2e-2, 1e-3),
    torch.float16: Tolerance(1e-2, 0.1, 3e-2),
    torch.bfloat16: Tolerance(5e-2, 0.3, 0.15),
}


def tolerance(precision: torch.dtype) -> Tolerance:
    """What to allow for numbers that were computed in a precision."""
    return _TOLERANCES.get(precision, _TOLERANCES[torch.float32])


@dataclass(frozen=True)
class Truth:
    """Losses of examples alone `[b]`; per parameter their gradients along a direction, and gradient norms `[b, q]`."""

    losses: Tensor
    scores: Tensor
    norms: Tensor

    @classmethod
    def of_nothing(cls, parameters: int) -> Truth:
        """No examples yet."""
        return cls(torch.zeros(0).double(), torch.zeros(0, parameters), torch.zeros(0, parameters))

    @property
    def finite(self) -> Tensor:
        """Which examples can tell anything `[b]`."""
        return self.losses.isfinite() & self.norms.isfinite().all(1) & self.scores.isfinite().all(1)

    @property
    def touched(self) -> Tensor:
        """Which parameters have a gradient other than zero in some example `[q]`."""
        return (self.norms[self.finite] > 0).any(0)

    def joined(self, other: Truth) -> Truth:
        """These examples and others."""
        return Truth(*(torch.cat([getattr(self, name), getattr(other, name)]) for name in self.__dataclass_fields__))

    def at(self, positions: slice | list[int]) -> Truth:
        """Some of the examples."""
        return Truth(*(getattr(self, name)[positions] for name in self.__dataclass_fields__))

    def other_losses(self, losses: Tensor, allowed: Tolerance) -> Tensor:
        """Which examples have other losses `[b]` than alone, as far as both are finite `[b]`."""
        finite = self.finite & losses.isfinite()
        if not bool(finite.any()):
            return finite
        scale = self.losses.abs() + self.losses[finite].abs().max()
        return ((losses - self.losses).abs() > allowed.most * scale) & finite

    def differs(self, scores: Tensor, allowed: Tolerance) -> Tensor:
        """Which parameters have other scores `[b, q]` than these examples should have `[q]`."""
        finite = self.finite
        if not bool(finite.any()):
            return torch.zeros(self.norms.shape[1], dtype=torch.bool)
        found, expected, norms = (values[finite] for values in (scores.to(self.scores), self.scores, self.norms))
        scale = norms + 1e-2 * norms.amax(0) + 1e-3 * norms.amax(1, keepdim=True)
        error = (found - expected).abs() / scale.clamp(min=torch.finfo(scale.dtype).tiny)
        informative = norms > 0
        typical = torch.where(informative, error, torch.nan).nanmedian(0).values
        return ~(error <= allowed.each).all(0) | (typical > allowed.most)


_DRAWN = 2**20 + 7  # a prime: numbers of a direction, which then come again; drawing is slower than a gradient


def random_direction(space: ParameterSpace) -> Tensor:
    """A fixed random direction `[1, p]`, drawn without touching the global random state."""
    generator = torch.Generator(space.device).manual_seed(0)
    drawn = torch.randn(min(space.size, _DRAWN), generator=generator, dtype=space.dtype, device=space.device)
    return drawn.repeat(-(-space.size // _DRAWN))[None, : space.size]


def truth_of(space: ParameterSpace, loss: ExampleLoss, alone: Sequence[Any], direction: Tensor) -> Truth:
    """The truth about examples, each given as a batch of one, along a direction `[1, p]`."""
    losses, scores, norms = [], [], []
    directions = [wide(space.part(direction, parameter)).flatten() for parameter in space.parameters.values()]
    for some in [[one] for one in alone] if space.changing else [alone]:  # what an example changes is put back
        with space.require_gradients(of_chosen=True):
            for one in some:
                value = loss.total(space.model, one)
                along, lengths = _measured(space.gradients_of(value), directions)
                losses.append(_on_cpu(value))
                scores.append(along)
                norms.append(lengths)
    return Truth(torch.stack(losses), torch.stack(scores).cpu(), torch.stack(norms).cpu())


def total_scores(space: ParameterSpace, loss: ExampleLoss, batch: Any, direction: Tensor) -> Tensor:
    """Gradient of the summed loss of a batch along a direction, per parameter `[q]`."""
    return plain_run(space, loss, batch, [space.part(direction, own)[0] for own in space.parameters.values()]).total


@dataclass(frozen=True)
class PlainRun:
    """A batch run by plain autograd.

    Attributes:
        losses: of the examples `[b]`.
        total: gradient of their sum along a direction, per parameter `[q]`.
        alters: what makes gradients other than derivatives, or None.
        told: stands for the functions that were called, and for the numbers that Python was told.
    """

    losses: Tensor
    total: Tensor
    alters: str | None
    told: int


def plain_run(space: ParameterSpace, loss: ExampleLoss, batch: Any, direction: Sequence[Tensor]) -> PlainRun:
    """Run a batch by plain autograd; the direction is given by parameter."""
    with space.require_gradients(of_chosen=True):
        with Watch(0) as watch:
            losses = loss.each(space.model, batch)
        alters = altered_gradients(losses, watch)
        gradients = space.gradients_of(losses.sum())
    pairs = zip(gradients, (wide(part).flatten() for part in direction), strict=True)
    return PlainRun(_on_cpu(losses), torch.stack([_dot(*pair) for pair in pairs]).cpu(), alters, watch.told)


def captured_scores(
    space: ParameterSpace, layers: list[Layer], loss: ExampleLoss, batch: Any, direction: Tensor, watcher: Observer
) -> tuple[Tensor, Calls]:
    """Scores of every example along a direction from layer inputs and output gradients, per parameter `[b, q]`.

    `watcher` sees the layers' calls too.
    """
    observer = _ParameterScores(space, direction, batch_length(batch), watcher)
    calls = observe(space, layers, loss, batch, observer, alters=True)
    return torch.stack([observer.scores[id(parameter)] for parameter in space.parameters.values()], 1).cpu(), calls


def _on_cpu(values: Tensor) -> Tensor:
    return values.detach().cpu().double()


def _dot(gradient: Tensor | None, direction: Tensor) -> Tensor:
    return direction.new_zeros(()) if gradient is None else torch.dot(gradient.flatten().to(direction), direction)


def _measured(gradients: list[Tensor | None], directions: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Of a gradient by parameter, products with a direction and norms `[q]`; None counts as zeros."""
    nothing = directions[0].new_zeros(())
    pairs = [
        None if gradient is None else (gradient.flatten().to(direction), direction)
        for gradient, direction in zip(gradients, directions, strict=True)
    ]
    norms = iter(torch._foreach_norm([pair[0] for pair in pairs if pair is not None]) if any(pairs) else ())
    along = [nothing if pair is None else torch.dot(*pair) for pair in pairs]
    return torch.stack(along), torch.stack([nothing if pair is None else next(norms) for pair in pairs])


def wide(values: Tensor) -> Tensor:
    """At least float32: dot products of half-precision numbers would add their own rounding."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class _ParameterScores(Observer):
    """Scores of every example along one direction, parameter by parameter."""

    def __init__(self, space: ParameterSpace, direction: Tensor, size: int, watcher: Observer) -> None:
        self.space, self.direction, self.size, self.watcher = space, wide(direction), size, watcher
        self.scores = {key: self.direction.new_zeros(size) for key in space.spans}

    def backward(self, layer: Layer, kept: Tensor, d: Tensor, repeats: int) -> None:
        self.watcher.backward(layer, kept, d, repeats)
        kept, d = wide(kept) if kept.is_floating_point() else kept, wide(d)
        if layer.bias is not None:
            starts = list(range(0, len(d) + 1, repeats))
            rows = layer.rule.bias_rows(layer.module, d, starts).reshape(self.size, -1)
            self.scores[id(layer.bias)] += rows @ self.space.part(self.direction, layer.bias).flatten()
        if layer.weight is not None:
            tangent = layer.apply(kept, self.space.part(self.direction, layer.weight)[0], None)
            self.scores[id(layer.weight)] += (tangent * d).reshape(self.size, -1).sum(1)


_PIECE = 4  # examples of a batch, at most half of it, that are run together, to see whether more have other losses

FAILS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError, AssertionError)
"""How a model fails that a strategy cannot run, though it runs by itself."""


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
) -> PlainRun:
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
    run = plain_run(space, loss, batch, [space.part(direction, own)[0] for own in space.parameters.values()])
    told = truth.finite.nonzero()[:, 0].tolist()
    if 0 < len(told) < len(truth.losses):  # infinite numbers of one example may spoil the gradients of all others
        check_batch(space, loss, pick(batch, told), truth.at(told), direction, allowed, name)
        return run
    losses = run.losses
    if len(losses) < 2 or not bool((truth.finite & losses.isfinite()).any()):
        return run
    off = truth.other_losses(losses, allowed)
    same = not bool(off.any()) and _same_sum(run.total, truth, allowed)
    # a loss near 0 is a difference of larger numbers, so only gradients can tell rounding from mixing
    if not same and not _alike_in_batch(space, loss, batch, truth, direction, allowed):
        _refuse_mixing(space.model, losses, truth.losses, off, name)
    return run


def check_reduction(space: ParameterSpace, loss: ExampleLoss, batch: Any, alone: Tensor, allowed: Tolerance) -> None:
    """Refuse a loss function whose value for a batch is neither the sum nor the mean of the losses of its examples.

    Args:
        space: model and chosen parameters.
        loss: of the examples.
        batch: some examples.
        alone: their losses, each alone `[b]`.
        allowed: differences that rounding may explain.
    """
    with space.require_gradients(of_chosen=True):
        reduced = loss.reduced(space.model, batch) if len(alone) > 1 else None
    alone = alone[alone.isfinite()]  # a mean over no targets, as of an example whose targets are all ignored, is none
    if reduced is None or not len(alone) or not bool(reduced.isfinite()):
        return
    whole, room = float(reduced.detach()), allowed.most * float(alone.abs().max() + alone.abs().mean())
    if abs(whole - float(alone.mean())) <= room or abs(whole - float(alone.sum())) <= room * len(alone):
        return
    raise ValueError(
        f"loss_fn gives {whole:.6g} for a batch of {len(alone)} examples whose losses alone have the mean "
        f"{float(alone.mean()):.6g}: neither their mean nor their sum, so what an example adds depends on who "
        "shares the batch (a weighted or masked mean, a broadcast of target against output, a comparison of "
        "examples). Let loss_fn return one loss per example [b], or their sum."
    )


def check_losses(space: ParameterSpace, loss: ExampleLoss, batch: Any, losses: Tensor, allowed: Tolerance) -> None:
    """Refuse a batch whose examples have other losses `[b]` than in small batches.

    Args:
        space: model and chosen parameters.
        loss: of the examples.
        batch: the examples.
        losses: theirs in this batch.
        allowed: differences that rounding may explain.
    """
    with space.require_gradients(of_chosen=True):
        apart = torch.cat([loss.each(space.model, piece).detach() for piece in _pieces(batch)])
    found, expected = losses.cpu().double(), apart.cpu().double()
    finite = found.isfinite() & expected.isfinite()
    room = expected.abs() + expected[finite].abs().max() if bool(finite.any()) else expected
    off = ((found - expected).abs() > allowed.each * room) & finite
    if bool(off.any()):
        _refuse_mixing(space.model, found, expected, off, "the data", f"in one of {_piece(batch)}")


def check_sum(space: ParameterSpace, loss: ExampleLoss, batch: Any, allowed: Tolerance) -> None:
    """Refuse a batch whose gradient is not the sum of those of small batches of its examples; as in `check_losses`."""
    direction = random_direction(space)
    whole = total_scores(space, loss, batch, direction)
    parts = torch.stack([total_scores(space, loss, piece, direction) for piece in _pieces(batch)])
    room = parts.abs().sum(0) + 1e-3 * parts.abs().sum()
    if bool(((whole - parts.sum(0)).abs() > 10 * allowed.most * room).any()):  # never so for NaN
        raise ValueError(
            f"the model or the loss mixes the examples of a batch: the gradient of a batch of {batch_length(batch)} is "
            f"not the sum of those of batches of {_piece(batch)} with the same examples. So the gradient of a group "
            "has no fixed value: pass a batch_size that the model does not treat otherwise, or mend the model."
        )


def _piece(batch: Any) -> int:
    return min(_PIECE, max(1, batch_length(batch) // 2))


def _pieces(batch: Any) -> Iterator[Any]:
    size, step = batch_length(batch), _piece(batch)
    return (pick(batch, range(low, min(low + step, size))) for low in range(0, size, step))


def _same_sum(total: Tensor, truth: Truth, allowed: Tolerance) -> bool:
    """Whether the gradient of a batch `[q]` is the sum of those of its examples."""
    room = truth.norms.sum(0) + 1e-3 * truth.norms.sum()
    return bool(((total - truth.scores.sum(0)).abs() <= 10 * allowed.most * room).all())


def _alike_in_batch(
    space: ParameterSpace, loss: ExampleLoss, batch: Any, truth: Truth, direction: Tensor, allowed: Tolerance
) -> bool:
    """Whether every example has the gradient in a batch that it has alone, and the batch has the sum of them."""
    found = torch.stack([total_scores(space, _OneOf(loss, at), batch, direction) for at in range(len(truth.losses))])
    total, room = total_scores(space, loss, batch, direction), truth.norms.sum(0) + 1e-3 * truth.norms.sum()
    if bool(((total - found.sum(0)).abs() > allowed.each * room).any()):
        return False
    return not bool(truth.differs(found, allowed).any())


class _OneOf(ExampleLoss):
    """The loss of one example of a batch."""

    def __init__(self, loss: ExampleLoss, at: int) -> None:
        self.loss, self.at = loss, at

    def each(self, model: nn.Module, batch: Any) -> Tensor:
        return self.loss.each(model, batch)[self.at : self.at + 1]


def _refuse_mixing(
    model: nn.Module, losses: Tensor, alone: Tensor, off: Tensor, name: str, apart: str = "alone"
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
    raise ValueError(
        f"the model or the loss mixes the examples of a batch: {name} has an example with a loss of "
        f"{float(losses[worst]):.6g} in a batch of {len(losses)} and of {float(alone[worst]):.6g} {apart}, or its "
        f"gradient differs{who}. So the gradient of a group has no fixed value: use statistics that do not depend on "
        "the batch, and a loss of each example by itself."
    )


def first_line(error: BaseException) -> str:
    """An error in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]
