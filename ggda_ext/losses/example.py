"""The training loss of each example of a batch, for any form of the user's loss.

One rule holds for every reduction: the loss of an example is the value of the loss function for that example alone. So
``reduction="none"``, ``"sum"`` and ``"mean"`` of the usual losses agree. A weighted mean over examples raises an error,
because for one example alone the weight cancels. An example whose targets are all ignored has the loss 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from inspect import ismethod, signature
from typing import Any

import torch
from torch import Tensor, nn

from ggda_ext.data import as_batch_of_one, batch_length
from ggda_ext.losses import errors

LABEL_KEYS = ("labels", "label", "targets", "target", "y")


class ExampleLoss:
    """The losses of a model for each example of a batch. Gradient providers need nothing else to know the loss."""

    vectorized = False
    """Whether the model runs under `torch.func.vmap`, in which a layer sees one example at a time."""

    @property
    def anchors(self) -> tuple[Any, ...] | None:
        """The objects that define this loss, to see whether two losses are the same; None if that is not known."""
        return (self,)

    def each(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of every example `[b]`."""
        raise NotImplementedError

    def total(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the sum of the losses of the batch, a scalar."""
        return self.each(model, batch).sum()

    def prepare(self, model: nn.Module, batch: Any) -> None:
        """Find out once how to compute the losses of a batch. This is called before any hooks watch the model."""

    def reduced(self, model: nn.Module, batch: Any) -> Tensor | None:
        """Return the value of the user's loss function for the whole batch if it is one number; None by default."""
        return None


class OutputLoss(ExampleLoss):
    """``loss_fn(model(*inputs), target)``; ``OutputLoss(None)`` is the sum of each example's outputs.

    Tuple batches are ``(*inputs, target)``. Dict batches are keyword arguments of the model plus one of the label keys.
    A batch that is a single tensor has no target: ``loss_fn(output)``. Pass ``OutputLoss(None)`` itself as the loss,
    because ``loss_fn=None`` means the model's own loss.
    """

    def __init__(self, loss_fn: Callable[..., Tensor] | None) -> None:
        self.loss_fn = loss_fn

    @property
    def anchors(self) -> tuple[Any, ...] | None:
        """The class, and the loss function. Two PyTorch losses with the same settings count as the same."""
        return (type(self),) if self.loss_fn is None else (type(self), _standing_for(self.loss_fn))

    def each(self, model: nn.Module, batch: Any) -> Tensor:
        output, target = model_output(model, batch)
        return example_losses(self.loss_fn, output, target)

    def reduced(self, model: nn.Module, batch: Any) -> Tensor | None:
        """Return the value of `loss_fn` for the batch; None if its reduction is known or it is not one number."""
        if self.loss_fn is None or _is_known(self.loss_fn):
            return None
        output, target = model_output(model, batch)
        value = self.loss_fn(*((output,) if target is None else (output, target)))
        return value if value.dim() == 0 else None


class BatchLoss(ExampleLoss):
    """A function ``fn(model, batch)`` that returns the losses `[b]`, for models with their own calling convention."""

    def __init__(self, fn: Callable[[nn.Module, Any], Tensor]) -> None:
        self.fn = fn

    @property
    def anchors(self) -> tuple[Any, ...] | None:
        """The class, and the function."""
        return type(self), *_held_by(self.fn)

    def each(self, model: nn.Module, batch: Any) -> Tensor:
        losses = self.fn(model, batch)
        size = batch_length(batch)
        if not isinstance(losses, Tensor) or losses.shape[:1] != (size,):
            raise ValueError(
                f"the loss returned {shape_of(losses)} for a batch of {size} examples: "
                f"return one loss per example, of shape [{size}]."
            )
        return losses.flatten(1).sum(1) if losses.dim() > 1 else losses


class FunctionalLoss(ExampleLoss):
    """A function ``fn(parameters, example)`` for one example, as in `torch.func`. vmap runs it on all examples.

    Args:
        fn: a function of the model's parameters (a dict by name) and one example that returns a scalar.
        batch_of_one: whether `fn` expects the example with a batch dimension of one.
    """

    vectorized = True

    def __init__(self, fn: Callable[[dict[str, Tensor], Any], Tensor], *, batch_of_one: bool = False) -> None:
        self.fn, self.batch_of_one = fn, batch_of_one

    @property
    def anchors(self) -> tuple[Any, ...] | None:
        """The class and `batch_of_one`, and the function."""
        return _with((type(self), self.batch_of_one)), *_held_by(self.fn)

    def each(self, model: nn.Module, batch: Any) -> Tensor:
        parameters: dict[str, Tensor] = dict(model.named_parameters())

        def alone(example: Any) -> Tensor:
            return self.fn(parameters, as_batch_of_one(example) if self.batch_of_one else example).sum()

        return torch.func.vmap(alone, randomness="different")(batch)


def as_example_loss(loss_fn: Any) -> ExampleLoss:
    """Turn ``loss_fn(output, target)`` with any reduction, or None for the model's own loss, into an `ExampleLoss`.

    An `ExampleLoss` is returned unchanged.
    """
    if isinstance(loss_fn, ExampleLoss):
        return loss_fn
    if _is_known(loss_fn):
        return OutputLoss(loss_fn)
    if loss_fn is None:
        from ggda_ext.losses.model_loss import OwnLoss

        return OwnLoss()
    if isinstance(loss_fn, type):
        raise TypeError(f"loss_fn is the class {loss_fn.__name__}: pass an instance, {loss_fn.__name__}().")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is a {type(loss_fn).__name__}: pass a callable loss_fn(output, target).")
    if cannot_take(loss_fn, 1, 2):
        raise TypeError(
            f"loss_fn takes {signature(loss_fn)}: pass a callable loss_fn(output, target), or BatchLoss(fn) with your "
            "own fn(model, batch) -> losses [b]."
        )
    return OutputLoss(loss_fn)


def cannot_take(function: Callable[..., Any], *counts: int) -> bool:
    """Whether the signature of a function shows that it cannot be called with any of these numbers of arguments."""
    try:
        own = signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return False
    for count in counts:
        try:
            own.bind(*range(count))
        except TypeError:
            continue
        return False
    return True


def model_output(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | None]:
    """Run the model on a batch; return the output of the model and the target of the batch (None if it has none)."""
    try:
        output, target = _called(model, batch)
    except (RuntimeError, TypeError, AttributeError) as error:
        explained = errors.of_model(error, model, batch)
        if explained is error:
            raise
        raise explained from error
    output = getattr(output, "logits", output)  # Hugging Face model outputs
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the model returned a {type(output).__name__}, not a tensor: pass BatchLoss(fn) as the loss, "
            "with your own fn(model, batch) that returns one loss per example."
        )
    if output.dim() == 0:
        raise ValueError(
            "the model returned a single number for a batch, not one output per example: let it return outputs "
            "[b, …], or pass BatchLoss(fn) as the loss, with your own fn(model, batch) that returns losses [b]; or "
            "loss_fn=None, if the number is the loss of inputs and targets."
        )
    return output, target


