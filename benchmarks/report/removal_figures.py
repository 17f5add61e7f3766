"""Figures of retraining score and pruning: fidelity against runtime (the paper's figures 1 and 2), removal curves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from benchmarks.names import (
    BASELINES,
    GRAD_K_MEANS,
    GROUPINGS,
    NO_REMOVAL,
    PER_POINT,
    RANDOM,
    RANDOM_REMOVAL,
    SINGLE_POINTS,
)
from benchmarks.report.rows import KEYS, Results, merged, methods_by_size, of_sums, ordered, slug
from benchmarks.report.style import (
    BLACK,
    GREY,
    HIGHER,
    LOWER,
    OF_GROUPING,
    SERIES,
    Picture,
    grid,
    line,
    log_axis,
    method_look,
    save,
    share_y,
)

_ACCURACY = "test accuracy (%)"


def runtime_figures(results: Results, folder: Path) -> Iterator[Picture]:
    """Draw for each setting accuracy against runtime: by grouping at the largest removal, then by removal for
    Grad-K-Means."""
    for setting, rows in results.of("retraining").groupby("setting", sort=False):
        found = ordered(merged(of_sums(rows), [*KEYS, "fraction"]))
        yield from _by_grouping(str(setting), found, folder)
        yield from _by_removal(str(setting), found, folder)


def removal_figures(results: Results, folder: Path) -> Iterator[Picture]:
    """Draw for each setting and experiment accuracy against the share removed, for single points and for groups."""
    for experiment in _REMOVED:
        for setting, rows in results.of(experiment).groupby("setting", sort=False):
            found = ordered(merged(of_sums(rows), [*KEYS, "fraction"]))
            panels = _removal_panels(found)
            if panels:
                yield _curves(experiment, str(setting), found, panels, folder)


_REMOVED = {"retraining": ("most important", LOWER), "pruning": ("least important", HIGHER)}


def _curves(
    experiment: str, setting: str, found: pd.DataFrame, panels: dict[str, pd.DataFrame], folder: Path
) -> Picture:
    methods = list(dict.fromkeys(method for rows in panels.values() for method in rows["method"]))
    start = found[found["method"] == NO_REMOVAL].assign(fraction=0.0).head(1)
    random = found[found["method"] == RANDOM_REMOVAL]
    which, better = _REMOVED[experiment]

    def plot(axis: Axes, rows: pd.DataFrame, look: tuple[str, str], style: str = "-") -> None:
        curve = pd.concat([start, rows]).sort_values("fraction")
        axis.errorbar(
            100 * curve["fraction"], 100 * curve["mean"], 100 * curve["stderr"].fillna(0), color=look[0],
            marker=look[1], linestyle=style, capsize=2, elinewidth=0.8,
        )  # fmt: skip

    def draw(axis: Axes, panel: str) -> None:
        for method, rows in panels[panel].groupby("method", sort=False):
            plot(axis, rows, method_look(str(method), methods))
        if not random.empty:
            plot(axis, random, (GREY, ""), "--")
        axis.set_xlabel("training points removed (%)")
        axis.set_ylabel(f"{_ACCURACY}\n{better}")

    figure = grid(list(panels), 3, draw, height=2.9, width=3.1)
    share_y(figure)
    handles = [line(name, *method_look(name, methods)) for name in methods]
    handles += [] if random.empty else [line("random removal", GREY, style="--")]
    title = f"{setting}: {which} points removed"
    caption = f"Test accuracy after retraining without the {which} points. {_BARS}"
    return save(figure, folder, f"{experiment}-curves-{slug(setting)}", title, handles, caption)


_BARS = "Bars: standard error over model seeds."


def _by_grouping(setting: str, found: pd.DataFrame, folder: Path) -> Iterator[Picture]:
    largest = found["fraction"].max()
    some = found[found["fraction"] == largest]
    curves = {
        name: (OF_GROUPING[name], some[some["grouping"].isin([name, SINGLE_POINTS])])
        for name in GROUPINGS
        if name in set(some["grouping"])
    }
    title = f"{setting}: accuracy after removing the top {100 * largest:g} %, by grouping"
    yield from _against_runtime(title, found, some, curves, largest, folder, f"runtime-groupings-{slug(setting)}")


def _by_removal(setting: str, found: pd.DataFrame, folder: Path) -> Iterator[Picture]:
    some = found[found["grouping"].isin([GRAD_K_MEANS, SINGLE_POINTS]) & ~found["method"].isin(BASELINES)]
    curves = {
        f"top {100 * fraction:g} % removed": (look, some[some["fraction"] == fraction])
        for fraction, look in zip(sorted(some["fraction"].unique()), SERIES, strict=False)
    }
    title = f"{setting}: accuracy after removal, Grad-K-Means groups"
    yield from _against_runtime(title, found, some, curves, None, folder, f"runtime-removals-{slug(setting)}")


def _against_runtime(
    title: str, found: pd.DataFrame, some: pd.DataFrame, curves: dict[str, tuple[tuple[str, str], pd.DataFrame]],
    fraction: float | None, folder: Path, name: str,
) -> Iterator[Picture]:  # fmt: skip
    """Draw accuracy against runtime with a panel for each method of `some`.

    Args:
        title: title of the figure.
        found: all rows of the setting, for the baselines.
        some: the rows that are drawn.
        curves: name of a curve → its colour and marker, and its rows.
        fraction: the share that is removed in all curves; None if they differ. Random removal is shown for one share
            only, and single points, which are the same in all curves, get a sign of their own.
        folder: where the figure goes.
        name: name of its files.
    """
    methods = methods_by_size(some)
    if not methods:
        return
    sizes = sorted(some.loc[~some["method"].isin(BASELINES), "group_size"].unique())
    at_random = found[(found["method"] == RANDOM_REMOVAL) & (found["fraction"] == fraction)]
    baselines = [("no removal", ":", found[found["method"] == NO_REMOVAL]), ("random removal", "--", at_random)]
    baselines = [(label, style, rows) for label, style, rows in baselines if not rows.empty]

    def draw(axis: Axes, method: str) -> None:
        for _, style, rows in baselines:
            axis.axhline(100 * rows["mean"].iloc[0], color=GREY, linestyle=style, linewidth=1.1)
        for look, rows in curves.values():
            _curve(axis, rows[rows["method"] == method].sort_values("group_size"), look)
        if fraction is not None:
            single = some[(some["method"] == method) & (some["group_size"] == 1)]
            x, y = single["seconds_total"], 100 * single["mean"]
            axis.plot(x, y, linestyle="", color=BLACK, marker="*", markersize=10)
        log_axis(axis)
        axis.set_xlabel("attribution time (CPU s, grouping included)")
        axis.set_ylabel(f"{_ACCURACY}\n{LOWER}")

    figure = grid(methods, 2, draw)
    share_y(figure)
    handles = [line("single points (size 1)", BLACK, "*", "", 9)] if fraction is not None else []
    handles += [line(label, *look) for label, (look, _) in curves.items()]
    handles += [line(label, GREY, style=style) for label, style, _ in baselines]
    shown = sizes if len(sizes) <= 3 else [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    handles += [line(f"group size {size:g}", GREY, "o", "", math.sqrt(_area(size))) for size in shown]
    caption = f"Left is cheaper; the marker grows with the group size along the curve. {_BARS}"
    yield save(figure, folder, name, title, handles, caption)


def _curve(axis: Axes, curve: pd.DataFrame, look: tuple[str, str]) -> None:
    color, marker = look
    x, y = curve["seconds_total"], 100 * curve["mean"]
    axis.errorbar(x, y, 100 * curve["stderr"].fillna(0), color=color, elinewidth=0.8, capsize=1.5, alpha=0.85)
    area = [_area(size) for size in curve["group_size"]]
    axis.scatter(x, y, s=area, color=color, marker=marker, edgecolors="white", linewidths=0.5, zorder=3)


def _area(size: float) -> float:
    """Return the area of a marker in points²; it grows with the logarithm of the group size."""
    return 14 + 11 * math.log2(max(size, 1))


def _removal_panels(found: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return panel name → rows: single points, then Grad-K-Means and random groups of the size nearest to 64."""
    attributed = found[~found["method"].isin((*BASELINES, PER_POINT))]  # per-point has the same curve as TracIn
    panels = {"single points": attributed[attributed["group_size"] == 1]}
    for grouping in (GRAD_K_MEANS, RANDOM):
        some = attributed[attributed["grouping"] == grouping]
        if not some.empty:
            size = min(some["group_size"].unique(), key=lambda one: abs(math.log2(one / 64)))
            panels[f"{grouping} groups of {size:g}"] = some[some["group_size"] == size]
    return {name: rows for name, rows in panels.items() if not rows.empty}
