"""The three lines a reader should see first: equal to the originals, how much faster, how faithful."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from benchmarks.check.table import verdict
from benchmarks.report.rows import PAPER_METHODS, Results, of_sums


@dataclass(frozen=True)
class Headlines:
    """What a run shows, in three lines.

    Attributes:
        equality: equal to the originals on N of N checks, with everything that is not.
        speed: median speed-up over the originals.
        fidelity: LDS against group size.
    """

    equality: str
    speed: str
    fidelity: str

    @property
    def lines(self) -> tuple[str, str, str]:
        """The three, in order."""
        return self.equality, self.speed, self.fidelity

    def __str__(self) -> str:
        return "\n".join(self.lines)


def headlines(results: Results) -> Headlines:
    """The lines of some rows; a line without rows says which command makes them."""
    checks = [
        {name: value for name, value in row.items() if not _missing(value)}
        for row in results.of("check").to_dict("records")
    ]
    equality = "equal to the originals: not checked here; run `python -m benchmarks check`"
    speed = "median speed-up: not measured here; run `python -m benchmarks check`"
    if checks:
        equality, *others = verdict(checks)
        speed = others[0] if others and others[0].startswith("median") else "median speed-up: no check came out equal"
    return Headlines(equality, speed, _fidelity(results.of("lds")))


def _fidelity(rows: pd.DataFrame) -> str:
    """Mean LDS of the paper's methods on single points, and by size for random and for Grad-K-Means groups.

    Only models with the most groupings and sizes, and only sizes they all have: the means are of the same things.
    """
    if rows.empty:
        return "fidelity (LDS): not measured here; run `python -m benchmarks run lds`"
    chosen = of_sums(rows[rows["method"].isin(PAPER_METHODS)])
    table = chosen.pivot_table("mean", ["setting", "method"], ["grouping", "group_size"])
    cells = table.notna().sum(axis=1)
    table = table[cells == cells.max()].dropna(axis=1)
    means = table.mean()
    parts = []
    for grouping in ("none", "Random", "Grad-K-Means"):
        sizes = [size for name, size in means.index if name == grouping]
        shown = sorted({*sizes[:1], *sizes[len(sizes) // 2 :][:1], *sizes[-1:]})
        values = ", ".join(f"{means[grouping, size]:.2f} at {size:g}" for size in shown)
        if values:
            parts.append(values if grouping == "none" else f"{grouping} groups {values}")
    if not parts:
        return "fidelity (LDS): no group size was measured for all methods; see the table"
    settings, methods = (table.index.get_level_values(level).nunique() for level in ("setting", "method"))
    where = table.index.get_level_values("setting")[0] if settings == 1 else f"{settings} models"
    return f"fidelity (LDS) by group size: {'; '.join(parts)} (mean of {methods} methods on {where})"


def _missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and pd.isna(value))