def output_of(model: nn.Module, batch: Any) -> Tensor:
    """Return the outputs of a batch `[b, …]`."""
    return model_output(model, batch)[0]


def _called(model: nn.Module, batch: Any) -> tuple[Any, Tensor | None]:
    """Call the model with the inputs of a batch; return its output unchanged, and the target."""
    target: Tensor | None
    if isinstance(batch, Tensor):
        return model(batch), None
    if isinstance(batch, Mapping):
        inputs = dict(batch)
        label_key = next((key for key in LABEL_KEYS if key in inputs), None)
        target = inputs.pop(label_key) if label_key is not None else None
        return model(**inputs), target
    if isinstance(batch, tuple | list) and batch:
        *arguments, target = batch if len(batch) > 1 else (batch[0], None)
        return model(*arguments), target
    raise TypeError(
        f"a batch is a {type(batch).__name__}: make the data give tuples (*inputs, target), dicts or "
        "tensors, or pass BatchLoss(fn) as the loss, with your own fn(model, batch)."
    )


_ELEMENTWISE = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.SoftMarginLoss,
    nn.PoissonNLLLoss, nn.KLDivLoss, nn.HingeEmbeddingLoss,
)  # fmt: skip
_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_BY_ROW = (nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss)
_KNOWN = frozenset((*_ELEMENTWISE, *_CLASSES, *_BY_ROW))
"""PyTorch losses whose ``reduction="none"``, reduced row by row, equals the loss of a row alone; no subclasses."""


def _is_known(loss_fn: Any) -> bool:
    """Whether a loss is of a class in `_KNOWN`, and its `forward` was not replaced."""
    return type(loss_fn) in _KNOWN and "forward" not in vars(loss_fn)


class _Alike:
    """A placeholder for all PyTorch losses of one class with the same settings."""


@cache
def _with(kind_and_settings: tuple[Any, ...]) -> _Alike:
    return _Alike()


def _held_by(function: Any) -> tuple[Any, ...]:
    """Return what identifies a function: itself, or the two parts of a bound method, whose object is new each time."""
    return (function.__self__, function.__func__) if ismethod(function) else (function,)


