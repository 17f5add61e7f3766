"""The loop that `check` and `compare` share: task by task, each method of the toolkits beside its group version."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from benchmarks.results import ResultFolder
from benchmarks.sizes import Scale

if TYPE_CHECKING:
    from benchmarks.check.case import Method

Row = dict[str, Any]


@dataclass(frozen=True)
class SideBySide:
    """What is done with each method.

    Attributes:
        unit: what the bar counts.
        heading: the table's first line.
        source: a row → the line above the rows of a task.
        line: the rows of a method → their line.
        keys: task, method → keys of its rows.
        prepare: task, scale, folder, data folder → what the methods of the task run on.
        rows: task, method, what was prepared → its rows, in the order of their keys.
    """

    unit: str
    heading: Callable[[], str]
    source: Callable[[Row], str]
    line: Callable[[Sequence[Row]], str]
    keys: Callable[[str, Method], list[str]]
    prepare: Callable[[str, Scale, ResultFolder, Path | None], Any]
    rows: Callable[[str, Method, Any], Iterable[Row]]

    def run(
        self,
        tasks: Sequence[str],
        scale: Scale,
        folder: ResultFolder,
        data_dir: Path | None = None,
        chosen: Iterable[str] | None = None,
        show_progress: bool = True,
    ) -> list[Row]:
        """Run the tasks, print the table as it grows, and append every row to the folder.

        Args:
            tasks: names of tasks, see `benchmarks.tasks.TASKS`.
            scale: how much of everything.
            folder: where rows go; what is there already is not run again.
            data_dir: folder with the data sets.
            chosen: names of methods; all if left out.
            show_progress: show a bar over all methods and tasks.

        Returns:
            The rows of these tasks and methods, in the order of the table.
        """
        from benchmarks import check

        names = None if chosen is None else set(chosen)
        wanted = [method for method in check.methods() if names is None or method.name in names]
        found: list[Row] = []
        print(self.heading())
        with _without_garbage(), tqdm(total=len(tasks) * len(wanted), unit=self.unit, disable=not show_progress) as bar:
            for task in tasks:
                prepared: Any = None
                for position, method in enumerate(wanted):
                    keys = self.keys(task, method)
                    if not all(map(folder.done, keys)):
                        if prepared is None:
                            bar.set_postfix_str(f"data and model of {task}")
                            prepared = self.prepare(task, scale, folder, data_dir)
                        bar.set_postfix_str(f"{task}: {method.toolkit} {method.name}")
                        for key, row in zip(keys, self.rows(task, method, prepared), strict=True):
                            if not folder.done(key):
                                folder.append({"key": key, **row})
                    rows = [row for row in folder.rows if row["key"] in keys]
                    if not position:
                        bar.write(f"\n{self.source(rows[0])}")
                    bar.write(self.line(rows))
                    bar.update()
                    found += rows
        return found


@contextmanager
def _without_garbage() -> Iterator[None]:
    """Modules are no garbage, and looking through them before every measurement takes a third of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
