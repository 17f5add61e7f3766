"""Tables of fidelity to real retraining, one for each protocol: group LDS with its ceilings, and leave-group-out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from benchmarks.names import HALVES, KEEP_80, LEAVE_ONE_OUT
from benchmarks.report import paper
from benchmarks.report.formats import Table, interval, plus_minus, size_names
from benchmarks.report.rows import grouping_title, lines_by_size, mean_interval, of_protocol, of_sums, ordered


@dataclass(frozen=True)
class ProtocolTable:
    """How the results of a protocol are shown.

    Attributes:
        protocol: one of `names.PROTOCOLS`.
        value: column of the correlation.
        interval: column of the interval of the correlation.
        name: name of the table; figures add the setting to it.
        what: the measure in words.
        axis: title of the axis.
        note: a sentence that says what the numbers are.
    """

    protocol: str
    value: str
    interval: str
    name: str
    what: str
    axis: str
    note: str


_LDS_NOTE = (
    "Spearman correlation of predicted test losses with those of models retrained on {} of the groups, all with about "
    "the same number of points; in brackets the 95 % bootstrap interval over models."
)
PROTOCOL_TABLES = (
    ProtocolTable(
        HALVES, "mean", "interval", "lds", "linear data-modelling score (LDS)", "Spearman correlation",
        _LDS_NOTE.format("random halves"),
    ),
    ProtocolTable(
        KEEP_80, "mean", "interval", "lds-keep-80", "LDS where 80 % of the groups are kept", "Spearman correlation",
        _LDS_NOTE.format("a random 80 %"),
    ),
    ProtocolTable(
        LEAVE_ONE_OUT, "pearson", "pearson_interval", "leave-group-out", "correlation with leaving groups out",
        "Pearson correlation",
        "Pearson correlation of the predicted with the real test loss without one group; in brackets the 95 % "
        "bootstrap interval over groups. Where there are few enough groups to leave each one out.",
    ),
)  # fmt: skip
CEILINGS = (("ceiling", "Ceiling"), ("additive_ceiling", "Best additive score"))
"""Columns of the two ceilings (models of other seeds, a fitted additive score), with their names in tables."""
CEILING_NOTE = (
    "Ceiling: how well as many models of other seeds do. Best additive score: one fitted to the retrainings "
    "themselves; a lower bound where there are few of them."
)


def lds_tables(rows: pd.DataFrame) -> Iterator[Table]:
    """Yield a table of the correlation by group size, for every protocol that was run."""
    for kind in PROTOCOL_TABLES:
        some = of_sums(of_protocol(rows, kind.protocol))
        if kind.value not in some or not some[kind.value].notna().any():
            continue
        some = ordered(some)
        sizes = sorted(some["group_size"].unique())

        def cell(rows: pd.DataFrame, kind: ProtocolTable = kind) -> str:
            return interval(rows[kind.value].mean(), *mean_interval(rows[kind.interval]))

        lines = lines_by_size(some, ["setting", "method", "grouping"], cell)
        for column, title in CEILINGS if kind.value == "mean" else ():
            lines += _ceilings(some, sizes, column, title)
        yield Table(
            kind.name,
            f"Fidelity, {kind.protocol}: {kind.what} by group size",
            pd.DataFrame(lines, columns=["Data / model", "Attributor", "Grouping", *size_names(sizes)]),
            keys=3,
            notes=[f"{kind.note} {CEILING_NOTE} {paper.LDS_NOTE}"],
        )


def _ceilings(rows: pd.DataFrame, sizes: Sequence[float], column: str, title: str) -> list[list[str]]:
    """Return the lines of a ceiling by group size, one for each setting and grouping where it is known."""
    if column not in rows:
        return []
    known = rows.dropna(subset=column).astype({column: float})
    table = known.pivot_table(column, ["setting", "grouping"], "group_size", sort=False).reindex(columns=list(sizes))
    return [
        [setting, title, grouping_title(grouping), *(plus_minus(value, np.nan, 2) for value in line)]
        for (setting, grouping), line in zip(table.index, table.to_numpy(), strict=True)
    ]
