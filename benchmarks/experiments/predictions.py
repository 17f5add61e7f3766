"""Predictions of every method for a choice of groups: the mean test loss of a model trained only on these groups.

Additive methods sum the importance of the groups that are left out. What-if and warm starts answer for each choice
separately. Two trivial rows know only how many points are kept, or their classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from benchmarks import names
from benchmarks.experiments.bench import Bench, Cell
from benchmarks.experiments.methods import Attribution, attributed
from benchmarks.experiments.refits import COPIES, class_shift, from_start, warm_started, what_if
from benchmarks.experiments.subject import Subject, Timed, timed
from ggda_ext import Groups, WhatIf
from ggda_ext.evaluation import Correlation, additive_ceiling, points_of

RETRAINED = 8
"""Number of retrainings that calibrate what-if. `to_retrain` chooses them among a random half of the choices of groups.
Calibrated values are compared on the other half, which the calibration does not use."""
FEWEST_FITTED = 15
"""Smallest number of choices of groups that an additive score is fitted to."""
EXPLAINED_SEEDS = 501
"""Models are explained in trios. The first model of the first trio has seed 0; all others have seeds from this one on.
None of these seeds is used for retraining."""


@dataclass(frozen=True)
class Truth:
    """Results of retrained models: the groups they saw `[s, k]`, and their mean test losses `[s, seeds]`."""

    kept: np.ndarray
    losses: np.ndarray

    @cached_property
    def additive(self) -> Correlation | None:
        """What an additive score reaches that is fitted to the losses.

        It is None for fewer than `FEWEST_FITTED` choices, and if any choice leaves out only one group or none.
        """
        if len(self.kept) < FEWEST_FITTED or self.kept.sum(1).max() >= self.kept.shape[1] - 1:
            return None
        return additive_ceiling(self.kept, self.losses.mean(1))


@dataclass(frozen=True)
class Prediction:
    """Predicted losses `[s]`. Some methods predict them only up to an offset and a scale.

    Attributes:
        values: the predictions.
        settings: how they were made, in words.
        seconds: CPU seconds by part, for all predictions together.
        calibrated: predictions for one half of the choices, calibrated with eight retrained models of the other half;
            None for methods that cannot be calibrated, and for few choices.
    """

    values: np.ndarray
    settings: str = ""
    seconds: dict[str, float] | None = None
    calibrated: np.ndarray | None = None

    @classmethod
    def additive(
        cls,
        kept: np.ndarray,
        importance: np.ndarray,
        loss: float,
        settings: str,
        seconds: dict[str, float] | None = None,
    ) -> Prediction:
        """Return predictions in which the loss of the model rises by the importance of every group that is left out."""
        return cls(loss + (~kept).astype(float) @ importance, settings, seconds)


def two_halves(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return positions of the choices of groups that may calibrate, and of those that are compared.

    The halves are random, because choices that leave out one group are in the order of the groups, that is of clusters.
    """
    order = np.random.default_rng(0).permutation(count)
    return order[: count // 2], order[count // 2 :]


class Predictor:
    """Makes the predictions of all methods for one grouping and one trio. A refit is set up once for all protocols.

    Args:
        bench: the task.
        groups: the groups.
        cell: grouping, size and seed of the groups; its method is ignored.
        trio: number of the three models that are explained, together or the first of them alone.
    """

    def __init__(self, bench: Bench, groups: Groups, cell: Cell, trio: int = 0) -> None:
        self.bench, self.groups, self.cell = bench, groups, cell
        first = bench.subject
        self._subjects = [
            first if seed == first.seed else bench.another_subject(seed) for seed in explained_seeds(trio)
        ]  # models are trained when they are first used
        self._refits: dict[str, Timed[WhatIf]] = {}

    def __call__(self, method: str, truth: Truth) -> Prediction:
        """Return the predictions of one method. Only what-if uses some of the real losses, to calibrate afterwards."""
        subsets, subject = points_of(self.groups, truth.kept), self._subjects[0]
        if method in names.WHAT_IFS:
            return _refitted(self._refit(method), truth, subject)
        match method:
            case names.WARM_START:
                found = timed(warm_started, subject, subsets)
                return Prediction(found.value, "a few epochs on what is kept", {"scoring": found.seconds})
            case names.KEPT_POINTS:
                return Prediction(-np.array([len(points) for points in subsets], float))
            case names.CLASS_BALANCE:
                return Prediction(class_shift(subject, subsets))
        return self._additive(method, truth.kept)

    def _additive(self, method: str, kept: np.ndarray) -> Prediction:
        cell = replace(self.cell, method=names.AVERAGED.get(method, method))
        found = [self._attributed(cell, subject) for subject in self._explained(method)]
        seconds = {part: sum(one.seconds.get(part, 0) for one in found) for part in found[0].seconds}
        importance = np.mean([one.importance for one in found], axis=0)
        settings = found[0].settings + ("; three models" if len(found) > 1 else "")
        return Prediction.additive(kept, importance, self._subjects[0].loss, settings, seconds)

    def _attributed(self, cell: Cell, subject: Subject) -> Attribution:
        """Return the importance of the groups for a model.

        The result for the model of `bench.subject` is kept, and its cost includes the grouping.
        """
        if subject is self.bench.subject:
            return self.bench.attribution(cell)
        return attributed(cell.method, subject, self.groups)

    def _explained(self, method: str) -> list[Subject]:
        """Return the models that a method averages over: all three, or the first alone."""
        return self._subjects if method in names.AVERAGED else self._subjects[:1]

    def _refit(self, method: str) -> Timed[WhatIf]:
        if method not in self._refits:
            subjects, size = self._explained(method), self.bench.size.lds
            if method in (names.FROM_START, names.FROM_START_3):
                self._refits[method] = timed(from_start, subjects, self.groups)
            else:
                assert size is not None
                copies = COPIES if method in (names.WITH_COPIES, names.WITH_COPIES_3) else 0
                self._refits[method] = timed(
                    what_if, subjects, self.groups, copies=copies, settled=size.settled_checkpoints
                )
        return self._refits[method]


def explained_seeds(trio: int) -> list[int]:
    """Return the seeds of the three models of a trio."""
    first = EXPLAINED_SEEDS + 3 * trio - 1
    return [first if trio else 0, first + 1, first + 2]


def _refitted(asked: Timed[WhatIf], truth: Truth, subject: Subject) -> Prediction:
    """Return the predictions of what-if, and those after `verify` with a few of the retrained models."""
    refit, measure = asked.value, subject.property
    found = timed(refit.subsets, truth.kept, measure)
    calibrated = None
    if len(truth.kept) >= 2 * RETRAINED - 1:
        calibrated = _verified(refit, truth, subject)
    seconds = {"gradients": asked.seconds, "scoring": found.seconds}
    return Prediction(found.value.numpy(), refit.explain(), seconds, calibrated)


def _verified(refit: WhatIf, truth: Truth, subject: Subject) -> np.ndarray:
    """Return calibrated predictions for the second half. The refit is restored afterwards, for the other protocols."""
    measure, ridges = subject.property, [model.ridge for model in refit.linearized]
    first, second = two_halves(len(truth.kept))
    chosen = refit.to_retrain(measure, RETRAINED, among=truth.kept[first])
    places = [int(np.flatnonzero((truth.kept == one).all(1))[0]) for one in chosen]
    try:
        refit.verify(lambda subsets: truth.losses[places], measure, chosen)
        return refit.subsets(truth.kept[second], measure).numpy()
    finally:
        refit.calibrations.clear()
        for model, ridge in zip(refit.linearized, ridges, strict=True):
            model.ridge = ridge
