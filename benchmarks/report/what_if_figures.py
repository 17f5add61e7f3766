"""Figures of counterfactuals: predicted against retrained losses, and fidelity against time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from benchmarks.names import AVERAGED, CG, HALVES, INFLUENCE, OURS, PAPER_METHODS, REFITS, TRIVIAL, WHAT_IF
from benchmarks.report.lds_tables import CEILINGS
from benchmarks.report.rows import Results, grouping_title, known, mean_interval, of_protocol, of_sums, ordered, slug
from benchmarks.report.style import GREY, ORANGE, SERIES, Picture, grid, line, log_axis, save

_BESIDE = INFLUENCE  # the additive method that is shown next to what-if
_LINES = {"ceiling": ("ceiling: other seeds", ":"), "additive_ceiling": ("best additive score", "--")}
assert set(_LINES) == {column for column, _ in CEILINGS}


def predicted_figures(results: Results, folder: Path) -> Iterator[Picture]:
    """Draw for each setting the losses predicted by additive influence and by what-if against those of retrained
    models."""
    for setting, rows in _halves(results):
        if "predicted" not in rows:
            continue
        shown = rows[rows["method"].isin((_BESIDE, WHAT_IF)) & rows["predicted"].notna()]
        panels = {
            f"{method}: {_groups_title(grouping, size)}": some
            for (grouping, size), both in shown.groupby(["grouping", "group_size"], sort=False)
            if set(both["method"]) == {_BESIDE, WHAT_IF}
            for method, some in both.groupby("method", sort=False)
        }
        if panels:
            yield _predicted(setting, panels, folder)


def _predicted(setting: str, panels: dict[str, pd.DataFrame], folder: Path) -> Picture:
    def draw(axis: Axes, panel: str) -> None:
        some = panels[panel]
        for at, row in enumerate(some.itertuples()):
            axis.scatter(row.predicted, row.real, s=12, color=_SHADES[at % len(_SHADES)], alpha=0.8, linewidths=0)
        real = np.concatenate([np.asarray(row.real) for row in some.itertuples()])
        axis.plot([real.min(), real.max()], [real.min(), real.max()], color=GREY, linewidth=1)
        axis.annotate(f"LDS {some['mean'].astype(float).mean():.2f}", (0.04, 0.9), xycoords="axes fraction")
        axis.set_xlabel("predicted test loss")
        axis.set_ylabel("test loss when retrained")

    figure = grid(list(panels), 2, draw, height=2.8)
    title = f"{setting}: predicted against retrained, {HALVES} of the groups"
    caption = (
        "Every point is a choice of half the groups, its shade the grouping seed; on the line a prediction is exact. "
        "Left: the model's own loss plus the scores of the groups left out. Right: what-if, not calibrated."
    )
    handles = [line("predicted = retrained", GREY), line("a retrained half", _SHADES[0], "o", "", 4)]
    return save(figure, folder, f"predicted-{slug(setting)}", title, handles, caption)


_SHADES = ("#0072B2", "#56B4E9", "#004466")


def fidelity_figures(results: Results, folder: Path) -> Iterator[Picture]:
    """Draw for each setting and grouping LDS against CPU seconds: a point for each method, a line for each ceiling."""
    for setting, rows in _halves(results):
        if "seconds_total" not in rows:
            continue
        shown = rows[rows["mean"].notna() & rows["seconds_total"].notna() & ~rows["method"].isin(TRIVIAL)]
        panels = {
            _groups_title(grouping, size): some
            for (grouping, size), some in shown.groupby(["grouping", "group_size"], sort=False)
            if WHAT_IF in set(some["method"])
        }
        if panels:
            yield _fidelity(setting, panels, folder)


def _fidelity(setting: str, panels: dict[str, pd.DataFrame], folder: Path) -> Picture:
    present = {method for some in panels.values() for method in some["method"]}
    methods = [name for name in (*PAPER_METHODS, CG, *OURS, *REFITS, *AVERAGED) if name in present]

    def draw(axis: Axes, panel: str) -> None:
        some = panels[panel]
        for method in methods:
            mine = some[some["method"] == method]
            if mine.empty:
                continue
            mean, (low, high) = float(mine["mean"].mean()), mean_interval(mine["interval"])
            color, marker = _look(method, methods)
            grouping = mine["seconds_grouping"].fillna(0) if "seconds_grouping" in mine else 0
            seconds = (mine["seconds_total"] - grouping).mean()
            bars = np.nan_to_num(np.clip([[mean - low], [high - mean]], 0, None))
            axis.errorbar(seconds, mean, bars, color=color, marker=marker, capsize=2, elinewidth=0.9)
        for column, (_, style) in _LINES.items():
            values = known(some, column)
            if len(values):
                axis.axhline(np.mean(values), color=ORANGE if style == "--" else GREY, linestyle=style, linewidth=1.2)
        axis.axhline(0, color=GREY, linewidth=0.6)
        axis.set_ylim(top=1.05)
        log_axis(axis)
        axis.set_xlabel("CPU seconds (left is cheaper)")
        axis.set_ylabel("LDS (up is better)")

    figure = grid(list(panels), 2, draw, height=2.8)
    handles = [line(name, *_look(name, methods), "") for name in methods]
    handles += [line(label, ORANGE if style == "--" else GREY, style=style) for label, style in _LINES.values()]
    title = f"{setting}: fidelity beside speed"
    caption = (
        "Each method a point: how well it follows models retrained on halves of the groups (bars: 95 % interval), and "
        "the CPU seconds for all its predictions, grouping apart. Between the two lines is what no sum of scores "
        "can reach."
    )
    return save(figure, folder, f"fidelity-speed-{slug(setting)}", title, handles, caption)


def _look(method: str, methods: list[str]) -> tuple[str, str]:
    """Return colour and marker of a method; no two methods of a figure have the same pair."""
    at = methods.index(method)
    return SERIES[at % len(SERIES)][0], _MARKERS[at % len(_MARKERS)]


_MARKERS = "os^DvP*X<>d"


def _halves(results: Results) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield each setting with its rows of LDS for halves of the groups."""
    rows = of_protocol(results.of("lds"))
    if not rows.empty:
        for setting, some in ordered(of_sums(rows)).groupby("setting", sort=False):
            yield str(setting), some


def _groups_title(grouping: str, size: float) -> str:
    return f"{grouping_title(grouping)} {size:g}"
