"""Tables of fidelity to real retraining: group LDS with its ceiling, and leave-group-out correlation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from benchmarks.report import paper
from benchmarks.report.formats import Table, interval, plus_minus, size_names
from benchmarks.report.rows import grouping_title, mean_interval, of_sums, ordered, with_ceiling


def lds_tables(rows: pd.DataFrame) -> Iterator[Table]:
    """LDS by group size, and the correlation with leaving groups out where it was run."""
    if rows.empty:
        return
    for mean, bounds, name, title, note in _FIDELITY:
        if mean not in rows:
            continue
        some = ordered(of_sums(rows[rows[mean].notna()]))
        sizes = sorted(some["group_size"].unique())
        lines = []
        for (setting, method, grouping), line in some.groupby(["setting", "method", "grouping"], sort=False):
            cells = {
                size: interval(one[mean].mean(), *mean_interval(one[bounds]))
                for size, one in line.groupby("group_size")
            }
            lines.append([setting, method, grouping_title(grouping), *(cells.get(size, "–") for size in sizes)])
        if name == "lds":
            lines += _ceilings(some, sizes)
        yield Table(
            name,
            title,
            pd.DataFrame(lines, columns=["Data / model", "Attributor", "Grouping", *size_names(sizes)]),
            keys=3,
            notes=[f"{note} {paper.LDS_NOTE}"],
        )


_FIDELITY = (
    (
        "mean", "interval", "lds", "Fidelity: group LDS by group size",
        "Spearman correlation of predicted test losses with those of models retrained on random halves of the groups; "
        "in brackets the 95 % bootstrap interval over models. Ceiling: how well retraining with other seeds does.",
    ),
    (
        "loo_mean", "loo_interval", "leave-group-out", "Fidelity: correlation with leaving out one group at a time",
        "Pearson correlation of importance with the real rise of the test loss; in brackets the 95 % bootstrap "
        "interval over groups. Where there are few enough groups to leave each one out.",
    ),
)  # fmt: skip
"""Column of the value, of its interval, name, title and note of the two tables of fidelity."""


def _ceilings(rows: pd.DataFrame, sizes: Sequence[float]) -> list[list[str]]:
    """What retraining with other seeds reaches, by setting, grouping and size: a line each where it is known."""
    table = with_ceiling(rows).pivot_table("ceiling", ["setting", "grouping"], "group_size", sort=False)
    table = table.reindex(columns=list(sizes))
    return [
        [setting, "Ceiling", grouping_title(grouping), *(plus_minus(value, np.nan, 2) for value in line)]
        for (setting, grouping), line in zip(table.index, table.to_numpy(), strict=True)
    ]
