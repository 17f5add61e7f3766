"""One task of a run: its models, groupings and scores, each computed once, and the rows that are made from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.data import TITLES
from benchmarks.experiments.groupings import OF_MODEL, grouped
from benchmarks.experiments.methods import METHODS, Attribution, attributed
from benchmarks.experiments.subject import Subject, Timed
from benchmarks.names import GRAD_K_MEANS, PAPER_METHODS, PER_POINT, RATES, SINGLE_POINTS, TRACIN, WARM_START, WHAT_IFS
from benchmarks.results import ResultFolder
from benchmarks.sizes import CellScale, ExperimentScale, Scale
from benchmarks.tasks import Task
from ggda_ext import Groups
from ggda_ext.evaluation import Aggregation, aggregated, standard_error


@dataclass(frozen=True)
class Cell:
    """A method on a grouping. A row of a table is about one cell."""

    method: str
    grouping: str = SINGLE_POINTS
    group_size: int = 1
    grouping_seed: int = 0
    aggregation: Aggregation = "sum"

    @property
    def name(self) -> str:
        return f"{self.method}/{self.grouping}/{self.group_size}/{self.grouping_seed}/{self.aggregation}"

    @property
    def is_compared(self) -> bool:
        """Whether sum and mean are compared on this cell: a method of the paper on its best grouping, with seed 0."""
        return self.method in PAPER_METHODS and self.grouping == GRAD_K_MEANS and self.grouping_seed == 0

    @property
    def mean(self) -> Cell:
        """The same cell with importance per member."""
        return replace(self, aggregation="mean")


class Bench:
    """A task at one scale, which writes to one folder.

    Args:
        task: data, model and training.
        scale: sizes of the run.
        folder: where rows go; trained models are kept there as well.
    """

    def __init__(self, task: Task, scale: Scale, folder: ResultFolder) -> None:
        self.task, self.scale, self.folder = task, scale, folder
        self.size: ExperimentScale = scale.experiments[task.name]
        self.subject = self.another_subject(0)
        self._groups: dict[tuple[Any, ...], Timed[Groups]] = {}
        self._attributions: dict[tuple[Any, ...], Attribution] = {}

    @property
    def models(self) -> Path:
        """Where trained models are kept."""
        return self.folder.path / "models"

    def another_subject(self, seed: int, labels: Tensor | None = None) -> Subject:
        """Return the model of another seed, or trained on other labels."""
        return Subject(self.task, self.size.methods, seed, labels, self.models)

    def groups(self, cell: Cell, subject: Subject | None = None) -> Groups:
        """Return the groups of a cell."""
        return self._timed_groups(cell, subject or self.subject).value

    def _timed_groups(self, cell: Cell, subject: Subject) -> Timed[Groups]:
        of_model = subject if cell.grouping in OF_MODEL else None
        key = (of_model, cell.grouping, cell.group_size, cell.grouping_seed)
        if key not in self._groups:
            self._groups[key] = grouped(subject, cell.grouping, cell.group_size, cell.grouping_seed)
        return self._groups[key]

    def attribution(self, cell: Cell, subject: Subject | None = None) -> Attribution:
        """Return the importance of the cell's groups, aggregated, and its cost, which includes the grouping."""
        subject = subject or self.subject
        groups = self._timed_groups(cell, subject)
        key = (subject, replace(cell, aggregation="sum"))
        if key not in self._attributions:
            self._attributions[key] = attributed(cell.method, subject, groups.value)
        found = self._attributions[key]
        return replace(
            found,
            importance=aggregated(found.importance, groups.value, cell.aggregation),
            seconds={"grouping": groups.seconds} | found.seconds,
        )

    def cells(self, size: CellScale) -> Iterator[Cell]:
        """Yield every method on every grouping and size of an experiment; single points come first.

        Only TracIn runs with more than one grouping seed.
        """
        single = [(SINGLE_POINTS, 1)] if SINGLE_POINTS in size.groups else []
        for grouping, group_size in [*single, *self.groupings(size)]:
            for method in METHODS:
                if method in size.methods and self.runs(method, grouping, group_size, size):
                    several = method == TRACIN and grouping != SINGLE_POINTS
                    for seed in size.grouping_seeds if several else size.grouping_seeds[:1]:
                        yield Cell(method, grouping, group_size, seed)

    def runs(self, method: str, grouping: str, group_size: int, size: CellScale) -> bool:
        """Whether a method runs on a grouping.

        TracIn with learning rates runs only on single points and on the paper's best grouping, per-point TracIn only on
        single points. Methods that train or refit a model for every group run only if there are few groups.
        """
        single = grouping == SINGLE_POINTS
        if method in (*WHAT_IFS, WARM_START):
            return not single and self.is_refitted(size, group_size)
        return single or (method != PER_POINT and (method != RATES or grouping == GRAD_K_MEANS))

    def groupings(self, size: CellScale) -> Iterator[tuple[str, int]]:
        """Yield the groupings with their sizes, without single points and without sizes that leave only one group."""
        for grouping, sizes in size.groups.items():
            for group_size in sizes:
                if grouping != SINGLE_POINTS and group_size * 2 <= len(self.task.data.train[0]):
                    yield grouping, group_size

    def is_refitted(self, size: CellScale, group_size: int) -> bool:
        """Whether groups of this size are few enough to refit the model without each of them."""
        return len(self.task.data.train[0]) / group_size <= size.refitted_groups

    def key(self, experiment: str, cell: Cell | str, *more: object) -> str:
        """Return the unique name of a row."""
        name = cell.name if isinstance(cell, Cell) else cell
        return "/".join([experiment, self.task.name, name, *map(str, more)])

    def common(self, experiment: str) -> dict[str, Any]:
        """Return the fields that all rows of an experiment share."""
        data = self.task.data
        return {
            "experiment": experiment,
            "data": TITLES[data.name],
            "model": self.task.title,
            "source": "; ".join(filter(None, (data.source, self.task.weights))),
            "stand_in": self.task.stand_in,
            "scale": self.scale.name,
            "train_points": len(data.train[0]),
            "test_points": len(data.test[0]),
            "recipe": asdict(self.task.recipe),
        }

    def about(self, cell: Cell, attribution: Attribution, groups: Groups) -> dict[str, Any]:
        """Return the fields that describe a cell."""
        return asdict(cell) | {
            "groups": len(groups),
            "seconds": attribution.seconds,
            "settings": attribution.settings,
        }


def summary(values: Any) -> dict[str, Any]:
    """Return the values of all seeds, their mean, and their standard error, which is None for a single seed."""
    array = np.asarray(values, float)
    error = float(standard_error(array))
    return {"values": array.tolist(), "mean": float(array.mean()), "stderr": None if np.isnan(error) else error}
