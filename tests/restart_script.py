"""Scores and gradients in a folder, by `torchrun`: started first, rank 1 kills itself when some blocks are finished."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ggda_ext.storage.scores
from ggda_ext import GradientStore, GroupGradients, attribute, properties

LOSS = nn.CrossEntropyLoss()


def work(folder: Path) -> list[torch.Tensor]:
    """The same on any number of ranks."""
    torch.manual_seed(0)
    x, y, model = torch.randn(300, 4), torch.randint(0, 2, (300,)), nn.Linear(4, 2)
    groups, goal = torch.arange(300) % 60, properties.mean_loss((x[:9], y[:9]), LOSS)
    scores = attribute(model, LOSS, (x, y), groups, goal, save_dir=folder / "scores", batch_size=1, method="tracin")
    provider = GroupGradients(model, LOSS, (x, y), groups, batch_size=1)
    gradients = GradientStore(provider, folder / "gradients")
    return [scores.clone(), gradients.scores(goal)]


def die_later() -> None:
    """Let this process kill itself in its third block of work."""
    part_of, calls = ggda_ext.storage.scores.part_of, []

    def counted(*args: Any) -> GroupGradients:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return part_of(*args)

    ggda_ext.storage.scores.part_of = counted  # type: ignore[attr-defined]


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, start, rank = Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
    first = start == "0"
    dist.init_process_group(
        "gloo", f"file://{where}/start-{start}", rank=rank, world_size=2
    )  # no addresses of the dead
    if first and rank == 1:
        die_later()
    if not first and rank == 0:
        (where / "finished_before").write_text(str(len(list(where.rglob("*block-*.npy")))))
    dist.barrier()
    found = {"resumed": work(where / "store"), "undisturbed": work(where / "undisturbed")}
    torch.save(found, where / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
