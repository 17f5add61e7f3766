"""A Trainer with a `GroupTracker`: on every rank, and in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from ggda_transformers import GroupTracker
from transformers_cases import examples, made, sources, trainer_of

N, ROWS_OF_A_STEP = 12, 4
RESUMES = transformers.__version__ >= "5"
"""Older Trainers cannot resume on several ranks without a GPU: they ask torch.load for the device cpu:0."""
ADAM: dict[str, Any] = {"every": 2, "preconditioner": "adam"}


def tracked(folder: Path, ranks: int, resumed: bool = False, **settings: Any) -> GroupTracker:
    """A tracker after two epochs; the ranks together take as many rows in a step as one process does."""
    data = sources(examples("gpt2", N))
    tracker = GroupTracker(data, "source", eval_dataset=examples("gpt2", 3, seed=1), show=False, **settings)
    model = made("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # each rank would draw its own
    trainer = trainer_of(
        model, data, folder, callbacks=[tracker], per_device_train_batch_size=ROWS_OF_A_STEP // ranks,
        max_steps=-1, num_train_epochs=2, save_strategy="epoch", logging_steps=2, average_tokens_across_devices=True,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resumed else None)
    return tracker


def everything(folder: Path, ranks: int) -> dict[str, torch.Tensor]:
    """Scores `[1, k]` of every step, of the same run taken up after its first epoch, and of every second step."""
    found = {}
    runs: dict[str, dict[str, Any]] = {"plain": {}, "resumed": {"resumed": True}, "adam": ADAM}
    if not RESUMES:
        del runs["resumed"]
    for name, settings in runs.items():
        tracker = tracked(folder / ("adam" if name == "adam" else "plain"), ranks, **settings)
        found[name] = tracker.result.scores
        found[f"{name}, logged"] = torch.tensor(tracker.sums.history[-1][1], dtype=torch.float64)
    return found


def main(folder: Path) -> None:
    """On every rank, which leaves what it found; what a `Trainer` was told before the fork is forgotten."""
    PartialState._reset_state()
    AcceleratorState._reset_state()
    GradientState._reset_state()
    result = everything(folder, int(os.environ["WORLD_SIZE"]))
    torch.save(result, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()
