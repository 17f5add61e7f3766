"""Tables of the comparison of speed: how many times faster than the original, and what the grouping costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from benchmarks.compare.table import HEADLINE_SIZE, OWN_CODE, chosen, times
from benchmarks.names import DEFAULT_MODE, EXACT_MODE, ONE_PROPERTY, TEST_POINTS
from benchmarks.report.formats import Table, three_digits
from benchmarks.report.rows import Results

_HOW = (
    "CPU seconds, best of several, original and groups taking turns. The group version scores all training points, the "
    "original as many as it is given time for; where those are fewer, its time is extrapolated along a line. "
    "Linear: seconds at the largest size as the two sizes before it predict them, over those measured. "
    "Hessian: Captum's own, the same for both sides, timed apart; in brackets with it."
)
_MODES = (
    "Groups: the drop-in as it comes. Where its Fisher is an approximation, the exact one and their rank correlation, "
    "for groups of 64. For groups of one both sides get the original's points where they form a row for each. "
    "First call: groups of 64, when the model was not looked at before; what is found out about it is kept."
)
_NOTES = {
    ONE_PROPERTY: [_HOW, _MODES],
    TEST_POINTS: [
        f"As above. {OWN_CODE.capitalize()}: for groups of one the drop-in runs the toolkit's own code, so there is "
        "nothing to compare. 20 test points, 4 of QNLI; fewer for methods that solve for each of them."
    ],
}


def speed_tables(results: Results) -> Iterator[Table]:
    """Yield one table for each question, then a table of the time of grouping."""
    rows = [row for row in results.of("speed").to_dict("records") if row["status"] == "measured"]
    for question, name, title in (
        (ONE_PROPERTY, "speed", "How many times faster than the original: one property, the mean test loss"),
        (TEST_POINTS, "speed-tests", "How many times faster than the original: test points, each for itself"),
    ):
        some = [row for row in rows if row["question"] == question]
        if some:
            sizes = sorted(
                {size for row in some for size in [*row["own_code"], *(c["group_size"] for c in row["cells"])]}
            )
            frame = pd.DataFrame([_line(row, sizes) for row in some])
            yield Table(name, title, frame, keys=2, notes=_NOTES[question])
    if rows:
        yield _grouping(rows)


def _line(row: dict[str, Any], sizes: list[int]) -> dict[str, str]:
    default = {cell["group_size"]: cell for cell in chosen(row["cells"])}
    headline = [cell for cell in row["cells"] if cell["group_size"] == HEADLINE_SIZE]
    modes = {cell["mode"] for cell in row["cells"]}
    agreements = [cell["agreement"] for cell in headline if cell["agreement"] is not None]
    linearity = row.get("linearity")
    line = {
        "Data / model": row["setting"],
        "Method": f"{row['toolkit']} · {row['method']}",
        "Original (s)": three_digits(row["original_seconds"]),
        "Timed on": f"{int(row['original_points']):,} of {int(row['train_points']):,}",
        "Hessian (s)": three_digits(row["hessian_seconds"]) if row["hessian_seconds"] else "–",
        "Linear": "all timed" if linearity is None or pd.isna(linearity) else f"{linearity:.2f}",
    }
    for size in sizes:
        cell = default.get(size)
        none = OWN_CODE if size in row["own_code"] else "–"
        line[f"Groups of {size:,}"] = none if cell is None else _times(cell, row["hessian_seconds"])
    if row["question"] == ONE_PROPERTY:
        approximate = DEFAULT_MODE in modes
        first = [times(cell["speed_up_first"]) for cell in chosen(headline)] or ["–"]
        line["First call"] = first[0]
        exact = [times(cell["speed_up"]) for cell in chosen(headline, EXACT_MODE)] or ["–"]
        agreement = [f"{value:.2f}" for value in agreements] or ["–"]
        line["Exact mode"] = exact[0] if approximate else "is the default"
        line["Agreement"] = agreement[0] if approximate else "1"
    return line


def _times(cell: Mapping[str, Any], hessian: float) -> str:
    both = f" ({times(cell['speed_up_with_hessian'])})" if hessian else ""
    return times(cell["speed_up"]) + both


def _grouping(rows: list[dict[str, Any]]) -> Table:
    lines = {}
    for row in rows:
        found = {f"Groups of {int(size):,} (s)": three_digits(took) for size, took in row["grouping_seconds"].items()}
        lines[row["setting"]] = {"Data / model": row["setting"], "Points": f"{int(row['train_points']):,}", **found}
    frame = pd.DataFrame(lines.values()).fillna("–").drop(columns="Groups of 1 (s)", errors="ignore")
    return Table("speed-grouping", "Grouping, timed apart: Grad-K-Means in CPU seconds", frame, keys=1)
