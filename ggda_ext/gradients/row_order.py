"""A check that the rows of a layer belong to the examples of a batch, in the order of the examples."""

from __future__ import annotations

import torch
from torch import Tensor

from ggda_ext.gradients.layers import Layer


class RowOrder:
    """Checks which example each row belongs to, by a second backward pass with a different weight for every loss.

    In the second pass the gradient at a row of example i is w_i times the gradient of the first pass. If it is not,
    the row belongs to another example, or to several.

    Args:
        allowed: relative differences that rounding may explain.

    Attributes:
        misplaced: a layer whose rows are not those of the examples in their order, or None.
    """

    def __init__(self, allowed: float) -> None:
        self.allowed = allowed
        self.misplaced: str | None = None
        self._weights: Tensor | None = None
        self._first: list[tuple[Layer, Tensor]] = []

    def weights(self, size: int, losses: Tensor) -> Tensor:
        """Return a weight for every example `[b]`. From now on `saw` compares gradients and does not keep them."""
        drawn = torch.rand(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) + 1
        self._weights = drawn.to(losses)
        self._first.reverse()
        return self._weights

    def saw(self, layer: Layer, d: Tensor, repeats: int) -> bool:
        """Keep the gradient at the output of a layer, or compare it with the kept one; return whether it compared."""
        if self._weights is None:
            self._first.append((layer, d.clone()))
            return False
        self._compare(layer, d, repeats)
        return True

    def _compare(self, layer: Layer, d: Tensor, repeats: int) -> None:
        before, first = self._first.pop() if self._first else (None, d)
        if before is not layer or first.shape != d.shape:
            self.misplaced = self.misplaced or layer.name
            return
        assert self._weights is not None
        precision = torch.promote_types(d.dtype, torch.float32)
        rows, expected = (values.reshape(len(d), -1).to(precision) for values in (d, first))
        error = (rows - expected * self._weights.to(precision).repeat_interleave(repeats)[:, None]).norm(dim=1)
        norms = expected.norm(dim=1)
        if bool((error > self.allowed * (norms + 0.01 * norms.mean())).any()):  # false for NaN
            self.misplaced = self.misplaced or layer.name
