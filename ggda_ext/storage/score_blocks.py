"""Finished scores on disk, in a grid of blocks (test points or components × groups), read a few rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ggda_ext.storage.folder import read_array
from ggda_ext.storage.jobs import Range


def block_name(tests: int, groups: int) -> str:
    """The name of a block, from its position in the grid."""
    return f"block-{tests:04d}-{groups:04d}"


@dataclass(frozen=True)
class ScoreBlocks:
    """Finished scores `[m, k]` of one question at one checkpoint, in a grid of blocks on disk.

    Attributes:
        folder: the folder of the store.
        name: the name of the question, which is a part of the store.
        made_with: a hash of everything that the scores depend on.
        tests: where each block of test points or components begins and ends.
        groups: where each block of groups begins and ends.
        dtype: dtype of the scores.
        made: all scores, if they are a single block that was made just now; None otherwise.
    """

    folder: Path
    name: str
    made_with: str
    tests: list[Range]
    groups: list[Range]
    dtype: torch.dtype
    made: Tensor | None = None

    @property
    def m(self) -> int:
        return self.tests[-1][1]

    @property
    def k(self) -> int:
        return self.groups[-1][1]

    @property
    def is_one_block(self) -> bool:
        return len(self.tests) == len(self.groups) == 1

    def whole(self) -> Tensor:
        """The scores, if they are a single block."""
        return torch.from_numpy(self._block(0, 0)) if self.made is None else self.made

    def _block(self, tests: int, groups: int) -> np.ndarray:
        return read_array(self.folder, block_name(tests, groups), self.name)

    @property
    def made_of(self) -> list[str]:
        """The name of the question in the store, and the hash of everything that its scores depend on."""
        return [self.name, self.made_with]

    def rows(self, low: int, high: int) -> Tensor:
        """The scores of the test points or components `low` … `high - 1`, `[high - low, k]`."""
        found = torch.empty(high - low, self.k, dtype=self.dtype)
        for i, (top, bottom) in enumerate(self.tests):
            if top >= high or bottom <= low:
                continue
            at = slice(max(top, low) - low, min(bottom, high) - low)
            for j, (left, right) in enumerate(self.groups):
                block = self._block(i, j)
                found[at, left:right] = torch.from_numpy(block[max(top, low) - top : min(bottom, high) - top])
        return found


@dataclass(frozen=True)
class StackedBlocks:
    """Finished scores of several sets of test points, one set after the other."""

    parts: list[ScoreBlocks]

    @property
    def m(self) -> int:
        return sum(part.m for part in self.parts)

    @property
    def k(self) -> int:
        return self.parts[0].k

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def made_of(self) -> list[str]:
        """The names of the parts' questions in the store, each with its hash."""
        return [text for part in self.parts for text in part.made_of]

    def rows(self, low: int, high: int) -> Tensor:
        """The scores of the test points `low` … `high - 1`, `[high - low, k]`."""
        found, top = [], 0
        for part in self.parts:
            if top < high and top + part.m > low:
                found.append(part.rows(max(low - top, 0), min(high - top, part.m)))
            top += part.m
        return torch.cat(found)