def _standing_for(loss_fn: Any) -> Any:
    """Return what identifies a loss: one object for all equal PyTorch losses without tensors and hooks; else itself."""
    own = vars(loss_fn) if _is_known(loss_fn) else {}
    held = {name: value for name, value in own.items() if not name.startswith("_") and name != "training"}
    bare = not any(own[name] for name in own if name.startswith("_") and "buffers" not in name)
    plain = all(isinstance(value, bool | int | float | str | None) for value in held.values())
    if not own or not plain or not bare or any(value is not None for value in own["_buffers"].values()):
        return loss_fn
    return _with((type(loss_fn), *sorted(held.items())))


def example_losses(loss_fn: Callable[..., Tensor] | None, output: Tensor, target: Tensor | None) -> Tensor:
    """Return ``loss_fn`` for each row of `output` and `target` alone `[b]`; it reduces the trailing dimensions."""
    with torch._C.DisableTorchFunction():  # a pass watches calls of the model and the loss, not these checks
        size = output.shape[0]
        known = _is_known(loss_fn) and target is not None and target.shape[:1] == (size,)
        comparable = known and _is_comparable(loss_fn, output, target)
    if loss_fn is None:
        return output.reshape(size, -1).sum(1)
    if comparable and target is not None:
        numbers = isinstance(loss_fn, _ELEMENTWISE)
        return _known_losses(loss_fn, output, _as_output(output, target) if numbers else target)
    if target is None and _is_known(loss_fn):
        raise ValueError(
            f"the data gives no targets, which {type(loss_fn).__name__} needs: pass (x, y), or a dict with one of the "
            f"keys {', '.join(LABEL_KEYS)}."
        )
    arguments = (output,) if target is None else (output, target)
    losses = loss_fn(*arguments)
    if not isinstance(losses, Tensor):
        raise TypeError(f"the loss returned a {type(losses).__name__}: it must return a tensor.")
    with torch._C.DisableTorchFunction():  # a loss may return zeros if all targets are masked
        if output.requires_grad and not losses.requires_grad and bool(losses.any()):
            raise ValueError("the loss cuts its value from the model's outputs: compute it without detach or no_grad.")
    if losses.dim() and len(losses) == size:
        return losses.reshape(size, -1).sum(1)
    if losses.dim():
        raise ValueError(
            f"the loss returned {shape_of(losses)} for a batch of {size} examples: "
            f"return a scalar, or one loss per example, of shape [{size}]."
        )
    return losses.reshape(1) if size == 1 else _alone(loss_fn, arguments)


def _is_comparable(loss_fn: Any, output: Tensor, target: Any) -> bool:
    """Whether a PyTorch loss can take all rows at once; if not, it is called row by row.

    Raise an error for a weighted mean, and for outputs and targets that do not fit.
    """
    classes = isinstance(loss_fn, _CLASSES)
    weighted = classes and loss_fn.weight is not None and loss_fn.reduction == "mean"
    if weighted and not target.is_floating_point():  # with probabilities as targets, it divides by their number
        raise ValueError(
            f"loss_fn is {type(loss_fn).__name__}(weight=…, reduction='mean'), which divides by the weights of "
            "whoever shares the batch, so an example has no loss of its own: pass reduction='sum' if the weights are "
            "to count, or leave out weight= if they are not."
        )
    if isinstance(loss_fn, _ELEMENTWISE) and output.numel() != target.numel():
        _check_comparable(loss_fn, output, target)
        return False
    _check_classes(loss_fn, output, target)
    return True


def _check_classes(loss_fn: Any, output: Tensor, target: Tensor) -> None:
    """Raise an error for outputs and targets that a PyTorch loss of classes would misinterpret or cannot take."""
    by_number = isinstance(loss_fn, _CLASSES) and output.dim() == 2 and not target.is_complex()
    if by_number and ((target.dim() == 1) == target.is_floating_point() or output.shape[1] == 1):
        errors.check_classes(type(loss_fn).__name__, output, target)


def _as_output(output: Tensor, target: Tensor) -> Tensor:
    """Return the target as floats in the shape of `output`: targets `[b]` would broadcast with outputs `[b, 1]`."""
    with torch._C.DisableTorchFunction():
        shaped, typed = target.shape == output.shape, target.is_floating_point()
    target = target if shaped else target.reshape(output.shape)
    return target if typed else target.to(output.dtype)


