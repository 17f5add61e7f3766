"""Calibration of predictions by a few real retrainings: the level and slope that later predictions need, and the error.

A refit ranks counterfactuals better than it predicts their level. The ridge decides the level more than anything else:
the smaller the ridge, the further all predictions lie from the model's own value. So a path of ridges is tried, and
real rises are compared with the rises that each ridge predicts,

    real rise = slope · predicted rise + level + per share · share left out + error.

Level and share stand for effects that a refit does not see: a model of fewer points takes fewer steps, and the training
of the explained model had its luck. Outside of the range of shares that were retrained, both are in proportion to the
share. So nothing changes if nothing is left out, and the level is not mistaken for a joint effect of several groups.

A correct refit has slope 1 and needs neither level nor share. So the priors are normal distributions: around 1 for the
slope, around 0 for level and share (in units of the mean share), around the present ridge for the logarithm of the
ridge. The chosen ridge is the one under which the retrainings are most likely. Slope, level and share get their means
given the retrainings (Bayesian linear regression; the sizes of the error and of the level are integrated out). If the
retrainings are few and agree on nothing, predictions stay as they are.

Errors may have one size, or grow with the predicted rise: a network without whole regions of its data ends up far from
where it was linearised. In that case, errors of one size would let the few retrainings with large errors decide the
slope and level of all predictions, and also the interval of a small change. So both kinds are tried with every ridge:
errors of one size, and errors that are twice as large at the mean predicted rise as at no rise. The likelier kind is
taken; growing errors have to be clearly likelier.

Eight retrainings tell a slope only if their predictions lie apart. So the subsets to retrain are chosen by prediction:
of many random subsets, the ones whose predictions are spread evenly from the lowest to the highest. Choosing by the
prediction leaves the relation of real to predicted rises unbiased.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ggda_ext.counterfactual.checks import check_count, one_number
from ggda_ext.counterfactual.newton import SingularRefit
from ggda_ext.evaluation import Retrain, points_of, random_subsets
from ggda_ext.properties import Property
from ggda_ext.results.named_scores import names_of, whether_higher_is_better
from ggda_ext.results.verifying import check_retrain, retrained

if TYPE_CHECKING:
    from ggda_ext.counterfactual.what_if import WhatIf

ByRidge = dict[float, np.ndarray]
"""Predicted rises `[s]` by the factor of the ridge."""
FEWEST = 4
DRAWN = 8
"""Number of random subsets that are predicted for each subset that is retrained."""
RIDGES = 2.0 ** np.arange(-6, 7)
"""Ridges that are tried, in units of the present one."""
SLOPE, RIDGE = 0.3, np.log(4)
"""Standard deviations of the priors: of the slope around 1, and of the ridge's logarithm around the logarithm of the
present ridge. Chosen on small problems; see benchmarks/RESULTS.md."""
GROWS = 0.25
"""Prior probability that errors grow with the predicted rise. Retrainings without errors must not decide this."""
_LEVELS = np.array([0.1, 1.0, 10.0, 100.0])  # variances of level and share to integrate over, relative to the error's
_FITTED = 2  # about how many numbers a calibration fits freely; numbers with a prior count less
_ERRORS = np.logspace(-12, 0.5, 101)  # squared errors to integrate over, in units of the predictions' own


@dataclass(frozen=True)
class Line:
    """Real rises of a property over the model's own value, as a function of predicted rises and of the share left out.

    Attributes:
        slope: slope of real rises on predicted rises.
        level: rise added at the lowest share left out; below that share it is in proportion to the share.
        per_share: rise added for each unit of share left out beyond the lowest, up to the highest.
        lowest: lowest share of points that a retraining left out.
        highest: highest share of points that a retraining left out.
        at_rest: error of a predicted rise of 0, in units of the root mean square error of the retrainings.
        per_rise: error added for each unit of predicted rise; 0 for errors of one size.
    """

    slope: float
    level: float
    per_share: float
    lowest: float
    highest: float
    at_rest: float = field(default=1.0, kw_only=True)
    per_rise: float = field(default=0.0, kw_only=True)

    def rise(self, predicted: Any, removed: Any) -> Any:
        """Return calibrated rises `[s]` for predicted rises `[s]` and shares of points left out `[s]`.

        If nothing is left out and no rise is predicted, the calibrated rise is 0.
        """
        near = removed.clip(max(self.lowest, 1e-12), max(self.highest, 1e-12))
        return self.slope * predicted + (self.level + self.per_share * (near - self.lowest)) * removed / near

    def spread(self, predicted: Any) -> Any:
        """Return the errors `[s]` of predicted rises `[s]`, in units of the error of the retrainings.

        Pass rises as they are before calibration.
        """
        return self.at_rest + self.per_rise * abs(predicted)


@dataclass(frozen=True)
class Calibration(Line):
    """Turns predicted rises into real rises.

    Attributes:
        error: standard error of a calibrated prediction, found by predicting each retraining from the others.
        retrainings: number of retrainings that the calibration was found from.
    """

    error: float
    retrainings: int

    def width(self, confidence: float = 0.95, error: float | None = None) -> float:
        """Return half the width of an interval for a retrained model; it uses Student's t, as retrainings are few.

        Args:
            confidence: confidence of the interval.
            error: standard error of this prediction; the error of the calibration if left out.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"confidence={confidence}: pass a share between 0 and 1, e.g. 0.95.")
        from scipy.special import stdtrit

        quantile = float(stdtrit(self.retrainings - _FITTED, (1 + confidence) / 2))
        return quantile * (self.error if error is None else error)

    def explain(self) -> str:
        """Describe the calibration in words."""
        told = (
            f"calibrated by {self.retrainings} retrainings: real rises are {self.slope:.3g} times the predicted ones "
            f"{self.level:+.3g}, give or take {self.error:.2g}"
        )
        if not self.per_rise:
            return told
        return f"{told}; less for small changes ({self.at_rest * self.error:.2g}), more for large ones"


