"""How uncertain scores are because the test points are only a sample: the jackknife over folds of test points.

Let g_(−j) be the property without fold j of J folds, and s_(−j) its scores. The variance of the scores is

    var = (J − 1) / J · Σ_j (s_(−j) − s̄)²

Scores are linear in the gradient. Therefore only gradients are computed: ∇g and the J changes ∇g_(−j) − ∇g.

A property made of several parts may be measured on several data sets. Parts on one data set lose the same fold
together; data sets are independent samples, so their variances add up.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.data import IndexedData, SomePoints
from ggda_ext.properties.classes import LinearProperty, OutputsProperty
from ggda_ext.properties.property import MeanProperty, NamedProperty, Parameters, Property, property_gradient

FOLDS = 10


def jackknifed(
    property: Property, model: nn.Module, parameters: Parameters, folds: int = FOLDS, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the gradient of a property `[m, p]`, and its changes without each fold `[folds, m, p]`, for `spread`.

    Args:
        property: a property of a whole test set, such as those in `ggda_ext.properties`; not of single test points.
        model: the model.
        parameters: the parameters that the gradients are taken for.
        folds: number of folds of the points of each data set; if it has fewer points, the number of points.
        seed: seed of the split into folds.
    """
    whole, changes = _without_folds(property, model, parameters, folds, seed)
    first, *others = changes.values()
    if not others:
        return whole, first
    total = sum(map(len, changes.values()))

    def scaled(block: Tensor) -> Tensor:  # `spread` of all blocks is then the root of their summed variances
        return (block - block.mean(0)) * ((len(block) - 1) / len(block) * total / (total - 1)) ** 0.5

    return whole, torch.cat([scaled(block) for block in changes.values()])


def _without_folds(
    property: Property, model: nn.Module, parameters: Parameters, folds: int, seed: int
) -> tuple[Tensor, dict[Hashable, Tensor]]:
    """Return the gradient of a property `[m, p]`, and for each of its data sets the changes `[folds, m, p]`."""
    if isinstance(property, NamedProperty):
        return _without_folds(property.property, model, parameters, folds, seed)
    if isinstance(property, LinearProperty):
        parts = [_without_folds(part, model, parameters, folds, seed) for part in property.properties]
        counts = {data: len(block) for _, changes in parts for data, block in changes.items()}
        joined = {
            data: torch.stack(
                [
                    property.join([found[data][j] if data in found else torch.zeros_like(of) for of, found in parts])
                    for j in range(count)
                ]
            )
            for data, count in counts.items()
        }
        return property.join([whole for whole, _ in parts]), joined
    if isinstance(property, MeanProperty):
        whole, found = _of_mean(property, model, parameters, _folds(property.data.n, folds, seed))
        return whole, {_identity(property.data): found}
    if isinstance(property, OutputsProperty):
        whole, found = _of_outputs(property, model, parameters, _folds(property.data.n, folds, seed))
        return whole, {_identity(property.data): found}
    raise TypeError(
        f"property is a {type(property).__name__}, whose test points cannot be drawn again, so there is no interval "
        "over them: pass a property of a test set, such as properties.mean_loss or properties.of_outputs, or leave out "
        "intervals."
    )


def _identity(data: IndexedData) -> Hashable:
    """A key that is equal for data sets that were made of the same tensors."""
    if type(data) is not IndexedData or data.anchors is None:
        return id(data)
    return tuple(map(id, data.anchors))


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
        try:
            changes.append(property_gradient(without, model, parameters) - whole)
        except ValueError as error:
            raise ValueError(
                f"without {len(fold)} of {len(everyone)} test points, as an interval over test points leaves them out, "
                f"{error} Pass more test points of this kind, or leave out intervals."
            ) from error
    return whole, torch.stack(changes)


def spread(changes: Tensor) -> Tensor:
    """Return the standard error `[m, k]` of scores, given their changes without each fold `[folds, m, k]`."""
    folds = len(changes)
    return ((folds - 1) / folds * (changes - changes.mean(0)).square().sum(0)).sqrt()
