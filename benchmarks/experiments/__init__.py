"""The paper's experiments: retraining score, pruning, noisy labels and group LDS, as rows of a result folder.

Every row says how it was made and is written as soon as it is known. A resumed run starts at the row where it was
stopped. Retrained models are kept, so no model is trained twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import data
from benchmarks.experiments import dattri, lds, noisy, removal
from benchmarks.experiments.bench import Bench
from benchmarks.names import DATTRI_TASKS, LDS_TASKS
from benchmarks.results import ResultFolder
from benchmarks.sizes import Scale
from benchmarks.tasks import PAPER, Task, task

EXPERIMENTS: dict[str, Callable[[Bench], None]] = {
    noisy.NAME: noisy.run,
    lds.NAME: lds.run,
    **{name: partial(removal.run, experiment=name) for name in (removal.PRUNING, removal.RETRAINING)},
}


def run(
    names: Sequence[str], tasks: Sequence[str], scale: Scale, folder: ResultFolder, data_dir: Path | None = None
) -> None:
    """Run experiments and append their rows.

    Args:
        names: names of `EXPERIMENTS`; they run in this order.
        tasks: names of tasks, see `benchmarks.tasks`; only LDS runs on those in `LDS_TASKS`.
        scale: sizes of the run.
        folder: where rows go.
        data_dir: folder with the data sets; if a data set is not in it, other sources are tried.
    """
    for name in names:
        if name not in EXPERIMENTS:
            raise ValueError(f"experiment {name!r} is not one of {', '.join(EXPERIMENTS)}.")
    for one in tasks:
        if one in LDS_TASKS:
            if lds.NAME in names:
                _run_lds(one, scale, folder, data_dir)
            continue
        whole = experiment_task(one, scale, data_dir)
        folder.add_source(whole.data.title, whole.data.source, whole.data.stand_in)
        benches = Bench(whole, scale, folder), Bench(retrained_task(whole, scale), scale, folder)
        for name in names:
            EXPERIMENTS[name](benches[name != noisy.NAME])


def _run_lds(task: str, scale: Scale, folder: ResultFolder, data_dir: Path | None) -> None:
    """Run LDS on a task that has no other experiments."""
    if task in DATTRI_TASKS:
        dattri.run(task, scale, folder, data_dir)
        return
    from benchmarks.experiments.qnli_sources import sources_task  # needs transformers

    lds.run(Bench(sources_task(scale, data_dir, folder.path / "models"), scale, folder))


def experiment_task(name: str, scale: Scale, data_dir: Path | None = None) -> Task:
    """Return a task with the number of points that the experiments use."""
    size, whole = scale.experiments[name], scale.data[PAPER[name].data]
    loaded = data.load(
        PAPER[name].data, data_dir, train=size.data.train or whole.train, test=size.data.test or whole.test,
        text_length=scale.text_length,
    )  # fmt: skip
    return task(name, loaded, scale, folder=data_dir)


def retrained_task(whole: Task, scale: Scale) -> Task:
    """Return a copy of a task for experiments that train many models; it has fewer epochs if the scale says so."""
    epochs = scale.experiments[whole.name].epochs or whole.recipe.epochs
    return replace(whole, recipe=replace(whole.recipe, epochs=epochs))
