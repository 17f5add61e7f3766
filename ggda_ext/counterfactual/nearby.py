"""Copies of a model nearby: they have other features, and compute nearly the same function once they have settled.

A refit moves along the features of one model. Which features a model has is partly the luck of its training:
predictions of another model differ, and the mean over several models is better than each of them. Copies average some
of that luck away without any training. In a copy, every parameter is changed at random by about a third of its size.
The copy settles where all points together put it (see `linearized`), and is refitted there. The change that its refit
predicts is added to the model's own value.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ggda_ext.gradients import GroupGradients

SIZE = 0.3
"""Standard deviation of the change of a parameter, in units of its own size. Chosen on HELOC with ANN-S among 0.1
(tried on one grouping), 0.3 and 0.6 (tried on two)."""


def copies_nearby(providers: Sequence[GroupGradients], count: int, seed: int) -> Iterator[tuple[nn.Module, list[str]]]:
    """Yield `count` copies of every provider's model, one of each model in turn.

    With each copy comes the list of the names of the parameters that the gradients are taken for.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for provider in providers:
            found, names = copy.deepcopy(provider.model), list(provider.space.parameters)
            own = dict(found.named_parameters())
            for name in names:
                noise = torch.randn(own[name].shape, generator=generator, dtype=torch.float64)
                own[name].data.mul_(1 + SIZE * noise.to(own[name]))
            yield found, names
