"""The loss that a model returns itself, for each example of a batch.

A model returns one number for its batch. `RowReductions` takes the loss of each example, all at once, from the PyTorch
losses that the model calls. On the first batch, these are compared with the losses of examples that are run alone. If
they differ, or if the model computes its loss in another way, every example is run alone, which is exact but slower.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ggda_ext.data import batch_length, pick
from ggda_ext.losses.example import ExampleLoss, shape_of
from ggda_ext.losses.row_reductions import RowReductions, Tokens

_by_rows: weakref.WeakKeyDictionary[OwnLoss, weakref.WeakKeyDictionary[nn.Module, bool]] = weakref.WeakKeyDictionary()
"""Whether the losses of examples can be taken from a whole batch of a model: found out, so no setting of the loss."""
_COMPARED = 4  # examples of the first batch that are run alone


def _as_it_is(loss: Tensor) -> Tensor:
    return loss


class OwnLoss(ExampleLoss):
    """The loss that the model itself returns: a Hugging Face output with ``.loss``, a dict with ``"loss"``, a number.

    Args:
        tokens: ``"mean"`` takes the loss that the model returns for the example alone; for a language model, this is
            the mean over its tokens. ``"sum"`` adds up the losses of its tokens. Targets that the loss ignores (−100)
            count in neither. An example whose targets are all ignored has the loss 0.
        of_token: a function applied to the loss of each token before the reduction; by default none.
        of_example: a function applied to the loss of each example; by default none.
    """

    def __init__(
        self,
        tokens: Tokens = "mean",
        of_token: Callable[[Tensor], Tensor] | None = None,
        of_example: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if tokens not in ("mean", "sum"):
            raise ValueError(f"tokens={tokens!r} is not one of 'mean', 'sum'.")
        self.tokens, self.of_token, self.of_example = tokens, of_token, of_example or _as_it_is

    @property
    def anchors(self) -> tuple[Any, ...] | None:
        """The kind of loss and the functions applied to it; everything else belongs to the model."""
        kind = RowReductions if self.tokens == "sum" else type(self)
        return type(self), kind, self.of_token or _as_it_is, self.of_example

    def prepare(self, model: nn.Module, batch: Any) -> None:
        """Find out, once per model, whether the losses of examples can be taken from a whole batch."""
        size = batch_length(batch)
        if size > 1 and model not in self._found():
            self._found()[model] = self._proven(model, batch, size)

    def each(self, model: nn.Module, batch: Any) -> Tensor:
        self.prepare(model, batch)
        size = batch_length(batch)
        if size == 1 or self._found()[model]:
            losses = self._rows(model, batch, size, self.tokens, self.of_token)[0]
        else:
            alone = (pick(batch, [at]) for at in range(size))
            losses = torch.cat([self._rows(model, one, 1, self.tokens, self.of_token)[0] for one in alone])
        return self.of_example(losses)

    def value(self, model: nn.Module, batch: Any, rows: RowReductions | None = None) -> Tensor:
        """Return the loss of a batch, one number; if `rows` is given, one number for each example."""
        try:
            if isinstance(batch, Mapping):
                output = model(**batch)
            else:
                output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
        except TypeError as error:
            raise TypeError(_no_own_loss(f"called with inputs and targets it fails ({error})")) from error
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        by_row = rows is not None and rows.calls > 0
        if not isinstance(loss, Tensor) or ((loss.numel() != 1 or (loss is output and loss.dim())) and not by_row):
            raise TypeError(_no_own_loss(f"it returned {shape_of(output if loss is None else loss)}"))
        return loss

    def _rows(
        self, model: nn.Module, batch: Any, size: int, tokens: Tokens, of_token: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss of each example `[b]`, and its number of counted tokens; raise an error if not possible."""
        with RowReductions(size, tokens, of_token) as rows:
            loss = self.value(model, batch, rows)
        if not rows.calls and (tokens == "sum" or of_token is not None):
            raise ValueError(
                "the model computes its loss without the losses of torch.nn.functional, so the losses of its tokens "
                "cannot be computed: use tokens='mean', or pass the loss as a BatchLoss."
            )
        if loss.numel() != size or (size > 1 and not rows.calls):
            raise _NotByRows
        return loss.reshape(size), rows.counted

    def _found(self) -> weakref.WeakKeyDictionary[nn.Module, bool]:
        """What was found out about each model."""
        return _by_rows.setdefault(self, weakref.WeakKeyDictionary())

    def _proven(self, model: nn.Module, batch: Any, size: int) -> bool:
        """Whether the losses taken from a whole batch equal the losses of its examples alone."""
        few = _with_padding(pick(batch, range(size)[:: max(1, size // _COMPARED)][:_COMPARED]))
        positions = range(batch_length(few))
        rows: Tensor | None
        with torch.no_grad():
            try:
                rows, counted = self._rows(model, few, len(positions), "mean", None)
            except (_NotByRows, RuntimeError, ValueError, TypeError):
                rows = counted = None  # if the model also fails below, on one example, it raises its own error
            alone = torch.stack([self.value(model, pick(few, [at])).reshape(()) for at in positions])
            if rows is not None:
                asked = (counted > 0 if counted is not None else torch.ones_like(rows) > 0) & alone.isfinite()
                allowed = 1e-2 if rows.dtype in (torch.float16, torch.bfloat16) else 1e-3
                if bool(((rows - alone).abs() <= allowed * (1e-3 + alone.abs()))[asked].all()):
                    return True
            if len(alone) > 1 and bool(alone.isfinite().all()):
                _refuse_comparisons(alone, self.value(model, few))
        return False


def _with_padding(batch: Any) -> Any:
    """The batch as if the last token of its first example were padding, by its masks and by labels that use −100.

    A loss may leave padding out. Then tokens are not in equal parts, as they may be in the first batch by chance.
    """
    changed = {}
    for name, value in batch.items() if isinstance(batch, Mapping) else ():
        out = 0 if "mask" in name else -100
        if isinstance(value, Tensor) and value.dim() == 2 and (out == 0 or bool((value == out).any())):
            kept = (value[0] != out).nonzero().flatten()
            changed[name] = value.clone()
            changed[name][0, kept[1:][-1:]] = out  # an example keeps at least one
    return {**batch, **changed} if changed else batch


class _NotByRows(ValueError):
    """Error: the model's loss of a batch cannot be split into one number per example."""

    def __init__(self) -> None:
        super().__init__("the model gives one loss for the whole batch")


def _refuse_comparisons(alone: Tensor, together: Tensor) -> None:
    """Raise an error if the joint loss of examples is neither their sum nor a mean of their losses alone `[b]`.

    A mean may weigh examples, and each of several heads may do so in its own way. So only a joint loss that is further
    outside the range of the losses alone than this range is wide counts as a comparison.
    """
    low, high = alone.min(), alone.max()
    rounding = 1e-2 * (1e-3 + together.abs())
    outside = torch.maximum(together - high, low - together) > high - low + rounding
    if bool(outside & ((together - alone.sum()).abs() > rounding)):
        own = f"{float(low) + 0.0:.6g}" + (f" to {float(high):.6g}" if bool(high - low > rounding) else "")
        raise ValueError(
            "the loss compares the examples of a batch with each other (contrastive learning?): "
            f"{len(alone)} of them have a loss of {float(together):.6g} together and {own} for each alone, so none has "
            "a loss of its own: take one that compares an example with a fixed set of others."
        )


def _no_own_loss(why: str) -> str:
    return (
        f"loss_fn is None, which stands for the loss that the model itself returns, but {why}: pass the training loss, "
        "e.g. nn.CrossEntropyLoss(), or let the model return an output with .loss."
    )
