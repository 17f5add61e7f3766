"""Tables that answer questions of the paper's reviewers.

They show per-point scores at the cost of groups, sum compared with mean, learning rates, and grouping seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from benchmarks.names import BASELINES, GRAD_K_MEANS, PER_POINT, RATES, SINGLE_POINTS, TRACIN
from benchmarks.report.formats import STDERR, Table, percent, plus_minus, size_names, three_digits
from benchmarks.report.rows import KEYS, Results, completed, lines_by_size, merged, of_protocol, ordered

_NO_NUMBERS = "The paper has no such numbers."
_COMPARED_SIZES = (16, 64, 256)


def review_tables(results: Results) -> Iterator[Table]:
    """Yield all tables that the rows allow."""
    found = measures(results)
    if not found.empty:
        yield from _per_point(found)
        uneven = found[found["grouping"] != "Random"]  # random groups all have the same size
        yield from _pairs(
            uneven[uneven["aggregation"] == "sum"],
            uneven[uneven["aggregation"] == "mean"],
            "review-aggregation",
            "Groups ordered by the sum of their members' scores, or by the mean",
            "sum / mean",
        )
        sums = found[found["aggregation"] == "sum"]
        yield from _pairs(
            sums[sums["method"] == TRACIN],
            sums[sums["method"] == RATES].assign(method=TRACIN),
            "review-learning-rates",
            "TracIn at the final checkpoint, or over checkpoints weighted by their learning rates",
            "final / weighted",
        )
        yield from _grouping_seeds(found)


def measures(results: Results) -> pd.DataFrame:
    """Return one line per setting, method, grouping, size, aggregation and measure.

    Experiments that remove points are shown for one share of removed points.
    """
    parts = []
    for experiment, name, better in (
        ("retraining", "accuracy, top {} removed", "lower"),
        ("pruning", "accuracy, last {} removed", "higher"),
        ("noisy", "noisy labels, AUC", "higher"),
        ("lds", "LDS", "higher"),
    ):
        rows = completed(results.of(experiment))
        rows = of_protocol(rows[rows["mean"].notna()]) if experiment == "lds" and not rows.empty else rows
        rows = rows[~rows["method"].isin(BASELINES)] if not rows.empty else rows
        if rows.empty:
            continue
        if "fraction" in rows:
            shares = sorted(rows["fraction"].unique())
            share = shares[-1] if experiment == "retraining" else shares[len(shares) // 2]
            rows, name = rows[rows["fraction"] == share], name.format(f"{100 * share:g} %")
        parts.append(merged(rows, KEYS).assign(measure=f"{name} ({better} is better)"))
    return ordered(pd.concat(parts, ignore_index=True)) if parts else pd.DataFrame()


def _per_point(found: pd.DataFrame) -> Iterator[Table]:
    """Yield a table of single-point scores at the cost of groups, next to TracIn of single points and of groups."""
    found = found[found["aggregation"] == "sum"]
    settings = found.loc[found["method"] == PER_POINT, "setting"].unique()
    names = list(dict.fromkeys(found["measure"]))
    lines: list[list[str]] = []
    for setting in settings:
        here = found[found["setting"] == setting]
        candidates = [("single points, per-sample gradients", TRACIN, SINGLE_POINTS, 1)]
        candidates += [("single points, directional", PER_POINT, SINGLE_POINTS, 1)]
        candidates += [(f"{GRAD_K_MEANS} groups of {size}", TRACIN, GRAD_K_MEANS, size) for size in _COMPARED_SIZES]
        for label, method, grouping, size in candidates:
            some = here[(here["method"] == method) & (here["grouping"] == grouping) & (here["group_size"] == size)]
            if some.empty:
                continue
            cells = {row["measure"]: _shown(row) for row in some.to_dict("records")}
            seconds = some["seconds_total"].mean() if "seconds_total" in some else float("nan")
            lines.append([setting, label, three_digits(seconds), *(cells.get(name, "–") for name in names)])
    if lines:
        yield Table(
            "review-per-point",
            "Does grouping earn its place for one property? TracIn of single points at the price of groups",
            pd.DataFrame(lines, columns=["Data / model", "TracIn of", "CPU s", *names]),
            keys=2,
            notes=[f"CPU seconds, grouping included; {STDERR}. {_NO_NUMBERS}"],
        )


def _pairs(one: pd.DataFrame, other: pd.DataFrame, name: str, title: str, variants: str) -> Iterator[Table]:
    """Yield a table by group size with two variants in one cell, for all cases in which both were run."""
    both = one.merge(other, on=["setting", "method", "grouping", "group_size", "measure"], suffixes=("", "_other"))
    rows = both.assign(stderr=float("nan")).to_dict("records")
    cells = [f"{_shown(row)} / {_shown(row | {'mean': row['mean_other']})}" for row in rows]
    note = f"In every cell: {variants}. {_NO_NUMBERS}"
    yield from _by_size(both.assign(cell=cells), name, f"{title} ({variants})", note)


def _grouping_seeds(found: pd.DataFrame) -> Iterator[Table]:
    """Yield a table that shows how much a result depends on the seed of the grouping."""
    several = found[(found["grouping_seeds"] > 1) & (found["aggregation"] == "sum")]
    cells = [_shown(row | {"stderr": row["spread"]}) for row in several.to_dict("records")]
    count = int(several["grouping_seeds"].max()) if len(several) else 0
    note = f"Mean ± standard deviation of {count} groupings with other seeds, same models. {_NO_NUMBERS}"
    title = "Grouping seeds: how far results of different groupings lie apart"
    yield from _by_size(several.assign(cell=cells), "review-grouping-seeds", title, note)


def _by_size(found: pd.DataFrame, name: str, title: str, note: str) -> Iterator[Table]:
    """Yield a table of cells by group size, with a line for every setting, measure, method and grouping."""
    if found.empty:
        return
    sizes = sorted(found["group_size"].unique())
    order = {key: {value: at for at, value in enumerate(dict.fromkeys(found[key]))} for key in ("setting", "measure")}
    found = found.sort_values(["setting", "measure"], key=lambda column: column.map(order[column.name]), kind="stable")
    keys = ["setting", "measure", "method", "grouping"]
    lines = lines_by_size(found, keys, lambda rows: rows["cell"].iloc[-1])
    columns = ["Data / model", "Measure", "Attributor", "Grouping", *size_names(sizes)]
    yield Table(name, title, pd.DataFrame(lines, columns=columns), keys=4, notes=[note])


def _shown(row: dict[str, Any]) -> str:
    if row["measure"].startswith("accuracy"):
        return percent(row["mean"], row["stderr"])
    return plus_minus(row["mean"], row["stderr"], 3)
