"""The loss of each sequence as a Trainer computes it: by the model, by a `compute_loss_func`, or with smoothed labels.

The loss of a sequence is the Trainer's loss for this sequence alone. For a language model it is the mean over the
tokens, or with ``tokens="sum"`` their sum. A Trainer divides by the number of tokens in its whole batch, so there the
weight of a sequence is its length. ``"sum"`` gives all tokens the same weight, ``"mean"`` all sequences.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dis import get_instructions
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from ggda_ext.losses.model_loss import OwnLoss
from ggda_ext.losses.row_reductions import RowReductions, Tokens
from ggda_transformers.peft_models import base_of

IGNORED = -100


class OverriddenLoss:
    """`compute_loss` of a Trainer that overrides it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def __call__(self, model: nn.Module, inputs: dict[str, Any], **counts: Any) -> Any:
        return self.trainer.compute_loss(model, inputs, **counts)

    def __fingerprint__(self) -> list[Any]:
        """What the loss may depend on: the class, its arguments, how far it is, and all that a plain Trainer has not.

        What else a Trainer holds belongs to the training (the optimizer, the accelerator) or is hashed elsewhere.
        """
        own, state = vars(self.trainer), getattr(self.trainer, "state", None)
        kept = {"label_smoother", "compute_loss_func", "processing_class", "model_accepts_loss_kwargs"}
        plain = _assigned_by_trainer() - kept
        arguments = {name: value for name, value in vars(self.trainer.args).items() if name not in _PLACES}
        reached = getattr(state, "global_step", None), getattr(state, "epoch", None)
        return [type(self.trainer), arguments, reached, {name: own[name] for name in sorted(own.keys() - plain)}]


_PLACES = frozenset({"output_dir", "logging_dir", "run_name", "distributed_state"})
"""Arguments of a Trainer that say where it writes and on which machine it runs; a time may be part of them."""


@cache
def _assigned_by_trainer() -> frozenset[str]:
    """Names of the attributes that the methods of `Trainer` itself assign to."""
    codes = [method.__code__ for method in vars(Trainer).values() if isinstance(method, FunctionType)]
    return frozenset(item.argval for code in codes for item in get_instructions(code) if item.opname == "STORE_ATTR")


class TrainerLoss(OwnLoss):
    """The Trainer's loss for each example.

    Args:
        tokens: ``"mean"`` or ``"sum"``, see the module's docstring.
        compute_loss_func: ``f(outputs, labels, num_items_in_batch=…)`` as given to Trainer, or None.
        smoother: the Trainer's label smoother, or None.
        compute_loss: the loss of a Trainer that overrides this method, or None.
        shifts: whether position i predicts label i + 1.
        of_token: as in `OwnLoss`.
        of_example: as in `OwnLoss`.
    """

    def __init__(
        self,
        tokens: Tokens = "mean",
        *,
        compute_loss_func: Callable[..., Any] | None = None,
        smoother: Any = None,
        compute_loss: OverriddenLoss | None = None,
        shifts: bool = False,
        of_token: Callable[[Tensor], Tensor] | None = None,
        of_example: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(tokens, of_token, of_example)
        self.compute_loss_func, self.smoother, self.compute_loss = compute_loss_func, smoother, compute_loss
        self.shifts = shifts

    @property
    def anchors(self) -> tuple[Any, ...] | None:
        """The anchors of the model's own loss, and the objects whose functions this loss uses."""
        before = super().anchors
        own = [self.compute_loss_func, self.smoother, self.compute_loss and self.compute_loss.trainer]
        return None if before is None else (*before, *(part for part in own if part is not None))

    def value(self, model: nn.Module, batch: Any, rows: RowReductions | None = None) -> Tensor:
        """The loss of a batch as one number, or one number for each example if `rows` is given."""
        if self.compute_loss is not None:
            counted = "labels" in batch and getattr(self.compute_loss.trainer, "model_accepts_loss_kwargs", False)
            counts = {"num_items_in_batch": self._counts(batch["labels"], rows)} if counted else {}
            return _checked(self.compute_loss(model, dict(batch), **counts), "compute_loss")
        if self.compute_loss_func is None and self.smoother is None:
            try:
                return super().value(model, batch, rows)
            except TypeError as error:
                if "labels" in batch and error.__cause__ is not None and _takes_labels(model):
                    raise  # the model itself failed
                if "labels" in batch:
                    raise ValueError(
                        f"a {type(model).__name__} gave no loss for rows with labels: take a model with a head, such "
                        "as one for SequenceClassification, or pass compute_loss_func=."
                    ) from error
                have = ", ".join(map(repr, batch))
                raise ValueError(
                    f"the model returned no loss: the rows have {have} and no 'labels'. Keep the column of labels, or "
                    "use a data collator that makes them."
                ) from error
        inputs = dict(batch)
        labels = inputs.pop("labels", None)
        outputs = model(**inputs)
        if self.compute_loss_func is not None:
            items = None if labels is None else self._counts(labels, rows)
            return _checked(self.compute_loss_func(outputs, labels, num_items_in_batch=items), "compute_loss_func")
        if labels is None:
            raise ValueError("the Trainer smooths labels, but the batch has no 'labels'.")
        if rows is None:
            return self.smoother(outputs, labels, shift_labels=self.shifts)
        return self._smoothed(outputs, labels, rows)

    def _counts(self, labels: Tensor, rows: RowReductions | None) -> Tensor:
        """Number of labels that are not ignored, which a loss divides by, for each example `[b]` or for the batch.

        If the tokens of an example are to be added up, each example counts as one.
        """
        kept = ((labels[..., 1:] if self.shifts and labels.dim() > 1 else labels) != IGNORED).reshape(len(labels), -1)
        if rows is None:
            return kept.sum()
        return torch.ones_like(kept[:, 0], dtype=torch.long) if rows.tokens == "sum" else kept.sum(1)

    def _smoothed(self, outputs: Any, labels: Tensor, rows: RowReductions) -> Tensor:
        """The smoother's loss for each example `[b]`."""
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        if self.shifts:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        losses = -logits.log_softmax(-1)
        kept = labels != self.smoother.ignore_index
        right = losses.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        each = (1 - self.smoother.epsilon) * right + self.smoother.epsilon * losses.mean(-1)
        values, counted = (each * kept).reshape(len(labels), -1), kept.reshape(len(labels), -1)
        rows.calls, rows.counted = rows.calls + 1, counted.sum(1)
        if rows.each is not None:
            values = torch.where(counted, rows.each(values), 0)
        return values.sum(1) if rows.tokens == "sum" else values.sum(1) / rows.counted.clamp(min=1)


def _takes_labels(model: nn.Module) -> bool:
    """Whether a model takes labels, by name or in ``**kwargs``; before 5.0, models without a head did not."""
    parameters = inspect.signature(base_of(model).forward).parameters
    return "labels" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _checked(loss: Any, name: str) -> Tensor:
    loss = loss[0] if isinstance(loss, tuple) else loss
    if not isinstance(loss, Tensor):
        raise TypeError(f"{name} returned a {type(loss).__name__}: it must return the loss as a tensor.")
    return loss
