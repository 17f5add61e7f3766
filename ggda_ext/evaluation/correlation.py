"""Do scores follow real retrainings? Group LDS, leave-group-out correlation, and the best LDS of additive scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ggda_ext.evaluation.importance import checked_numbers

Rank = Literal["pearson", "spearman"]


@dataclass(frozen=True)
class Correlation:
    """A correlation with retrained models.

    Attributes:
        value: the correlation; the mean over columns if there are several.
        interval: its 95 % bootstrap interval over the retrained models.
        columns: the correlation of every test point or property `[m]`.
    """

    value: float
    interval: tuple[float, float]
    columns: np.ndarray


@dataclass(frozen=True)
class Agreement:
    """How well predicted values follow real values.

    Attributes:
        spearman: correlation of the ranks.
        pearson: correlation of the values.
        slope: slope of real on predicted values, the mean over columns; 1 if predicted changes have the real size.
    """

    spearman: Correlation
    pearson: Correlation
    slope: float


def agreement(predicted: Any, real: Any, *, resamples: int = 1000, seed: int = 0) -> Agreement:
    """Measure how well predictions, additive or not, follow the values of models that were really retrained.

    Args:
        predicted: a value for every retrained model `[s]`, or for several test points or properties `[s, m]`.
        real: the values of the retrained models, in the same shape as `predicted`.
        resamples: number of resamples of the bootstrap over models, for the intervals.
        seed: random seed of the bootstrap.

    >>> found = agreement([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.5])
    >>> found.spearman.value, round(found.slope, 2)
    (1.0, 2.15)
    """
    x, y = checked_numbers(predicted, "predicted"), checked_numbers(real, "real")
    if x.shape != y.shape or x.ndim not in (1, 2):
        raise ValueError(f"predicted has shape {list(x.shape)}, real {list(y.shape)}: pass both as [s] or [s, m].")
    x, y = (side[:, None] if side.ndim == 1 else side for side in (x, y))
    ranks = _correlation(x, y, "spearman", resamples, seed)
    values = _correlation(x, y, "pearson", resamples, seed)
    spread = values.columns * y.std(0)
    slopes = np.divide(spread, x.std(0), out=np.full(spread.shape, np.nan), where=x.std(0) > 0)
    return Agreement(ranks, values, float(np.nanmean(slopes)) if np.isfinite(slopes).any() else float("nan"))


def group_lds(importance: Any, kept: Any, values: Any, *, resamples: int = 1000, seed: int = 0) -> Correlation:
    """Linear data-modelling score: do summed scores rank the test losses of really retrained models?

    It is the Spearman correlation over subsets of the predicted loss, ``-Σ_{kept G} importance_G``, with the real loss.

    Args:
        importance: importance of every group `[k]`, or for several test points or properties `[m, k]`.
        kept: which groups every retrained model saw `[s, k]`, see `random_subsets`.
        values: test loss of every retrained model `[s]`, or `[s, m]`.
        resamples: number of resamples of the bootstrap over subsets, for the interval.
        seed: random seed of the bootstrap.
    """
    scores = np.atleast_2d(checked_numbers(importance, "importance"))
    chosen = np.asarray(kept, dtype=float)
    if chosen.ndim != 2 or chosen.shape[1] != scores.shape[1]:
        raise ValueError(f"kept has shape {list(chosen.shape)}: pass [subsets, {scores.shape[1]}].")
    return _correlation(-chosen @ scores.T, checked_numbers(values, "values"), "spearman", resamples, seed)


def additive_ceiling(kept: Any, values: Any, *, train: float = 0.8, splits: int = 50, seed: int = 0) -> Correlation:
    """Estimate the best LDS that an additive score can reach on these retrainings, by fitting one to them.

    On a part of the subsets, values are regressed on which groups were kept, with the ridge that predicts best within
    that part. The Spearman correlation is taken on the other subsets. With few subsets for many groups this is a lower
    bound. If the ceiling is low and the values are reliable (models of other seeds agree), the effects of groups do not
    add up: ask `ggda_ext.WhatIf` instead of adding scores.

    Args:
        kept: which groups every retrained model saw `[s, k]`, see `random_subsets`.
        values: test loss of every retrained model `[s]`, or `[s, m]`.
        train: share of the subsets that scores are fitted to.
        splits: number of random splits to average over; the middle 95 % of the splits is the interval.
        seed: random seed of the splits.
    """
    chosen, real = np.asarray(kept, dtype=float), checked_numbers(values, "values")
    real = real[:, None] if real.ndim == 1 else real
    if chosen.ndim != 2 or len(chosen) != len(real):
        raise ValueError(f"kept has shape {list(chosen.shape)}: pass [{len(real)}, groups], a row for every value.")
    size = round(train * len(real))
    if size < 3 or len(real) - size < 3:
        raise ValueError(
            f"train={train} of {len(real)} subsets: at least 3 must be fitted to and 3 left to compare with."
        )
    draw = np.random.default_rng(seed)
    found, tested = np.empty((splits, real.shape[1])), np.empty((splits, len(real) - size, real.shape[1]))
    for split in range(splits):
        order = draw.permutation(len(real))
        fitted, rest = order[:size], order[size:]
        predicted = _ridge_prediction(chosen[fitted], real[fitted], chosen[rest])
        tested[split] = real[rest]
        found[split] = _columnwise(predicted[None], real[rest][None], "spearman")[0]
    known = np.isfinite(found).sum(0)
    columns = np.divide(np.nansum(found, 0), known, out=np.full(len(known), np.nan), where=known > 0)
    low, high = (float(value) for value in np.nanpercentile(_mean(found, tested), [2.5, 97.5]))
    return Correlation(float(_mean(columns[None], real[None])[0]), (low, high), columns)


def _ridge_prediction(x: np.ndarray, y: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Predict values `[t, m]` at new rows by ridge regression with an intercept.

    The penalty is chosen by leave-one-out error.
    """
    from sklearn.linear_model import RidgeCV  # takes seconds to import

    largest = max(float(np.linalg.norm(x - x.mean(0), 2)) ** 2, 1e-12)
    fitted = RidgeCV(np.logspace(-4, 3, 15) * largest, alpha_per_target=True).fit(x, y)
    return fitted.predict(new).reshape(len(new), -1)


