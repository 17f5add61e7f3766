"""Compares fifty HELOC models trained at once with the same fifty models trained one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from benchmarks import models
from benchmarks.speed.timing import Row, best_times
from benchmarks.tasks import PAPER, SMALL_MODELS
from ggda_ext.training import Recipe, initial_model, train_many, train_one

LOSS = nn.CrossEntropyLoss()
MODELS = 50
GOALS = {"heloc-lr": 15.0, "heloc-ann-s": 8.0, "heloc-ann-m": 4.0}
TURNS = 5


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield a row for each model, timed on one epoch; the time of an epoch does not depend on the number of epochs."""
    for name, goal in GOALS.items():
        yield at_once(name, goal, MODELS // 5 if quick else MODELS)


def at_once(name: str, goal: float, looped: int) -> Row:
    """Compare the time of a stack of 50 models with that of a loop, which is timed on `looped` models and scaled up.

    The loop uses PyTorch's Adam and OneCycleLR on batches indexed from a tensor, without a DataLoader.
    """
    paper = PAPER[name]
    data, make_model = models.tabular(paper.train, 23, 2), SMALL_MODELS[name]
    recipe = Recipe(1, paper.recipe.learning_rate, paper.recipe.batch_size, paper.recipe.weight_decay)

    def one_by_one() -> None:
        for seed in range(looped):
            train_one(initial_model(make_model, seed), LOSS, data, recipe, seed=seed)

    together = partial(train_many, make_model, LOSS, data, recipe, seeds=range(MODELS))
    times = best_times({"together": together, "loop": one_by_one}, TURNS)
    loop = times["loop"] * MODELS / looped
    note = f"made data of HELOC's shape, n = {paper.train:,}, batch {recipe.batch_size}, one epoch, "
    note += f"{torch.get_num_threads()} thread(s)" + (f", {looped} models looped" if looped < MODELS else "")
    return Row(
        "training", paper.title, f"{MODELS} models at once", None, times["together"], "loop",
        loop / times["together"], "x faster", goal, note,
    )  # fmt: skip
