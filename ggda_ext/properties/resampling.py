"""How sure a property's gradient is, given that its test points are a sample: the jackknife over folds of test points.

With g_(−j) the property without fold j of J, the scores it gives vary as

    var = (J − 1) / J · Σ_j (s_(−j) − s̄)²

Scores are linear in the gradient, so only gradients are taken again: ∇g and the J changes ∇g_(−j) − ∇g.
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
    """The gradient of a property `[m, p]`, and by how much it differs without each fold `[folds, m, p]`.

    Args:
        property: of a test set, such as those of `ggda_ext.properties`; not of single test points.
        model: the model.
        parameters: what is differentiated by.
        folds: parts of the test points; as many as there are points, if these are fewer.
        seed: of the parts.
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
    """The same property of some of its test points."""
    found = copy.copy(property)
    found.data = SomePoints(property.data, np.sort(points))
    return found


def _of_mean(
    property: MeanProperty, model: nn.Module, parameters: Parameters, folds: list[np.ndarray]
) -> tuple[Tensor, Tensor]:
    """A mean is put together from its folds: one pass in all."""
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
    """Standard error `[m, k]` of scores from their changes without each fold `[folds, m, k]`."""
    folds = len(changes)
    return ((folds - 1) / folds * (changes - changes.mean(0)).square().sum(0)).sqrt()
