"""Losses inside a model, reduced example by example. This turns a model's own loss into a loss for each example.

A model that returns its own loss calls one of PyTorch's losses, which takes the mean (or sum) over its whole batch.
Under `RowReductions`, the same call returns one number per example instead: its value for that example alone. So
everything that the model does with it afterwards (a sum of two losses, a division) is done for each example. The
examples must follow one another along the first dimension, and the tokens of an example must be together, as they are
if a model flattens them. The caller must check this by a comparison with examples that are run alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Tokens = Literal["mean", "sum"]
"""How the losses of the tokens of a sequence are combined: as the model does it, or by their sum."""

_OF_CLASSES = (F.cross_entropy, F.nll_loss)
_OF_ELEMENTS = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.soft_margin_loss, F.kl_div,
)  # fmt: skip
_SIGNATURES = {loss: inspect.signature(loss) for loss in (*_OF_CLASSES, *_OF_ELEMENTS)}


class RowReductions(TorchFunctionMode):
    """While this mode is active, PyTorch's losses return a value per example `[b]` instead of one for the batch.

    Args:
        size: number of examples b.
        tokens: ``"mean"`` to reduce as the loss itself does, ``"sum"`` to add up an example's tokens.
        each: a function applied to the loss of every token before the reduction, such as
            ``lambda loss: (-loss).exp()``. Ignored tokens stay ignored.
    """

    def __init__(self, size: int, tokens: Tokens = "mean", each: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.size, self.tokens, self.each = size, tokens, each
        self.calls = 0
        """Number of calls of a loss that were reduced by example."""
        self.counted: Tensor | None = None
        """Number of tokens of each example that counted in the last of these calls `[b]`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self._by_row(func, args, kwargs or {}) if func in _SIGNATURES else None
        return func(*args, **(kwargs or {})) if found is None else found

    def _by_row(self, loss: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """Return the loss of every example `[b]`; None if the loss is not reduced or its rows are not the examples."""
        given = _SIGNATURES[loss].bind(*args, **kwargs)
        given.apply_defaults()
        reduction = given.arguments["reduction"]
        old_style = any(given.arguments.get(name) is not None for name in ("size_average", "reduce"))
        if reduction not in ("mean", "sum") or old_style:
            return None
        given.arguments["reduction"] = "none"
        values = loss(*given.args, **given.kwargs)
        if values.numel() == 0 or values.numel() % self.size:
            return None
        values = values.reshape(self.size, -1)
        weights = self._weights(loss, given.arguments, values)
        self.calls += 1
        self.counted = (weights != 0).sum(1)
        if self.each is not None:
            values = torch.where(weights != 0, self.each(values), 0)
        total = values.sum(1)
        if reduction == "sum" or self.tokens == "sum":
            return total
        return total / weights.sum(1).clamp(min=torch.finfo(total.dtype).tiny)  # all ignored: 0, not 0 / 0

    def _weights(self, loss: Any, given: dict[str, Any], values: Tensor) -> Tensor:
        """Return the weight of each token in a mean `[b, t]`."""
        target = given["target"]
        if loss not in _OF_CLASSES or target.is_floating_point():
            return torch.ones_like(values)
        kept = target != given["ignore_index"]
        if given["weight"] is None:
            return kept.reshape(values.shape).to(values)
        weights = given["weight"][torch.where(kept, target, 0)] * kept
        return weights.reshape(values.shape).to(values)
