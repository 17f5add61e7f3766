"""The command line. `python -m benchmarks` runs the tour; each part of the tour, and more, has its own command.

Modules that import torch are imported after the arguments are parsed, so `--help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import shlex
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.interrupts import ctrl_c_held
from benchmarks.names import (
    DATTRI_TASKS,
    EQUAL_GROUPINGS,
    EXPERIMENTS,
    FETCHABLE,
    GROUPINGS,
    LDS_METHODS,
    LDS_TASKS,
    METHODS,
    PROTOCOLS,
    SINGLE_POINTS,
    SOURCES,
    SPEED_PARTS,
)
from benchmarks.published import RUNS
from benchmarks.scales import SCALES
from benchmarks.sizes import narrowed

if TYPE_CHECKING:
    from benchmarks.results import ResultFolder

PROGRAM = "python -m benchmarks"
LATEST = Path("latest")
STOPPED, FAILED, MISUSED = 130, 1, 2
_NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
_LDS = "lds "  # before the names of the options of `run` that replace sizes of LDS
DOCUMENTS = (Path("benchmarks/RESULTS.md"), Path("docs/results_details.md"))
TASKS = tuple(SCALES["paper"].epochs)

DESCRIPTION = """\
Group data attribution, measured against the original toolkits on HELOC, MNIST, CIFAR-10 and QNLI.

Without a command: the tour, up to ten minutes. It checks the group versions of Captum, dattri and TRAK against the
originals, measures how much faster they are, runs the paper's experiments at a small scale, and writes a page."""

