"""The loop that `check` and `compare` share. For each task it runs every method of the toolkits and its group version.

Several tasks can run at once, each in its own process. Both sides of a row always run in one process, in turns.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from multiprocessing import resource_tracker
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import std
from tqdm.auto import tqdm

from benchmarks.interrupts import ctrl_c_held
from benchmarks.results import ResultFolder
from benchmarks.sizes import Scale

if TYPE_CHECKING:
    from benchmarks.check.case import Method

Row = dict[str, Any]
Workers = Sequence[ProcessPoolExecutor]
Todo = dict[str, list[int]]
"""Task → numbers of the methods whose rows are still missing."""


@dataclass(frozen=True)
class SideBySide:
    """The functions that define a check or a comparison.

    Attributes:
        module: name of the module that holds this object as `SIDE`; other processes find it there.
        methods: returns all methods; imports the toolkits.
        unit: what the progress bar counts.
        heading: returns the first line of the table.
        source: a row → the line above the rows of a task.
        line: the rows of a method → their line in the table.
        keys: task, method → keys of its rows.
        prepare: task, scale, data folder → the object that the methods of the task run on.
        rows: task, method, the object of `prepare` → rows of the method, in the order of their keys.
    """

    module: str
    methods: Callable[[], Sequence[Method]]
    unit: str
    heading: Callable[[], str]
    source: Callable[[Row], str]
    line: Callable[[Sequence[Row]], str]
    keys: Callable[[str, Method], list[str]]
    prepare: Callable[[str, Scale, Path | None], Any]
    rows: Callable[[str, Method, Any], Iterable[Row]]

    def run(
        self,
        tasks: Sequence[str],
        scale: Scale,
        folder: ResultFolder,
        data_dir: Path | None = None,
        chosen: Iterable[str] | None = None,
        show_progress: bool = True,
        workers: Workers = (),
    ) -> list[Row]:
        """Run the tasks, print the table as it grows, and append every row to the folder.

        Args:
            tasks: names of tasks, see `benchmarks.tasks.TASKS`.
            scale: sizes of the run.
            folder: where rows go; rows that are already there are not computed again.
            data_dir: folder with the data sets.
            chosen: names of methods; all if left out.
            show_progress: show a bar over all methods and tasks.
            workers: processes of `at_once`. Each runs one task at a time, and the rows of a task are printed when all
                of them are there. Without workers the tasks run in this process, one after the other.

        Returns:
            The rows of these tasks and methods, in the order of the table.
        """
        for worker in workers:
            worker.submit(_get_ready, self.module)
        names = None if chosen is None else set(chosen)
        every = self.methods()
        wanted = [place for place, method in enumerate(every) if names is None or method.name in names]
        keys = {(task, place): self.keys(task, every[place]) for task in tasks for place in wanted}
        todo = {task: [at for at in wanted if not all(map(folder.done, keys[task, at]))] for task in tasks}
        print(self.heading())
        with _without_garbage(), tqdm(total=len(keys), unit=self.unit, disable=not show_progress) as bar:
            printed = dict.fromkeys(tasks, 0)

            def show(task: str) -> None:
                """Print new rows of a task in order; if tasks run at once, print a task only when it is complete."""
                there = list(takewhile(lambda place: all(map(folder.done, keys[task, place])), wanted))
                if workers and there != wanted:
                    return
                for place in there[printed[task] :]:
                    rows = _with_keys(folder, keys[task, place])
                    if not printed[task]:
                        bar.write(f"\n{self.source(rows[0])}")
                    bar.write(self.line(rows))
                    printed[task] += 1

            bar.update(len(keys) - sum(map(len, todo.values())))
            for task in tasks:
                show(task)
            work = partial(self._at_once, workers) if workers else self._alone
            for task, place, rows in work(todo, scale, data_dir, bar.set_postfix_str):
                for key, row in zip(keys[task, place], rows, strict=True):
                    if not folder.done(key):
                        folder.add_source(row["data"], row["source"], row["stand_in"])
                        folder.append({"key": key, **row})
                bar.update()
                show(task)
        return [row for task, place in keys for row in _with_keys(folder, keys[task, place])]

    def _alone(
        self, todo: Todo, scale: Scale, data_dir: Path | None, say: Callable[[str], object]
    ) -> Iterator[tuple[str, int, Iterable[Row]]]:
        """Yield task, number of the method and its rows; tasks run one after the other in this process."""
        every = self.methods()
        for task, places in todo.items():
            if places:
                say(f"data and model of {task}")
                prepared = self.prepare(task, scale, data_dir)
                for place in places:
                    say(f"{task}: {every[place].toolkit} {every[place].name}")
                    yield task, place, self.rows(task, every[place], prepared)

    def _at_once(
        self, workers: Workers, todo: Todo, scale: Scale, data_dir: Path | None, say: Callable[[str], object]
    ) -> Iterator[tuple[str, int, Iterable[Row]]]:
        """Yield task, number of the method and its rows from several processes.

        The next task goes to the first process that has finished its task.
        """
        waiting = deque((task, places) for task, places in todo.items() if places)
        running: dict[Future[list[Row]], tuple[str, int, ProcessPoolExecutor]] = {}
        while waiting or running:
            busy = [worker for _, _, worker in running.values()]
            for worker in workers:
                if waiting and worker not in busy:
                    task, places = waiting.popleft()
                    for place in places:
                        made = worker.submit(_rows_of, self.module, task, place, scale, data_dir)
                        running[made] = task, place, worker
            say(" and ".join(dict.fromkeys(task for task, _, _ in running.values())))
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                task, place, _ = running.pop(done)
                yield task, place, done.result()


@contextmanager
def at_once(count: int) -> Iterator[Workers]:
    """Start `count` processes that each run one job at a time; start none if the count is one.

    They end when the block ends, for any reason, and when this process ends.
    """
    import torch

    others = set(multiprocessing.active_children())
    context, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    pools = [ProcessPoolExecutor(1, context, _begin, (threads,)) for _ in range(count if count > 1 else 0)]
    resource_tracker.ensure_running()  # when it starts, it lets Ctrl-C through again
    with ctrl_c_held():  # so that Ctrl-C while they import prints nothing
        for pool in pools:
            pool.submit(os.getpid)
    try:
        yield pools
    except BaseException:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)


_prepared: dict[str, Any] = {}
"""Name of the last task → its prepared object, in a process that runs tasks."""


def _rows_of(module: str, task: str, place: int, scale: Scale, data_dir: Path | None) -> list[Row]:
    """Return the rows of one method of a task. The task is prepared only if the method before was of another task."""
    side: SideBySide = importlib.import_module(module).SIDE
    if task not in _prepared:
        _prepared.clear()
        _prepared[task] = side.prepare(task, scale, data_dir)
    return list(side.rows(task, side.methods()[place], _prepared[task]))


def _get_ready(module: str) -> None:
    """Prepare a process for a run: forget the task of the last run and import the toolkits.

    All processes import them at the same time.
    """
    _prepared.clear()
    importlib.import_module(module).SIDE.methods()
    gc.collect()
    gc.freeze()  # as in `_without_garbage`


def _begin(threads: int) -> None:
    """Set up a new process: it ignores Ctrl-C, which its parent handles, and it ends when its parent ends."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    torch.set_num_threads(threads)
    std.tqdm.set_lock(threading.RLock())  # tqdm's own lock is shared by processes, and stays behind if one is killed


def _end_with(parent: int) -> None:
    wait_for([parent])
    os._exit(1)


def _with_keys(folder: ResultFolder, keys: Sequence[str]) -> list[Row]:
    return [row for row in folder.rows if row["key"] in keys]


@contextmanager
def _without_garbage() -> Iterator[None]:
    """Exclude the objects that exist now, such as modules, from garbage collection.

    Going through them before every measurement would take a third of a second.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
