"""The table of dattri's public settings: our LDS next to the numbers that dattri has published."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from benchmarks.report.formats import Table, interval, plus_minus, three_digits
from benchmarks.report.rows import known

_LR, _MLP = "LR (dattri)", "MLP (dattri)"
PUBLISHED = {
    _LR: {"IF, explicit Hessian": 0.80, "TRAK-50": 0.68, "TracIn": 0.33},
    _MLP: {"TRAK-50": 0.45, "TRAK-10": 0.33, "CG": 0.26, "TracIn": 0.15},
}
"""Read from dattri's charts, to two digits at best. Influence functions have the best of seven dampings."""

MODELS = 50  # costs are compared with training this many models
_COLUMNS = ["Data / model", "Method", "LDS here", "Published", "Models", "Training s", "Scores s", "Cost"]


def dattri_tables(rows: pd.DataFrame) -> Iterator[Table]:
    """Yield one table for both settings: every method run here, then the methods that dattri published and we did not
    run."""
    if rows.empty:
        return
    lines = []
    for setting, some in rows.groupby("setting", sort=False):
        published = dict(PUBLISHED.get(str(some["model"].iloc[0]), {}))
        for row in some.to_dict("records"):
            quoted = published.pop(row["method"].removeprefix("dattri "), None)
            cells = [interval(row["mean"], *row["interval"]), "–" if quoted is None else f"{quoted:.2f}"]
            seconds = row["training_seconds"], row["cpu_seconds"]
            share = f"{sum(seconds) / (MODELS * row['seconds_of_half']):.2f}"
            lines.append([setting, row["method"], *cells, f"{row['models']:.0f}", *map(three_digits, seconds), share])
        for method, value in published.items():
            lines.append([setting, f"dattri {method}", "not run", f"{value:.2f}", *["–"] * 4])
        ceilings = known(some, "ceiling")
        if len(ceilings):
            lines.append([setting, "Ceiling", plus_minus(ceilings.iloc[0], float("nan"), 2), *["–"] * 5])
    counts = rows.iloc[0]
    yield Table(
        "dattri",
        "dattri's public settings: LDS of single points, mean over test points",
        pd.DataFrame(lines, columns=_COLUMNS),
        keys=1,
        notes=[
            f"{counts['train_points']:.0f} training and {counts['test_points']:.0f} test points, "
            f"{counts['subsets']:.0f} random halves, {counts['seeds']:.0f} models for each; in brackets the 95 % "
            "bootstrap interval over halves. Methods named dattri are its original code. CPU seconds of training the "
            f"models explained and of the scores; cost: both, as a share of training {MODELS} models on halves, "
            "which TRAK-50 begins with. Published: from dattri's charts; halves and seeds differ, "
            "and its influence functions have the best damping by LDS. Ceiling: how well one seed's models rank those "
            "of the other."
        ],
    )