EXAMPLES = """\
examples:
  python -m benchmarks                                   the tour
  python -m benchmarks data --fetch all                  get the data first, see where it came from
  python -m benchmarks check --data mnist                one data set against all originals
  python -m benchmarks check --scale laptop --resume     go on with the check that was stopped
  python -m benchmarks compare --tasks heloc-ann-s       how much faster than the originals, at real size
  python -m benchmarks run lds noisy --tasks heloc-ann-s two of the paper's experiments
  python -m benchmarks report results/*                  one report on all results

Ctrl-C keeps what is finished; the line printed then says how to go on. Each command has its own --help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the command line names.

    Args:
        arguments: the command line without the program name; `sys.argv[1:]` if left out.

    Returns:
        Exit code: 0 on success, 1 if a check failed or something is missing, 2 for bad arguments, 130 if interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given.insert(0, "tour")
    options = _parser().parse_args(given)
    try:
        with ctrl_c_held():  # for seconds; in the middle of this import Ctrl-C may end in an abort
            import torch

            from benchmarks.data.errors import DataError
            from benchmarks.data.folders import chosen
    except KeyboardInterrupt:
        return _stopped(options, None)
    if hasattr(options, "threads"):
        torch.set_num_threads(options.threads)
    if options.command == "speed" and options.json is None:
        options.json = Path("results") / f"{time.strftime('%Y%m%d-%H%M%S')}-speed" / "speed.json"
    folder: ResultFolder | None = None
    try:
        chosen(getattr(options, "data_dir", None))  # before a result folder is made
        if options.command in ("tour", "check", "compare", "run"):
            folder = _folder(options, given)
            return _in_folder(options, folder)
        return _without_folder(options)
    except KeyboardInterrupt:
        return _stopped(options, folder)
    except DataError as error:
        print(f"{error}\n{_how_to_go_on(options, folder)}", file=sys.stderr)
        return FAILED
    except OSError as error:
        if error.errno in _NO_PLACE:
            print(
                f"{error.filename} cannot be used ({error.strerror}): name a folder that can be written to, or run in "
                "one.",
                file=sys.stderr,
            )
            return MISUSED
        if error.errno != errno.ENOSPC:
            raise
        print(f"the disk is full ({error}): make room. {_how_to_go_on(options, folder)}", file=sys.stderr)
        return FAILED


def _stopped(options: argparse.Namespace, folder: ResultFolder | None) -> int:
    """Say how to go on after Ctrl-C, and return the exit code."""
    print(f"\nstopped. {_how_to_go_on(options, folder)}", file=sys.stderr)
    return STOPPED


def _in_folder(options: argparse.Namespace, folder: ResultFolder) -> int:
    """Run one of the commands that write rows to a result folder, and return the exit code."""
    scale, tasks, processes = SCALES[folder.config["scale"]], folder.config["tasks"], folder.config.get("processes", 1)
    at_once = f", {processes} tasks at once" if processes > 1 else ""
    print(
        f"{options.command}, scale {scale.name} ({scale.about}), {options.threads} thread(s){at_once}; "
        f"results: {folder.path}\n"
    )
    if options.command == "tour":
        from benchmarks import tour

        return 0 if tour.run(tasks, scale, folder, options.data_dir, processes=processes) else FAILED
    if options.command == "run":
        from benchmarks import experiments

        if folder.config["lds"]:
            scale = narrowed(scale, tasks, folder.config["lds"])
        experiments.run(folder.config["experiments"], tasks, scale, folder, options.data_dir)
        folder.finish()
        print(f"\n{len(folder.rows)} rows in {folder.path}; tables and figures: {PROGRAM} report {folder.path}")
        return 0
    from benchmarks import side_by_side

    part = importlib.import_module(f"benchmarks.{options.command}")  # check or compare
    with side_by_side.at_once(min(processes, len(tasks))) as workers:
        rows = part.run(tasks, scale, folder, options.data_dir, folder.config["methods"], workers=workers)
    folder.finish()
    print("\n" + "\n".join(part.table.verdict(rows)))
    return 0 if part.table.passed(rows) else FAILED


def _without_folder(options: argparse.Namespace) -> int:
    """Run one of the commands that need no result folder, and return the exit code."""
    if options.command == "data":
        from benchmarks import data

        return data.command(options.fetch, options.data_dir)
    if options.command == "report":
        from benchmarks import report

        return report.command(options.folders, options.out, options.documents)
    if options.command == "results":
        return _published(options)
    if options.command == "speed":
        from benchmarks import speed

        speed.run(options.parts, options.quick, options.threads, options.json, options.ranks)
    else:
        from benchmarks import fidelity

        fidelity.run(options.data_dir, fidelity.QUICK if options.quick else fidelity.Scale(), options.json)
    return 0


def _published(options: argparse.Namespace) -> int:
    """Make the missing runs behind the documents; write the documents if no run is missing afterwards."""
    from benchmarks import published, report

    documents = options.documents or DOCUMENTS
    found = published.run(options.names or list(published.RUNS), options.out, options.data_dir)
    if len(found) == len(published.RUNS):
        return report.command(found, options.out / "report", documents)
    shown = " and ".join(map(str, documents))
    print(f"{len(found)} of {len(published.RUNS)} runs are finished; {shown} are written when all are.")
    return 0


def _folder(options: argparse.Namespace, given: list[str]) -> ResultFolder:
    """Return the folder of the run: a new one, or the one to resume.

    A resumed run takes its scale, tasks, methods and experiments from the folder unless the command line gives them.
    """
    from benchmarks.results import FolderInUse, ResultFolder, read_config

    config: dict[str, Any] = {
        "command": options.command, "arguments": shlex.join(given), "threads": options.threads,
        "seeds": {"data": 0, "model": 0, "groups": 0, "projection": 0},
    }  # fmt: skip
    if hasattr(options, "processes"):
        config["processes"] = options.processes or _processes(options.threads)
    chosen = {
        "scale": options.scale,
        "tasks": _tasks(options),
        "methods": getattr(options, "methods", None),
        "experiments": getattr(options, "experiments", None) or None,
    }
    try:
        resume = options.resume
        if resume == LATEST:
            resume = ResultFolder.latest_unfinished(options.command)
        before = {} if resume is None else read_config(resume)
        defaults = {"scale": "quick", "tasks": list(TASKS), "methods": None, "experiments": list(EXPERIMENTS)}
        for name, value in chosen.items():
            config[name] = value if value is not None else before.get(name, defaults[name])
        _check_known(config, resume)
        config["lds"] = before.get("lds", {}) | _lds_sizes(options)
        return ResultFolder.open(options.command, config, resume)
    except (ValueError, FileNotFoundError, FolderInUse) as error:
        print(error, file=sys.stderr)
        raise SystemExit(MISUSED) from None


def _check_known(config: Mapping[str, Any], resume: Path | None) -> None:
    """Raise an error if the config of a folder names a scale, a task, a method or an experiment that is not known."""
    known: dict[str, Collection[str]] = {
        "scale": SCALES, "tasks": (*TASKS, *LDS_TASKS), "methods": METHODS, "experiments": EXPERIMENTS,
    }  # fmt: skip
    for name, names in known.items():
        value = config[name]
        values = [value] if name == "scale" else [] if value is None else value
        strange = [one for one in values if one not in list(names)] if isinstance(values, list) else [value]
        if strange:
            raise ValueError(
                f"{resume} is no folder of this version: its {name} has {strange[0]!r}, which is none of "
                f"{', '.join(names)}. Start a new run without --resume."
            )


def _tasks(options: argparse.Namespace) -> list[str] | None:
    if options.tasks is None and options.data is None:
        return None
    wanted = options.tasks or [task for task in TASKS if _data_of(task) in options.data]
    others = [task for task in LDS_TASKS if task in wanted]
    if others and options.command != "run":
        print(f"task {others[0]} has LDS only: {PROGRAM} run lds --tasks {others[0]}", file=sys.stderr)
        raise SystemExit(MISUSED)
    return [task for task in TASKS if task in wanted] + others


def _lds_sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sizes of LDS that the command line of `run` gives."""
    given = {name.removeprefix(_LDS): value for name, value in vars(options).items() if name.startswith(_LDS)}
    found = {name: value for name, value in given.items() if value is not None}
    others = [one for one in getattr(options, "experiments", None) or () if one != "lds"]
    others += [task for task in options.tasks or () if task in DATTRI_TASKS]
    if found and others:
        print(f"{others[0]} has sizes of its own: leave out --{next(iter(found)).replace('_', '-')}.", file=sys.stderr)
        raise SystemExit(MISUSED)
    if "groups" in found:
        found["groups"] = {name: [size for one, size in found["groups"] if one == name] for name, _ in found["groups"]}
    return found


