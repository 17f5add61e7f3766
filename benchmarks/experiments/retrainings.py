"""Retrained models of a task. Every subset and seed is trained once, many at a time, and its result is kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm.auto import tqdm

from benchmarks.tasks import LOSS, Task
from ggda_ext.storage.folder import Store, digest
from ggda_ext.training import train_many
from ggda_ext.training.many_models import layout_of, models_at_once

_STACKS = 2  # stacks of models that are trained between two writes


class Wanted(NamedTuple):
    """A model to train: the training indices it may see, and its seed."""

    kept: np.ndarray
    seed: int

    @property
    def key(self) -> bytes:
        """A hash of 16 bytes that identifies the model; the order of the indices does not matter."""
        points = np.sort(np.asarray(self.kept, np.int64))
        return hashlib.blake2b(points.tobytes() + str(self.seed).encode(), digest_size=16).digest()


class Result(NamedTuple):
    """Test accuracy and mean test loss of a retrained model."""

    accuracy: float
    loss: float


class Retrainings:
    """Results of retrained models. It is a context manager, because only one process at a time may write.

    Args:
        task: data, model and training.
        folder: where results are kept.
        show_progress: whether to show a progress bar.
    """

    def __init__(self, task: Task, folder: Path, show_progress: bool = True) -> None:
        self.task, self.show_progress = task, show_progress
        x, y = task.data.train
        made_of = {"recipe": asdict(task.recipe), "data": digest(x.cpu().numpy(), y.cpu().numpy())}
        self._store = Store(folder / task.name, made_of)
        self._results: dict[bytes, Result] = {}
        for number in range(self._chunks):
            if all(name in self._store for name in (f"keys-{number}", f"results-{number}")):
                self._remember(self._store.load(f"keys-{number}"), self._store.load(f"results-{number}"))

    def __enter__(self) -> Retrainings:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def __contains__(self, wanted: Wanted) -> bool:
        return wanted.key in self._results

    def __getitem__(self, wanted: Wanted) -> Result:
        return self._results[wanted.key]

    def train(self, wanted: Iterable[Wanted]) -> Iterator[None]:
        """Train the models that are missing, in the given order, and yield each time more results are there."""
        missing = list({one.key: one for one in wanted if one not in self}.values())
        x, y = self.task.data.train
        layout = layout_of(self.task.make_model, LOSS, (x, y))
        chunk = 1 if layout is None else _STACKS * models_at_once(layout, self.task.recipe)
        with tqdm(
            total=len(missing), desc=f"retraining {self.task.name}", unit="model", disable=not self.show_progress
        ) as bar:
            for start in range(0, len(missing), chunk):
                some = missing[start : start + chunk]
                self._save(some, self._trained(some))
                bar.update(len(some))
                yield

    def _trained(self, some: list[Wanted]) -> np.ndarray:
        """Train models and return their accuracy and loss `[models, 2]`."""
        models = train_many(
            self.task.make_model, LOSS, self.task.data.train, self.task.recipe,
            seeds=[one.seed for one in some], subsets=[one.kept for one in some],
        )  # fmt: skip
        inputs, targets = self.task.data.test
        outputs = models.outputs(inputs)
        accuracy = (outputs.argmax(-1) == targets).double().mean(1)
        losses = torch.stack([LOSS(one, targets) for one in outputs]).double()
        return torch.stack([accuracy, losses], 1).cpu().numpy()

    def _save(self, some: list[Wanted], results: np.ndarray) -> None:
        keys = np.frombuffer(b"".join(one.key for one in some), np.uint8).reshape(len(some), -1)
        number = self._chunks
        self._store.save(f"keys-{number}", keys)
        self._store.save(f"results-{number}", results)
        self._remember(keys, results)

    @property
    def _chunks(self) -> int:
        return sum(name.startswith("results-") for name in self._store.names)

    def _remember(self, keys: np.ndarray, results: np.ndarray) -> None:
        for key, (accuracy, loss) in zip(keys, results, strict=True):
            self._results[key.tobytes()] = Result(float(accuracy), float(loss))
