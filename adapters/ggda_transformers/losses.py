"""The loss of each sequence as a Trainer computes it: the model's own, a `compute_loss_func`, with smoothed labels.

The loss of a sequence is what the Trainer's loss gives for that sequence alone: for a language model the mean over its
tokens, or with ``tokens="sum"`` their sum. A Trainer divides by the tokens of its whole batch, which weighs a sequence
by its length there; ``"sum"`` weighs all tokens alike, ``"mean"`` all sequences.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ggda_ext.losses.model_loss import OwnLoss
from ggda_ext.losses.row_reductions import RowReductions, Tokens
from ggda_transformers.peft_models import base_of

IGNORED = -100


class TrainerLoss(OwnLoss):
    """The loss of a Trainer, of each example.

    Args:
        tokens: ``"mean"`` or ``"sum"``, see above.
        compute_loss_func: ``f(outputs, labels, num_items_in_batch=…)`` as given to Trainer, or None.
        smoother: the Trainer's label smoother, or None.
        compute_loss: ``f(model, inputs)`` of a Trainer that overrides it, or None.
        shifts: whether position i predicts label i + 1.
        owner: the object that the functions belong to.
        of_token: as in `OwnLoss`.
        of_example: as in `OwnLoss`.
    """

    def __init__(
        self,
        tokens: Tokens = "mean",
        *,
        compute_loss_func: Callable[..., Any] | None = None,
        smoother: Any = None,
        compute_loss: Callable[..., Any] | None = None,
        shifts: bool = False,
        owner: Any = None,
        of_token: Callable[[Tensor], Tensor] | None = None,
        of_example: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(tokens, of_token, of_example)
        self.compute_loss_func, self.smoother, self.compute_loss = compute_loss_func, smoother, compute_loss
        self.shifts, self.owner = shifts, owner

    @property
    def anchors(self) -> tuple[Any, ...] | None:
        """Those of the model's own loss, and whose functions make this one."""
        before = super().anchors
        own = [self.compute_loss_func, self.smoother, self.owner if self.compute_loss is not None else None]
        return None if before is None else (*before, *(part for part in own if part is not None))

    def value(self, model: nn.Module, batch: Any, rows: RowReductions | None = None) -> Tensor:
        """The loss of a batch, one number; one for each example under `rows`."""
        if self.compute_loss is not None:
            return _checked(self.compute_loss(model, dict(batch)), "compute_loss")
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
            counts = None if labels is None else self._counts(labels, each=rows is not None)
            return _checked(self.compute_loss_func(outputs, labels, num_items_in_batch=counts), "compute_loss_func")
        if labels is None:
            raise ValueError("the Trainer smooths labels, but the batch has no 'labels'.")
        if rows is None:
            return self.smoother(outputs, labels, shift_labels=self.shifts)
        return self._smoothed(outputs, labels, rows)

    def _counts(self, labels: Tensor, *, each: bool) -> Tensor:
        """How many labels count, of each example `[b]` or of the batch."""
        kept = (labels[..., 1:] if self.shifts and labels.dim() > 1 else labels) != IGNORED
        return kept.reshape(len(labels), -1).sum(1) if each else kept.sum()

    def _smoothed(self, outputs: Any, labels: Tensor, rows: RowReductions) -> Tensor:
        """What the smoother gives for each example `[b]`."""
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
    """Whether labels may be passed to a model, by name or among others: those without a head took none before 5.0."""
    parameters = inspect.signature(base_of(model).forward).parameters
    return "labels" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _checked(loss: Any, name: str) -> Tensor:
    loss = loss[0] if isinstance(loss, tuple) else loss
    if not isinstance(loss, Tensor):
        raise TypeError(f"{name} returned a {type(loss).__name__}: it must return the loss as a tensor.")
    return loss
