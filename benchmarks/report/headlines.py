"""The three lines a reader should see first: equal to the originals, how much faster, how faithful."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from benchmarks.check.table import verdict
from benchmarks.names import CG, GRAD_K_MEANS, PAPER_METHODS, RANDOM, SINGLE_POINTS
from benchmarks.report.rows import Results, of_protocol, of_sums


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
    return Headlines(equality, speed, _fidelity(of_protocol(results.of("lds"))))


def _fidelity(rows: pd.DataFrame) -> str:
    """LDS of the paper's methods on average, and of converged influence, by size and grouping.

    Only models with the most groupings and sizes, and only sizes they all have: the means are of the same things.
    """
    if rows.empty:
        return "fidelity (LDS): not measured here; run `python -m benchmarks run lds`"
    table = of_sums(rows).pivot_table("mean", ["setting", "method"], ["grouping", "group_size"])
    theirs = table[table.index.get_level_values("method").isin(PAPER_METHODS)]
    cells = theirs.notna().sum(axis=1)
    theirs = theirs[cells == cells.max()].dropna(axis=1)
    if theirs.empty:
        return "fidelity (LDS): no group size was measured for all methods; see the table"
    settings, methods = (list(theirs.index.unique(level)) for level in ("setting", "method"))
    where = settings[0] if len(settings) == 1 else f"{len(settings)} models"
    found = f"fidelity (LDS) by group size: {_by_size(theirs)} (mean of {len(methods)} methods on {where})"
    ours = table.reindex([(setting, CG) for setting in settings])[theirs.columns]
    return found if ours.isna().to_numpy().any() else f"{found}; {CG} {_by_size(ours)}"


def _by_size(table: pd.DataFrame) -> str:
    """Means over the rows at the smallest, a middle and the largest size of single points and two groupings."""
    means, parts = table.mean(), []
    for grouping in (SINGLE_POINTS, RANDOM, GRAD_K_MEANS):
        sizes = [size for name, size in means.index if name == grouping]
        shown = sorted({*sizes[:1], *sizes[len(sizes) // 2 :][:1], *sizes[-1:]})
        values = ", ".join(f"{means[grouping, size]:.2f} at {size:g}" for size in shown)
        if values:
            parts.append(values if grouping == SINGLE_POINTS else f"{grouping} groups {values}")
    return "; ".join(parts)


def _missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and pd.isna(value))