@dataclass(frozen=True)
class Verification:
    """Predictions beside real retrainings.

    Attributes:
        kept: which groups were kept `[s, k]`.
        real: values of the retrained models `[s, seeds]`.
        predicted: predicted values before calibration `[s]`.
        calibrated: predicted values, each with a calibration found from the other retrainings `[s]`.
        calibration: level, slope and error.
        ridge: the ridge that every model uses from now on.
    """

    kept: np.ndarray
    real: np.ndarray
    predicted: np.ndarray
    calibrated: np.ndarray
    calibration: Calibration
    ridge: tuple[float, ...]

    def __repr__(self) -> str:
        rows = [f"{'predicted':>10} {'calibrated':>10} {'retrained':>10}"]
        for columns in zip(self.predicted, self.calibrated, self.real.mean(1), strict=True):
            rows.append(" ".join(f"{value:10.4f}" for value in columns))
        return "\n".join([*rows, self.calibration.explain()])


def verified(
    what_if: WhatIf, retrain: Retrain, property: Property, subsets: Any, fraction: float, seed: int
) -> Verification:
    """See `WhatIf.verify`."""
    check_retrain(retrain, names_of(property, 1)[0], whether_higher_is_better(property, 1)[0])
    if isinstance(subsets, Integral):
        check_count("subsets", subsets, FEWEST)
        subsets = chosen_subsets(what_if, property, int(subsets), fraction, seed)
    weights = _zeros_and_ones(what_if, subsets, "subsets")
    kept = weights.numpy().astype(bool)
    if len(kept) < FEWEST:
        raise ValueError(
            f"there are {len(kept)} subsets of {kept.shape[1]} groups to retrain, and verify needs {FEWEST}: pass more "
            "with subsets= [s, k], or finer groups; for few groups leave_group_out tells all."
        )
    _predicted(what_if, property, weights[:1])  # raises an error for a wrong question before anything is trained
    real = retrained(retrain, points_of(what_if.groups, kept))
    if not np.isfinite(real).all():
        raise ValueError("retrain gave NaN or infinite values: look at the retrained models.")
    removed = what_if.removed(weights).numpy()
    path, base = _path(what_if, property, weights)
    rises = real.mean(1) - base
    factor, line = _likeliest(path, removed, rises)
    others = _from_others(path, removed, rises)
    error = float(np.sqrt(np.mean(((others - rises) / line.spread(path[factor])) ** 2)))
    for model in what_if.linearized:
        model.ridge *= factor
    found = Calibration(**vars(line), error=error, retrainings=len(kept))
    what_if.calibrations[what_if.identity(property)] = (property, found)
    ridges = tuple(model.ridge for model in what_if.linearized)
    return Verification(kept, real, base + path[factor], base + others, found, ridges)


def chosen_subsets(
    what_if: WhatIf, property: Property, count: int, fraction: float, seed: int, among: Any = None
) -> np.ndarray:
    """See `WhatIf.to_retrain`."""
    check_count("count", count)
    if among is None:
        among = random_subsets(what_if.groups, DRAWN * count, fraction=fraction, seed=seed)
        among = among[what_if.masses(among) > 0]
    candidates = np.unique(_zeros_and_ones(what_if, among, "among").numpy().astype(bool), axis=0)
    if len(candidates) <= count:
        return candidates
    values = one_number(what_if.subsets(candidates, property))
    goals = np.linspace(values.min(), values.max(), count)
    taken: list[int] = []
    for goal in goals[np.argsort(-np.abs(goals - goals.mean()), kind="stable")]:  # the ends first: they fix the slope
        away = np.abs(values - goal)
        away[taken] = np.inf
        taken.append(int(np.argmin(away)))
    return candidates[np.sort(taken)]


def _zeros_and_ones(what_if: WhatIf, given: Any, name: str) -> Tensor:
    """Return subsets `[s, k]` as weights of groups; raise an error if some are neither 0 nor 1."""
    weights = what_if.checked_weights(given, name)
    if not bool(((weights == 0) | (weights == 1)).all()):
        raise ValueError(f"{name} holds weights other than 0 and 1: a retraining keeps a group or leaves it out.")
    return weights


