"""CountSketch: a random projection that costs one addition per coordinate.

Every coordinate is added, with a random sign, to one random place. Inner products keep their value on average, with a
standard deviation of at most √(2/dim) · |u| |v|, as with a dense Gaussian projection (Johnson-Lindenstrauss).
"""

from __future__ import annotations

import torch
from torch import Tensor

_ENTRIES, _ROWS = 1 << 18, 128  # size of a block, small enough to stay in the cache


def draw_sketch(size: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw random places `[size]` below `dim`, and random signs `[size]`."""
    places = torch.randint(dim, (size,), generator=generator)
    return places, torch.randint(2, (size,), generator=generator).mul_(2).sub_(1).float()


def count_sketch(rows: Tensor, places: Tensor, signs: Tensor, dim: int) -> Tensor:
    """Return the sketch `[b, dim]` of rows `[b, d]`: every coordinate, times its sign, is added to its place."""
    sketch = rows.new_empty(len(rows), dim)
    signs = signs.to(rows.dtype)
    for top in range(0, len(rows), _ROWS):
        block = rows[top : top + _ROWS]
        turned = rows.new_zeros(dim, len(block))
        columns = _ENTRIES // len(block)
        for low in range(0, rows.shape[1], columns):
            at = slice(low, low + columns)
            turned.index_add_(0, places[at], (block[:, at] * signs[at]).T.contiguous())
        sketch[top : top + _ROWS] = turned.T
    return sketch
