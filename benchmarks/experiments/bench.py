"""One task of a run: its models, groupings and scores, each made once, and the rows that are made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.data import TITLES
from benchmarks.experiments.groupings import OF_MODEL, grouped
from benchmarks.experiments.methods import METHODS, Attribution, attributed
from benchmarks.experiments.subject import Subject, Timed
from benchmarks.names import CG, GRAD_K_MEANS, PAPER_METHODS, RATES, SINGLE_POINTS, TRACIN
from benchmarks.results import ResultFolder
from benchmarks.scales import ExperimentScale, Scale
from benchmarks.tasks import Task
from ggda_ext import Groups
from ggda_ext.evaluation import Aggregation, aggregated, standard_error


@dataclass(frozen=True)
class Cell:
    """A method on a grouping: what a row of a table is about."""

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
        """Whether sum and mean are compared on it: a method of the paper, on the first of its best groupings."""
        return self.method in PAPER_METHODS and self.grouping == GRAD_K_MEANS and self.grouping_seed == 0

    @property
    def mean(self) -> Cell:
        """The same with importance per member."""
        return replace(self, aggregation="mean")


class Bench:
    """A task at one scale, writing to one folder.

    Args:
        task: data, model and training.
        scale: how much of everything.
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

    @property
    def seeds(self) -> range:
        """Seeds of models, trained or retrained."""
        return range(self.size.model_seeds)

    def another_subject(self, seed: int, labels: Tensor | None = None) -> Subject:
        """The model of another seed, or trained on other labels."""
        return Subject(self.task, self.size, seed, labels, self.models)

    def groups(self, cell: Cell, subject: Subject | None = None) -> Groups:
        """The groups of a cell."""
        return self._timed_groups(cell, subject or self.subject).value

    def _timed_groups(self, cell: Cell, subject: Subject) -> Timed[Groups]:
        of_model = subject if cell.grouping in OF_MODEL else None
        key = (of_model, cell.grouping, cell.group_size, cell.grouping_seed)
        if key not in self._groups:
            self._groups[key] = grouped(subject, cell.grouping, cell.group_size, cell.grouping_seed)
        return self._groups[key]

    def attribution(self, cell: Cell, subject: Subject | None = None) -> Attribution:
        """The importance of the cell's groups, aggregated, with its cost, grouping included."""
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

    def cells(
        self, groupings: Sequence[str] | None = None, methods: Sequence[str] | None = None, *, retrained: bool = True
    ) -> Iterator[Cell]:
        """Every method on every grouping and size; single points first.

        Learning-rate weights go with the paper's best grouping only, and more grouping seeds with TracIn only.

        Args:
            groupings: instead of those of the scale.
            methods: likewise.
            retrained: whether models are retrained for the cells, which a scale may limit to fewer of them.
        """
        size = self.size
        own_methods, sizes, own_groupings = size.methods, size.group_sizes, size.groupings
        if retrained:
            own_methods, sizes = size.retrained_methods or own_methods, size.retrained_sizes or sizes
            own_groupings = size.retrained_groupings or own_groupings
        methods = methods or own_methods
        if 1 in sizes:
            yield from (Cell(method) for method in METHODS if method in methods)
        for grouping in groupings or own_groupings:
            for group_size in sizes:
                if group_size == 1 or group_size * 2 > len(self.task.data.train[0]):
                    continue
                for method in (*PAPER_METHODS, CG, *([RATES] if grouping == GRAD_K_MEANS else [])):
                    for seed in range(size.grouping_seeds if method == TRACIN else 1):
                        if method in methods:
                            yield Cell(method, grouping, group_size, seed)

    def key(self, experiment: str, cell: Cell | str, *more: object) -> str:
        """The unique name of a row."""
        name = cell.name if isinstance(cell, Cell) else cell
        return "/".join([experiment, self.task.name, name, *map(str, more)])

    def common(self, experiment: str) -> dict[str, Any]:
        """The fields all rows of an experiment share."""
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
        """The fields that describe a cell."""
        return asdict(cell) | {
            "groups": len(groups),
            "seconds": attribution.seconds,
            "settings": attribution.settings,
        }


def summary(values: Any) -> dict[str, Any]:
    """Values by seed with mean and standard error, None where there is one seed only."""
    array = np.asarray(values, float)
    error = float(standard_error(array))
    return {"values": array.tolist(), "mean": float(array.mean()), "stderr": None if np.isnan(error) else error}
