"""How faithful is a Fisher of groups? Kind of Fisher (exact, batched, the paper's) × damping × group size × grouping.

On real data, scores are compared with two references, each by a Spearman correlation, averaged over test points:

* agreement — with the sums of TRAK's own scores over the groups (exact Fisher, no ridge);
* LDS — with the margins of models really retrained on random halves of the groups (linear data-modelling score).

The scale is reduced so that a run takes minutes, see `Scale`. There is one checkpoint. Scores are computed from the
rows that `ggda_trak.TRAKer` would store, so all dampings share these rows.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ggda_trak.projection import Projection
from ggda_trak.task_gradients import point_rows
from ggda_trak.task_outputs import TaskOutputs, margins
from scipy.stats import spearmanr
from torch import Tensor, nn
from trak.modelout_functions import ImageClassificationModelOutput
from trak.projectors import BasicProjector, ProjectionType

from benchmarks import models
from benchmarks.data import DataSet, load
from ggda_ext import GroupGradients, Groups
from ggda_ext.curvature.fisher import FISHERS, Damping, EmpiricalFisher
from ggda_ext.evaluation import points_of, random_subsets
from ggda_ext.grouping import GradKMeansGroups, random_groups
from ggda_ext.model import ParameterSpace
from ggda_ext.training import Recipe, initial_model, train_many, train_one

LOSS = nn.CrossEntropyLoss()
DAMPINGS: tuple[Damping, ...] = (0.0, 0.01, 0.1, 0.3, 1.0, 10.0, "auto")
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Scale:
    """Sizes of a run.

    Attributes:
        points: number of training points, drawn at random for every seed.
        tests: number of test points.
        proj_dim: projection dimension.
        sizes: group sizes.
        subsets: number of retrained models per grouping, each on half of the groups.
        seeds: each seed repeats the run with other points, initial weights, groups and subsets. The defaults leave out
            seeds 0 and 1, because the automatic damping was chosen on them.
    """

    points: int = 2048
    tests: int = 60
    proj_dim: int = 128
    sizes: tuple[int, ...] = (4, 16, 64)
    subsets: int = 40
    seeds: tuple[int, ...] = (2, 3, 4)


QUICK = Scale(points=512, tests=20, proj_dim=32, sizes=(4, 16), subsets=10, seeds=(2,))


@dataclass(frozen=True)
class Problem:
    """A data set with a model and how to train it; with `standardise`, columns get mean 0 and standard deviation 1."""

    name: str
    model: Callable[[], nn.Module]
    epochs: int
    rate: float
    data: str
    standardise: bool = False

    @property
    def recipe(self) -> Recipe:
        """How every model is trained."""
        return Recipe(self.epochs, self.rate, 64, schedule="constant")


@dataclass(frozen=True)
class Cell:
    """One number of the table: a Fisher, a damping, a grouping and a size, for one seed."""

    data: str
    seed: int
    grouping: str
    size: int
    groups: int
    fisher: str
    damping: str
    chosen: float
    agreement: float
    lds: float


def loaded(problem: Problem, folder: Path | None) -> tuple[DataSet, Pair, Pair]:
    """Return the data set of a problem, and its training and test points ready for the model."""
    dataset = load(problem.data, folder)
    (x, y), (x_test, y_test) = dataset.train, dataset.test
    if problem.standardise:
        mean, spread = x.mean(0), x.std(0).clamp_min(1e-6)
        x, x_test = (x - mean) / spread, (x_test - mean) / spread
    return dataset, (x, y), (x_test, y_test)


PROBLEMS = (
    Problem("MNIST", models.ann_l, epochs=8, rate=1e-3, data="mnist"),
    Problem("HELOC", models.ann_s, epochs=12, rate=3e-3, data="heloc", standardise=True),
)


def run(folder: Path | None, scale: Scale, path: Path | None) -> list[Cell]:
    """Measure every cell, print the tables, and write the cells as JSON to `path`."""
    print(f"{scale}, Spearman, mean ± sd over seeds, {torch.get_num_threads()} thread(s)")
    cells: list[Cell] = []
    _write(path, scale, cells)  # a place that cannot be written to is said now
    for problem in PROBLEMS:
        start = time.process_time()
        dataset, train, test = loaded(problem, folder)
        for seed in scale.seeds:
            cells += measured(problem, seed, scale, train, test)
            _write(path, scale, cells)
        print(f"\n{dataset.title}, {dataset.source} ({time.process_time() - start:.0f} CPU s)")
        for line in table([cell for cell in cells if cell.data == problem.name]):
            print(line)
    return cells


def _write(path: Path | None, scale: Scale, cells: list[Cell]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"scale": asdict(scale), "cells": [asdict(cell) for cell in cells]}, indent=1))


def measured(problem: Problem, seed: int, scale: Scale, all_train: Pair, all_test: Pair) -> Iterator[Cell]:
    """Yield all cells of one data set and seed."""
    draw = np.random.default_rng(seed)
    (x, y), (x_test, y_test) = all_train, all_test
    chosen = torch.from_numpy(draw.choice(len(x), scale.points, replace=False))
    tested = torch.from_numpy(draw.choice(len(x_test), scale.tests, replace=False))
    train, test = (x[chosen], y[chosen]), (x_test[tested], y_test[tested])
    model = train_one(initial_model(problem.model, seed), LOSS, train, problem.recipe, seed=seed).model
    rows, weights, targets = features(model, train, test, scale.proj_dim)
    reference = scores(rows, rows * weights, targets, 0.0)[0]
    for grouping, size, groups in partitions(model, train, scale, seed):
        kept = random_subsets(groups, scale.subsets, seed=seed)
        halves = torch.from_numpy(kept).double()
        retrained = train_many(
            problem.model, LOSS, train, problem.recipe, seeds=[seed] * len(kept), subsets=points_of(groups, kept)
        )
        real = torch.stack([margin(retrained.model(j), test) for j in range(len(kept))])
        sizes = torch.from_numpy(groups.sizes.copy())[:, None]
        numerators = groups.sum(rows * weights, 0)
        sums = {"exact": rows, "batched": groups.sum(rows, 0) / sizes.sqrt(), "paper": numerators}
        expected = groups.sum(reference, 0)
        for fisher in FISHERS:
            for damping in DAMPINGS:
                try:
                    found, ridge = scores(sums[fisher], numerators, targets, damping)
                except ValueError:  # singular
                    continue
                yield Cell(
                    problem.name, seed, grouping, size, len(groups), fisher, str(damping), ridge,
                    agreement=mean_rank_correlation(found, expected),
                    lds=mean_rank_correlation(halves @ found.double(), real),
                )  # fmt: skip


def partitions(model: nn.Module, train: Pair, scale: Scale, seed: int) -> Iterator[tuple[str, int, Groups]]:
    """Yield name, group size and groups of every grouping."""
    for size in scale.sizes:
        yield "Random", size, random_groups(scale.points, size, random_state=seed)
        clustering = GradKMeansGroups(model, LOSS, group_size=size, max_size=4 * size, random_state=seed)
        yield "Grad-K-Means", size, clustering.fit_groups(train)


def features(model: nn.Module, train: Pair, test: Pair, proj_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return TRAK's projected output gradients of training points `[n, p]`, their Q `[n, 1]`, and those of tests."""
    task, space = ImageClassificationModelOutput(), ParameterSpace(model)
    projector = BasicProjector(space.size, proj_dim, 0, ProjectionType.normal, "cpu")
    projection = Projection(projector, space, space.size**0.5)

    def projected(pair: Pair) -> Tensor:
        return point_rows(GroupGradients(model, TaskOutputs(task, False, model, pair), pair), projection, 0)

    weights = task.get_out_to_loss_grad(model, dict(model.named_parameters()), {}, train)
    return projected(train), weights.detach(), projected(test)


