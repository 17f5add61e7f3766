"""Compares several ranks, each with one thread, with one rank alone, in wall-clock time. The scores are the same.

``python -m benchmarks speed --ranks 2`` starts this module with `torchrun`. One rank alone and all ranks together take
turns, with barriers around each turn, so that both run under the same load of the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import models
from benchmarks.speed.timing import Row
from ggda_ext import GroupGradients, Groups
from ggda_ext.data import DataLike
from ggda_ext.distributed import gather_objects
from ggda_ext.sharing import alone, rank, world_size

GROUP_SIZE = 16
EFFICIENCY = 0.85
"""The goal, as a share of the ideal speed-up: on two ranks, 1.7 times faster."""
SETTINGS: list[tuple[str, Callable[[], nn.Module], Callable[[int], DataLike], int, int]] = [
    ("ResNet-18, width 16", lambda: models.resnet18(16), models.images, 1024, 256),
    ("BERT, small", models.small_bert, models.texts, 1024, 256),
]
"""Name, model, data, points, points with ``--quick``."""


def rows(quick: bool = False, ranks: int = 2) -> Iterator[Row]:
    """Measure with `ranks` processes on this machine, and yield the rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += ["-m", "benchmarks.speed.ranks", str(path), str(int(quick))]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"torchrun ended with {done.returncode}:\n{done.stderr}")
        for found in json.loads(path.read_text()):
            yield _row(found, ranks)


def _row(found: dict[str, Any], ranks: int) -> Row:
    wall, cpu = found["alone"]["wall"] / found["together"]["wall"], found["alone"]["cpu"] / found["together"]["cpu"]
    note = (
        f"wall-clock, one thread each; {cpu:.2f} in CPU time of the busiest rank; machine load {found['load']:.1f} on "
        f"{os.cpu_count()} cores; scores equal on all ranks, off by {found['error']:.1e} from one"
    )
    return Row(
        "ranks", found["model"], f"{ranks} ranks", GROUP_SIZE, found["together"]["wall"], "one rank alone", wall,
        "x faster", EFFICIENCY * ranks, note, found,
    )  # fmt: skip


def _measure(name: str, build: Callable[[], nn.Module], data: DataLike, n: int, turns: int) -> dict[str, Any]:
    """Measure the best of several turns, of one rank alone and of all ranks together. Every rank calls this.

    Raise an error if the scores of the ranks differ from each other or from those of one rank alone.
    """
    torch.manual_seed(0)
    gradients = GroupGradients(build(), nn.CrossEntropyLoss(), data, Groups(torch.arange(n) // GROUP_SIZE))
    direction = torch.randn(1, gradients.p, generator=torch.Generator().manual_seed(1))
    gradients.plan(direction)  # before the turns, because the choice of a strategy is not timed

    def one() -> Tensor | None:
        with alone():
            return gradients.scores(direction) if first else None

    first = rank() == 0
    best: dict[str, dict[str, float]] = {}
    for _ in range(turns):
        for case, run in (("alone", one), ("together", lambda: gradients.scores(direction))):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            scores = run()
            cpu = time.process_time() - cpu
            dist.barrier()
            times = {"wall": time.perf_counter() - wall, "cpu": max(gather_objects(cpu))}
            best[case] = {key: min(value, best.get(case, times)[key]) for key, value in times.items()}
            if case == "alone":
                expected = scores
    assert scores is not None
    if len(set(gather_objects(scores.numpy().tobytes()))) != 1:
        raise RuntimeError(f"{name}: the ranks end with different scores.")
    error = float((scores - expected).abs().max() / expected.abs().max()) if expected is not None else 0.0
    if error > 1e-4:
        raise RuntimeError(f"{name}: {world_size()} ranks give other scores than one, by {error:.1e} of the largest.")
    return {"model": name, "points": n, "error": error, "load": os.getloadavg()[0], **best}


def main() -> None:
    """Entry point for `torchrun`: measure on every rank, and write the results as JSON on rank 0."""
    path, quick = Path(sys.argv[1]), sys.argv[2] == "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for name, build, data, n, quick_n in SETTINGS:
        points = quick_n if quick else n
        found.append(_measure(name, build, data(points), points, turns=3 if quick else 5))
    if rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
