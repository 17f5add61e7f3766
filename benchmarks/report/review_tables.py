"""Tables that answer the paper's reviewers: per-point scores at the price of groups, sum against mean, learning rates,
grouping seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from benchmarks.report.formats import Table, percent, plus_minus, three_digits
from benchmarks.report.rows import BASELINES, KEYS, PER_POINT, Results, completed, grouping_title, merged, ordered
from benchmarks.report.wording import STDERR

TRACIN, RATES, BEST = "TracIn", "TracIn (learning rates)", "Grad-K-Means"
_NO_NUMBERS = "The paper has no such numbers."
_COMPARED_SIZES = (16, 64, 256)


def review_tables(results: Results) -> Iterator[Table]:
    """All of them that the rows allow."""
    found = measures(results)
    if not found.empty:
        yield from _per_point(found)
        uneven = found[found["grouping"] != "Random"]  # random groups are all of one size
        yield from _pairs(
            uneven[uneven["aggregation"] == "sum"],
            uneven[uneven["aggregation"] == "mean"],
            "review-aggregation",
            "Sum against mean: groups ordered by the sum of their members' scores, or by the mean",
            ("Sum", "Mean"),
        )
        yield from _pairs(
            found[found["method"] == TRACIN],
            found[found["method"] == RATES].assign(method=TRACIN),
            "review-learning-rates",
            "TracIn at the final checkpoint, and over checkpoints weighted by their learning rates",
            ("Final checkpoint", "Learning rates"),
        )
        yield from _grouping_seeds(found)


def measures(results: Results) -> pd.DataFrame:
    """One line per setting, method, grouping, size, aggregation and measure; one removal of each experiment."""
    parts = []
    for experiment, name, values, better in (
        ("retraining", "accuracy, top {} removed", "values", "lower"),
        ("pruning", "accuracy, last {} removed", "values", "higher"),
        ("noisy", "noisy labels, AUC", "values", "higher"),
        ("lds", "LDS", "values", "higher"),
    ):
        rows = completed(results.of(experiment))
        rows = rows[~rows["method"].isin(BASELINES)] if not rows.empty else rows
        if rows.empty:
            continue
        if "fraction" in rows:
            shares = sorted(rows["fraction"].unique())
            share = shares[-1] if experiment == "retraining" else shares[len(shares) // 2]
            rows, name = rows[rows["fraction"] == share], name.format(f"{100 * share:g} %")
        parts.append(merged(rows, KEYS, values).assign(measure=name, better=better))
    return ordered(pd.concat(parts, ignore_index=True)) if parts else pd.DataFrame()


def _per_point(found: pd.DataFrame) -> Iterator[Table]:
    """Scores of single points at the price of groups, beside TracIn of single points and of groups."""
    found = found[found["aggregation"] == "sum"]
    settings = found.loc[found["method"] == PER_POINT, "setting"].unique()
    names = list(dict.fromkeys(found["measure"]))
    lines: list[list[str]] = []
    for setting in settings:
        here = found[found["setting"] == setting]
        candidates = [("single points, per-sample gradients", TRACIN, "none", 1)]
        candidates += [("single points, directional", PER_POINT, "none", 1)]
        candidates += [(f"{BEST} groups of {size}", TRACIN, BEST, size) for size in _COMPARED_SIZES]
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
            pd.DataFrame(lines, columns=["Data / model", "TracIn of", "CPU s", *_titles(found, names)]),
            keys=2,
            notes=[f"CPU seconds, grouping included; {STDERR}. {_NO_NUMBERS}"],
        )


def _pairs(one: pd.DataFrame, other: pd.DataFrame, name: str, title: str, columns: tuple[str, str]) -> Iterator[Table]:
    """Two variants side by side wherever both were run."""
    keys = ["setting", "method", "grouping", "group_size", "measure"]
    both = one.merge(other, on=keys, suffixes=("", "_other"))
    if both.empty:
        return
    lines = []
    for row in both.to_dict("records"):
        variant = {field: row[f"{field}_other"] for field in ("mean", "stderr")}
        label = f"{row['measure']} ({row['better']} is better)"
        where = [row["setting"], label, row["method"], grouping_title(row["grouping"]), f"{row['group_size']:g}"]
        lines.append([*where, _shown(row), _shown(row | variant)])
    header = ["Data / model", "Measure", "Attributor", "Grouping", "Group size", *columns]
    frame = pd.DataFrame(lines, columns=header).sort_values(
        ["Data / model", "Measure"], key=lambda column: column.map({v: at for at, v in enumerate(column.unique())}),
        kind="stable",
    )  # fmt: skip
    yield Table(name, title, frame.reset_index(drop=True), keys=5, notes=[f"{STDERR}. {_NO_NUMBERS}"])


def _grouping_seeds(found: pd.DataFrame) -> Iterator[Table]:
    """How much a result depends on the seed of the grouping."""
    several = found[(found["grouping_seeds"] > 1) & (found["aggregation"] == "sum")]
    if several.empty:
        return
    lines = []
    for row in several.to_dict("records"):
        scale, digits = (100, 1) if row["measure"].startswith("accuracy") else (1, 3)
        lines.append(
            [
                row["setting"], row["measure"], row["method"], row["grouping"], f"{row['group_size']:g}", _shown(row),
                plus_minus(scale * row["spread"], float("nan"), digits), str(row["grouping_seeds"]),
            ]
        )  # fmt: skip
    header = ["Data / model", "Measure", "Attributor", "Grouping", "Group size"]
    frame = pd.DataFrame(lines, columns=[*header, "Mean", "Standard deviation over groupings", "Groupings"])
    frame = frame.sort_values(["Data / model", "Measure"], kind="stable").reset_index(drop=True)
    title = "Grouping seeds: how far results of different groupings lie apart"
    yield Table("review-grouping-seeds", title, frame, keys=5, notes=[f"{STDERR}. {_NO_NUMBERS}"])


def _titles(found: pd.DataFrame, names: list[str]) -> list[str]:
    better = found.drop_duplicates("measure").set_index("measure")["better"]
    return [f"{name} ({better[name]} is better)" for name in names]


def _shown(row: dict[str, Any]) -> str:
    if row["measure"].startswith("accuracy"):
        return percent(row["mean"], row["stderr"])
    return plus_minus(row["mean"], row["stderr"], 3)
