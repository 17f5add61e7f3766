"""Which method should `attribute` use unless told? LDS against real retraining, and cost, side by side.

    python -m benchmarks.default_method --data-dir FOLDER --out results/default-method

HELOC's three models on all points, MNIST's network on 10,000: models retrained on random halves of the groups, two
seeds each, for groupings at random, by Grad-K-Means and by K-Means of the inputs. Settings of the methods were chosen
on other data (scikit-learn's digits and breast cancer, and made data). CPU time is given in passes: forward and
backward over the training data in batches of 1,024. It ends with a table of all rows in the folder. `--seed` takes
another explained model, other groups, halves and retrainings.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.data import load
from benchmarks.speed.core import passes, unit_of
from benchmarks.speed.timing import best_times
from ggda_ext import Groups, attribute, grouping, properties
from ggda_ext.curvature import Hessian, conjugate_gradients
from ggda_ext.data import IndexedData
from ggda_ext.evaluation import Retrainer, group_lds, points_of, random_subsets
from ggda_ext.gradients import GroupGradients
from ggda_ext.methods import EKFAC, Fisher, Influence, Method, TracIn
from ggda_ext.model import ParameterSpace
from ggda_ext.properties import property_gradient
from ggda_ext.training import Recipe, train_many

LOSS = nn.CrossEntropyLoss()
HALVES, GROUP_SIZE = 32, 64
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """A data set, a model and its training; it uses `points` points of the training set, all if None."""

    name: str
    data: str
    make_model: Callable[[], nn.Module]
    recipe: Recipe
    points: int | None = None


PROBLEMS = (
    Problem("HELOC / LR", "heloc", models.logistic_regression, Recipe(200, 0.1, 128)),
    Problem("HELOC / ANN-S", "heloc", models.ann_s, Recipe(100, 1e-3, 128, 4e-4)),
    Problem("HELOC / ANN-M", "heloc", models.ann_m, Recipe(50, 5e-4, 128, 4e-4)),
    Problem("MNIST / ANN-L", "mnist", models.ann_l, Recipe(15, 1e-3, 128), 10_000),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[problem.name for problem in PROBLEMS])
    parser.add_argument("--groupings", nargs="*", default=["random", "Grad-K-Means", "K-Means"])
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    rows = chosen.out / "rows.jsonl"
    for problem in PROBLEMS:
        if problem.name in chosen.only:
            with rows.open("a") as file:
                for row in measured(problem, chosen.data_dir, chosen.out, chosen.groupings, chosen.seed):
                    print(json.dumps(row), file=file, flush=True)
                    print(row, flush=True)
    print(table([json.loads(line) for line in rows.read_text().splitlines()]))


def measured(
    problem: Problem, folder: Path | None, out: Path, names: Sequence[str], seed: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for every grouping and method."""
    train, test = points_for(problem, folder)
    model = trained(problem, train, 100 + 10 * seed)
    _scores(model, (train[0][:200], train[1][:200]), Groups(np.arange(200) % 4), goal_of(test), Influence())  # warms up
    one_pass = unit_of(best_times(passes(model, train, (1024,)), 3))
    for name in names:
        groups = GROUPINGS[name](model, train, 11 + seed)
        kept = random_subsets(groups, HALVES, seed=500 + seed, equal_points=True)
        path = out / f"{problem.name.replace(' / ', '-')}-{name}-{seed}.npy"
        real = retrained(problem, train, test, groups, kept, (101 + 10 * seed, 102 + 10 * seed), path)
        for method, scores in scored(problem, model, train, test, groups):
            start = time.process_time()
            found = scores()
            seconds = time.process_time() - start
            lds = group_lds(found, kept, real.mean(1))
            yield {
                "problem": problem.name, "grouping": name, "seed": seed, "method": method,
                "lds": round(lds.value, 3),
                "interval": [round(end, 3) for end in lds.interval], "passes": round(seconds / one_pass, 2),
                "ceiling": round(float(np.corrcoef(real.T)[0, 1]), 3),
            }  # fmt: skip


