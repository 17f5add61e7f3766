"""Answers to "Which method should I use?", one for each need, from the rows of the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from benchmarks.check.table import passed
from benchmarks.compare.table import HEADLINE_SIZE, times
from benchmarks.names import BASELINES, EXACT_MODE, PER_POINT, TRIVIAL
from benchmarks.report.formats import Table, three_digits
from benchmarks.report.rows import Results, of_protocol, of_sums

_NEARLY = 0.9
"""A method follows retraining nearly as well as the best if its LDS is at least this share of the best LDS."""
_NO_CHOICE = (*BASELINES, *TRIVIAL, PER_POINT)


@dataclass(frozen=True)
class Need:
    """What a user wants, what to use, and the numbers that support this.

    Attributes:
        want: the need in a sentence.
        short: the need in a few words.
        use: the method to use.
        because: the numbers measured in this run.
    """

    want: str
    short: str
    use: str
    because: str


def advice(results: Results) -> list[Need]:
    """Return all needs that the rows can answer."""
    return [*_faithful(results), *_noisy(results), *_own_toolkit(results)]


def advice_table(results: Results) -> Table | None:
    """Return the needs as a table, or None if no need can be answered."""
    needs = advice(results)
    if not needs:
        return None
    frame = pd.DataFrame([[need.want, need.use, need.because] for need in needs], columns=["I want", "Use", "Because"])
    notes = ["From the rows of this report alone: a larger run, or other data, may say something else."]
    return Table("advice", "What the rows of this report say", frame, keys=3, notes=notes)


def _faithful(results: Results) -> Iterator[Need]:
    """Yield the method that follows retraining best, the cheapest one nearly as good, and the cheapest of all."""
    rows = of_protocol(results.of("lds"))
    if rows.empty or not {"mean", "seconds_total"} <= set(rows):
        return
    rows = of_sums(rows[rows["mean"].notna()])
    rows = rows[(rows["group_size"] > 1) & ~rows["method"].isin(_NO_CHOICE)]
    found = rows.groupby("method", sort=False)[["mean", "seconds_total"]].mean().dropna()
    if found.empty:
        return
    where = f"mean over groupings and sizes, {', '.join(rows['setting'].unique())}"
    best = str(found["mean"].idxmax())
    yield Need("scores of groups that follow real retraining best", "most faithful", best, _numbers(found, best, where))
    near = found[found["mean"] >= _NEARLY * found["mean"].max()]
    cheap = str(near["seconds_total"].idxmin())
    if cheap != best:
        yield Need(
            "nearly the same for less time", "nearly as faithful and cheaper", cheap, _numbers(found, cheap, where)
        )
    quick = str(found["seconds_total"].idxmin())
    if quick not in (best, cheap):
        yield Need("a first look at once", "quickest", quick, _numbers(found, quick, where))


def _numbers(found: pd.DataFrame, method: str, where: str) -> str:
    row = found.loc[method]
    return f"LDS {row['mean']:.2f} in {three_digits(row['seconds_total'])} CPU s ({where})"


def _noisy(results: Results) -> Iterator[Need]:
    rows = results.of("noisy")
    if rows.empty or "mean" not in rows:
        return
    rows = of_sums(rows)
    rows = rows[~rows["method"].isin(_NO_CHOICE)]
    by_method = rows[rows["group_size"] > 1].groupby("method", sort=False)["mean"].mean()
    if by_method.empty:
        return
    best = str(by_method.idxmax())
    where = ", ".join(rows["setting"].unique())
    yield Need(
        "groups with mislabelled points first", "for wrong labels", best,
        f"area under the detection curve {by_method[best]:.2f}, chance is 0.50 ({where})",
    )  # fmt: skip


def _own_toolkit(results: Results) -> Iterator[Need]:
    """Yield the speed-up of each toolkit's drop-in, for users who stay with their toolkit."""
    checks, cells = results.of("check"), results.speed_ups
    if cells.empty:
        return
    equal = not checks.empty and passed(checks.to_dict("records"))
    for toolkit, some in cells.groupby("toolkit", sort=False):
        if toolkit == "core":
            continue
        middle = some.groupby("method", sort=False)["speed_up"].median()
        gains = "; ".join(f"{method} {times(value)}" for method, value in middle.sort_values(ascending=False).items())
        exact = "" if (some["mode"] == EXACT_MODE).all() else ' (where it has a Fisher, with fisher="exact")'
        scores = f"the same scores{exact}, " if equal else ""
        tasks = len(some["setting"].unique())
        yield Need(
            f"to stay with {toolkit}", f"with {toolkit}", f"ggda_{str(toolkit).lower()} in its place",
            f"{scores}faster by default (one property, groups of {HEADLINE_SIZE}, median over {tasks} "
            f"task{'s' * (tasks > 1)}): {gains}",
        )  # fmt: skip
