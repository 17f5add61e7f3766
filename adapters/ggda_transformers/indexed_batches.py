"""Identify the rows in a Trainer's shuffled batches: every batch carries the numbers of its rows to the training step.

A callback sees neither batches nor their order. So the Trainer's data loader gets a data set whose rows know their
number, and a collator that adds these numbers and a copy of the batch to the batch, under a key of its own. They are
removed at the start of the Trainer's step, before any loss sees them. Shuffling, several epochs, skipped batches after
a resume and the shares of several ranks stay as the Trainer makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import DataLoader

from ggda_transformers.columns import check_rows
from ggda_transformers.setup import checked_batch

KEY = "ggda_rows"
_COMPARED = 64  # number of the Trainer's rows that are compared with the given rows


@dataclass
class Carried:
    """A batch of training rows and their numbers, carried to the training step.

    Attributes:
        rows: numbers of the rows in the data set.
        batch: the batch that the collator made of the rows.
    """

    rows: list[int]
    batch: dict[str, Any]

    def to(self, *_: Any, **__: Any) -> Carried:
        """Return the object unchanged. Code that moves a batch to a device calls `to` on every value in it."""
        return self


class _NumberedRows:
    """A data set whose rows are ``(number, row)``."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> tuple[int, Any]:
        return number, self.dataset[number]

    def __getitems__(self, numbers: list[int]) -> list[tuple[int, Any]]:
        fetch = getattr(self.dataset, "__getitems__", None)
        rows = fetch(numbers) if fetch is not None else [self.dataset[number] for number in numbers]
        return list(zip(numbers, rows, strict=True))

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet while the object is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


class _NumberedCollator:
    """A collator that adds the numbers of its rows to the batch."""

    def __init__(self, collator: Callable[[list[Any]], Any]) -> None:
        self.collator = collator

    def __call__(self, numbered: list[tuple[int, Any]]) -> Any:
        numbers, rows = [int(number) for number, _ in numbered], [row for _, row in numbered]
        batch = checked_batch(self.collator(rows), len(rows))
        carrying: Any = copy(batch)  # keeps the type, because losses may use BatchEncoding's attributes
        carrying[KEY] = Carried(numbers, dict(batch))
        return carrying


@dataclass
class NumberedLoader:
    """A Trainer's data loader whose batches carry the numbers of their rows.

    Attributes:
        undo: a function that undoes the change.
        compared: whether the Trainer's rows could be compared with the given rows.
        batch_of: a function that makes a batch of some rows, as the data loader does.
    """

    undo: Callable[[], None]
    compared: bool
    batch_of: Callable[[list[int]], Carried]


def number_rows(loader: Any, given: Any) -> NumberedLoader:
    """Make the batches of a Trainer's data loader carry the numbers of their rows.

    Args:
        loader: the Trainer's data loader, as accelerate prepared it.
        given: the rows that the groups were made for.
    """
    inner: Any = loader
    while "base_dataloader" in vars(inner):  # remove accelerate's wrapper, which passes as a DataLoader
        inner = inner.base_dataloader
    if not isinstance(inner, DataLoader):
        raise TypeError(f"the Trainer's data loader is a {type(loader).__name__}: GroupTracker needs a DataLoader.")
    dataset: Any = inner.dataset
    collator = inner.collate_fn
    numbered = isinstance(dataset, _NumberedRows)  # another tracker has done it
    dataset = dataset.dataset if numbered else dataset
    check_rows(dataset, "the Trainer's training data")
    if len(dataset) != len(given):
        raise ValueError(
            f"groups is of {len(given)} rows, and the Trainer trains on {len(dataset)}: pass GroupTracker the data set "
            "that the Trainer was given."
        )
    compared = check_same_order(given, dataset)

    def put(data: Any, collate: Any) -> None:
        vars(inner)["dataset"], vars(inner)["collate_fn"] = data, collate  # a DataLoader forbids setattr here

    if not numbered:
        put(_NumberedRows(dataset), _NumberedCollator(collator))
    rows: Any = inner.dataset
    collate = inner.collate_fn
    return NumberedLoader(
        (lambda: None) if numbered else (lambda: put(dataset, collator)),
        compared,
        lambda numbers: collate(rows.__getitems__(numbers))[KEY],
    )


def check_same_order(given: Any, own: Any) -> bool:
    """Raise an error if the Trainer's rows are in another order than the given rows; False if they share no column.

    Args:
        given: the rows that the groups were made for.
        own: the rows that the Trainer trains on; some columns may be missing.
    """
    if own is given:
        return True
    compared = False
    for number in np.linspace(0, len(own) - 1, min(_COMPARED, len(own))).astype(int).tolist():
        one, other = given[number], own[number]
        if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
            return False
        for name in sorted(one.keys() & other.keys()):
            compared = True
            if not _alike(one[name], other[name]) and _alike(one[name], given[number][name]):  # else random
                raise ValueError(
                    f"row {number} of the Trainer has another {name!r} than row {number} of train_dataset: the Trainer "
                    "was given the rows in another order (shuffle) or others. Pass GroupTracker the data set that the "
                    "Trainer was given, after the shuffle; the Trainer shuffles its batches by itself."
                )
    return compared


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, str) and isinstance(other, str):
        return other.startswith(one)  # the Trainer may have added an end-of-sequence token
    return bool(np.array_equal(np.asarray(one), np.asarray(other)))


class _TakingStep:
    """Replaces a Trainer's `training_step`: gives carried batches to the trackers, and the other inputs to the step."""

    def __init__(self, trainer: Any) -> None:
        self.before = vars(trainer).get("training_step")
        self.step, self.takers = trainer.training_step, list[Callable[[Carried], None]]()

    def __call__(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        carried = inputs.pop(KEY, None)
        if carried is not None:
            for take in self.takers:
                take(carried)
        return self.step(model, inputs, *args, **kwargs)


def take_at_the_step(trainer: Any, take: Callable[[Carried], None]) -> Callable[[], None]:
    """Remove carried batches from the inputs of a Trainer's `training_step` and pass them to `take`.

    Several trackers of a Trainer may do so.

    Returns:
        A function that undoes this.
    """
    step = trainer.training_step
    if not isinstance(step, _TakingStep):
        step = trainer.training_step = _TakingStep(trainer)
    step.takers.append(take)

    def undo() -> None:
        step.takers.remove(take)
        if not step.takers and trainer.training_step is step:
            del trainer.training_step
            if step.before is not None:
                trainer.training_step = step.before

    return undo
