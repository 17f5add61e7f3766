"""Fidelity in one picture: the LDS of every method for one setting and grouping, the one with the most methods."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.compare.table import HEADLINE_SIZE
from benchmarks.names import RANDOM, SINGLE_POINTS, TRIVIAL
from benchmarks.report.rows import Results, of_protocol, of_sums, with_ceiling


@dataclass(frozen=True)
class Fidelity:
    """How well scores of groups follow real retraining.

    Attributes:
        setting: data set and model.
        grouping: how the groups were made.
        group_size: mean size of the groups.
        by_method: method → mean LDS; the best method comes first.
        ceiling: LDS of retraining with other seeds; None if it was not measured.
    """

    setting: str
    grouping: str
    group_size: int
    by_method: dict[str, float]
    ceiling: float | None

    @property
    def question(self) -> str:
        """Words that say what was scored."""
        groups = "single points" if self.grouping == SINGLE_POINTS else f"{self.grouping} groups of {self.group_size}"
        return f"scores of {groups} on {self.setting}"


def fidelity(results: Results) -> Fidelity | None:
    """Return the fidelity for the setting, grouping and size with the most methods; groups come before single points.

    If several have the same number, random groups are preferred, then the size nearest to 64.
    """
    rows = of_protocol(results.of("lds"))
    if rows.empty or "mean" not in rows:
        return None
    rows = of_sums(rows[rows["mean"].notna() & ~rows["method"].isin(TRIVIAL)])
    if rows.empty:
        return None
    counts = rows.groupby(["setting", "grouping", "group_size"], sort=False)["method"].nunique()

    def preference(place: tuple[str, str, int]) -> tuple[bool, int, bool, float]:
        _, grouping, size = place
        return grouping != SINGLE_POINTS, counts[place], grouping == RANDOM, -abs(math.log2(size / HEADLINE_SIZE))

    best = max(counts.index, key=preference)
    setting, grouping, size = best
    some = rows[(rows["setting"] == setting) & (rows["grouping"] == grouping) & (rows["group_size"] == size)]
    means = some.groupby("method", sort=False)["mean"].mean().sort_values(ascending=False)
    known = with_ceiling(some)
    ceiling = None if known.empty else float(known["ceiling"].mean())
    by_method = {str(method): float(value) for method, value in means.items()}
    return Fidelity(str(setting), str(grouping), int(size), by_method, ceiling)
