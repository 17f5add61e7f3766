"""Run seeds, or write the tables."""

from __future__ import annotations

import argparse
from pathlib import Path

import benchmarks.trainer_sources
from benchmarks.trainer_sources.made import made
from benchmarks.trainer_sources.qnli import qnli
from benchmarks.trainer_sources.tables import last, tables, write_into
from benchmarks.trainer_sources.task import run


def main() -> None:
    """Run seeds, or write the tables."""
    parser = argparse.ArgumentParser(
        description=benchmarks.trainer_sources.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("task", nargs="?", choices=("qnli", "made"))
    parser.add_argument("--data-dir", type=Path, help="holds qnli.tsv.gz and bert-minilm-l6")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--out", type=Path, required=True, help="folder, one file for each seed")
    parser.add_argument("--page", type=Path, help="page to write the tables into")
    given = parser.parse_args()
    if given.command == "table":
        found = tables(given.out)
        print("\n\n".join(found.values()))
        if given.page is not None:
            write_into(given.page, found)
        return
    if given.task is None or (given.task == "qnli" and given.data_dir is None):
        parser.error("run needs a task, qnli or made; qnli needs --data-dir")
    task = made() if given.task == "made" else qnli(given.data_dir)
    given.out.mkdir(parents=True, exist_ok=True)
    for seed in given.seeds:
        known = run(task, seed, given.out / f"{task.name}-{seed}.json")
        print(seed, {name: last(scores) for name, scores in known["scores"].items()}, flush=True)


if __name__ == "__main__":
    main()
