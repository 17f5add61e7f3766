"""The three small bar charts at the top of the page: same scores? how much faster? how faithful?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.compare.table import HEADLINE_SIZE, times
from benchmarks.report.fidelity import fidelity
from benchmarks.report.rows import Results


@dataclass(frozen=True)
class Bar:
    """One bar: its name, its length and the position of its mark as shares of the width, and the number next to it."""

    name: str
    share: float
    text: str
    mark: float | None = None


@dataclass(frozen=True)
class Chart:
    """A question with its answer, as a number and as bars."""

    question: str
    answer: str
    bars: list[Bar]
    caption: str
    good: bool = False


def charts(results: Results) -> list[Chart]:
    """Return the charts that have rows."""
    return [chart for chart in (_equal(results), _faster(results), _faithful(results)) if chart is not None]


def _equal(results: Results) -> Chart | None:
    rows = results.of("check")
    if rows.empty:
        return None
    equal = rows["status"] == "equal"
    bars = [
        Bar(str(name), float(some.mean()), f"{int(some.sum())} of {len(some)}")
        for name, some in equal.groupby(rows["toolkit"], sort=False)
    ]
    caption = "Group scores against the sums of the original's scores, by toolkit, over all data sets and models."
    return Chart("Same scores?", f"{int(equal.sum())} of {len(rows)} equal", bars, caption, good=True)


def _faster(results: Results) -> Chart | None:
    cells = results.speed_ups
    if cells.empty:
        return None
    middle = cells.groupby("method", sort=False)["speed_up"].median().sort_values(ascending=False)
    largest = max(math.log10(middle.max()), 1e-9)
    bars = [Bar(str(name), max(0.0, math.log10(value) / largest), times(value)) for name, value in middle.items()]
    answer = f"{times(cells['speed_up'].median())} in the median"
    caption = f"One property, groups of {HEADLINE_SIZE}; median over tasks; logarithmic, an empty bar is no gain."
    return Chart("How much faster?", answer, bars, caption)


def _faithful(results: Results) -> Chart | None:
    found = fidelity(results)
    if found is None:
        return None
    mark = None if found.ceiling is None else min(1.0, max(0.0, found.ceiling))
    bars = [Bar(name, min(1.0, max(0.0, value)), f"{value:.2f}", mark) for name, value in found.by_method.items()]
    best = next(iter(found.by_method.values()))
    limit = "" if mark is None else " The line is what retraining with other seeds reaches."
    caption = f"Rank correlation with real retraining (LDS): {found.question}. Higher is better.{limit}"
    return Chart("How faithful?", f"LDS {best:.2f}", bars, caption)
