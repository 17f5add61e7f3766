"""One sentence for each section of the page, which sums up its tables and figures."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from benchmarks.compare.table import HEADLINE_SIZE, chosen, times
from benchmarks.names import BASELINES, NO_REMOVAL, PER_POINT, RANDOM_REMOVAL, SINGLE_POINTS, TEST_POINTS
from benchmarks.report.cost_tables import cost
from benchmarks.report.fidelity import fidelity
from benchmarks.report.rows import Results, of_sums

NOTHING = ""


def check(results: Results) -> str:
    """Say how many comparisons are equal, and how large the largest difference is."""
    rows = results.of("check")
    compared = rows[rows["status"].isin(["equal", "differs"])] if not rows.empty else rows
    if compared.empty:
        return NOTHING
    equal, worst = int((compared["status"] == "equal").sum()), compared["error"].max()
    return (
        f"{equal} of {len(compared)} comparisons are equal: the largest difference is {worst:.0e} of the largest "
        f"score, and {compared['tolerance'].max():.0e} is allowed."
    )


def speed(results: Results) -> str:
    """Give the median speed-up for one property by toolkit, and for test points."""
    cells = results.speed_ups
    if cells.empty:
        return NOTHING
    toolkits = ", ".join(
        f"{name} {times(some.median())}" for name, some in cells.groupby("toolkit", sort=False)["speed_up"]
    )
    tests = [
        cell["speed_up"]
        for row in results.of("speed").to_dict("records")
        if row["status"] == "measured" and row["question"] == TEST_POINTS
        for cell in chosen(row["cells"])
        if cell["group_size"] == HEADLINE_SIZE
    ]
    more = (
        f" For test points, each for itself, the median is {times(float(pd.Series(tests).median()))}." if tests else ""
    )
    return f"For one property and groups of {HEADLINE_SIZE}, in the median: {toolkits}.{more}"


def retraining(results: Results) -> str:
    """Give the accuracy without the most important points, compared with removing random points."""
    return _removal(results, "retraining", "most", "lower")


def pruning(results: Results) -> str:
    """Give the accuracy without the least important points, compared with removing random points."""
    return _removal(results, "pruning", "least", "higher")


def _removal(results: Results, experiment: str, which: str, better: str) -> str:
    rows = results.of(experiment)
    if rows.empty:
        return NOTHING
    rows = of_sums(rows)
    rows = rows[rows["fraction"].isin([0.0, rows["fraction"].max()])]
    means = rows.groupby("method", sort=False)["mean"].mean()
    attributed = rows[~rows["method"].isin(BASELINES)]
    grouped = attributed[attributed["group_size"] > 1]["mean"].mean()
    single = attributed[attributed["group_size"] == 1]["mean"].mean()
    parts = [("groups", grouped), ("single points", single), ("random points", means.get(RANDOM_REMOVAL, float("nan")))]
    said = ", ".join(f"{name} {100 * value:.1f} %" for name, value in parts if pd.notna(value))
    none = means.get(NO_REMOVAL)
    return (
        f"Test accuracy after retraining without the {which} important {100 * rows['fraction'].max():.0f} % "
        f"({better} is better), mean over all methods: {said}"
        + ("." if none is None else f"; without removal {100 * none:.1f} %.")
    )


def noisy(results: Results) -> str:
    """Say how much better than chance wrong labels are found."""
    rows = results.of("noisy")
    if rows.empty:
        return NOTHING
    rows = of_sums(rows)
    rows = rows[~rows["method"].isin(PER_POINT_AND_BASELINES)]
    single = rows[rows["group_size"] == 1]["mean"].mean()
    grouped = rows[rows["group_size"] > 1]["mean"].mean()
    parts = [
        f"{name} {value:.2f}" for name, value in (("single points", single), ("groups", grouped)) if pd.notna(value)
    ]
    return f"Wrong labels are found earlier than by chance (0.50), mean over all methods: {', '.join(parts)}."


def lds(results: Results) -> str:
    """Give the LDS of every method, the best first, and the ceiling."""
    found = fidelity(results)
    if found is None:
        return NOTHING
    values = ", ".join(f"{name} {value:.2f}" for name, value in found.by_method.items())
    limit = "" if found.ceiling is None else f"; ceiling {found.ceiling:.2f}"
    return f"Rank correlation with real retraining (higher is better), {found.question}: {values}{limit}."


def costs(results: Results) -> str:
    """Say how much less the largest groups cost than single points."""
    found = cost(results)
    if found.empty:
        return NOTHING
    largest = found[found["group_size"] == found["group_size"].max()]
    faster = largest[largest["grouping"] != SINGLE_POINTS]["faster"].median()
    if pd.isna(faster):
        return NOTHING
    size = f"{largest['group_size'].iloc[0]:g}"
    return f"Groups of {size} cost {times(faster)} less than single points in the median, grouping included."


PER_POINT_AND_BASELINES = (*BASELINES, PER_POINT)
OF_SECTION: dict[str, Callable[[Results], str]] = {
    "check": check,
    "speed": speed,
    "retraining": retraining,
    "pruning": pruning,
    "noisy": noisy,
    "lds": lds,
    "cost": costs,
}
"""First prefix of a section's tables → function that makes its sentence, which is empty without rows."""
