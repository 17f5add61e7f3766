"""A few real retrainings beside the predictions: what level and slope later predictions need, and how wrong they are.

A refit ranks counterfactuals better than it knows their level: the linearised model forgets less than a new one would.
So real changes are compared with predicted ones and with the share of points left out,

    real change = slope · predicted change + level · share left out + error,

both zero where nothing is left out. Slope and level are those of least squares, and the slope is then drawn towards 1,
which an exact refit has, by as much as the retrainings leave it open (empirical Bayes): with slopes from a normal
distribution around 1 of variance v, and an estimate whose own squared error is e, the part v / (v + e) of its distance
from 1 remains; v is what the squared distance exceeds e by, from 0 to 1. So few retrainings that agree on nothing leave
predictions as they are. The ridge is chosen on the way, if another one predicts clearly better. Eight retrainings tell
a slope only if their predictions lie apart, so the subsets to retrain are chosen by them: of many random ones, those
whose predictions are spread evenly from the lowest to the highest. Choosing by the prediction leaves the relation of
real to predicted changes unbiased.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ggda_ext.counterfactual.checks import check_count, one_number
from ggda_ext.evaluation import Retrain, random_subsets
from ggda_ext.properties import Property

if TYPE_CHECKING:
    from ggda_ext.counterfactual.what_if import WhatIf

FEWEST = 4
DRAWN = 8
"""Random subsets that are predicted for each one that is retrained."""
RIDGES = (0.25, 1.0, 4.0)
"""Ridges that are tried, in units of the present one."""
_FITTED = 2  # numbers that a calibration fits
_BETTER = 0.6  # share of the present ridge's error below which another one is taken


@dataclass(frozen=True)
class Calibration:
    """What turns predicted changes into real ones.

    Attributes:
        slope: of real on predicted changes.
        level: rise of the property per share of points left out that the predictions miss.
        error: standard error of a calibrated prediction: of the retrainings, each predicted from the others.
        retrainings: how many it was found from.
    """

    slope: float
    level: float
    error: float
    retrainings: int

    def change(self, predicted: Tensor, removed: Tensor) -> Tensor:
        """Calibrated changes of predicted ones `[s, …]`, given the share of points left out `[s]`."""
        shape = (-1,) + (1,) * (predicted.dim() - 1)
        return self.slope * predicted + self.level * removed.to(predicted).view(shape)

    def width(self, confidence: float = 0.95) -> float:
        """Half the width of an interval for a retrained model: a quantile of Student's t, for few retrainings."""
        if not 0 < confidence < 1:
            raise ValueError(f"confidence={confidence}: pass a share between 0 and 1, e.g. 0.95.")
        from scipy.special import stdtrit

        return float(stdtrit(self.retrainings - _FITTED, (1 + confidence) / 2)) * self.error

    def explain(self) -> str:
        """The calibration in words."""
        return (
            f"calibrated by {self.retrainings} retrainings: real changes are {self.slope:.3g} times the predicted ones "
            f"and {self.level:+.3g} per share of points left out, give or take {self.error:.2g}"
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
    if not callable(retrain):
        raise TypeError(f"retrain is a {type(retrain).__name__}: pass a function of index arrays, e.g. a Retrainer.")
    if isinstance(subsets, int):
        check_count("subsets", subsets, FEWEST)
        subsets = chosen_subsets(what_if, property, subsets, fraction, seed)
    weights = what_if.checked_weights(subsets)
    kept = weights.numpy().astype(bool)
    if not bool((weights == torch.from_numpy(kept)).all()):
        raise ValueError("subsets holds weights other than 0 and 1: a retraining keeps a group or leaves it out.")
    check_count("the number of subsets", len(kept), FEWEST)
    _predicted(what_if, property, weights[:1])  # a question that cannot be asked is refused before anything is trained
    real = _retrained(retrain, what_if.groups.labels, kept)
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
        error = float(np.sqrt(np.sum((others - real.mean(1)) ** 2) / (len(kept) - _FITTED)))
        if best is None or error < _BETTER * best[1]:
            best = factor, error, values, others
    assert best is not None
    factor, error, values, others = best
    for model, ridge in zip(what_if.models, ridges, strict=True):
        model.ridge = factor * ridge
    base = _predicted(what_if, property, weights[:1])[1]
    slope, level = _fit(values - base, removed, real.mean(1) - base)
    found = Calibration(slope, level, error, len(kept))
    what_if.calibrations[what_if.identity(property)] = (property, found)
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
    values = one_number(what_if.subsets(candidates, property))
    goals = np.linspace(values.min(), values.max(), count)
    taken: list[int] = []
    for goal in goals[np.argsort(-np.abs(goals - goals.mean()), kind="stable")]:  # the ends first: they tell the slope
        away = np.abs(values - goal)
        away[taken] = np.inf
        taken.append(int(np.argmin(away)))
    return candidates[np.sort(taken)]


def _retrained(retrain: Retrain, labels: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Values of retrained models `[s, seeds]`."""
    points = [np.flatnonzero((labels < 0) | choice[labels]) for choice in kept]
    real = np.asarray(retrain(points), dtype=float)
    if real.ndim not in (1, 2) or len(real) != len(kept):
        raise ValueError(
            f"retrain gave values of shape {list(real.shape)}: return [{len(kept)}, seeds], a row a subset."
        )
    if not np.isfinite(real).all():
        raise ValueError("retrain gave NaN or infinite values: look at the retrained models.")
    return real.reshape(len(kept), -1)


def _predicted(what_if: WhatIf, property: Property, weights: Tensor) -> tuple[np.ndarray, float]:
    """Predicted values `[s]`, and the value with nothing left out."""
    everything = torch.ones(1, weights.shape[1], dtype=torch.float64)
    numbers = one_number(what_if.values(property, torch.cat([everything, weights])).mean(0))
    return numbers[1:], float(numbers[0])


def _fit(predicted: np.ndarray, removed: np.ndarray, real: np.ndarray) -> tuple[float, float]:
    """Slope, drawn towards 1, and level; a slope is never negative, which would turn the ranks around."""
    told = removed > 0
    predicted, removed, real = predicted[told], removed[told], real[told]
    freedom, weight = len(real) - _FITTED, float(removed @ removed)
    if not len(real):
        return 1.0, 0.0
    apart = predicted - removed * float(removed @ predicted) / weight  # what the shares do not tell as well
    spread = float(apart @ apart)
    slope = 1.0
    if freedom > 0 and spread > 1e-12 * float(predicted @ predicted):
        found = float(apart @ real) / spread
        level = float(removed @ (real - found * predicted)) / weight
        left = real - found * predicted - level * removed
        error = float(left @ left) / freedom / spread
        variance = min(max((found - 1) ** 2 - error, 0.0), 1.0)
        slope = max(0.0, 1 + (found - 1) * variance / (variance + error)) if variance > 0 else 1.0
    return slope, float(removed @ (real - slope * predicted)) / weight


def _from_others(predicted: np.ndarray, removed: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Calibrated changes, each by a fit to the others."""
    found = np.empty_like(predicted)
    for j in range(len(predicted)):
        rest = np.arange(len(predicted)) != j
        slope, level = _fit(predicted[rest], removed[rest], real[rest])
        found[j] = slope * predicted[j] + level * removed[j]
    return found