def _processes(threads: int) -> int:
    """Return how many tasks run at once: two if there are enough cores for the threads of both, else one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 2 if cores >= 2 * threads else 1


def _data_of(task: str) -> str:
    return task.partition("-")[0]


def _how_to_go_on(options: argparse.Namespace, folder: ResultFolder | None) -> str:
    if folder is not None:
        rows = f"{len(folder.rows)} finished rows are kept"
        return f"{rows}; go on with: {PROGRAM} {options.command} --resume {folder.path}"
    written: Path | None = getattr(options, "json", None)
    if written is not None and written.exists():
        return f"What is finished is in {written}."
    return f"Run `{PROGRAM} {options.command}` again."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    common = _common_options()
    touring = commands.add_parser(
        "tour", parents=[common], help="check, compare, a few experiments, report (the default)"
    )
    checking = commands.add_parser(
        "check", parents=[common], help="original toolkits, point by point, next to their group versions",
        description="Runs every original toolkit point by point and its group version on the same model and data, "
        "compares the scores, and prints peak memory of both. Exit code 1 if any differs or fails.",
    )  # fmt: skip
    comparing = commands.add_parser(
        "compare", parents=[common], help="how much faster than the original toolkits, at real size",
        description="Times every group version on all training points of the scale, for one property and for test "
        "points, in groups of 1, 64 and 1,024, against its original on as many points as a fixed time allows.",
    )  # fmt: skip
    for one in (touring, checking, comparing):
        one.add_argument(
            "--processes", type=_count, metavar="N",
            help="tasks that are checked and compared at once, each in a process; 2 by default where cores are enough, "
            "1 to time each alone",
        )  # fmt: skip
    for one in (checking, comparing):
        one.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help=f"of {', '.join(METHODS)}")
    running = commands.add_parser("run", parents=[common], help="the paper's experiments")
    running.add_argument(
        "experiments", nargs="*", type=partial(_one_of, EXPERIMENTS), metavar="EXPERIMENT",
        help=f"of {', '.join(EXPERIMENTS)}; all by default",
    )  # fmt: skip
    _add_lds_sizes(running)
    reporting = commands.add_parser("report", help="tables, figures and one HTML page from result folders")
    reporting.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="result folders, e.g. results/*")
    reporting.add_argument("--out", type=Path, help="where to write; the last folder's own `report` by default")
    reporting.add_argument("--document", dest="documents", action="append", type=Path, default=[], metavar="FILE",
                           help="also bring this Markdown file up to date; repeatable")  # fmt: skip
    publishing = commands.add_parser(
        "results", help="the runs behind RESULTS.md, and its tables",
        description="Makes the runs behind benchmarks/RESULTS.md that are missing, some of them or all (hours), and "
        "writes tables and figures of the documents when all are there. Run it again to go on where it was stopped.",
    )  # fmt: skip
    publishing.add_argument("names", nargs="*", type=partial(_one_of, RUNS), metavar="RUN",
                            help=f"of {', '.join(RUNS)}; all by default")  # fmt: skip
    publishing.add_argument("--out", type=Path, default=Path("results") / "published", help="%(default)s by default")
    publishing.add_argument("--document", dest="documents", action="append", type=Path, metavar="FILE",
                            help=f"repeatable; {' and '.join(map(str, DOCUMENTS))} by default")  # fmt: skip
    publishing.add_argument("--data-dir", **_DATA_DIR)
    publishing.add_argument("--threads", type=_count, default=1, help="torch threads; 1 by default")
    fetching = commands.add_parser("data", help="what data is here, where it came from, and its checks; get the rest")
    fetching.add_argument("--fetch", nargs="+", default=[], choices=FETCHABLE, metavar="NAME",
                          help=f"get it: {', '.join(FETCHABLE)}")  # fmt: skip
    fetching.add_argument("--data-dir", **_DATA_DIR)
    timing = commands.add_parser("speed", help="time every strategy and toolkit on made data")
    timing.add_argument("--parts", nargs="+", choices=SPEED_PARTS, default=list(SPEED_PARTS), metavar="PART",
                        help=f"of {', '.join(SPEED_PARTS)}; all by default")  # fmt: skip
    timing.add_argument("--quick", action="store_true", help="smaller data: minutes instead of an hour")
    timing.add_argument("--threads", type=_count, default=1, help="torch threads; 1 by default, the steadiest")
    timing.add_argument("--ranks", type=int, metavar="N", help="instead: N processes of one thread against one alone")
    timing.add_argument("--json", type=Path, help="where to write the rows; results/<time>-speed/speed.json by default")
    faithful = commands.add_parser("fidelity", help="Fishers and dampings of TRAK against TRAK and against retraining")
    faithful.add_argument("--data-dir", **_DATA_DIR)
    faithful.add_argument("--threads", type=_count, default=1, help="torch threads; 1 by default")
    faithful.add_argument("--quick", action="store_true", help="a smaller scale: half a minute instead of ten")
    faithful.add_argument("--json", type=Path, help="where to write the numbers; nowhere by default")
    return parser


_DATA_DIR: dict[str, Any] = {
    "type": Path,
    "help": "folder with the data sets, tried first; or set GGDA_DATA_DIR. Without it: the cache, published "
    "archives, package registries, and a marked stand-in",
}


def _common_options() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    scales = "; ".join(f"{name}: {scale.about}" for name, scale in SCALES.items())
    common.add_argument("--scale", choices=SCALES, help=f"how much of everything. {scales}")
    common.add_argument("--data-dir", **_DATA_DIR)
    which = common.add_mutually_exclusive_group()
    every = (*TASKS, *LDS_TASKS)
    which.add_argument("--tasks", nargs="+", choices=every, metavar="TASK",
                       help=f"of {', '.join(TASKS)}; for `run lds` also {', '.join(LDS_TASKS)}")  # fmt: skip
    which.add_argument("--data", nargs="+", choices=list(dict.fromkeys(map(_data_of, TASKS))),
                       help="all tasks of these data sets")  # fmt: skip
    common.add_argument("--threads", type=_count, default=1, help="torch threads; 1 by default: times are CPU times")
    common.add_argument(
        "--resume", nargs="?", type=Path, const=LATEST, metavar="FOLDER",
        help="go on with a stopped run: its folder, or the latest one of this command if no folder is named",
    )  # fmt: skip
    return common


def _add_lds_sizes(running: argparse.ArgumentParser) -> None:
    """Add the options that replace the scale's sizes of LDS."""
    sizes = running.add_argument_group("instead of the scale's, for lds")

    def add(name: str, **settings: Any) -> None:
        sizes.add_argument(f"--{name}", dest=_LDS + name.replace("-", "_"), **settings)

    add("methods", nargs="*", metavar="METHOD", choices=LDS_METHODS,
        help=f"of {', '.join(map(repr, LDS_METHODS))}; the trivial ones are always there")  # fmt: skip
    add("groups", nargs="+", type=_group_size, metavar="NAME:SIZE",
        help=f"e.g. Grad-K-Means:256; of {', '.join((*GROUPINGS, *EQUAL_GROUPINGS))}")  # fmt: skip
    add("protocols", nargs="+", choices=PROTOCOLS, help="models on which choices of groups")
    add("grouping-seeds", nargs="+", type=int, metavar="SEED")
    add("subsets", type=_count, metavar="N", help="choices of groups of each grouping and protocol")
    add("seeds", type=_count, metavar="N", help="models retrained on each of them")
    add("trios", type=_count, metavar="N", help="trios of models explained, one trio after the other")
    add("settled-checkpoints", action="store_true", default=None,
        help="what-if explains all checkpoints of a model, settled")  # fmt: skip
    add("points", type=_count, metavar="N", help="training points")
    add("epochs", type=_count, metavar="N", help="of models that are retrained, and of those explained")


def _group_size(text: str) -> tuple[str, int]:
    name, _, size = text.rpartition(":")
    known = (SINGLE_POINTS, SOURCES, *GROUPINGS, *EQUAL_GROUPINGS)
    if name not in known or not size.isdecimal() or int(size) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: pass NAME:SIZE with a name of {', '.join(known)}.")
    return name, int(size)


def _one_of(known: Collection[str], text: str) -> str:
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(known)}.")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: pass a whole number from 1 on.")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
