"""How good are scores of groups? Retraining score, pruning, noisy labels, group LDS, leave-group-out correlation.

*Importance* has one meaning everywhere: the predicted rise of the test loss if the group is removed, so helpful
groups are positive and harmful ones negative, as `ggda_ext.attribute` scores a test loss. What needs new models asks
a function for them, ``retrain(subsets) -> values [subsets, seeds]``: a `Retrainer`, or your own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.distributed import alone, in_order, rank, world_size
from ggda_ext.groups.partition import Groups, GroupsLike
from ggda_ext.training import Recipe, train_many

Retrain = Callable[[Sequence[np.ndarray]], np.ndarray]
"""Training indices to keep, one array per subset → a value of every subset's models `[subsets, seeds]`."""
Aggregation = Literal["sum", "mean"]
_DRAWS = 50  # choices drawn for each one that is taken, if they should be equal in points
Rank = Literal["pearson", "spearman"]


@dataclass(frozen=True)
class RemovalCurve:
    """Values of models retrained without part of the data.

    Attributes:
        fractions: removed fractions of the training points `[f]`.
        values: one value per fraction and seed `[f, s]`, test accuracy unless `retrain` measures something else.
    """

    fractions: np.ndarray
    values: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """Mean over seeds `[f]`."""
        return self.values.mean(1)

    @property
    def stderr(self) -> np.ndarray:
        """Standard error of the mean over seeds `[f]`; NaN for one seed."""
        return standard_error(self.values)