def _predicted(what_if: WhatIf, property: Property, weights: Tensor, factor: float = 1.0) -> tuple[np.ndarray, float]:
    """Return predicted values `[s]` and the value with nothing left out; a factor multiplies the ridges."""
    everything = torch.ones(1, weights.shape[1], dtype=torch.float64)
    numbers = one_number(what_if.values(property, torch.cat([everything, weights]), factor).mean(0))
    return numbers[1:], float(numbers[0])


def _path(what_if: WhatIf, property: Property, weights: Tensor) -> tuple[ByRidge, float]:
    """Return predicted rises `[s]` for each factor of the ridge, and the value with nothing left out.

    Only the present ridge is tried if another property was calibrated with it.
    """
    values, base = _predicted(what_if, property, weights)
    path = {1.0: values - base}
    chosen = set(what_if.calibrations) - {what_if.identity(property)}  # properties that need the present ridge
    if not chosen and any(model.ridge and not model.exact for model in what_if.linearized):
        for factor in RIDGES[RIDGES != 1].tolist():
            with suppress(SingularRefit):  # the ridge is too small
                path[factor] = _predicted(what_if, property, weights, factor)[0] - base
    return path, base


def _likeliest(path: ByRidge, removed: np.ndarray, real: np.ndarray) -> tuple[float, Line]:
    """Return the factor of the ridge under which the real rises are most likely, and the `Line` for that ridge."""
    n, share = len(real), float(removed.mean())
    unit = max(share, 1e-12)  # in units of the mean share, shares that hardly differ have hardly any effect
    factors, predicted = np.tile(list(path), 2), np.tile(np.stack(list(path.values())), (2, 1))  # [members, n]
    grows = np.repeat([False, True], len(path))
    at_rest, per_rise = _growth(path[1.0])  # one for all ridges: runaway predictions must not make a ridge likelier
    spread = np.where(grows[:, None], at_rest + per_rise * np.abs(path[1.0]), 1.0)
    columns = np.stack([np.ones(n), (removed - share) / unit], 1) / spread[:, :, None]
    inner = np.linalg.inv(
        np.eye(n) + _LEVELS[:, None, None] * (columns @ columns.transpose(0, 2, 1))[:, None]
    )  # [members, levels, n, n]
    size = np.maximum(((real - predicted) ** 2).sum(1), 1e-20 * float(real @ real) + 1e-200) / n
    errors = size[:, None, None] * _ERRORS  # [members, 1, errors]
    rises, left = predicted / spread, (real - predicted) / spread
    square, both, rest = (
        ((one[:, None, None] @ inner)[:, :, 0] * other[:, None]).sum(2)[:, :, None]
        for one, other in ((rises, rises), (rises, left), (left, left))
    )
    drawn = SLOPE**2 / (errors + SLOPE**2 * square)
    told = np.linalg.slogdet(inner)[1][:, :, None] - n * np.log(errors) - np.log1p(SLOPE**2 * square / errors)
    told = (told - (rest - drawn * both**2) / errors) / 2  # log-likelihoods [members, levels, errors]
    highest = told.max((1, 2), keepdims=True)
    weights = np.exp(told - highest)
    likely = highest[:, 0, 0] + np.log(weights.sum((1, 2))) - np.log(spread).sum(1)
    likely += np.log(np.where(grows, GROWS, 1 - GROWS)) - (np.log(factors) / RIDGE) ** 2 / 2
    best = int(np.argmax(likely))
    chances = weights[best] / weights[best].sum()
    slope = max(0.0, 1 + float((chances * drawn[best] * both[best]).sum()))  # a negative slope would reverse the ranks
    mixed = np.tensordot(chances.sum(1) * _LEVELS, inner[best], 1)
    parts = columns[best].T @ mixed @ ((real - slope * predicted[best]) / spread[best])
    per_share, lowest = float(parts[1] / unit), float(removed.min())
    level = float(parts[0]) + per_share * (lowest - share)
    at_rest, per_rise = _growth(predicted[best]) if grows[best] else (1.0, 0.0)
    found = Line(slope, level, per_share, lowest, float(removed.max()), at_rest=at_rest, per_rise=per_rise)
    return float(factors[best]), found


def _growth(predicted: np.ndarray) -> tuple[float, float]:
    """Return `at_rest` and `per_rise` (see `Line`) of errors that grow with predicted rises `[n]`.

    The mean square of the errors is 1.
    """
    sizes = np.abs(predicted)
    norm = float(np.sqrt(np.mean((sizes.mean() + sizes) ** 2)))
    return (float(sizes.mean()) / norm, 1 / norm) if norm else (1.0, 0.0)


def _from_others(path: ByRidge, removed: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return calibrated rises `[s]`, each with the ridge and the line found from the other retrainings."""
    found = np.empty_like(real)
    for j in range(len(real)):
        rest = np.arange(len(real)) != j
        factor, line = _likeliest({f: rises[rest] for f, rises in path.items()}, removed[rest], real[rest])
        found[j] = line.rise(path[factor][j], removed[j])
    return found
