"""`python -m benchmarks`: equal to the originals? how much faster? how faithful? and a page about all of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks import check, compare
from benchmarks.data import TITLES, where
from benchmarks.names import EXPERIMENTS
from benchmarks.results import ResultFolder
from benchmarks.side_by_side import at_once
from benchmarks.sizes import Scale

EXPERIMENT_TASKS = ("heloc-lr",)
"""Experiments retrain many models: the tour does so for the smallest ones, `run` for any."""
CPU_SECONDS = {
    "smoke": {"heloc-lr": 10, "heloc-ann-s": 15, "heloc-ann-m": 15, "mnist-ann-l": 15, "cifar10-resnet18": 30,
              "qnli-bert": 40},
    "quick": {"heloc-lr": 40, "heloc-ann-s": 35, "heloc-ann-m": 55, "mnist-ann-l": 45, "cifar10-resnet18": 145,
              "qnli-bert": 205},
}  # fmt: skip
"""What check and comparison of a task took on one core of a small cloud machine; larger scales take hours."""
EXPERIMENT_SECONDS = {"smoke": 10, "quick": 60}
"""What the experiments on one task took there."""
AT_ONCE = 0.7
"""Share of that time in which check and comparison are done when two tasks run at once."""
_CALIBRATION = 0.055
"""CPU seconds of `_work` on that machine."""


def run(
    tasks: Sequence[str],
    scale: Scale,
    folder: ResultFolder,
    data_dir: Path | None = None,
    methods: Iterable[str] | None = None,
    processes: int = 1,
) -> bool:
    """Check, comparison, experiments and report into one folder; ends with the headlines and the place of the page.

    Args:
        tasks: names of tasks, see `benchmarks.tasks.TASKS`; experiments run on those of `EXPERIMENT_TASKS` among them.
        scale: how much of everything.
        folder: where rows and report go; what is there already is not run again.
        data_dir: folder with the data sets.
        methods: methods of check and comparison; all if left out.
        processes: how many tasks of check and comparison run at once.

    Returns:
        Whether the check passed and everything could be measured.
    """
    print(expected_time(tasks, scale, processes), flush=True)
    for line in where_from(tasks, data_dir):
        print(line, flush=True)
    with at_once(min(processes, len(tasks))) as workers:
        print("\n1. Equal? The original toolkits, point by point, next to their group versions\n")
        checked = check.run(tasks, scale, folder, data_dir, methods, workers=workers)
        print("\n2. How much faster? Times faster than the original, by group size\n")
        compared = compare.run(tasks, scale, folder, data_dir, methods, workers=workers)
    from benchmarks import experiments, report  # seconds to import, for the first time: not before the first lines

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
    """How long it will take, from a short measurement of this machine."""
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
    """A line for each data set, as soon as it is there: real and from where, or made."""
    yield "Data:"
    for name in dict.fromkeys(task.partition("-")[0] for task in tasks):
        yield f"  {TITLES[name]}: {where(name, data_dir)}"


def _work() -> None:
    """Some forward and backward passes of a small network."""
    import torch
    from torch import nn

    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)), torch.zeros(512, 256)
    for _ in range(20):
        model(x).sum().backward()
