"""How uncertain scores are because the test points are only a sample: the jackknife over folds of test points.

Let g_(−j) be the property without fold j of J folds, and s_(−j) its scores. The variance of the scores is

    var = (J − 1) / J · Σ_j (s_(−j) − s̄)²

Scores are linear in the gradient. Therefore only gradients are computed: ∇g and the J changes ∇g_(−j) − ∇g.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.data import SomePoints
from ggda_ext.properties.classes import LinearProperty, OutputsProperty
from ggda_ext.properties.property import MeanProperty, NamedProperty, Parameters, Property, property_gradient

FOLDS = 10


def jackknifed(
    property: Property, model: nn.Module, parameters: Parameters, folds: int = FOLDS, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the gradient of a property `[m, p]`, and its changes without each fold `[folds, m, p]`.

    Args:
        property: a property of a whole test set, such as those in `ggda_ext.properties`; not of single test points.
        model: the model.
        parameters: the parameters that the gradients are taken for.
        folds: number of folds of the test points; if there are fewer points, the number of points.
        seed: seed of the split into folds.
    """
    if isinstance(property, NamedProperty):
        return jackknifed(property.property, model, parameters, folds, seed)
    if isinstance(property, LinearProperty):
        parts = [jackknifed(part, model, parameters, folds, seed + at) for at, part in enumerate(property.properties)]
        folds = min(len(changes) for _, changes in parts)
        changes = [property.join([change[j] for _, change in parts]) for j in range(folds)]
        return property.join([whole for whole, _ in parts]), torch.stack(changes)
    if isinstance(property, MeanProperty):
        return _of_mean(property, model, parameters, _folds(property.data.n, folds, seed))
    if isinstance(property, OutputsProperty):
        return _of_outputs(property, model, parameters, _folds(property.data.n, folds, seed))
    raise TypeError(
        f"property is a {type(property).__name__}, whose test points cannot be drawn again, so there is no interval "
        "over them: pass a property of a test set, such as properties.mean_loss or properties.of_outputs, or leave out "
        "intervals."
    )


def _folds(n: int | None, folds: int, seed: int) -> list[np.ndarray]:
    if n is None:
        raise TypeError("the test data is a stream without a length: an interval over test points needs to draw them.")
    if n < 2:
        raise ValueError(f"the property has {n} test point: an interval over test points needs at least 2.")
    return np.array_split(np.random.default_rng(seed).permutation(n), min(folds, n))


def _on(property: Any, points: np.ndarray) -> Any:
    """Return the same property on some of its test points."""
    found = copy.copy(property)
    found.data = SomePoints(property.data, np.sort(points))
    return found


def _of_mean(
    property: MeanProperty, model: nn.Module, parameters: Parameters, folds: list[np.ndarray]
) -> tuple[Tensor, Tensor]:
    """The changes of a mean, computed from the gradients of its folds; this takes one pass in all."""
    each = torch.stack([property_gradient(_on(property, fold), model, parameters) for fold in folds])
    sizes = torch.tensor([len(fold) for fold in folds], dtype=each.dtype, device=each.device)[:, None, None]
    total = sizes.sum()
    whole = (sizes * each).sum(0) / total
    return whole, (whole - each) * sizes / (total - sizes)


def _of_outputs(
    property: OutputsProperty, model: nn.Module, parameters: Parameters, folds: list[np.ndarray]
) -> tuple[Tensor, Tensor]:
    whole = property_gradient(property, model, parameters)
    everyone = np.concatenate(folds)
    changes = []
    for fold in folds:
        rest = np.sort(np.setdiff1d(everyone, fold))
        without = property.of_points(rest)
        without.data = SomePoints(property.data, rest)
        changes.append(property_gradient(without, model, parameters) - whole)
    return whole, torch.stack(changes)


def spread(changes: Tensor) -> Tensor:
    """Return the standard error `[m, k]` of scores, given their changes without each fold `[folds, m, k]`."""
    folds = len(changes)
    return ((folds - 1) / folds * (changes - changes.mean(0)).square().sum(0)).sqrt()
