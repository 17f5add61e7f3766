"""The tour, `python -m benchmarks`. It answers three questions and writes a page about the answers.

Are the group versions equal to the originals? How much faster are they? How faithful are they to real retraining?
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import check, compare
from benchmarks.data import TITLES, where
from benchmarks.names import EXPERIMENTS
from benchmarks.results import ResultFolder
from benchmarks.side_by_side import at_once
from benchmarks.sizes import Scale

EXPERIMENT_TASKS = ("heloc-lr",)
"""Tasks that the tour runs the experiments on. They retrain many models, so only the smallest one; `run` takes any."""
CPU_SECONDS = {
    "smoke": {"heloc-lr": 10, "heloc-ann-s": 15, "heloc-ann-m": 15, "mnist-ann-l": 15, "cifar10-resnet18": 30,
              "qnli-bert": 40},
    "quick": {"heloc-lr": 40, "heloc-ann-s": 35, "heloc-ann-m": 55, "mnist-ann-l": 45, "cifar10-resnet18": 145,
              "qnli-bert": 205},
}  # fmt: skip
"""Scale → task → CPU seconds of its check and comparison on one core of a small cloud machine.

Larger scales take hours.
"""
EXPERIMENT_SECONDS = {"smoke": 10, "quick": 60}
"""Scale → CPU seconds of the experiments on one task, on the same machine."""
AT_ONCE = 0.7
"""Share of `CPU_SECONDS` that check and comparison need when two tasks run at once."""
_CALIBRATION = 0.055
"""CPU seconds of `_work` on the same machine."""


def run(
    tasks: Sequence[str],
    scale: Scale,
    folder: ResultFolder,
    data_dir: Path | None = None,
    processes: int = 1,
) -> bool:
    """Run check, comparison, experiments and report into one folder, and print the headlines and where the page is.

    Args:
        tasks: names of tasks, see `benchmarks.tasks.TASKS`; experiments run only on those in `EXPERIMENT_TASKS`.
        scale: sizes of the run.
        folder: where rows and report go; rows that are already there are not computed again.
        data_dir: folder with the data sets.
        processes: how many tasks of check and comparison run at once.

    Returns:
        Whether the check passed and everything could be measured.
    """
    print(expected_time(tasks, scale, processes), flush=True)
    for line in where_from(tasks, data_dir):
        print(line, flush=True)
    with at_once(min(processes, len(tasks))) as workers:
        print("\n1. Equal? The original toolkits, point by point, next to their group versions\n")
        checked = check.run(tasks, scale, folder, data_dir, workers=workers)
        print("\n2. How much faster? Times faster than the original, by group size\n")
        compared = compare.run(tasks, scale, folder, data_dir, workers=workers)
    from benchmarks import experiments, report  # here, because a first import takes seconds and delays the first lines

    retrained = [task for task in tasks if task in EXPERIMENT_TASKS]
    if retrained:
        print(f"\n3. How faithful? The paper's experiments on {', '.join(retrained)}: {', '.join(EXPERIMENTS)}\n")
        experiments.run(EXPERIMENTS, retrained, scale, folder, data_dir)
    folder.finish()
    out = folder.path / "report"
    found = report.write([folder.path], out)
    problems = [*check.table.problems(checked), *compare.table.problems(compared)]
    print("\n" + "\n".join([*problems, *found.lines]))
    print(f"The page: {(out / 'report.html').resolve()}")
    return check.table.passed(checked) and compare.table.passed(compared)


def expected_time(tasks: Sequence[str], scale: Scale, processes: int = 1) -> str:
    """Return a line that says how long the tour will take, estimated from a short measurement of this machine."""
    known = CPU_SECONDS.get(scale.name)
    if known is None:
        return f"Expected time: {scale.about}."
    start = time.process_time()
    _work()
    here = (time.process_time() - start) / _CALIBRATION
    seconds = sum(known[task] for task in tasks) * (AT_ONCE if processes > 1 and len(tasks) > 1 else 1.0)
    seconds += EXPERIMENT_SECONDS[scale.name] * sum(task in EXPERIMENT_TASKS for task in tasks)
    minutes = max(1, round(here * seconds / 60))
    unit = "minute" if minutes == 1 else "minutes"
    return f"Expected time: about {minutes} {unit}, without downloads. Ctrl-C keeps what is done."


def where_from(tasks: Sequence[str], data_dir: Path | None) -> Iterator[str]:
    """Yield a line for each data set as soon as it is available: where it came from, or that it is made data."""
    yield "Data:"
    for name in dict.fromkeys(task.partition("-")[0] for task in tasks):
        yield f"  {TITLES[name]}: {where(name, data_dir)}"


def _work() -> None:
    """Run some forward and backward passes of a small network."""
    import torch
    from torch import nn

    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)), torch.zeros(512, 256)
    for _ in range(20):
        model(x).sum().backward()
