"""Ratios of times that are reliable on a busy machine: one process, the same work, cases in turns, best of several.

CPU time is measured, on one thread by default. On a busy machine, threads that wait for each other keep spinning, and
then neither CPU time nor wall-clock time is right.
"""

from __future__ import annotations

import gc
import io
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One measured case: its time, and how it compares with the case it is measured against.

    Attributes:
        part: part of the benchmark that the row belongs to, e.g. ``"core"`` or ``"captum"``.
        model: name of the model.
        case: what was run, e.g. ``"directional"``.
        group_size: mean number of points per group; 1 for per-point attribution; None if it has no meaning.
        seconds: CPU seconds of the fastest of several runs.
        against: name of the case that it is compared with.
        ratio: seconds of `against` divided by `seconds` (a speed-up), or the inverse, depending on `unit`.
        unit: ``"x faster"``, ``"passes"`` (multiples of one forward+backward pass over the same data), ``"times"`` (as
            much memory or inertia) or ``"off"`` (distance from an expected share). For the first, more is better; for
            the others, less is better.
        goal: the bound that the ratio should reach; None if there is none.
        note: the data used, reduced settings, and similar facts.
    """

    part: str
    model: str
    case: str
    group_size: int | None
    seconds: float
    against: str
    ratio: float
    unit: str
    goal: float | None = None
    note: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None if there is no goal."""
        if self.goal is None:
            return None
        return self.ratio >= self.goal if self.unit == "x faster" else self.ratio <= self.goal

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain data, for JSON."""
        return asdict(self) | {"reached": self.reached}


def best_times(
    cases: Mapping[str, Callable[[], Any]], repeats: int = 5, slow: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Return the CPU seconds of the fastest run of every case; the cases take turns.

    Args:
        cases: name → function to run.
        repeats: number of turns.
        slow: name → smaller number of turns, for cases that take long.
    """
    best = dict.fromkeys(cases, float("inf"))
    for turn in range(repeats):
        for name, run in cases.items():
            if slow is not None and turn >= slow.get(name, repeats):
                continue
            gc.collect()
            with redirect_stderr(io.StringIO()):  # hides the progress bars of the toolkits
                start = time.process_time()
                run()
                seconds = time.process_time() - start
            best[name] = min(best[name], seconds)
    return best
