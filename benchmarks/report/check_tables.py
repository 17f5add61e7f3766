"""Tables of the check against the original toolkits: which scores are equal, which checks compared nothing and why, and
the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from benchmarks.report.formats import Table
from benchmarks.report.rows import Results


def check_tables(results: Results) -> Iterator[Table]:
    """Yield a table of the rows that compare scores, then a table of the rows that failed or were skipped."""
    rows = results.of("check")
    if rows.empty:
        return
    compared = rows[rows["status"].isin(["equal", "differs"])]
    if not compared.empty:
        yield Table(
            "check",
            "Group scores against the sums of the original toolkit's scores, on the same points",
            pd.DataFrame([_comparison(row) for row in compared.to_dict("records")]),
            keys=3,
            notes=[
                "Error: largest difference, relative to the largest score. MB: peak memory of the call. "
                "The paper compares no group score with its toolkit's own."
            ],
        )
    others = rows[~rows["status"].isin(["equal", "differs"])]
    if not others.empty:
        lines = [
            [row["setting"], row["toolkit"], row["method"], row["status"], str(row.get("reason") or "")]
            for row in others.to_dict("records")
        ]
        columns = ["Data / model", "Toolkit", "Method", "Status", "Reason"]
        frame = pd.DataFrame(lines, columns=columns)
        yield Table("check-skipped", "Checks that compared nothing, and why", frame, keys=len(columns))


def what_is_real(results: Results) -> str:
    """Return a sentence that says which data are real and which are made up."""
    stand_in = results.rows["stand_in"].map(lambda yes: bool(pd.notna(yes) and yes))
    made_up = list(dict.fromkeys(results.rows[stand_in]["data"]))
    real = [name for name in dict.fromkeys(results.rows["data"]) if name not in made_up]
    if not made_up:
        return f"All data are real: {', '.join(map(str, real))}."
    rest = f" Real: {', '.join(map(str, real))}." if real else ""
    return f"Made up, because no source could be reached: {', '.join(map(str, made_up))}.{rest}"


def source_table(results: Results) -> Table:
    """Return a table of every data set with its size and source; stand-ins are marked."""
    keys = ["setting", "scale", "epochs", "source", "stand_in"]
    rows = results.rows.drop_duplicates(["experiment", "train_points", "test_points", *keys])
    lines = []
    for values, some in rows.groupby(keys, sort=False, dropna=False):
        setting, scale, epochs, source, stand_in = values
        train, test = (
            ", ".join(_count(count) for count in sorted(some[points].dropna().unique(), reverse=True)) or "–"
            for points in ("train_points", "test_points")
        )
        lines.append(
            [
                setting, ", ".join(some["experiment"].unique()), scale or "–", train, test,
                _count(epochs), source or "–", "stand-in" if stand_in else "real",
            ]
        )  # fmt: skip
    columns = ["Data / model", "Used in", "Scale", "Training points", "Test points", "Epochs", "Source", "Kind"]
    return Table("sources", "Sizes and sources", pd.DataFrame(lines, columns=columns), keys=len(columns))


def _comparison(row: dict[str, Any]) -> dict[str, str]:
    return {
        "Data / model": row["setting"],
        "Toolkit": row["toolkit"],
        "Method": row["method"],
        "Points": _count(row["train_points"]),
        "Groups": _count(row["groups"]),
        "Result": row["status"],
        "Error": f"{row['error']:.1e}",
        "Allowed": f"{row['tolerance']:.0e}",
        "Original (MB)": _megabytes(row.get("peak_original")),
        "Groups (MB)": _megabytes(row.get("peak_groups")),
    }


def _count(number: float | None) -> str:
    return "–" if number is None or pd.isna(number) else f"{int(number):,}"


def _megabytes(count: float | None) -> str:
    return "–" if count is None or pd.isna(count) else f"{count / 2**20:,.0f}"