def scores(of_fisher: Tensor, numerators: Tensor, targets: Tensor, damping: Damping) -> tuple[Tensor, float]:
    """Return TRAK's scores `[rows, targets]` with the Fisher of the rows `of_fisher`, and its relative ridge."""
    fisher, ridge = EmpiricalFisher(of_fisher.shape[1]).add(of_fisher.double()).damped(damping)
    return numerators.double() @ torch.linalg.solve(fisher, targets.double().T), ridge


def margin(model: nn.Module, test: Pair) -> Tensor:
    """Return TRAK's output f for every test point: the log-odds of its label."""
    with torch.no_grad():
        return margins(model(test[0]).double(), test[1])


def mean_rank_correlation(a: Tensor, b: Tensor) -> float:
    """Return the Spearman correlation between the columns of two matrices `[r, t]`, averaged over columns."""
    found = [spearmanr(a[:, t].numpy(), b[:, t].numpy()).statistic for t in range(a.shape[1])]
    return float(np.nanmean(found))


def table(cells: Iterable[Cell]) -> Iterator[str]:
    """Yield the lines of a table: one per grouping, size and Fisher, with agreement / LDS for every damping."""
    found: dict[tuple[Any, ...], dict[str, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        found[(cell.grouping, cell.size, cell.fisher)][cell.damping].append(cell)
    names = [str(damping) for damping in DAMPINGS]
    yield f"{'grouping':13} {'size':>4} {'k':>5} {'Fisher':8}" + "".join(f"{'λ=' + name:>22}" for name in names)
    for (grouping, size, fisher), by_damping in found.items():
        entries = ""
        k = round(np.mean([cell.groups for cell in next(iter(by_damping.values()))]))
        for name in names:
            some = by_damping.get(name, [])
            if not some:
                entries += f"{'singular':>22}"
                continue
            text = " / ".join(
                f"{np.mean(values):.2f}±{np.std(values):.2f}"
                for values in ([cell.agreement for cell in some], [cell.lds for cell in some])
            )
            ridge = f" ({np.mean([cell.chosen for cell in some]):.2g})" if name == "auto" else ""
            entries += f"{text:>22}{ridge}"
        yield f"{grouping:13} {size:4d} {k:5d} {fisher:8}{entries}"
