"""Finished scores on disk, in a grid of blocks: test points or components by groups, read a few rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ggda_ext.storage.files import open_array
from ggda_ext.storage.jobs import Range


def block_name(tests: int, groups: int) -> str:
    """The name of a block by its place in the grid."""
    return f"block-{tests:04d}-{groups:04d}"


@dataclass(frozen=True)
class ScoreBlocks:
    """Finished scores `[m, k]` of one question at one checkpoint, in a grid of blocks on disk."""

    folder: Path
    tests: list[Range]
    groups: list[Range]
    dtype: torch.dtype

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
        """The only block, as a memory map."""
        return torch.from_numpy(open_array(self.folder / f"{block_name(0, 0)}.npy", sealed=True)).to(self.dtype)

    def names(self, folder: Path) -> list[str]:
        """What they are called in a folder."""
        return [str(self.folder.relative_to(folder))]

    def rows(self, low: int, high: int) -> Tensor:
        """The scores of the test points or components from `low` up to `high`, `[high - low, k]`."""
        found = torch.empty(high - low, self.k, dtype=torch.float32 if self.dtype == torch.bfloat16 else self.dtype)
        for i, (top, bottom) in enumerate(self.tests):
            if top >= high or bottom <= low:
                continue
            at = slice(max(top, low) - low, min(bottom, high) - low)
            for j, (left, right) in enumerate(self.groups):
                block = open_array(self.folder / f"{block_name(i, j)}.npy", sealed=True)
                found[at, left:right] = torch.from_numpy(block[max(top, low) - top : min(bottom, high) - top])
        return found


@dataclass(frozen=True)
class StackedBlocks:
    """Finished scores of some test points after others."""

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

    def names(self, folder: Path) -> list[str]:
        """What they are called in a folder."""
        return [name for part in self.parts for name in part.names(folder)]

    def rows(self, low: int, high: int) -> Tensor:
        """The scores of the test points from `low` up to `high`, `[high - low, k]`."""
        found, top = [], 0
        for part in self.parts:
            if top < high and top + part.m > low:
                found.append(part.rows(max(low - top, 0), min(high - top, part.m)))
            top += part.m
        return torch.cat(found)
