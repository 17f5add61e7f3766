"""Predictions that are not additive, for any choice of groups: what-if, warm starts, and how far the classes shift."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from benchmarks.experiments.subject import Subject
from benchmarks.tasks import LOSS
from ggda_ext import Groups, WhatIf
from ggda_ext.checkpoints import load_state
from ggda_ext.training import initial_model, train_many

COPIES = 6  # of every model in "What-if, copies"
WARM_EPOCHS, SLOWER = 3, 10.0  # epochs of a warm start, and the number that divides the learning rate


def what_if(subjects: Sequence[Subject], groups: Groups, copies: int = 0, settled: bool = False) -> WhatIf:
    """Return the refit of one model, or of several models whose answers are averaged.

    Args:
        subjects: the models.
        groups: the groups.
        copies: number of copies of every model, see `nearby` of `WhatIf`.
        settled: whether to use all checkpoints of every model, settled, instead of the final model.
    """
    first, *others = (
        model for subject in subjects for model in (_checkpoints(subject) if settled else [subject.model])
    )
    return WhatIf(
        first, LOSS, subjects[0].train, groups,
        recipe=subjects[0].task.recipe, models=others, nearby=copies, settle=settled,
    )  # fmt: skip


def _checkpoints(subject: Subject) -> list[nn.Module]:
    """Return copies of a model, one for each checkpoint of its training."""
    found = [copy.deepcopy(subject.model) for _ in subject.trained.checkpoints]
    for model, state in zip(found, subject.trained.checkpoints, strict=True):
        load_state(model, state)
    return found


def from_start(subjects: Sequence[Subject], groups: Groups) -> WhatIf:
    """Return the refit of the whole training of the first model, for a training that stops early.

    The features come from the first checkpoint of every model.
    """
    explained = subjects[0]
    return WhatIf(
        explained.model, LOSS, explained.train, groups, recipe=explained.task.recipe,
        start=initial_model(explained.task.make_model, explained.seed),
        checkpoints=[subject.trained.checkpoints[0] for subject in subjects],
    )  # fmt: skip


def warm_started(subject: Subject, subsets: Sequence[np.ndarray]) -> np.ndarray:
    """Train the model for a few more epochs on each subset of points, and return the test losses `[s]`."""
    recipe = subject.task.recipe
    slower = replace(
        recipe, epochs=WARM_EPOCHS, learning_rate=recipe.learning_rate / SLOWER, schedule="constant"
    )  # fmt: skip
    model, (x, y) = subject.model, subject.test
    models = train_many(
        lambda: copy.deepcopy(model), LOSS, subject.train, slower, seeds=[0] * len(subsets), subsets=subsets
    )
    return np.array([float(LOSS(outputs, y)) for outputs in models.outputs(x)])


def class_shift(subject: Subject, subsets: Sequence[np.ndarray]) -> np.ndarray:
    """Return how far the classes of each subset differ from those of all points `[s]`.

    It is the sum over classes of the absolute differences of their shares.
    """
    labels, classes = subject.train[1].cpu().numpy(), subject.task.data.classes

    def shares(some: np.ndarray) -> np.ndarray:
        return np.bincount(some, minlength=classes) / len(some)

    return np.array([np.abs(shares(labels[points]) - shares(labels)).sum() for points in subsets])