def _known_losses(loss_fn: Any, output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of each row alone `[b]` for a PyTorch loss."""
    reduction, classes, unreduced = loss_fn.reduction, isinstance(loss_fn, _CLASSES), object.__new__(type(loss_fn))
    unreduced.__dict__ = {**vars(loss_fn), "reduction": "none"}  # a copy, since `copy.copy` takes as long as the loss
    try:
        rows = unreduced(output, target)
        with torch._C.DisableTorchFunction():
            flat, size = rows.shape == output.shape[:1], output.shape[0]
        rows = rows if flat else rows.reshape(size, -1)
    except (RuntimeError, IndexError) as error:
        explained = errors.of_loss(error, type(loss_fn).__name__, output, target)
        if explained is error:
            raise
        raise explained from error
    if flat:
        return rows
    if rows.shape[1] == 1:
        return rows.reshape(size)
    if reduction != "mean":
        return rows.sum(1)
    if classes and not target.is_floating_point():
        counted = (target.reshape(size, -1) != loss_fn.ignore_index).sum(1)
        return rows.sum(1) / counted.clamp(min=1)
    return rows.mean(1)


def training_loss(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``loss_fn(output, target)`` of a batch, for training; a PyTorch loss gets the targets as `example_losses`.

    Its errors say what to do.
    """
    if not _is_known(loss_fn):
        return loss_fn

    def fitted(output: Tensor, target: Tensor) -> Tensor:
        alike = output.shape[:1] == target.shape[:1] and output.numel() == target.numel()
        target = _as_output(output, target) if alike and isinstance(loss_fn, _ELEMENTWISE) else target
        _check_classes(loss_fn, output, target)
        try:
            return loss_fn(output, target)
        except (RuntimeError, IndexError) as error:
            explained = errors.of_loss(error, type(loss_fn).__name__, output, target)
            if explained is error:
                raise
            raise explained from error

    return fitted


@torch.no_grad()
def check_not_broadcast(loss_fn: Callable[..., Tensor], output: Any, target: Tensor) -> None:
    """Raise an error if a loss compares every output `[b, 1]` with every target `[b]`.

    Its value for a batch is then not that of its rows alone, but would be for outputs `[b]`.
    """
    pairs = isinstance(output, Tensor) and output.shape == (*target.shape, 1) and len(target) > 1
    if not pairs or _is_known(loss_fn):
        return
    try:
        value, fitting = loss_fn(output, target), loss_fn(output[..., 0], target)
        alone = _alone(loss_fn, (output, target))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return  # a loss that cannot be called so raises its own error, or is none of outputs [b]
    by_rows = alone.sum() if torch.allclose(fitting, alone.sum(), 1e-3) else alone.mean()
    if torch.allclose(fitting, by_rows, 1e-3) and not torch.allclose(value, by_rows, 1e-3):
        raise ValueError(
            f"loss_fn compares every output with every target, because the model gives outputs {list(output.shape)} "
            f"for targets {list(target.shape)}: pass targets of that shape, y[..., None]."
        )


def has_class_outside(loss_fn: Any, output: Tensor, target: Tensor) -> bool:
    """Whether a PyTorch loss of classes gets a target that is the number of no output of the model."""
    if not isinstance(loss_fn, _CLASSES) or target.is_floating_point():
        return False
    counted = target[target != loss_fn.ignore_index]
    return counted.numel() > 0 and not 0 <= int(counted.min()) <= int(counted.max()) < output.shape[1]


def ignored_targets(loss_fn: Any, target: Tensor | None) -> Tensor | None:
    """Return which targets `[b]` a PyTorch loss ignores, also in a mean; None if it cannot ignore such targets."""
    if not isinstance(loss_fn, _CLASSES) or target is None or target.is_floating_point() or target.dim() != 1:
        return None
    return target == loss_fn.ignore_index


def _check_comparable(loss_fn: Any, output: Tensor, target: Tensor) -> None:
    try:
        torch.broadcast_shapes(output.shape, target.shape)
    except RuntimeError:
        raise ValueError(
            f"the model gives outputs {list(output.shape)} for targets {list(target.shape)}, which "
            f"{type(loss_fn).__name__} cannot compare: for classes use nn.CrossEntropyLoss(), for numbers a model with "
            "one output for each."
        ) from None


def _alone(loss_fn: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> Tensor:
    """Return a scalar loss for every row alone `[b]`: all at once under vmap, or one by one if vmap cannot run it."""

    def alone(*row: Tensor) -> Tensor:
        return loss_fn(*(value.unsqueeze(0) for value in row)).sum()

    try:
        return torch.func.vmap(alone)(*arguments)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        pass  # e.g. a boolean mask, or an `if` on a value; row by row it runs, or raises its own error
    return torch.stack([alone(*row) for row in zip(*arguments, strict=True)])


def shape_of(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
