"""Weights of training points: the gradients of Σ_i w_i ℓ_i, for any strategy.

A loss sees batches only, so the weights travel with the data: ``WeightedData`` gives batches ``(batch, weights)``
to a ``WeightedLoss``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import tee
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.data import IndexedData
from ggda_ext.losses import ExampleLoss


class WeightedData(IndexedData):
    """The points of `data`, each with a weight, or a row of weights: batches are ``(batch, weights [b, …])``."""

    def __init__(self, data: IndexedData, weights: Tensor) -> None:
        if data.n is None or weights.shape[:1] != (data.n,):
            raise ValueError(f"weights has shape {list(weights.shape)}: pass one for each of the {data.n} points.")
        self.data, self.weights = data, weights.detach()
        self.name, self.n, self.is_stream = data.name, data.n, False

    def batches(self, index_batches: Iterable[Sequence[int] | np.ndarray]) -> Iterator[Any]:
        """One batch for every sequence of indices, in that order."""
        asked, again = tee(index_batches)
        for indices, batch in zip(asked, self.data.batches(again), strict=True):
            at = torch.from_numpy(np.asarray(indices).astype(np.int64)).to(self.weights.device)
            yield batch, self.weights[at]


class WeightedLoss(ExampleLoss):
    """``w_i ℓ_i`` of batches ``(batch, weights)``."""

    def __init__(self, loss: ExampleLoss) -> None:
        self.loss, self.vectorized = loss, loss.vectorized

    @property
    def anchors(self) -> tuple[Any, ...] | None:
        """Those of the loss that is weighted."""
        return None if self.loss.anchors is None else (type(self), *self.loss.anchors)

    def each(self, model: nn.Module, batch: Any) -> Tensor:
        """Weighted losses `[b]`."""
        examples, weights = batch
        return self.loss.each(model, examples) * weights