def trained(problem: Problem, data: Pair, seed: int) -> nn.Module:
    """Return the problem's model in eval mode, trained on the given data."""
    return train_many(problem.make_model, LOSS, data, problem.recipe, seeds=[seed]).model(0)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of LDS, with the cost in passes in brackets.

    It has a line for every problem, grouping and seed, and a line with the means of every data set.
    """
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault(f"{row['problem']}, {row['grouping']}, seed {row['seed']}", []).append(row)
    for row in rows:
        lines.setdefault(f"{row['problem'].split(' / ')[0]}, mean", []).append(row)
    table = [["task, groups of 64", *methods], ["---"] * (len(methods) + 1)]
    for name, found in lines.items():
        of_method = [[row for row in found if row["method"] == method] for method in methods]
        means = [
            [np.mean([row[key] for row in some]) if some else np.nan for key in ("lds", "passes")] for some in of_method
        ]
        table.append([name, *(f"{lds:.2f} ({passes:.0f})" for lds, passes in means)])
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


def points_for(problem: Problem, folder: Path | None) -> tuple[Pair, Pair]:
    """Return training and test points."""
    found = load(problem.data, folder)
    (x, y), test = found.train, found.test
    if problem.points is not None:
        some = torch.from_numpy(np.random.default_rng(9).choice(len(x), problem.points, replace=False))
        x, y = x[some], y[some]
    return (x, y), test


def _clustered(model: nn.Module, train: Pair, seed: int, *, by_gradient: bool) -> Groups:
    size: dict[str, Any] = {"group_size": GROUP_SIZE, "max_size": 4 * GROUP_SIZE, "random_state": seed}
    found = grouping.GradKMeansGroups(model, LOSS, **size) if by_gradient else grouping.KMeansGroups(**size)
    return found.fit_groups(train)


GROUPINGS: dict[str, Callable[[nn.Module, Pair, int], Groups]] = {
    "random": lambda model, train, seed: grouping.random_groups(len(train[0]), GROUP_SIZE, random_state=seed),
    "Grad-K-Means": partial(_clustered, by_gradient=True),
    "K-Means": partial(_clustered, by_gradient=False),
}
"""Name → function that makes the groups; all three groupings have the same group size."""


def retrained(
    problem: Problem, train: Pair, test: Pair, groups: Groups, kept: np.ndarray, seeds: Sequence[int], path: Path
) -> np.ndarray:
    """Return test losses of models retrained on every half `[halves, seeds]`; they are kept in the file `path`."""
    if not path.exists():
        train_again = Retrainer(problem.make_model, LOSS, train, test, problem.recipe, seeds=seeds, measure="loss")
        np.save(path, train_again(points_of(groups, kept)))
    return np.load(path)


def scored(
    problem: Problem, model: nn.Module, train: Pair, test: Pair, groups: Groups
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the name of every method, and a function that returns its scores `[1, k]`."""
    goal = goal_of(test)
    named: dict[str, Method] = {
        "tracin": TracIn(), "influence": Influence(), "influence, recipe": Influence(recipe=problem.recipe),
        "ekfac": EKFAC(), "fisher": Fisher(),
    }  # fmt: skip
    for name, method in named.items():
        yield name, partial(_scores, model, train, groups, goal, method)
    yield "ten full CG steps", lambda: ten_steps(model, train, groups, goal)


def goal_of(test: Pair) -> properties.MeanProperty:
    """The mean test loss."""
    return properties.mean_loss(test, LOSS)


def _scores(model: nn.Module, train: Pair, groups: Groups, goal: Any, method: Method) -> Tensor:
    return attribute(model, LOSS, train, groups, goal, method=method, show_progress=False).scores


def ten_steps(model: nn.Module, train: Pair, groups: Groups, goal: Any) -> Tensor:
    """Return scores `[1, k]` of the method recommended earlier: ten CG steps, Hessian of all points, damping 0.001."""
    space = ParameterSpace(model)
    hessian = Hessian(space, lambda net, batch: LOSS(net(batch[0]), batch[1]), IndexedData(train))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solved = conjugate_gradients(
            hessian, property_gradient(goal, model, space.parameters), max_iter=10, regularization=1e-3
        )
    return GroupGradients(model, LOSS, train, groups).scores(solved)


if __name__ == "__main__":
    main()
