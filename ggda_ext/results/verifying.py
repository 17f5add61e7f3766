"""Comparison of predictions with the truth: models trained again without the groups that matter most."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ggda_ext.results import ranking
from ggda_ext.results.table import aligned_lines, number, shown
from ggda_ext.words import check_counts

if TYPE_CHECKING:
    from ggda_ext.results.attribution import Attribution

Retrain: TypeAlias = Callable[[Sequence[np.ndarray]], Any]
"""A function from subsets (arrays of training indices to keep) to the property of their models `[subsets, seeds]`."""


@dataclass(frozen=True)
class Verified:
    """The predicted and the measured effect of removing each of some groups. Prints as a table.

    Attributes:
        names: names of the groups.
        predicted: predicted scores `[g]`.
        real: measured rises of the property without each group, one for each training seed `[g, seeds]`.
        in_unit: whether predictions are in the property's unit. If not, only signs and order can be compared.
        measured: the name of the property.
    """

    names: tuple[Hashable, ...]
    predicted: np.ndarray
    real: np.ndarray
    in_unit: bool
    measured: str

    @property
    def rises(self) -> np.ndarray:
        """Measured rise of the property without each group, the mean over seeds `[g]`."""
        return self.real.mean(1)

    @property
    def stderr(self) -> np.ndarray:
        """Standard error of the mean rise over seeds `[g]`; NaN for one seed."""
        return standard_error(self.real)

    @property
    def agrees(self) -> np.ndarray:
        """Whether prediction and truth have the same sign `[g]`."""
        return np.sign(self.predicted) == np.sign(self.rises)

    def __str__(self) -> str:
        rows = [["group", "predicted", "retrained", "± se", ""]]
        for j, name in enumerate(self.names):
            error = f"{self.stderr[j]:.2g}" if self.stderr[j] == self.stderr[j] else "–"
            found = [number(float(value)) for value in (self.predicted[j], self.rises[j])]
            rows.append([shown(name), *found, error, self._word(j)])
        unit = "" if self.in_unit else " (a rank: its size is not in the property's unit)"
        seeds = f"{self.real.shape[1]} seed{'s' * (self.real.shape[1] > 1)}"
        title = f"Rise of {self.measured} without each group, predicted{unit} and retrained, {seeds}"
        return "\n".join([title, "", *aligned_lines(rows, {0, 4})])

    __repr__ = __str__

    def _word(self, j: int) -> str:
        if not np.isfinite(self.rises[j]):
            return "the retrained value is not a number"
        if self.stderr[j] == self.stderr[j] and abs(self.rises[j]) < 2 * self.stderr[j]:
            return "within the noise of training"
        return "same sign" if self.agrees[j] else "OTHER SIGN"


def standard_error(values: np.ndarray) -> np.ndarray:
    """Return the standard error of the mean along the last axis; NaN for one value."""
    count = values.shape[-1]
    return values.std(-1, ddof=1) / np.sqrt(count) if count > 1 else np.full(values.shape[:-1], np.nan)


def retrained(retrain: Retrain, subsets: Sequence[np.ndarray]) -> np.ndarray:
    """Retrain on every subset and return the values `[subsets, seeds]`; values `[subsets]` count as one seed."""
    returned = retrain(subsets)
    try:
        values = np.asarray(returned, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"retrain returned a {type(returned).__name__} that is not made of numbers: {error}.") from None
    if values.ndim not in (1, 2) or len(values) != len(subsets):
        raise ValueError(
            f"retrain returned shape {list(values.shape)}: return [{len(subsets)}, seeds], one value per subset and "
            "seed."
        )
    return values.reshape(len(subsets), -1)


def check_retrain(retrain: Any, name: str, higher_is_better: bool | None) -> None:
    """Raise an error if `retrain` is no function, or measures another property than the one of this name."""
    if not callable(retrain):
        raise TypeError(
            f"retrain is a {type(retrain).__name__}: pass a function retrain(subsets) -> values [subsets, seeds], such "
            "as ggda_ext.evaluation.Retrainer, that measures the property."
        )
    measure = getattr(retrain, "measure", None)
    if (measure, higher_is_better) in {("accuracy", False), ("loss", True)}:
        raise ValueError(
            f"retrain measures measure={measure!r}, and the property is {name}, where "
            f"{'higher' if higher_is_better else 'lower'} is better: pass a Retrainer that measures the same property, "
            f"e.g. measure={'accuracy' if higher_is_better else 'loss'!r}."
        )


def verified(result: Attribution, retrain: Retrain, top: int, by: str | int | None) -> Verified:
    """Retrain and compare; see `Attribution.verify`."""
    check_counts(top=top)
    row = ranking.property_id(result, by)
    check_retrain(retrain, shown(result.properties[row]), result.higher_is_better[row])
    ids = ranking.order(result, row)[:top]
    if not ids:
        raise ValueError("there is no group to verify.")
    everyone = np.arange(result.groups.n)
    subsets = [everyone, *(np.setdiff1d(everyone, result.groups[j]) for j in ids)]
    empty = next((j for j, kept in zip(ids, subsets[1:], strict=True) if not len(kept)), None)
    if empty is not None:
        raise ValueError(f"group {result.groups.name(empty)!r} holds all training points: nothing is left to train on.")
    values = retrained(retrain, subsets)
    unit = result.method is not None and result.method.unit == "property"
    predicted = result.scores[row].cpu().double().numpy()[ids]
    names = tuple(result.groups.name(j) for j in ids)
    return Verified(names, predicted, values[1:] - values[:1], unit, shown(result.properties[row]))
