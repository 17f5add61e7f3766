"""One row of the check: the original and the group version on the same case, their difference, time and memory."""

from __future__ import annotations

import errno
import io
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.check.case import Case, Method
from benchmarks.names import GRAD_K_MEANS
from benchmarks.speed.memory import peak_bytes

TOLERANCE = 1e-3
"""Largest difference allowed, relative to the largest score. Most differences are below 1e-5. But if a model fits its
points very well, their gradients have few correct digits, and the originals in float32 differ by 4e-4 from float64."""


@dataclass(frozen=True)
class Measured:
    """Scores with the CPU seconds and the peak memory they took."""

    scores: Tensor
    seconds: float
    peak: int | None


def row_of(method: Method, case: Case) -> dict[str, Any]:
    """Run both sides, compare them and return the row. If either raises an error, the row is `failed` and the check
    goes on."""
    row: dict[str, Any] = {
        "toolkit": method.toolkit,
        "method": method.name,
        "train_points": len(case.train[0]),
        "group_size": case.size.group_size,
        "groups": len(case.groups),
        "group_sizes": f"{case.groups.sizes.min()}…{case.groups.sizes.max()}",
        "grouping": GRAD_K_MEANS,
        "tolerance": TOLERANCE,
    }
    try:
        row["settings"] = method.settings(case)
        original = measured(lambda: method.original(case))
        grouped = measured(lambda: method.grouped(case))
        error = relative_error(grouped.scores, case.groups.sum(original.scores, 1))
    except Exception as failure:
        return row | failed(failure)
    return row | {
        "status": "equal" if error <= TOLERANCE else "differs",
        "error": error,
        "seconds_original": original.seconds,
        "seconds_groups": grouped.seconds,
        "peak_original": original.peak,
        "peak_groups": grouped.peak,
    }


def measured(run: Callable[[], Tensor]) -> Measured:
    """Return scores, time and memory of a call. It runs only once, because `benchmarks.compare` measures the speed."""
    found: list[Tensor] = []

    def once() -> None:
        found.append(run().detach())

    with quiet():
        start = time.process_time()
        peak = peak_bytes(once)
        return Measured(found[0], time.process_time() - start, peak)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bars and warnings of the toolkits."""
    with redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of scores `[tests, groups]`, relative to the largest score."""
    if found.shape != expected.shape:
        raise ValueError(f"the group version gave scores {list(found.shape)}, the original {list(expected.shape)}.")
    for name, scores in (("group version", found), ("original", expected)):
        if not bool(torch.isfinite(scores).all()):
            raise ValueError(f"scores of the {name} are not finite.")
    largest = float(expected.abs().max())
    if largest == 0:
        raise ValueError("all scores of the original are zero, so there is nothing to compare.")
    return float((found.double() - expected.double()).abs().max()) / largest


def failed(failure: Exception) -> dict[str, Any]:
    """Return the fields of a row for an exception that is being handled. A full disk is raised again."""
    if isinstance(failure, OSError) and failure.errno == errno.ENOSPC:
        raise failure  # not the fault of the method; a resumed run can compute the row
    reason = ": ".join(filter(None, (type(failure).__name__, " ".join(str(failure).split()))))
    return {"status": "failed", "reason": reason, "traceback": traceback.format_exc()}
