"""Figures of fidelity to real retraining: LDS and leave-group-out correlation by group size, with intervals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from benchmarks.names import EQUAL_GROUPINGS, GROUPINGS, SINGLE_POINTS
from benchmarks.report.lds_tables import PROTOCOL_TABLES, ProtocolTable
from benchmarks.report.rows import (
    Results,
    grouping_title,
    mean_interval,
    methods_by_size,
    of_protocol,
    of_sums,
    ordered,
    slug,
    with_ceiling,
)
from benchmarks.report.style import GREY, HIGHER, OF_GROUPING, Picture, grid, line, save, share_y, size_axis


def lds_figures(results: Results, folder: Path) -> Iterator[Picture]:
    """Draw for each setting and protocol the correlation with real retraining by group size."""
    for kind in PROTOCOL_TABLES:
        for setting, rows in of_protocol(results.of("lds"), kind.protocol).groupby("setting", sort=False):
            if kind.value in rows:
                some = of_sums(rows[rows[kind.value].notna()])
                yield from _against_size(kind, str(setting), ordered(some), folder)


def _against_size(kind: ProtocolTable, setting: str, rows: pd.DataFrame, folder: Path) -> Iterator[Picture]:
    methods = methods_by_size(rows)
    if not methods:
        return
    groupings = [one for one in (SINGLE_POINTS, *GROUPINGS, *EQUAL_GROUPINGS) if one in set(rows["grouping"])]
    sizes = sorted(rows["group_size"].unique())
    known = with_ceiling(rows if kind.value == "mean" else rows[:0])
    ceiling = known.groupby(["grouping", "group_size"])["ceiling"].mean()

    def draw(axis: Axes, method: str) -> None:
        axis.axhline(0, color=GREY, linewidth=0.8)
        for at, grouping in enumerate(groupings):
            mine = rows[(rows["method"] == method) & (rows["grouping"] == grouping)]
            points = [
                (size, some[kind.value].astype(float).mean(), *mean_interval(some[kind.interval]))
                for size, some in mine.groupby("group_size")
            ]
            if not points:
                continue
            x, y, low, high = np.asarray(points, float).T
            bars = np.nan_to_num(np.clip([y - low, high - y], 0, None))
            color, marker = OF_GROUPING[grouping]
            if grouping in ceiling:
                highest = ceiling[grouping]
                axis.plot(highest.index, highest, color=color, linestyle=":", marker="_", markersize=9, alpha=0.7)
            apart = 1 if grouping == SINGLE_POINTS else 2 ** (0.14 * (at - len(groupings) / 2))  # bars do not overlap
            axis.errorbar(
                x * apart, y, bars, color=color, marker=marker, capsize=2, elinewidth=0.9,
                markersize=9 if grouping == SINGLE_POINTS else 5,
            )  # fmt: skip
        size_axis(axis, sizes)
        axis.set_ylabel(f"{kind.axis}\n{HIGHER}")

    figure = grid(methods, 2, draw)
    share_y(figure)
    handles = [line(grouping_title(one), *OF_GROUPING[one]) for one in groupings]
    handles += [] if ceiling.empty else [line("ceiling, by grouping", GREY, style=":")]
    caption = "Predicted against real effects of retraining. Bars: 95 % bootstrap interval."
    caption += "" if ceiling.empty else " Ceiling: how well as many models of other seeds do."
    title = f"{setting}: {kind.what} against group size"
    yield save(figure, folder, f"{kind.name}-{slug(setting)}", title, handles, caption)
