"""What an `Attribution` is made of has to fit together: scores, names of properties, ends of intervals, warnings."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ggda_ext.groups.partition import Groups
from ggda_ext.properties.property import HigherIsBetter


def plain_tensor(values: Any) -> Tensor:
    """Numbers as a plain tensor without a graph, on the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        found = values if isinstance(values, Tensor) else torch.as_tensor(values)
        return found.detach().as_subclass(Tensor)


def checked_scores(
    scores: Any,
    groups: Groups,
    properties: Sequence[str] | None,
    higher_is_better: Sequence[HigherIsBetter] | None,
) -> tuple[Tensor, tuple[str, ...], tuple[HigherIsBetter, ...]]:
    """Scores `[m, k]` as a plain tensor, with a name and a direction for each of the m properties."""
    plain = plain_tensor(scores)
    plain = plain if plain.is_floating_point() else plain.float()
    if plain.dim() != 2 or plain.shape[1] != len(groups):
        raise ValueError(
            f"scores has shape {list(plain.shape)} for {len(groups)} groups: pass [m, {len(groups)}], or use "
            "Attribution.of, which takes other shapes."
        )
    m = len(plain)
    names = tuple(f"property {j}" for j in range(m)) if properties is None else tuple(properties)
    directions = (None,) * m if higher_is_better is None else tuple(higher_is_better)
    for name, found in (("properties", names), ("higher_is_better", directions)):
        if len(found) != m:
            raise ValueError(f"{name} has {len(found)} entries for scores of {m} properties.")
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < m else None
    if twice is not None:
        raise ValueError(f"two properties are called {twice!r}: give them names of their own (properties.named).")
    return plain, names, directions


def shaped(values: Any, name: str, shape: Sequence[int]) -> Tensor | None:
    """Numbers of a shape as a plain tensor; None for None."""
    if values is None:
        return None
    found = plain_tensor(values)
    if found.shape != torch.Size(shape):
        raise ValueError(f"{name} has shape {list(found.shape)}: pass {list(shape)}.")
    return found


def checked_warnings(warnings: Mapping[Hashable, Sequence[str]], groups: Groups) -> dict[Hashable, tuple[str, ...]]:
    """Warnings by the name of a group, each a tuple of texts."""
    found = {name: (text,) if isinstance(text, str) else tuple(text) for name, text in warnings.items()}
    names = set(groups.all_names) if found else set()
    for name in found:
        if name not in names:
            raise ValueError(f"warnings has an entry for {name!r}, which is no group.")
    return found
