"""The table of counterfactuals: how well predictions follow models that were really retrained, in rank and in size."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from benchmarks.names import CG, INFLUENCE, INFLUENCE_3, REFITS, TRACIN, TRIVIAL, WHAT_IF, WHAT_IF_3
from benchmarks.report.formats import Table, interval, plus_minus
from benchmarks.report.lds_tables import CEILING_NOTE, CEILINGS
from benchmarks.report.rows import grouping_title, mean_interval, of_sums

SHOWN = (
    WHAT_IF,
    WHAT_IF_3,
    *(name for name in REFITS if name != WHAT_IF),
    TRACIN,
    CG,
    INFLUENCE,
    INFLUENCE_3,
    *TRIVIAL,
)
_COLUMNS = ("pearson", "slope", "calibrated_mean", "calibrated_pearson", "calibrated_slope")
_NAMES = ("Pearson", "Slope", "LDS, verified", "Pearson, verified", "Slope, verified")


def what_if_tables(rows: pd.DataFrame) -> Iterator[Table]:
    """One line for every protocol, grouping and predictor, where what-if was asked."""
    if rows.empty or WHAT_IF not in set(rows["method"]):
        return
    lines = []
    keys = ["setting", "protocol", "grouping", "group_size"]
    for (setting, protocol, grouping, size), some in of_sums(rows).groupby(keys, sort=False):
        if WHAT_IF not in set(some["method"]):
            continue
        first = [setting, protocol, f"{grouping_title(grouping)} {int(size)}"]
        for method in SHOWN:
            line = some[some["method"] == method]
            if not line.empty:
                lines.append([*first, method, *_cells(line)])
        for column, title in CEILINGS:
            values = some[column].dropna() if column in some else pd.Series(dtype=float)
            if not values.empty:
                text = plus_minus(values.astype(float).mean(), float("nan"), 2)
                lines.append([*first, title, text, "", *["–"] * len(_COLUMNS)])
    yield Table(
        "what-if",
        "Counterfactuals: predicted against retrained",
        pd.DataFrame(lines, columns=["Data / model", "Protocol", "Groups", "Predictor", "LDS", "By grouping", *_NAMES]),
        keys=3,
        notes=[
            "LDS and Pearson: Spearman and Pearson correlation of predicted mean test losses with those of retrained "
            "models; slope: of real on predicted losses. Means over grouping seeds, each of which stands under By "
            "grouping; in brackets the 95 % bootstrap interval over models. Verified: after `verify` with eight "
            f"retrainings, compared on the others. {CEILING_NOTE}"
        ],
    )


def _cells(line: pd.DataFrame) -> list[str]:
    """LDS with its interval, its value for every grouping seed, and the other columns."""
    known = line[line["mean"].notna()].sort_values("grouping_seed")
    if known.empty:
        return ["–", "", *["–"] * len(_COLUMNS)]
    each = " ".join(f"{value:.2f}" for value in known["mean"])
    cells = [interval(known["mean"].mean(), *mean_interval(known["interval"])), each if len(known) > 1 else ""]
    for column in _COLUMNS:
        values = known[column].dropna() if column in known else pd.Series(dtype=float)
        cells.append("–" if values.empty else plus_minus(values.astype(float).mean(), float("nan"), 2))
    return cells
