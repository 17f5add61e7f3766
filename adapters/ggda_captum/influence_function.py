"""Influence functions for groups: ∇gᵀ R Rᵀ Σ_{i∈G} ∇ℓ_i. Captum computes R Rᵀ ≈ H⁻¹, and groups do not change it."""

from __future__ import annotations

import captum.influence
import torch
from captum.influence._core import arnoldi_influence_function as captums
from torch import Tensor

from ggda_captum.group_influence import GroupInfluence
from ggda_captum.last_layer import Asked, asked_of, layer_for
from ggda_ext import PointGradients
from ggda_ext.attribution import property_directions
from ggda_ext.model import ParameterSpace
from ggda_ext.storage.folder import digest


class ProjectedInfluence(GroupInfluence):
    """Group scores through the projection R `[p, r]`. They are on the CPU, like Captum's scores.

    The pass over the training set takes min(m, r) directions: R Rᵀ ∇g if there are fewer properties or test points
    than columns of R, else the columns of R.
    """

    def _projection(self, space: ParameterSpace) -> Tensor:
        """Rᵀ as rows `[r, p]`, with the parameters in the order of `space`."""
        raise NotImplementedError

    def _group_scores(self, asked: Asked) -> Tensor:
        provider, explained, kept = asked_of(layer_for(asked, self.model), asked, self.model) or asked
        projection = self._projection(provider.space)
        if isinstance(explained, PointGradients):
            tests = provider.tests(explained).scores(projection).T
        else:
            rows = explained if isinstance(explained, Tensor) else property_directions(provider, explained)
            tests = rows @ projection.T
        with kept:
            if len(tests) < len(projection):
                return kept.total([(1.0, kept.scores(provider, tests @ projection))]).cpu()
            scores = kept.total([(1.0, kept.scores(provider, projection))])
            tests = tests.to(scores)
            made_of = f"projected tests {digest(tests.cpu().numpy())}"
            size = len(tests), scores.shape[1]
            return kept.write(made_of, *size, scores.dtype, lambda low, high: tests[low:high] @ scores).cpu()

    def _group_self_influence(self, asked: Asked) -> Tensor:
        provider, _, kept = asked
        with kept:
            return kept.total([(1.0, kept.scores(provider, self._projection(provider.space)))]).square().sum(0).cpu()

    def _in_space(self, space: ParameterSpace, rows: Tensor) -> Tensor:
        """Reorder the columns of rows `[r, p]` from Captum's order, which follows `layers`, to the order of `space`."""
        parameters = self._parameters()
        pieces = rows.split([parameter.numel() for parameter in parameters], 1)
        ordered = rows.new_empty(rows.shape)
        for parameter, piece in zip(parameters, pieces, strict=True):
            low, high = space.spans[id(parameter)]
            ordered[:, low:high] = piece
        return ordered.to(space.device, space.dtype)


class NaiveInfluenceFunction(ProjectedInfluence, captum.influence.NaiveInfluenceFunction):
    """Captum's `NaiveInfluenceFunction`, with `groups=` and `influence(property=…)`.

    The group path differs from Captum in three ways. With ``k=`` it uses `test_loss_fn`, which Captum ignores in this
    case. With ``sample_wise_grads_per_batch=True`` it includes parameters outside Linear and Conv2d layers, and it
    does not take a mean loss without a `reduction` attribute (a lambda) for a sum, as Captum does. Like Captum, it
    leaves out directions of negative curvature.
    """

    R: Tensor

    def _projection(self, space: ParameterSpace) -> Tensor:
        return self._in_space(space, self.R.T)


class ArnoldiInfluenceFunction(ProjectedInfluence, captums.ArnoldiInfluenceFunction):
    """Captum's `ArnoldiInfluenceFunction`, with `groups=` and `influence(property=…)`.

    Its projection R comes from Arnoldi iterations. The group path differs from Captum in three ways. With ``k=`` it
    uses `test_loss_fn`, which Captum ignores in this case. With ``sample_wise_grads_per_batch=True`` it includes
    parameters outside Linear and Conv2d layers, and it does not take a mean loss without a `reduction` attribute (a
    lambda) for a sum, as Captum does.
    """

    R: list[tuple[Tensor, ...]]

    def _projection(self, space: ParameterSpace) -> Tensor:
        rows = [torch.cat([part.reshape(-1) for part in vector]) for vector in self.R]
        return self._in_space(space, torch.stack(rows))
