"""Predictions that do not add up: what-if, warm starts, and how far classes shift, for any choice of groups."""

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

WARM_EPOCHS, SLOWER = 3, 10.0  # of a warm start, with a tenth of the learning rate


def what_if(subjects: Sequence[Subject], groups: Groups, nearby: int = 0, settled: bool = False) -> WhatIf:
    """The refit of one model, or of several whose answers are averaged.

    Args:
        subjects: the models.
        groups: the groups.
        nearby: copies of every model, see `WhatIf`.
        settled: whether to take all checkpoints of every model, settled, in place of the last.
    """
    first, *others = (
        model for subject in subjects for model in (_checkpoints(subject) if settled else [subject.model])
    )
    return WhatIf(
        first, LOSS, subjects[0].train, groups,
        recipe=subjects[0].task.recipe, models=others, nearby=nearby, settle=settled,
    )  # fmt: skip


def _checkpoints(subject: Subject) -> list[nn.Module]:
    """Copies of a model, one at each checkpoint of its training."""
    found = [copy.deepcopy(subject.model) for _ in subject.trained.checkpoints]
    for model, state in zip(found, subject.trained.checkpoints, strict=True):
        load_state(model, state)
    return found


def from_start(subjects: Sequence[Subject], groups: Groups) -> WhatIf:
    """The refit of the first model's whole training, with features of every model's first checkpoint: for a training
    that stops early."""
    explained = subjects[0]
    return WhatIf(
        explained.model, LOSS, explained.train, groups, recipe=explained.task.recipe,
        start=initial_model(explained.task.make_model, explained.seed),
        checkpoints=[subject.trained.checkpoints[0] for subject in subjects],
    )  # fmt: skip


def warm_started(subject: Subject, subsets: Sequence[np.ndarray]) -> np.ndarray:
    """Test losses `[s]` of the model itself, trained on for a few epochs on the points that are kept."""
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
    """How far the classes of the kept points are from those of all points `[s]`: summed differences of shares."""
    labels, classes = subject.train[1].cpu().numpy(), subject.task.data.classes

    def shares(some: np.ndarray) -> np.ndarray:
        return np.bincount(some, minlength=classes) / len(some)

    return np.array([np.abs(shares(labels[points]) - shares(labels)).sum() for points in subsets])
