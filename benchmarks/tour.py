"""`python -m benchmarks`: the check on all data sets, a small run of the experiments, and the report on both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import check
from benchmarks.results import ResultFolder
from benchmarks.sizes import Scale

EXPERIMENTS = ("lds", "noisy", "pruning", "retraining")
EXPERIMENT_TASKS = ("heloc-lr",)
"""Experiments retrain many models: the tour does so for the smallest ones, `run` for any."""


def run(
    tasks: Sequence[str],
    scale: Scale,
    folder: ResultFolder,
    data_dir: Path | None = None,
    methods: Iterable[str] | None = None,
) -> bool:
    """Check, experiments and report into one folder; ends with the headlines and the place of the page.

    Args:
        tasks: names of tasks, see `benchmarks.tasks.TASKS`; experiments run on those of `EXPERIMENT_TASKS` among them.
        scale: how much of everything.
        folder: where rows and report go; what is there already is not run again.
        data_dir: folder with the data sets.
        methods: methods of the check; all if left out.

    Returns:
        Whether the check passed.
    """
    from benchmarks import experiments, report

    print("1. The original toolkits, point by point, next to their group versions (CPU seconds, peak memory)\n")
    rows = check.run(tasks, scale, folder, data_dir, methods)
    retrained = [task for task in tasks if task in EXPERIMENT_TASKS]
    if retrained:
        print(f"\n2. The paper's experiments on {', '.join(retrained)}: {', '.join(EXPERIMENTS)}\n")
        experiments.run(EXPERIMENTS, retrained, scale, folder, data_dir)
    folder.finish()
    out = folder.path / "report"
    found = report.write([folder.path], out)
    print("\n" + "\n".join([*check.table.problems(rows), *found.lines]))
    print(f"report: {out / 'report.html'}")
    return check.table.passed(rows)
