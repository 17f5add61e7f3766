"""Tables of counterfactuals: how well predictions follow models that were really retrained."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from benchmarks.report.formats import Table, interval, plus_minus
from benchmarks.report.rows import grouping_title, mean_interval

_COLUMNS = ("pearson", "slope", "calibrated_mean", "calibrated_pearson", "calibrated_slope")


def what_if_tables(rows: pd.DataFrame) -> Iterator[Table]:
    """One line for every protocol, grouping and predictor, averaged over grouping seeds."""
    if rows.empty:
        return
    lines = []
    keys = ["setting", "protocol", "grouping", "group_size"]
    for (setting, protocol, grouping, size), some in rows.groupby(keys, sort=False):
        first = [setting, protocol, f"{grouping_title(grouping)} {int(size)}"]
        for method, line in some.groupby("method", sort=False):
            known = line[line["mean"].notna()]
            if known.empty:
                lines.append([*first, method, *["–"] * (1 + len(_COLUMNS))])
                continue
            cells = [interval(known["mean"].mean(), *mean_interval(known["interval"]))]
            for column in _COLUMNS:
                values = known[column].dropna() if column in known else pd.Series(dtype=float)
                cells.append("–" if values.empty else plus_minus(values.mean(), float("nan"), 2))
            lines.append([*first, method, *cells])
        for column, title in (("ceiling", "Ceiling"), ("additive_ceiling", "Best additive score")):
            values = some[column].dropna() if column in some else pd.Series(dtype=float)
            if not values.empty:
                text = plus_minus(values.astype(float).mean(), float("nan"), 2)
                lines.append([*first, title, text, *["–"] * len(_COLUMNS)])
    names = ["Pearson", "Slope", "LDS, calibrated", "Pearson, calibrated", "Slope, calibrated"]
    yield Table(
        "what-if",
        "Counterfactuals: predicted against retrained",
        pd.DataFrame(lines, columns=["Data / model", "Protocol", "Groups", "Predictor", "LDS", *names]),
        keys=3,
        notes=[
            "Spearman and Pearson correlation of predicted mean test losses with those of retrained models, and the "
            "slope of real on predicted losses, means over grouping seeds; in brackets the 95 % bootstrap interval of "
            "models. Calibrated: by `verify` with eight retrainings, compared on the others. Ceiling: how well "
            "retraining with other seeds does; best additive score: one fitted to the retrainings themselves."
        ],
    )