def leave_group_out_correlation(
    importance: Any, rises: Any, *, kind: Rank = "pearson", resamples: int = 1000, seed: int = 0
) -> Correlation:
    """Correlation of importance with the real rise of the test loss when a group is left out.

    Args:
        importance: importance of every group `[k]`, or for several test points or properties `[m, k]`.
        rises: loss without the group minus loss with all data, in the same shape as `importance`; the `scores` of
            `ggda_ext.counterfactual.leave_group_out.leave_group_out`.
        kind: ``"pearson"`` or ``"spearman"``.
        resamples: number of resamples of the bootstrap over groups, for the interval.
        seed: random seed of the bootstrap.
    """
    if kind not in ("pearson", "spearman"):
        raise ValueError(f"kind={kind!r} is not one of 'pearson', 'spearman'.")
    scores = np.atleast_2d(checked_numbers(importance, "importance"))
    real = np.atleast_2d(checked_numbers(rises, "rises"))
    if real.shape != scores.shape:
        raise ValueError(f"rises has shape {list(real.shape)}: pass {list(scores.shape)}, as importance.")
    return _correlation(scores.T, real.T, kind, resamples, seed)


def _correlation(predicted: np.ndarray, real: np.ndarray, kind: Rank, resamples: int, seed: int) -> Correlation:
    """Correlations of the columns of two matrices `[s, m]`, their mean, and the mean's bootstrap interval over rows."""
    real = real[:, None] if real.ndim == 1 else real
    if predicted.shape != real.shape:
        raise ValueError(
            f"there are {len(predicted)} predictions for {predicted.shape[1]} test points or properties, but retrained "
            f"values of shape {list(real.shape)}: pass values {list(predicted.shape)}."
        )
    if len(real) < 3:
        raise ValueError(f"a correlation over {len(real)} retrained models says nothing: pass at least 3.")
    columns = _columnwise(predicted[None], real[None], kind)[0]
    draw = np.random.default_rng(seed)
    means = [
        _mean(_columnwise(predicted[at], real[at], kind), real[at])
        for at in np.array_split(draw.integers(0, len(real), (resamples, len(real))), -(-resamples // 100))
    ]
    low, high = (float(value) for value in np.nanpercentile(np.concatenate(means), [2.5, 97.5]))
    return Correlation(float(_mean(columns[None], real[None])[0]), (low, high), columns)


def _mean(columns: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Means `[r]` of correlations `[r, m]` over the columns whose real values `[r, s, m]` differ.

    A test point with the same value in all retrained models tells nothing. If there are several columns, a column whose
    predictions are all the same counts as 0, because leaving it out could raise the mean.
    """
    told = np.ptp(real, axis=1) > 0
    known = np.nan_to_num(columns) if columns.shape[1] > 1 else columns
    total = np.where(told, known, 0.0).sum(1)
    return np.divide(total, told.sum(1), out=np.full(len(columns), np.nan), where=told.any(1))


def _columnwise(a: np.ndarray, b: np.ndarray, kind: Rank) -> np.ndarray:
    """Correlations `[r, m]` along the second axis of `[r, s, m]`; NaN where one side is constant."""
    if kind == "spearman":
        from scipy.stats import rankdata  # takes seconds to import

        a, b = rankdata(a, axis=1), rankdata(b, axis=1)
    a, b = (side - side.mean(1, keepdims=True) for side in (a, b))
    lengths = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    return np.divide((a * b).sum(1), lengths, out=np.full(lengths.shape, np.nan), where=lengths > 0)
