"""A task with its rows and its training, and the measurements for one seed."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ggda_transformers import GroupTracker, attribute_trainer
from transformers import Trainer, TrainingArguments

from ggda_ext.storage.files import replaced

Rows = list[dict[str, Any]]
BROKEN = ("flipped", "shuffled")
SCORES: dict[str, tuple[Any, dict[str, Any]]] = {
    "tracker": (GroupTracker, {}),
    "tracker, as Adam steps": (GroupTracker, {"preconditioner": "adam"}),
    "tracin": (attribute_trainer, {"method": "tracin"}),
    "curvature": (attribute_trainer, {}),
}
"""Kind of score → its function and settings. The trackers score during training, by gradients alone or as Adam steps;
the others score after training, without and with curvature."""


@dataclass(frozen=True)
class Task:
    """Data and training of a task.

    Attributes:
        name: name of the task.
        data: seed → training rows, rows for the property, rows for the test.
        fit: ``(rows, seed, callbacks)`` → a Trainer after training.
        left_out: sources to leave out, one after the other; "" for trainings with all sources and the same seeds.
        kinds: kinds of scores, see `SCORES`.
        every: a tracker takes the gradient of the property after this many steps; it scores all batches.
        repeats: number of trainings for each source that is left out.
    """

    name: str
    data: Callable[[int], tuple[Rows, Rows, Rows]]
    fit: Callable[[Rows, int, list[Any]], Trainer]
    left_out: tuple[str, ...]
    kinds: tuple[str, ...]
    every: int
    repeats: int


def trained(
    model: Any, rows: Rows, collator: Any, callbacks: list[Any], seed: int, batch_size: int, **settings: Any
) -> Trainer:
    """Train a model on rows and return its Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=batch_size, seed=seed, logging_steps=10, save_strategy="no",
            report_to=[], use_cpu=True, disable_tqdm=True, warmup_steps=10, log_level="error", **settings,
        )  # fmt: skip
        trainer = Trainer(model, arguments, data_collator=collator, train_dataset=rows, callbacks=callbacks)
        trainer.train()
    return trainer


def measured(trainer: Trainer, rows: Rows) -> tuple[float, float]:
    """Return mean loss and accuracy on rows."""
    model: Any = trainer.model
    model.eval()
    loss, right = 0.0, 0
    with torch.no_grad():
        for low in range(0, len(rows), 50):
            kept = [{key: value for key, value in row.items() if key != "source"} for row in rows[low : low + 50]]
            batch = trainer.data_collator(kept)
            output = model(**batch)
            loss += float(output["loss"]) * len(kept)
            right += int((output["logits"].argmax(1) == batch["labels"]).sum())
    return loss / len(rows), right / len(rows)


def scored(task: Task, seed: int) -> dict[str, Any]:
    """Return scores of every source by every kind, their cost, and loss and accuracy with all sources."""
    rows, goal, tests = task.data(seed)
    trackers, found, seconds = {}, {}, {}
    for kind in task.kinds:
        make, settings = SCORES[kind]
        if make is GroupTracker:
            trackers[kind] = GroupTracker(
                rows, "source", eval_dataset=goal, every=task.every, batches="all", show=False, **settings
            )  # fmt: skip
    begin = time.process_time()
    trainer = task.fit(rows, seed, list(trackers.values()))
    seconds["training with trackers"] = time.process_time() - begin
    for kind in task.kinds:
        begin = time.process_time()
        if kind in trackers:
            found[kind] = trackers[kind].result
        else:
            found[kind] = attribute_trainer(trainer, rows, "source", eval_dataset=goal, **SCORES[kind][1])
            seconds[kind] = time.process_time() - begin
    return {
        "scores": {
            name: dict(zip(map(str, one.names), one.scores[0].tolist(), strict=True)) for name, one in found.items()
        },
        "curvature": str(found["curvature"].method),
        "overhead": {kind: tracker.overhead for kind, tracker in trackers.items()}, "CPU s": seconds,
        "with all": {"goal": measured(trainer, goal), "tests": measured(trainer, tests)},
    }  # fmt: skip


def trained_without(task: Task, seed: int, source: str | None) -> list[dict[str, Any]]:
    """Return loss and accuracy of models trained without a source, or with all sources if it is None."""
    rows, goal, tests = task.data(seed)
    kept, found = [row for row in rows if row["source"] != source], []
    for repeat in range(task.repeats):
        trainer = task.fit(kept, seed + 100 * repeat, [])
        found.append({"goal": measured(trainer, goal), "tests": measured(trainer, tests)})
    return found


def run(task: Task, seed: int, path: Path) -> dict[str, Any]:
    """Run one seed. Results that are already in the file are not computed again."""
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"seed": seed}

    def keep() -> None:
        with replaced(path) as file:
            file.write(json.dumps(known, indent=1).encode())

    if "scores" not in known:
        known |= scored(task, seed)
        keep()
    left_out: dict[str, Any] = known.setdefault("without", {})
    for source in task.left_out:
        if source not in left_out:
            left_out[source] = trained_without(task, seed, source or None)
            keep()
    return known
