"""Tables of `python -m benchmarks speed`, one for each part, made from the files that it writes.

They are written into a document that is given by --document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.report.formats import Table, three_digits

FILE = "speed.json"
PREFIX = "timing-"
_TITLES = {
    "core": "The core's strategies, in passes over the data and against per-point toolkits",
    "captum": "ggda_captum against Captum",
    "dattri": "ggda_dattri against dattri",
    "trak": "ggda_trak against TRAK",
    "grouping": "Grouping",
    "training": "Many models at once against a loop",
    "scaling": "Large data: passes, memory, stores, estimates",
    "transformers": "Hugging Face models after training, and what a tracker adds to a training",
    "ranks": "Several processes against one",
}


def timing_tables(folders: Sequence[Path]) -> Iterator[Table]:
    """Yield a table of the rows of all folders for each part. If two folders have the same case, the later one counts.

    Raises:
        ValueError: the file of a folder was not written by `speed`.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    abouts: dict[str, str] = {}
    for folder in folders:
        try:
            found = json.loads((folder / FILE).read_text(encoding="utf-8"))
            about = found["about"]
            said = f"torch {about['torch']}, {about['threads']} thread(s), {about['time'][:10]}"
            for row in found["rows"]:
                rows[row["part"], row["model"], row["case"], row["group_size"], row["against"]] = row
                abouts[row["part"]] = said + (", --quick" if about["quick"] else "")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / FILE} is no file of `python -m benchmarks speed` ({error}).") from None
    for part in dict.fromkeys(row["part"] for row in rows.values()):
        lines = [_line(row) for row in rows.values() if row["part"] == part]
        note = f"CPU time, best of several, cases taking turns; made data; {abouts[part]}."
        yield Table(f"{PREFIX}{part}", _TITLES.get(part, part), pd.DataFrame(lines), keys=2, notes=[note])


def _line(row: dict[str, Any]) -> dict[str, str]:
    goal, more = row["goal"], row["unit"] == "x faster"
    missed = goal is not None and (row["ratio"] < goal if more else row["ratio"] > goal)
    unit = row["unit"].replace("x ", "× ")
    return {
        "Model": row["model"],
        "Case": row["case"],
        "Group size": "–" if row["group_size"] is None else f"{row['group_size']:,}",
        "CPU s": three_digits(row["seconds"]) if row["seconds"] else "–",
        "Ratio": f"{row['ratio']:.2f} {unit}",
        "Goal": "–" if goal is None else f"{'≥' if more else '≤'} {goal:g}{', missed' if missed else ''}",
        "Against": "one pass" if row["against"] == "pass" else row["against"],
    }
