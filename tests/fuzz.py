"""Mutated inputs for every reader: none may crash, hang, write outside its folder, or be accepted with other content.

The tests try a few of each; ``python -m tests.fuzz --count 10000`` tries the full number. Each reader runs in a process
of its own, so that a crash of the interpreter is seen, and a mutation is known by its reader and number.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.errors import DataError
from tests.children import said
from tests.fuzz_readers import READERS, Reader, mutate

CPU_SECONDS, WAITING_SECONDS = 30.0, 120  # a reader that takes longer hangs
TICK = 1.0
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # the readers are tried, not the disk
REFUSALS = (ValueError, DataError, OSError)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and np.allclose(found, expected, rtol=0, atol=1e-3)
    return found == expected


def trouble(reader: Reader, pristine: Path, expected: dict[str, Any], seed: str, space: Path) -> str | None:
    """What went wrong with one mutation, None if nothing did."""
    folder, outside = space / "folder", space / "outside.txt"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(pristine, folder)
    outside.write_text("outside")
    if reader.forge is None:
        mutate(folder, random.Random(seed), outside)
    else:
        reader.forge(folder, random.Random(seed))
    try:
        with limited():
            found = reader.read(folder)
    except REFUSALS as error:
        found = {} if str(error) else {"": "an error without a word"}
    except Exception as error:
        return f"a raw {type(error).__name__}: {error}"
    if reader.forge is not None:
        found = {name: expected[name] for name in found}
    other = [name for name in found if name not in expected or not same(found[name], expected[name])]
    if other:
        return f"it is accepted with another {other[0]!r}"
    if outside.read_text() != "outside" or {path.name for path in space.iterdir()} != {"folder", "outside.txt"}:
        return "it wrote outside of its folder"
    return None


@contextmanager
def limited() -> Iterator[None]:
    """Raise where the work inside hangs, by its CPU time, or by ticks of a clock if it waits for something.

    A process that is stopped from outside gets the ticks of that time as one.
    """
    begun, ticks = time.process_time(), count(1)

    def tick(*_: Any) -> None:
        if time.process_time() - begun > CPU_SECONDS or next(ticks) * TICK > WAITING_SECONDS:
            raise AssertionError("it hangs")

    signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def troubles(name: str, many: int, first: int = 0) -> list[str]:
    """What went wrong with some mutations for one reader."""
    reader, found = READERS[name], []
    logging.disable(logging.CRITICAL)
    with (
        tempfile.TemporaryDirectory(dir=IN_MEMORY) as made,
        tempfile.TemporaryDirectory(dir=IN_MEMORY) as space,
        warnings.catch_warnings(),
        open(os.devnull, "w") as nowhere,
        redirect_stderr(nowhere),  # TRAK's progress bars
    ):
        warnings.simplefilter("ignore")
        reader.make(Path(made))
        expected = reader.read(Path(shutil.copytree(made, Path(space) / "folder")))
        for number in range(first, first + many):
            problem = trouble(reader, Path(made), expected, f"{name} {number}", Path(space))
            if problem is not None:
                found.append(f"{name}, number {number}: {problem}")
    logging.disable(logging.NOTSET)
    return found


def in_child(name: str, many: int) -> list[str]:
    """The same in a process of its own; a crash is trouble too."""
    text, status = said(lambda: "\n".join(troubles(name, many)))
    return [f"{name}: the process ended with status {status}"] if status else text.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="mutations for each reader")
    parser.add_argument("--readers", nargs="*", default=list(READERS), choices=list(READERS), metavar="READER")
    given = parser.parse_args()
    failed = False
    for name in given.readers:
        found = in_child(name, given.count)
        failed |= bool(found)
        print(f"{name}: {given.count:,} mutations, {len(found)} troubles", *found[:20], sep="\n  ", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
