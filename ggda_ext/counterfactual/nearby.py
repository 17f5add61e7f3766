"""Copies of a model nearby: other features, and nearly the same function once they have settled.

A refit moves along the features of one model, and which features those are is the luck of its training: predictions of
another model differ, and the mean over several is better than each. So some of that luck is averaged away without any
training. A copy has every parameter changed at random by a third of its size, settles where all points together put it
(see `linearized`), and is refitted there; what it changes is added to the model's own value.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ggda_ext.gradients import GroupGradients

SIZE = 0.3
"""By how much parameters are changed, in units of their own size. Chosen on HELOC with ANN-S among 0.1 (one grouping),
0.3 and 0.6 (two)."""


def copies_nearby(providers: Sequence[GroupGradients], count: int, seed: int) -> Iterator[tuple[nn.Module, list[str]]]:
    """Copies of every provider's model, one of each in turn, and the names of the parameters that count."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for provider in providers:
            found, names = copy.deepcopy(provider.model), list(provider.space.parameters)
            own = dict(found.named_parameters())
            for name in names:
                noise = torch.randn(own[name].shape, generator=generator, dtype=torch.float64)
                own[name].data.mul_(1 + SIZE * noise.to(own[name]))
            yield found, names
