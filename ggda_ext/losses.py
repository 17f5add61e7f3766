"""The training loss of each example of a batch, whatever shape the user's loss has.

One rule for every reduction: the loss of an example is what the loss function gives for that
example alone. So ``reduction="none"``, ``"sum"`` and ``"mean"`` of the usual losses agree, and a
class-weighted mean, whose value depends on who shares the batch, has a well-defined answer too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ggda_ext.data import as_batch_of_one, batch_length

LABEL_KEYS = ("labels", "label", "targets", "target", "y")


class ExampleLoss:
    """Per-example losses of a model on a batch: the one thing gradient providers need to know."""

    vectorized = False
    """Whether the model runs under `torch.func.vmap`, where a layer sees one example at a time."""

    def each(self, model: nn.Module, batch: Any) -> Tensor:
        """Loss of every example `[b]`."""
        raise NotImplementedError

    def total(self, model: nn.Module, batch: Any) -> Tensor:
        """Sum of the losses of the batch, a scalar."""
        return self.each(model, batch).sum()


class OutputLoss(ExampleLoss):
    """``loss_fn(model(*inputs), target)``, or the summed outputs where `loss_fn` is None.

    Tuple batches are ``(*inputs, target)``, dict batches are keyword arguments of the model plus
    one of the label keys, and a batch that is a single tensor has no target: ``loss_fn(output)``.
    """

    def __init__(self, loss_fn: Callable[..., Tensor] | None) -> None:
        self.loss_fn = loss_fn

    def each(self, model: nn.Module, batch: Any) -> Tensor:
        output, target = model_output(model, batch)
        return example_losses(self.loss_fn, output, target)


class BatchLoss(ExampleLoss):
    """``fn(model, batch)`` gives the losses `[b]` itself: for models with a calling convention of their own."""

    def __init__(self, fn: Callable[[nn.Module, Any], Tensor]) -> None:
        self.fn = fn

    def each(self, model: nn.Module, batch: Any) -> Tensor:
        losses = self.fn(model, batch)
        size = batch_length(batch)
        if not isinstance(losses, Tensor) or losses.shape[:1] != (size,):
            raise ValueError(
                f"the loss returned {_shape(losses)} for a batch of {size} examples: "
                f"return one loss per example, of shape [{size}]."
            )
        return losses.flatten(1).sum(1) if losses.dim() > 1 else losses


class FunctionalLoss(ExampleLoss):
    """``fn(parameters, example)``, written for one example in the manner of `torch.func`, made per-example by vmap.

    Args:
        fn: a scalar of the model's parameters (a dict by name) and one example.
        batch_of_one: whether `fn` expects the example with a batch dimension of one.
    """

    vectorized = True

    def __init__(self, fn: Callable[[dict[str, Tensor], Any], Tensor], *, batch_of_one: bool = False) -> None:
        self.fn, self.batch_of_one = fn, batch_of_one

    def each(self, model: nn.Module, batch: Any) -> Tensor:
        parameters: dict[str, Tensor] = dict(model.named_parameters())

        def alone(example: Any) -> Tensor:
            return self.fn(parameters, as_batch_of_one(example) if self.batch_of_one else example).sum()

        return torch.func.vmap(alone, randomness="different")(batch)


def as_example_loss(loss_fn: Any) -> ExampleLoss:
    """`loss_fn` as an `ExampleLoss`: a ``loss_fn(output, target)`` of any reduction, or one already."""
    if isinstance(loss_fn, ExampleLoss):
        return loss_fn
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn is a {type(loss_fn).__name__}: pass a callable loss_fn(output, target).")
    return OutputLoss(loss_fn)


def model_output(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | None]:
    """Run the model on a batch: its output and the batch's target (None if it has none)."""
    target: Tensor | None
    if isinstance(batch, Tensor):
        output, target = model(batch), None
    elif isinstance(batch, Mapping):
        inputs = dict(batch)
        label_key = next((key for key in LABEL_KEYS if key in inputs), None)
        target = inputs.pop(label_key) if label_key is not None else None
        output = model(**inputs)
    elif isinstance(batch, tuple | list) and batch:
        *arguments, target = batch if len(batch) > 1 else (batch[0], None)
        output = model(*arguments)
    else:
        raise TypeError(
            f"a batch is a {type(batch).__name__}: make the data give tuples (*inputs, target), dicts or "
            "tensors, or pass BatchLoss(fn) as the loss, with your own fn(model, batch)."
        )
    output = getattr(output, "logits", output)  # Hugging Face model outputs
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the model returned a {type(output).__name__}, not a tensor: pass BatchLoss(fn) as the loss, "
            "with your own fn(model, batch) that returns one loss per example."
        )
    return output, target


def example_losses(loss_fn: Callable[..., Tensor] | None, output: Tensor, target: Tensor | None) -> Tensor:
    """``loss_fn`` of each row of `output` and `target` alone `[b]`; trailing dimensions are reduced as it does."""
    size = len(output)
    if loss_fn is None:
        return output.reshape(size, -1).sum(1)
    arguments = (output,) if target is None else (output, target)
    unreduced, reduction = _unreduced(loss_fn, target)
    losses = unreduced(*arguments)
    if not isinstance(losses, Tensor):
        raise TypeError(f"the loss returned a {type(losses).__name__}: it must return a tensor.")
    if losses.dim() and len(losses) == size:
        rows = losses.reshape(size, -1)
        return rows.mean(1) if reduction == "mean" else rows.sum(1)
    if losses.dim():
        raise ValueError(
            f"the loss returned {_shape(losses)} for a batch of {size} examples: "
            f"return a scalar, or one loss per example, of shape [{size}]."
        )
    if size == 1:
        return losses.reshape(1)

    def alone(*row: Tensor) -> Tensor:
        return loss_fn(*(value.unsqueeze(0) for value in row)).sum()

    return torch.func.vmap(alone)(*arguments)


def _unreduced(loss_fn: Callable[..., Tensor], target: Tensor | None) -> tuple[Callable[..., Tensor], str]:
    """`loss_fn` with ``reduction="none"`` where that, reduced row by row, is the loss of a row alone."""
    reduction = getattr(loss_fn, "reduction", "none")
    if reduction == "none" or not isinstance(loss_fn, nn.Module):
        return loss_fn, "none"
    weighted = getattr(loss_fn, "weight", None) is not None
    masked = hasattr(loss_fn, "ignore_index") and target is not None and target.dim() > 1
    if reduction == "mean" and (weighted or masked):
        return loss_fn, "mean"  # a weighted mean: only the loss of the row alone is well defined
    unreduced = copy.copy(loss_fn)
    unreduced.reduction = "none"  # type: ignore[assignment]
    return unreduced, reduction


def _shape(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
