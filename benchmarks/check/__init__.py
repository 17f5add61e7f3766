"""`python -m benchmarks check`: every toolkit's original, point by point, next to its group version, on every data set.

Both run on the same model and points; the original's scores, summed by group, must be the group version's.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from benchmarks.check import table
from benchmarks.results import ResultFolder
from benchmarks.sizes import CheckScale, Scale

if TYPE_CHECKING:
    from benchmarks.check.case import Case, Method

TOOLKITS = ("captum", "dattri", "trak", "fisher")
SKIPPED: Mapping[tuple[str, str, str], str] = {}
"""(task, toolkit, method) → what the original cannot do there; nothing else may be left out."""


def methods() -> tuple[Method, ...]:
    """All methods of all toolkits, which are imported here."""
    found: list[Method] = []
    for toolkit in TOOLKITS:
        found += importlib.import_module(f"benchmarks.check.{toolkit}").METHODS
    return tuple(found)


def run(
    tasks: Sequence[str],
    scale: Scale,
    folder: ResultFolder,
    data_dir: Path | None = None,
    chosen: Iterable[str] | None = None,
    show_progress: bool = True,
) -> list[dict[str, Any]]:
    """Check the tasks, print the table as it grows, and append every row to the folder.

    Args:
        tasks: names of tasks, see `benchmarks.tasks.TASKS`.
        scale: how much of everything.
        folder: where rows go; what is there already is not run again.
        data_dir: folder with the data sets.
        chosen: names of methods; all if left out.
        show_progress: show a bar over all rows.

    Returns:
        The rows of this check, in the order of the table.
    """
    wanted = [method for method in methods() if chosen is None or method.name in set(chosen)]
    keys = {task: {method: f"check/{task}/{method.toolkit}/{method.name}" for method in wanted} for task in tasks}
    print(table.heading())
    with without_garbage():
        _fill(keys, scale, folder, data_dir, show_progress)
    found = {row["key"]: row for row in folder.rows}
    return [found[key] for of_task in keys.values() for key in of_task.values()]


@contextmanager
def without_garbage() -> Iterator[None]:
    """Modules are no garbage, and looking through them before every measurement takes a third of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _fill(
    keys: Mapping[str, Mapping[Method, str]], scale: Scale, folder: ResultFolder, data_dir: Path | None, show: bool
) -> None:
    """Append the rows that are not there, task by task, and print all."""
    with tqdm(total=sum(map(len, keys.values())), unit="check", disable=not show) as bar:
        for name, of_task in keys.items():
            case: Case | None = None
            for position, (method, key) in enumerate(of_task.items()):
                if not folder.done(key):
                    if case is None:
                        bar.set_postfix_str(f"data and model of {name}")
                        case, common = prepared(name, scale, folder, data_dir, scale.check[name])
                    bar.set_postfix_str(f"{name}: {method.toolkit} {method.name}")
                    folder.append({"key": key, **common, **_checked(name, method, case)})
                row = next(row for row in folder.rows if row["key"] == key)
                if not position:
                    bar.write(f"\n{table.source(row)}")
                bar.write(table.line(row))
                bar.update()


def _checked(task: str, method: Method, case: Case) -> dict[str, Any]:
    from benchmarks.check.measure import row_of

    reason = SKIPPED.get((task, method.toolkit, method.name))
    if reason is not None:
        return {
            "toolkit": method.toolkit,
            "method": method.name,
            "status": "skipped",
            "reason": reason,
            "train_points": 0,
        }
    return row_of(method, case.few if method.toolkit == "dattri" else case)


def prepared(
    name: str, scale: Scale, folder: ResultFolder, data_dir: Path | None, numbers: CheckScale
) -> tuple[Case, dict[str, Any]]:
    """A task's case, with as many points as the numbers say, and the fields its rows share."""
    from benchmarks import data
    from benchmarks.check.case import Case
    from benchmarks.tasks import PAPER, task

    of_data = PAPER[name].data
    size = scale.data[of_data]
    dataset = data.load(of_data, data_dir, train=size.train, test=size.test, text_length=scale.text_length)
    made = task(name, dataset, scale, folder=data_dir)
    source = f"{dataset.source}; weights: {made.weights}" if made.weights else dataset.source
    folder.add_source(dataset.title, source, made.stand_in)
    points = dataset.subset(train=numbers.points, test=numbers.tests)
    model = made.trained(seed=0).model
    case = Case(model, points.train, points.test, numbers, made.projection_dim)
    return case, {
        "experiment": "check",
        "data": data.TITLES[dataset.name],
        "model": made.title,
        "source": source,
        "stand_in": made.stand_in,
        "scale": scale.name,
        "test_points": len(points.test[0]),
    }
