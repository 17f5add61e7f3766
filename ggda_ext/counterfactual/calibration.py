"""A few real retrainings beside the predictions: what level and slope later predictions need, and how wrong they are.

A refit ranks counterfactuals better than it knows their level: the linearised model forgets less than a new one would.
So real changes are regressed on predicted ones and on the share of points left out,

    real change ≈ slope · predicted change + level · share left out,

both zero where nothing is left out. The ridge is chosen on the way, if another one predicts clearly better. Eight
retrainings tell a slope only if their predictions lie apart, so the subsets to retrain are chosen by them: of many
random ones, those whose predictions are spread evenly from the lowest to the highest. Choosing by the prediction leaves
the regression of real on predicted changes unbiased.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ggda_ext.evaluation import Retrain, random_subsets
from ggda_ext.properties import Property

if TYPE_CHECKING:
    from ggda_ext.counterfactual.what_if import WhatIf

FEWEST = 4
DRAWN = 8
"""Random subsets that are predicted for each one that is retrained."""
RIDGES = (0.25, 1.0, 4.0)
"""Ridges that are tried, in units of the present one."""
_BETTER = 0.6  # share of the present ridge's error below which another one is taken


@dataclass(frozen=True)
class Calibration:
    """What turns predicted changes into real ones.

    Attributes:
        slope: of real on predicted changes.
        level: rise of the property per share of points left out that the predictions miss.
        error: standard error of a calibrated prediction: of the retrainings, each predicted from the others.
    """

    slope: float
    level: float
    error: float

    def change(self, predicted: Tensor, removed: Tensor) -> Tensor:
        """Calibrated changes of predicted ones `[s, …]`, given the share of points left out `[s]`."""
        shape = (-1,) + (1,) * (predicted.dim() - 1)
        return self.slope * predicted + self.level * removed.to(predicted).view(shape)

    def explain(self) -> str:
        """In words."""
        return (
            f"calibrated: real changes are {self.slope:.3g} times the predicted ones and {self.level:+.3g} per share "
            f"of points left out, give or take {self.error:.2g}"
        )


@dataclass(frozen=True)
class Verification:
    """Predictions beside real retrainings.

    Attributes:
        kept: which groups were kept `[s, k]`.
        real: values of the retrained models `[s, seeds]`.
        predicted: before calibration `[s]`.
        calibrated: every one by the calibration of the others `[s]`.
        calibration: level, slope and error.
        ridge: the ridge of every model, as it is from now on.
    """

    kept: np.ndarray
    real: np.ndarray
    predicted: np.ndarray
    calibrated: np.ndarray
    calibration: Calibration
    ridge: tuple[float, ...]

    def __str__(self) -> str:
        rows = [f"{'predicted':>10} {'calibrated':>10} {'retrained':>10}"]
        for columns in zip(self.predicted, self.calibrated, self.real.mean(1), strict=True):
            rows.append(" ".join(f"{value:10.4f}" for value in columns))
        return "\n".join([*rows, self.calibration.explain()])


def verified(
    what_if: WhatIf, retrain: Retrain, property: Property, subsets: Any, fraction: float, seed: int
) -> Verification:
    """See `WhatIf.verify`."""
    if isinstance(subsets, int):
        _check_count(subsets)
        kept = chosen_subsets(what_if, property, subsets, fraction, seed)
    else:
        kept = np.asarray(subsets, dtype=bool)
    weights = what_if.checked_weights(kept)
    _check_count(len(kept))
    labels = what_if.groups.labels
    points = [np.flatnonzero((labels < 0) | choice[labels]) for choice in kept]
    real = np.asarray(retrain(points), dtype=float).reshape(len(kept), -1)
    if not np.isfinite(real).all():
        raise ValueError("retrain gave NaN or infinite values: look at the retrained models.")
    removed = what_if.removed(weights).numpy()
    best: tuple[float, float, np.ndarray, np.ndarray] | None = None
    ridges = [model.ridge for model in what_if.models]
    for factor in sorted(RIDGES, key=lambda value: value != 1):  # the present one first
        if factor != 1 and not any(ridges):
            continue
        for model, ridge in zip(what_if.models, ridges, strict=True):
            model.ridge = factor * ridge
        values, base = _predicted(what_if, property, weights)
        others = base + _from_others(values - base, removed, real.mean(1) - base)
        error = float(np.sqrt(np.mean((others - real.mean(1)) ** 2)))
        if best is None or error < _BETTER * best[1]:
            best = factor, error, values, others
    assert best is not None
    factor, error, values, others = best
    for model, ridge in zip(what_if.models, ridges, strict=True):
        model.ridge = factor * ridge
    base = _predicted(what_if, property, weights[:1])[1]
    slope, level = _fit(values - base, removed, real.mean(1) - base)
    found = Calibration(slope, level, error)
    what_if.calibrations[id(property)] = (property, found)
    return Verification(kept, real, values, others, found, tuple(model.ridge for model in what_if.models))


def chosen_subsets(
    what_if: WhatIf, property: Property, count: int, fraction: float, seed: int, among: Any = None
) -> np.ndarray:
    """See `WhatIf.to_retrain`."""
    if among is None:
        among = random_subsets(what_if.groups, DRAWN * count, fraction=fraction, seed=seed)
    candidates = np.unique(np.asarray(among, dtype=bool), axis=0)
    if len(candidates) <= count:
        return candidates
    values = what_if.subsets(candidates, property).numpy()
    if values.ndim != 1:
        raise ValueError(f"property gives {values.shape[1]} numbers: verify one number at a time.")
    goals = np.linspace(values.min(), values.max(), count)
    taken: list[int] = []
    for goal in goals[np.argsort(-np.abs(goals - goals.mean()), kind="stable")]:  # the ends first: they tell the slope
        away = np.abs(values - goal)
        away[taken] = np.inf
        taken.append(int(np.argmin(away)))
    return candidates[np.sort(taken)]


def _check_count(count: int) -> None:
    if count < FEWEST:
        raise ValueError(f"subsets has {count} entries: a calibration needs at least {FEWEST}.")


def _predicted(what_if: WhatIf, property: Property, weights: Tensor) -> tuple[np.ndarray, float]:
    """Predicted values `[s]`, and the value with nothing left out."""
    everything = torch.ones(1, weights.shape[1], dtype=torch.float64)
    values = what_if.values(property, torch.cat([everything, weights])).mean(0)
    if values.dim() != 1:
        raise ValueError(f"property gives {values.shape[1]} numbers: verify one number at a time.")
    numbers = values.numpy()
    return numbers[1:], float(numbers[0])


def _fit(predicted: np.ndarray, removed: np.ndarray, real: np.ndarray) -> tuple[float, float]:
    """Slope and level by least squares; a slope is never negative, which would turn the ranks around."""
    slope, level = np.linalg.lstsq(np.stack([predicted, removed], 1), real, rcond=None)[0]
    if slope <= 0 or not np.isfinite(slope):
        size = float((removed * removed).sum())
        return 0.0, float((removed * real).sum() / size) if size else 0.0
    return float(slope), float(level)


def _from_others(predicted: np.ndarray, removed: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Calibrated changes, each by a fit to the others."""
    found = np.empty_like(predicted)
    for j in range(len(predicted)):
        rest = np.arange(len(predicted)) != j
        slope, level = _fit(predicted[rest], removed[rest], real[rest])
        found[j] = slope * predicted[j] + level * removed[j]
    return found
