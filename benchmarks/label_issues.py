"""What `find_label_issues` is worth: ROC AUC with some of the labels flipped, on HELOC and MNIST, several seeds.

    python -m benchmarks.label_issues --data-dir FOLDER --seeds 0 1 2 --flipped 0.2

Flipped labels are drawn evenly from the other classes. 500 test points with their own labels are the clean ones. Each
row ends with what the default, ``rank_by="auto"``, reaches, how often it ranks by the loss alone, and how many of the
wrong labels the model has learned.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from benchmarks.default_method import LOSS, PROBLEMS, Problem, points_for, trained
from ggda_ext import LabelIssues, find_label_issues
from ggda_ext.training import Recipe

CLEAN = 500
BY_HEART = tuple(
    replace(problem, name=f"{problem.name}, by heart", recipe=recipe)
    for problem, recipe in (
        (PROBLEMS[1], Recipe(300, 1e-2, 128)),
        (PROBLEMS[3], Recipe(40, 1e-3, 128)),
    )
)
"""Two of the `PROBLEMS` whose models are trained until they have learned most of the wrong labels."""


def measured(problem: Problem, seed: int, flipped: float, folder: Path | None) -> Iterator[tuple[str, float]]:
    """Yield name and value: ROC AUC of every ranking and of the default, whether the default ranks by the loss alone,
    and the share of wrong labels that the model has learned."""
    (x, y), test = points_for(problem, folder)
    draw = np.random.default_rng(seed)
    wrong = torch.from_numpy(draw.random(len(y)) < flipped)
    classes = int(y.max()) + 1
    labels = torch.where(wrong, (y + torch.from_numpy(draw.integers(1, classes, len(y)))) % classes, y)
    data = (x, labels)
    model = trained(problem, data, seed)
    some = torch.from_numpy(draw.choice(len(test[0]), CLEAN, replace=False))
    found = find_label_issues(model, LOSS, data, validation=(test[0][some], test[1][some]))
    for name in ("loss", "self_influence", "influence", "loss and influence"):
        again = LabelIssues.ranked(found.loss, found.self_influence, found.influence, ranked_by=name, why="")
        yield name, float(roc_auc_score(wrong.numpy(), again.suspicion))
    yield "auto", float(roc_auc_score(wrong.numpy(), found.suspicion))
    yield "auto ranks by the loss", float(found.ranked_by == "loss")
    with torch.no_grad():
        yield "learned", float((model(x).argmax(1) == labels)[wrong].double().mean())


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: pass a share above 0 and below 1.")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of wrong labels and of training")
    parser.add_argument("--flipped", type=_share, default=0.2, help="share of wrong labels")
    names = [problem.name for problem in (*PROBLEMS, *BY_HEART)]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="problems; all by default")
    given = parser.parse_args()
    for problem in (*PROBLEMS, *BY_HEART):
        if problem.name not in given.only:
            continue
        rows = [dict(measured(problem, seed, given.flipped, given.data_dir)) for seed in given.seeds]
        each = [np.array([row[name] for row in rows]) for name in rows[0]]
        cells = [f"{values.mean():.3f} ± {values.std():.3f}" for values in each]
        print(f"| {problem.name}, {given.flipped:.0%} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