@dataclass(frozen=True)
class Detection:
    """How early mislabelled points are found if points are checked from the lowest importance on.

    Attributes:
        auc: area under `found` against `checked`, the paper's: 0.5 for a random order, and at best one minus half the
            noisy fraction.
        roc_auc: the ordinary ROC AUC: 0.5 for a random order, at best 1.
        checked: fractions of the points that were checked, from 0 to 1, at the boundaries of groups.
        found: fractions of the mislabelled points among them; within a group they are expected evenly.
    """

    auc: float
    roc_auc: float
    checked: np.ndarray
    found: np.ndarray


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
class Retrainer:
    """Trains models on subsets of the data, several seeds each, all at once, and measures them on test points.

    Args:
        make_model: a new model, its weights drawn from torch's current seed.
        loss_fn: the training loss, ``loss_fn(output, target)``.
        train: inputs and targets of all training points.
        test: inputs and targets of the test points.
        recipe: how to train.
        seeds: of initial weights and batches; every subset is trained once for each.
        measure: ``"accuracy"``, ``"loss"``, or a function of outputs `[n, …]` and targets `[n]`.
        show_progress: whether to show a progress bar.
    """

    make_model: Callable[[], nn.Module]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    recipe: Recipe
    seeds: Sequence[int] = (0,)
    measure: Literal["accuracy", "loss"] | Callable[[Tensor, Tensor], Any] = "accuracy"
    show_progress: bool = False

    def __call__(self, subsets: Sequence[np.ndarray]) -> np.ndarray:
        """Values `[subsets, seeds]` of models trained on every subset; under several ranks each trains some of them."""
        jobs = [(subset, seed) for subset in subsets for seed in self.seeds]
        return in_order(self._my_values(jobs)).numpy().reshape(len(subsets), len(self.seeds))

    def _my_values(self, jobs: Sequence[tuple[np.ndarray, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Which of the jobs are this rank's, and the values of their models."""
        mine = list(range(rank(), len(jobs), world_size()))
        if not mine and jobs:
            return
        with alone():
            models = train_many(
                self.make_model,
                self.loss_fn,
                self.train,
                self.recipe,
                subsets=[jobs[j][0] for j in mine],
                seeds=[jobs[j][1] for j in mine],
                show_progress=self.show_progress and mine[:1] == [0],
            )
            values = [float(self._value(outputs)) for outputs in models.outputs(self.test[0])]
        yield torch.tensor(mine), torch.tensor(values, dtype=torch.float64)

    def _value(self, outputs: Tensor) -> Any:
        targets = self.test[1]
        if self.measure == "accuracy":
            return (outputs.argmax(1) == targets).double().mean()
        return self.loss_fn(outputs, targets).mean() if self.measure == "loss" else self.measure(outputs, targets)


def aggregated(importance: Any, groups: GroupsLike, aggregation: Aggregation = "sum") -> np.ndarray:
    """Importance of groups `[k]` as it is (``"sum"`` over the members), or divided by their sizes (``"mean"``)."""
    if aggregation not in ("sum", "mean"):
        raise ValueError(f"aggregation={aggregation!r} is not one of 'sum', 'mean'.")
    groups = Groups.of(groups)
    values = _importance(importance, groups)
    return values if aggregation == "sum" else values / groups.sizes


def removal_order(
    importance: Any, groups: GroupsLike, fraction: float = 1.0, *, largest_first: bool = True, seed: int = 0
) -> np.ndarray:
    """The training points to remove: whole groups in order of importance, random points of the last one.

    For one seed a smaller fraction is the beginning of a larger one.

    Args:
        importance: of every group `[k]`.
        groups: a `Groups` or anything it accepts. Points in no group stay.
        fraction: how much of the training set to remove.
        largest_first: whether to begin with the most important group.
        seed: of the order within groups, and of groups of equal importance.

    >>> removal_order([0.5, 2.0], [0, 0, 1, 1], 0.5).tolist()
    [2, 3]
    """
    groups = Groups.of(groups)
    values = _importance(importance, groups)
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction={fraction}: pass a number from 0 to 1.")
    draw = np.random.default_rng(seed)
    ties = draw.permutation(len(groups))
    position = np.empty(len(groups), np.int64)
    position[np.lexsort((ties, -values if largest_first else values))] = np.arange(len(groups))
    points = draw.permutation(groups.order)
    points = points[np.argsort(position[groups.labels[points]], kind="stable")]
    return points[: round(fraction * groups.n)]


def retraining_score(
    importance: Any,
    groups: GroupsLike,
    retrain: Retrain,
    fractions: Sequence[float] = (0.01, 0.05, 0.1, 0.2),
    *,
    aggregation: Aggregation = "sum",
    seed: int = 0,
) -> RemovalCurve:
    """Accuracy after removing the most important points and training again; lower is better.

    Args:
        importance: of every group `[k]`.
        groups: a `Groups` or anything it accepts.
        retrain: a `Retrainer`, or any function of its form.
        fractions: how much to remove.
        aggregation: rank groups by their importance, or by that divided by their size.
        seed: of the random choice among the members of the last group.
    """
    return _curve(importance, groups, retrain, fractions, aggregation, seed, largest_first=True)


def pruning_score(
    importance: Any,
    groups: GroupsLike,
    retrain: Retrain,
    fractions: Sequence[float] = (0.25, 0.5, 0.75),
    *,
    aggregation: Aggregation = "sum",
    seed: int = 0,
) -> RemovalCurve:
    """Accuracy after removing the least important points and training again; higher is better.

    Arguments as in `retraining_score`.
    """
    return _curve(importance, groups, retrain, fractions, aggregation, seed, largest_first=False)


def noisy_label_detection(
    importance: Any, groups: GroupsLike, is_noisy: Any, *, aggregation: Aggregation = "sum"
) -> Detection:
    """How well low importance points at wrong labels.

    Args:
        importance: of every group `[k]`.
        groups: a `Groups` or anything it accepts. Points in no group are not checked.
        is_noisy: whether the label of every training point is wrong `[n]`.
        aggregation: rank groups by their importance, or by that divided by their size.

    >>> found = noisy_label_detection([-1.0, 2.0], [0, 0, 1, 1], [True, True, False, False])
    >>> found.auc, found.roc_auc
    (0.75, 1.0)
    """
    groups = Groups.of(groups)
    values = aggregated(importance, groups, aggregation)
    noisy = np.asarray(is_noisy, dtype=bool)
    if noisy.shape != (groups.n,):
        raise ValueError(f"is_noisy has shape {list(noisy.shape)}: pass one entry for each of {groups.n} points.")
    inside = groups.labels >= 0
    points, noisy = values[groups.labels[inside]], noisy[inside]
    if noisy.all() or not noisy.any():
        raise ValueError(f"is_noisy marks {noisy.sum()} of {len(noisy)} points: both kinds are needed.")
    levels, level = np.unique(points, return_inverse=True)  # groups of equal importance are checked together
    checked = np.concatenate([[0], np.cumsum(np.bincount(level, minlength=len(levels)))]) / len(points)
    found = np.concatenate([[0], np.cumsum(np.bincount(level, noisy, len(levels)))]) / noisy.sum()
    area = float(np.sum(np.diff(checked) * (found[1:] + found[:-1]) / 2))
    from sklearn.metrics import roc_auc_score  # takes seconds to import

    return Detection(area, float(roc_auc_score(noisy, -points)), checked, found)


def random_subsets(
    groups: GroupsLike, count: int, *, fraction: float = 0.5, equal_points: bool = False, seed: int = 0
) -> np.ndarray:
    """Random choices of groups for `group_lds`: which groups each subset keeps `[count, k]`, as booleans.

    Args:
        groups: a `Groups` or anything it accepts.
        count: number of subsets.
        fraction: of the groups that a subset keeps.
        equal_points: keep about the same number of points in all of them: of many different choices, those nearest to
            `fraction` of the points; fewer than `count` if there are no more. Otherwise halves of uneven groups differ
            in size, and with a fixed number of epochs in training steps, which alone may explain their losses.
        seed: of the choice.
    """
    groups = Groups.of(groups)
    k = len(groups)
    size = round(fraction * k)
    if not 0 < size < k:
        raise ValueError(f"fraction={fraction} of {k} groups keeps {size} of them: some must stay and some must go.")
    draw = np.random.default_rng(seed)
    kept = np.zeros((_DRAWS * count if equal_points else count, k), bool)
    for row in kept:
        row[draw.choice(k, size, replace=False)] = True
    if not equal_points:
        return kept
    kept = kept[np.sort(np.unique(kept, axis=0, return_index=True)[1])]
    off = np.abs(kept @ groups.sizes - fraction * groups.sizes.sum())
    return kept[np.sort(np.argsort(off, kind="stable")[:count])]


def points_of(groups: GroupsLike, kept: np.ndarray) -> list[np.ndarray]:
    """The training indices of every choice of groups `[s, k]`; points in no group are in none."""
    groups = Groups.of(groups)
    inside = groups.labels >= 0
    return [np.flatnonzero(inside & choice[groups.labels]) for choice in np.asarray(kept, bool)]


def group_lds(importance: Any, kept: Any, values: Any, *, resamples: int = 1000, seed: int = 0) -> Correlation:
    """Linear data-modelling score: do summed scores rank the test losses of really retrained models?

    The Spearman correlation over subsets of the predicted loss, ``-Σ_{kept G} importance_G``, with the real one.

    Args:
        importance: of every group `[k]`, or for several test points or properties `[m, k]`.
        kept: which groups every retrained model saw `[s, k]`, see `random_subsets`.
        values: test loss of every retrained model `[s]`, or `[s, m]`.
        resamples: of the bootstrap over subsets, for the interval.
        seed: of the bootstrap.
    """
    scores = np.atleast_2d(_numbers(importance, "importance"))
    chosen = np.asarray(kept, dtype=float)
    if chosen.ndim != 2 or chosen.shape[1] != scores.shape[1]:
        raise ValueError(f"kept has shape {list(chosen.shape)}: pass [subsets, {scores.shape[1]}].")
    return _correlation(-chosen @ scores.T, _numbers(values, "values"), "spearman", resamples, seed)


def additive_ceiling(kept: Any, values: Any, *, train: float = 0.8, splits: int = 50, seed: int = 0) -> Correlation:
    """The LDS of the best additive score there can be on these retrainings: one fitted to them.

    Values are regressed on which groups were kept, on a part of the subsets, with the ridge that predicts best within
    that part; the Spearman correlation is taken on the others. With few subsets for many groups this is a lower bound.
    A low ceiling beside reliable values (models of other seeds agree) says that what groups do does not add up: ask
    `ggda_ext.WhatIf` instead of adding scores.

    Args:
        kept: which groups every retrained model saw `[s, k]`, see `random_subsets`.
        values: test loss of every retrained model `[s]`, or `[s, m]`.
        train: share of the subsets that scores are fitted to.
        splits: random splits that are averaged; their middle 95 % is the interval.
        seed: of the splits.
    """
    chosen, real = np.asarray(kept, dtype=float), _numbers(values, "values")
    real = real[:, None] if real.ndim == 1 else real
    if chosen.ndim != 2 or len(chosen) != len(real):
        raise ValueError(f"kept has shape {list(chosen.shape)}: pass [{len(real)}, groups], a row for every value.")
    size = round(train * len(real))
    if size < 3 or len(real) - size < 3:
        raise ValueError(
            f"train={train} of {len(real)} subsets: at least 3 must be fitted to and 3 left to compare with."
        )
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(splits):
        order = draw.permutation(len(real))
        fitted, rest = order[:size], order[size:]
        predicted = _ridge_prediction(chosen[fitted], real[fitted], chosen[rest])
        found.append(_columnwise(predicted[None], real[rest][None], "spearman")[0])
    columns = np.nanmean(found, axis=0)
    low, high = (float(value) for value in np.nanpercentile(np.nanmean(found, axis=1), [2.5, 97.5]))
    return Correlation(float(columns.mean()), (low, high), columns)


def _ridge_prediction(x: np.ndarray, y: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Ridge regression with an intercept, its penalty by leave-one-out error, at new rows `[t, m]`."""
    centre, level = x.mean(0), y.mean(0)
    u, s, vt = np.linalg.svd(x - centre, full_matrices=False)
    best: tuple[np.ndarray, np.ndarray] | None = None
    for penalty in np.logspace(-4, 3, 15) * max(float((s * s).max()), 1e-12):
        shrunk = s * s / (s * s + penalty)
        leverage = (u * u * shrunk).sum(1) + 1 / len(x)
        left = (y - level - u * shrunk @ (u.T @ (y - level))) / (1 - leverage).clip(1e-6)[:, None]
        error = (left * left).sum(0)
        weights = vt.T @ ((s / (s * s + penalty))[:, None] * (u.T @ (y - level)))
        if best is None:
            best = error, weights
        else:
            better = error < best[0]
            best = np.where(better, error, best[0]), np.where(better, weights, best[1])
    assert best is not None
    return level + (new - centre) @ best[1]


def leave_group_out_correlation(
    importance: Any, rises: Any, *, kind: Rank = "pearson", resamples: int = 1000, seed: int = 0
) -> Correlation:
    """Correlation of importance with the real rise of the test loss when a group is left out.

    Args:
        importance: of every group `[k]`, or for several test points or properties `[m, k]`.
        rises: loss without the group minus loss with all data, `[k]` or `[m, k]` as `importance`: the `scores` of
            `ggda_ext.counterfactual.leave_group_out.leave_group_out`.
        kind: ``"pearson"`` or ``"spearman"``.
        resamples: of the bootstrap over groups, for the interval.
        seed: of the bootstrap.
    """
    if kind not in ("pearson", "spearman"):
        raise ValueError(f"kind={kind!r} is not one of 'pearson', 'spearman'.")
    scores = np.atleast_2d(_numbers(importance, "importance"))
    real = np.atleast_2d(_numbers(rises, "rises"))
    if real.shape != scores.shape:
        raise ValueError(f"rises has shape {list(real.shape)}: pass {list(scores.shape)}, as importance.")
    return _correlation(scores.T, real.T, kind, resamples, seed)


def standard_error(values: np.ndarray) -> np.ndarray:
    """Standard error of the mean along the last axis; NaN for one value."""
    count = values.shape[-1]
    return values.std(-1, ddof=1) / np.sqrt(count) if count > 1 else np.full(values.shape[:-1], np.nan)


def _curve(
    importance: Any, groups: GroupsLike, retrain: Retrain, fractions: Sequence[float], aggregation: Aggregation,
    seed: int, *, largest_first: bool,
) -> RemovalCurve:  # fmt: skip
    groups = Groups.of(groups)
    values = aggregated(importance, groups, aggregation)
    removed = [removal_order(values, groups, f, largest_first=largest_first, seed=seed) for f in fractions]
    kept = [np.setdiff1d(np.arange(groups.n), gone, assume_unique=True) for gone in removed]
    return RemovalCurve(np.asarray(fractions, float), np.asarray(retrain(kept), float))


def _correlation(predicted: np.ndarray, real: np.ndarray, kind: Rank, resamples: int, seed: int) -> Correlation:
    """Correlations of the columns of two matrices `[s, m]`, their mean, and its bootstrap interval over rows."""
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
        _columnwise(predicted[at], real[at], kind).mean(1)
        for at in np.array_split(draw.integers(0, len(real), (resamples, len(real))), -(-resamples // 100))
    ]
    low, high = (float(value) for value in np.nanpercentile(np.concatenate(means), [2.5, 97.5]))
    return Correlation(float(columns.mean()), (low, high), columns)


def _columnwise(a: np.ndarray, b: np.ndarray, kind: Rank) -> np.ndarray:
    """Correlations `[r, m]` along the second axis of `[r, s, m]`; NaN where one side is constant."""
    if kind == "spearman":
        from scipy.stats import rankdata  # takes seconds to import

        a, b = rankdata(a, axis=1), rankdata(b, axis=1)
    a, b = (side - side.mean(1, keepdims=True) for side in (a, b))
    lengths = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    return np.divide((a * b).sum(1), lengths, out=np.full(lengths.shape, np.nan), where=lengths > 0)


def _importance(importance: Any, groups: Groups) -> np.ndarray:
    values = _numbers(importance, "importance")
    if values.shape != (len(groups),):
        raise ValueError(
            f"importance has shape {list(values.shape)}: pass one number for each of {len(groups)} groups."
        )
    return values


def _numbers(values: Any, name: str) -> np.ndarray:
    """Values as float64, all of them finite."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    array = np.asarray(values, dtype=float)
    if not np.isfinite(array).all():
        bad = np.flatnonzero(~np.isfinite(array).reshape(-1))
        raise ValueError(f"{name} holds {len(bad)} NaN or infinite numbers, first at {bad[:5].tolist()}.")
    return array
