"""Two made-up methods side by side, for processes that import them: which process ran what, and how often."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.data.errors import DataError
from benchmarks.side_by_side import SideBySide
from benchmarks.sizes import Scale

METHODS: Any = (SimpleNamespace(toolkit="Captum", name="first"), SimpleNamespace(toolkit="dattri", name="second"))
prepared = 0


def _prepare(task: str, scale: Scale, data_dir: Path | None) -> dict[str, Any]:
    global prepared
    if data_dir is not None:
        raise DataError(f"no data in {data_dir}")
    prepared += 1
    return {"data": task.upper(), "source": "made", "stand_in": True, "process": os.getpid(), "prepared": prepared}


def _rows(task: str, method: Any, common: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield common | {"method": method.name}


SIDE = SideBySide(
    __name__, lambda: METHODS, "row", lambda: "method", lambda row: row["data"], lambda rows: rows[0]["method"],
    lambda task, method: [f"{task}/{method.name}"], _prepare, _rows,
)  # fmt: skip
