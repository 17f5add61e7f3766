"""Tables of noisy labels: the paper's table with its numbers next to ours, then every grouping with the ROC AUC."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from benchmarks.names import GRAD_K_MEANS, SINGLE_POINTS
from benchmarks.report import paper
from benchmarks.report.formats import RUNTIME, STDERR, Table, plus_minus, size_names, three_digits
from benchmarks.report.rows import KEYS, data_model, lines_by_size, merged, of_sums, ordered, seed_count


def noisy_tables(rows: pd.DataFrame) -> Iterator[Table]:
    """Yield the paper's table (AUC / runtime by size of Grad-K-Means groups), then a table of every grouping."""
    if rows.empty:
        return
    sums = of_sums(rows)
    found = ordered(merged(sums, KEYS))
    roc = merged(sums, KEYS, "roc_values").set_index(list(KEYS))["mean"]
    sizes = sorted(found["group_size"].unique())
    grad = found[found["grouping"].isin([GRAD_K_MEANS, SINGLE_POINTS])]
    lines = []
    for (setting, method), some in grad.groupby(["setting", "method"], sort=False):
        cells = {
            row.group_size: f"{plus_minus(row.mean, row.stderr, 3)} / {three_digits(row.seconds_total)}"
            for row in some.itertuples()
        }
        lines.append([setting, method, "ours", *(cells.get(size, "–") for size in sizes)])
        theirs = paper.noisy(*data_model(rows, setting), method)
        if theirs:
            quoted = {size: f"{cell.auc:.3f} / {cell.seconds:g}" for size, cell in theirs.items()}
            lines.append([setting, method, "paper", *(quoted.get(size, "–") for size in sizes)])
    seeds = seed_count(found)
    noise = " and ".join(sorted({f"{100 * share:g} %" for share in rows["noise"]}))
    yield Table(
        "noisy",
        f"Noisy labels ({noise} flipped): AUC / runtime by size of Grad-K-Means groups",
        pd.DataFrame(lines, columns=["Data / model", "Attributor", "", *size_names(sizes)]),
        keys=3,
        notes=[f"AUC of mislabelled points found against points checked; {STDERR} ({seeds}); {RUNTIME}."],
    )

    def both(rows: pd.DataFrame) -> str:
        return f"{rows['mean'].iloc[0]:.3f} / {roc[tuple(rows[key].iloc[0] for key in KEYS)]:.3f}"

    wide = lines_by_size(found, ["setting", "method", "grouping"], both)
    yield Table(
        "noisy-groupings",
        "Noisy labels, every grouping: the paper's AUC / ordinary ROC AUC by group size",
        pd.DataFrame(wide, columns=["Data / model", "Attributor", "Grouping", *size_names(sizes)]),
        keys=3,
        notes=["The paper prints no ROC AUC, and its AUC for Grad-K-Means only (table above)."],
    )
