"""Copies of a model nearby: other features, and nearly the same function once they have settled.

A refit moves along the features of one model, and which features those are is the luck of its training: predictions of
another model differ, and the mean over several is better than each. So some of that luck is averaged away without any
training. A copy has every parameter changed at random by a third of its size, settles where all points together put it
(see `linearized`), and is refitted there; what it changes is added to the model's own value.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from ggda_ext.gradients import GroupGradients

SIZE = 0.3
"""By how much parameters are changed, in units of their own size. Chosen on HELOC with ANN-S, two groupings, among 0.1,
0.3 and 0.6."""


@torch.no_grad()
def copy_nearby(provider: GroupGradients, generator: torch.Generator) -> nn.Module:
    """A copy of a provider's model with the parameters that count changed at random."""
    found = copy.deepcopy(provider.model)
    own = dict(found.named_parameters())
    for name in provider.space.parameters:
        noise = torch.randn(own[name].shape, generator=generator, dtype=torch.float64)
        own[name].mul_(1 + SIZE * noise.to(own[name]))
    return found
