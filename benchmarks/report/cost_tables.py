"""Tables of cost: CPU seconds of grouping, gradients, curvature and scoring, next to the paper's runtime."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from benchmarks.names import AVERAGED, BASELINES, FROM_START, GRAD_K_MEANS, REFITS, SINGLE_POINTS
from benchmarks.report import paper
from benchmarks.report.formats import Table, three_digits
from benchmarks.report.rows import PARTS, SECONDS, Results, data_model, grouping_title, of_sums, ordered

DEFAULT_MODE = "default_mode_seconds"


def cost_tables(results: Results) -> Iterator[Table]:
    """Yield a table of single points and Grad-K-Means groups of 256, then a table of every grouping and size."""
    costs = cost(results)
    if costs.empty:
        return
    short = costs[(costs["group_size"] == 1) | ((costs["grouping"] == GRAD_K_MEANS) & (costs["group_size"] == 256))]
    if not short.empty:
        yield _table("cost-256", "Attribution cost in CPU seconds: single points, Grad-K-Means of 256", short, results)
    yield _table("cost", "Attribution cost in CPU seconds, every grouping", costs, results)


def _table(name: str, title: str, costs: pd.DataFrame, results: Results) -> Table:
    lines = []
    for row in costs.itertuples():
        theirs = paper.noisy(*data_model(results.rows, row.setting), row.method)
        quoted = theirs.get(row.group_size) if row.grouping in (GRAD_K_MEANS, SINGLE_POINTS) else None
        lines.append(
            [
                row.setting, row.method, grouping_title(row.grouping), f"{row.group_size:g}",
                *(three_digits(getattr(row, f"seconds_{part}")) for part in PARTS),
                three_digits(row.seconds_total),
                three_digits(row.faster, "×"),
                three_digits(row.faster_ungrouped, "×"),
                three_digits(row.default_mode / row.seconds_total, "×"),
                "–" if quoted is None else f"{quoted.seconds:g}",
                "–" if quoted is None or row.group_size == 1 else three_digits(theirs[1].seconds / quoted.seconds, "×"),
            ]
        )  # fmt: skip
    columns = [
        "Data / model", "Attributor", "Grouping", "Group size", *(part.capitalize() for part in PARTS), "Total",
        "Faster than size 1", "… without grouping", "Faster than default mode", "Paper's total", "Paper: faster",
    ]  # fmt: skip
    notes = [
        "Means over the experiments' runs. Size 1 is the vectorised per-sample way. Default mode: Captum's TracInCP as "
        "it comes, one backward pass per point. The paper's seconds are those of its noisy-label tables."
    ]
    return Table(name, title, pd.DataFrame(lines, columns=columns), keys=4, notes=notes)


def cost(results: Results) -> pd.DataFrame:
    """Return mean CPU seconds of each part by setting, method, grouping and size, and the speed-up over size 1."""
    if "seconds_total" not in results.rows:
        return pd.DataFrame()
    rows = of_sums(results.rows[results.rows["seconds_total"].notna()])
    refitted = (*BASELINES, *REFITS, *AVERAGED, FROM_START)  # their time is per choice of groups
    rows = rows[~rows["method"].isin(refitted)]
    keys = ["setting", "method", "grouping", "group_size"]
    found = ordered(rows.groupby(keys, sort=False)[list(SECONDS)].mean().reset_index())
    single = found[found["group_size"] == 1].groupby(["setting", "method"])["seconds_total"].first()
    base = pd.Series([single.get((row.setting, row.method), np.nan) for row in found.itertuples()], index=found.index)
    base = base.where(found["group_size"] > 1)
    found["faster"] = base / found["seconds_total"]
    found["faster_ungrouped"] = base / (found["seconds_total"] - found["seconds_grouping"])
    if DEFAULT_MODE in rows:
        default = rows[rows[DEFAULT_MODE].notna()].groupby(["setting", "method"])[DEFAULT_MODE].mean()
        found["default_mode"] = [default.get((row.setting, row.method), np.nan) for row in found.itertuples()]
    else:
        found["default_mode"] = np.nan
    return found
