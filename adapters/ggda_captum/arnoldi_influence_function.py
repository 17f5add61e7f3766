"""Influence functions for groups with the projection R from Arnoldi iterations."""

from __future__ import annotations

import torch
from captum.influence._core import arnoldi_influence_function as captums
from torch import Tensor

from ggda_captum.influence_function import ProjectedInfluence
from ggda_ext.model import ParameterSpace


class ArnoldiInfluenceFunction(ProjectedInfluence, captums.ArnoldiInfluenceFunction):
    """Captum's `ArnoldiInfluenceFunction`, with `groups=` and `influence(property=…)`.

    Differences of the group path: with ``k=`` it uses `test_loss_fn`, which Captum then ignores; parameters outside
    Linear and Conv2d layers count with ``sample_wise_grads_per_batch=True``, too.
    """

    R: list[tuple[Tensor, ...]]

    def _projection(self, space: ParameterSpace) -> Tensor:
        rows = [torch.cat([part.reshape(-1) for part in vector]) for vector in self.R]
        return self._in_space(space, torch.stack(rows))
