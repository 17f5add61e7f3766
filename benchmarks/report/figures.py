"""All figures of a report. This module draws the figures of detection, cost and speed-up itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from tqdm.auto import tqdm

from benchmarks.compare.table import HEADLINE_SIZE
from benchmarks.names import GRAD_K_MEANS, PER_POINT, SINGLE_POINTS
from benchmarks.report.cost_tables import cost
from benchmarks.report.lds_figures import lds_figures
from benchmarks.report.removal_figures import removal_figures, runtime_figures
from benchmarks.report.rows import PARTS, Results, methods_by_size, of_sums, ordered, slug
from benchmarks.report.style import (
    BLACK,
    GREY,
    HIGHER,
    LOWER,
    OF_PART,
    SERIES,
    Picture,
    grid,
    line,
    log_axis,
    method_look,
    save,
    style,
)
from benchmarks.report.what_if_figures import fidelity_figures, predicted_figures

Drawer = Callable[[Results, Path], Iterator[Picture]]


def draw_all(results: Results, folder: Path, show_progress: bool = True) -> tuple[list[Picture], list[str]]:
    """Draw every figure that the rows allow.

    Returns:
        The figures in the order of the report, and for each kind without rows a line that says what to run.
    """
    pictures, missing = [], []
    with style():
        for title, command, drawer in tqdm(KINDS, desc="figures", disable=not show_progress, leave=False):
            found = list(drawer(results, folder))
            pictures += found
            if not found:
                missing.append(f"No figure of {title}: no rows for it; run `python -m benchmarks {command}`.")
    return pictures, missing


def detection_figures(results: Results, folder: Path) -> Iterator[Picture]:
    """Draw for each setting mislabelled points found against points checked, for up to three group sizes."""
    for setting, rows in results.of("noisy").groupby("setting", sort=False):
        some = ordered(of_sums(rows))
        some = some[some["grouping"].isin([SINGLE_POINTS, GRAD_K_MEANS]) & some["curve"].notna()]
        some = some[some["method"] != PER_POINT]  # it has the same curve as TracIn
        if not some.empty:
            yield _detection(str(setting), some, folder)


def _detection(setting: str, rows: pd.DataFrame, folder: Path) -> Picture:
    methods = list(dict.fromkeys(rows["method"]))
    sizes = sorted(rows["group_size"].unique())
    shown = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    panels = {"single points" if size == 1 else f"Grad-K-Means groups of {size:g}": size for size in shown}

    def draw(axis: Axes, panel: str) -> None:
        axis.plot([0, 100], [0, 100], color=GREY, linestyle=":", linewidth=1)
        for method, some in rows[rows["group_size"] == panels[panel]].groupby("method", sort=False):
            checked, found = _mean_curve(some["curve"])
            color, marker = method_look(str(method), methods)
            axis.plot(100 * checked, 100 * found, color=color, marker=marker, markevery=5)
        axis.set_xlabel("training points checked (%)")
        axis.set_ylabel(f"mislabelled points found (%)\n{HIGHER}")
        axis.set_xlim(0, 101)
        axis.set_ylim(0, 102)

    figure = grid(list(panels), 3, draw, height=2.9, width=3.1)
    handles = [*(line(name, *method_look(name, methods)) for name in methods), line("by chance", GREY, style=":")]
    title = f"{setting}: mislabelled points found"
    caption = "Points are checked in the order of their (group's) importance, the least important first."
    return save(figure, folder, f"detection-{slug(setting)}", title, handles, caption)


def cost_figures(results: Results, folder: Path) -> Iterator[Picture]:
    """Draw for each setting CPU seconds by part and group size (Grad-K-Means), with one panel per method."""
    costs = cost(results)
    if costs.empty:
        return
    for setting, rows in costs[costs["grouping"].isin([SINGLE_POINTS, GRAD_K_MEANS])].groupby("setting", sort=False):
        methods = methods_by_size(rows)
        if methods:
            yield _cost(str(setting), methods, rows, folder)


def _cost(setting: str, methods: list[str], rows: pd.DataFrame, folder: Path) -> Picture:
    def draw(axis: Axes, method: str) -> None:
        mine = rows[rows["method"] == method].sort_values("group_size")
        base = np.zeros(len(mine))
        names = [f"{size:g}" for size in mine["group_size"]]
        for part in PARTS:
            height = mine[f"seconds_{part}"].to_numpy()
            color, hatch = OF_PART[part]
            axis.bar(names, height, bottom=base, color=color, hatch=hatch, edgecolor="white", width=0.75)
            base = base + height
        for at, total in enumerate(base):
            axis.annotate(
                f"{float(f'{total:.2g}'):g}", (at, total), (0, 2), textcoords="offset points", ha="center", fontsize=8
            )
        axis.set_ylim(0, 1.14 * base.max() or 1)
        axis.set_xlabel("group size (points; 1 = single points)")
        axis.set_ylabel(f"CPU seconds\n{LOWER}")

    figure = grid(methods, 2, draw)
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=part) for part, (color, hatch) in OF_PART.items()
    ]
    title = f"{setting}: where the time goes (Grad-K-Means)"
    caption = "CPU seconds of attribution by part, the total above every bar. Every panel has its own scale."
    return save(figure, folder, f"cost-{slug(setting)}", title, handles, caption)


def speed_figures(results: Results, folder: Path) -> Iterator[Picture]:
    """Draw the speed-ups over the originals, with one line per method and one marker per setting."""
    cells = results.speed_ups
    if cells.empty:
        return
    names = list(dict.fromkeys(cells["toolkit"] + " · " + cells["method"]))
    settings = list(dict.fromkeys(cells["setting"]))
    figure = Figure(figsize=(7.2, 0.27 * len(names) + 1.9), layout="constrained")
    axis = figure.subplots()
    for at, setting in enumerate(settings):
        some = cells[cells["setting"] == setting]
        color, marker = SERIES[at % len(SERIES)]
        y = [names.index(f"{row.toolkit} · {row.method}") for row in some.itertuples()]
        axis.scatter(
            some["speed_up"], y, color=color, marker=marker, s=34, edgecolors="white", linewidths=0.5, zorder=3
        )
    axis.axvline(1, color=BLACK, linewidth=1)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    log_axis(axis, unit="×")
    axis.set_xlabel(f"times faster than the original\n{HIGHER}")
    handles = [line(name, *SERIES[at % len(SERIES)], "") for at, name in enumerate(settings)]
    title = f"One property, groups of {HEADLINE_SIZE}: how many times faster than the original"
    caption = "Ratio of CPU seconds, all training points; right of the black line the group version is faster."
    yield save(figure, folder, "speed-up", title, handles, caption)


def _mean_curve(curves: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of several curves `[[checked, found], …]` on a common grid."""
    checked = np.linspace(0, 1, 41)
    found = [np.interp(checked, *np.asarray([[0, 0], *one, [1, 1]], float).T) for one in curves]
    return checked, np.mean(found, axis=0)


KINDS: tuple[tuple[str, str, Drawer], ...] = (
    ("the speed-up over the originals", "compare", speed_figures),
    ("fidelity against runtime", "run retraining", runtime_figures),
    ("removal curves", "run retraining pruning", removal_figures),
    ("detection curves", "run noisy", detection_figures),
    ("LDS against group size", "run lds", lds_figures),
    ("predicted against retrained losses", "run lds", predicted_figures),
    ("fidelity beside speed", "run lds", fidelity_figures),
    ("the cost by part", "run retraining", cost_figures),
)
"""What a figure shows, the command that makes its rows, and the function that draws it, in the order of the report."""
