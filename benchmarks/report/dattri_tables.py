"""dattri's public settings: LDS here beside the numbers dattri has published."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from benchmarks.report.formats import Table, interval, plus_minus, three_digits

_LR, _MLP = "LR (dattri)", "MLP (dattri)"
PUBLISHED = {
    _LR: {"IF, explicit Hessian": 0.80, "TRAK-50": 0.68, "TracIn": 0.33},
    _MLP: {"TRAK-50": 0.45, "TRAK-10": 0.33, "CG": 0.26, "TracIn": 0.15},
}
"""Read from dattri's charts, to two digits at best. Influence functions are those with the best of seven dampings."""


def dattri_tables(rows: pd.DataFrame) -> Iterator[Table]:
    """One table for both settings: every method here, then what dattri published and was not run here."""
    if rows.empty:
        return
    lines = []
    for setting, some in rows.groupby("setting", sort=False):
        published = dict(PUBLISHED.get(str(some["model"].iloc[0]), {}))
        for row in some.to_dict("records"):
            quoted = published.pop(row["method"].removeprefix("dattri "), None)
            cells = [interval(row["mean"], *row["interval"]), "–" if quoted is None else f"{quoted:.2f}"]
            lines.append([setting, row["method"], *cells, f"{row['models']:.0f}", three_digits(row["cpu_seconds"])])
        for method, value in published.items():
            lines.append([setting, f"dattri {method}", "not run", f"{value:.2f}", "–", "–"])
        ceilings = some["ceiling"].dropna() if "ceiling" in some else pd.Series(dtype=float)
        if len(ceilings):
            lines.append([setting, "Ceiling", plus_minus(float(ceilings.iloc[0]), float("nan"), 2), "–", "–", "–"])
    counts = rows.iloc[0]
    yield Table(
        "dattri",
        "dattri's public settings: LDS of single points, mean over test points",
        pd.DataFrame(lines, columns=["Data / model", "Method", "LDS here", "Published", "Models", "CPU s"]),
        keys=1,
        notes=[
            f"{counts['train_points']:.0f} training and {counts['test_points']:.0f} test points, "
            f"{counts['subsets']:.0f} random halves, {counts['seeds']:.0f} models for each; in brackets the 95 % "
            "bootstrap interval over halves. Methods named dattri are its original code. CPU seconds include training "
            "the models explained, unless they were there. Published: from dattri's charts; halves and seeds differ, "
            "and its influence functions have the best damping by LDS. Ceiling: how well one seed's models rank those "
            "of the other."
        ],
    )
