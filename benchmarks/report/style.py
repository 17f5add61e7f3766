"""Style of figures: colours for colour-blind readers (Okabe and Ito), a marker for each colour, legends outside."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks import names
from benchmarks.report.rows import STAND_IN

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#767676"
SERIES = ((BLUE, "o"), (RED, "s"), (GREEN, "^"), (PURPLE, "D"), (ORANGE, "v"), (SKY, "P"), (BLACK, "X"))
OF_METHOD = dict(zip((*names.PAPER_METHODS, names.CG, names.WHAT_IF), SERIES, strict=False))
OF_GROUPING = {
    names.SINGLE_POINTS: (BLACK, "*"),
    names.RANDOM: (ORANGE, "o"),
    names.K_MEANS: (SKY, "s"),
    names.REPR_K_MEANS: (GREEN, "^"),
    names.GRAD_K_MEANS: (RED, "D"),
    names.EQUAL_K_MEANS: (BLUE, "s"),
    names.EQUAL_GRAD_K_MEANS: (PURPLE, "D"),
}
OF_PART = {
    "grouping": (SKY, "//"),
    "gradients": (ORANGE, ""),
    "curvature": (GREEN, "xx"),
    "scoring": (PURPLE, ".."),
}
_SETTINGS: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.grid": True,
    "grid.color": "#e2e2e2",
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
    "hatch.linewidth": 0.5,
    "svg.hashsalt": "ggda",  # so that the same rows give the same file
    "svg.fonttype": "none",  # text stays text: a third of the size, searchable; other fonts are narrower
}
_TITLE_LETTER, _LEGEND_LETTER, _LEGEND_SIGN, _LEGEND_LINE = 0.1, 0.075, 0.62, 0.19  # inches, rounded up
_TELEPHONE = 3.9  # inches: at 390 px text has the same size as in the wide figure
NARROW = "narrow"
LOWER, HIGHER = "lower is better", "higher is better"
Draw = Callable[[Axes, str], None]


@dataclass(frozen=True)
class Picture:
    """A figure on disk.

    Attributes:
        name: file name without its extension.
        title: what the figure shows.
        caption: how to read it.
        svg: the vector file.
        png: the pixel file.
        narrow: a vector file with the panels in one column, for a phone.
    """

    name: str
    title: str
    caption: str
    svg: Path
    png: Path
    narrow: Path


@contextmanager
def style() -> Iterator[None]:
    """Draw figures in the report's style inside the block; restore the caller's settings afterwards."""
    with matplotlib.rc_context(_SETTINGS):
        yield


def grid(panels: Sequence[str], columns: int, draw: Draw, height: float = 2.5, width: float = 3.4) -> Figure:
    """Return a figure with one panel per name, in rows of at most `columns`; there are no empty panels."""
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(width * columns + 0.4, height * rows + 0.9), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, name in zip(axes, panels, strict=False):
        draw(axis, name)
        axis.set_title(name)
    for axis in axes[len(panels) :]:
        axis.remove()
    return figure


def finish(figure: Figure, title: str, handles: Sequence[Artist]) -> Figure:
    """Add a title above the panels and a legend below them.

    The title is red if the setting has stand-in data. Lines and columns are chosen to fit the width of the figure.
    """
    width = figure.get_figwidth()
    lines = textwrap.fill(title, int(width / _TITLE_LETTER))
    color = RED if STAND_IN in title else BLACK
    figure.suptitle(lines, x=0.01, ha="left", fontsize=10.5, fontweight="bold", color=color)
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = min(len(handles), max(1, int(width / (_LEGEND_LETTER * longest + _LEGEND_SIGN))))
    figure.set_figheight(figure.get_figheight() + _LEGEND_LINE * (math.ceil(len(handles) / columns) - 1))
    figure.legend(handles=list(handles), loc="outside lower center", ncols=columns, fontsize=8.5)
    return figure


def save(
    figure: Figure, folder: Path, name: str, title: str, handles: Sequence[Artist], caption: str
) -> Picture:  # fmt: skip
    """Add title and legend to a figure; write it as SVG and PNG, and as SVG with its panels in one column."""
    finish(figure, title, handles)
    picture = Picture(
        name, title, caption, folder / f"{name}.svg", folder / f"{name}.png", folder / NARROW / f"{name}.svg"
    )
    picture.narrow.parent.mkdir(parents=True, exist_ok=True)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # both files use the same layout
    figure.savefig(picture.svg, metadata={"Date": None})
    figure.savefig(picture.png, dpi=150)
    _in_one_column(figure, title).savefig(picture.narrow, metadata={"Date": None})
    return picture


def _in_one_column(figure: Figure, title: str) -> Figure:
    """Change the figure to one column of panels, as wide as the screen of a phone, and return it."""
    panels = figure.axes
    rows = len({panel.get_position().y0 for panel in panels})
    height = figure.get_figheight() / rows
    below = GridSpec(len(panels), 1, figure=figure)
    for at, panel in enumerate(panels):
        panel.set_subplotspec(below[at])
        panel.tick_params(axis="y", labelsize=8)
    handles = [handle for legend in figure.legends for handle in legend.legend_handles if handle is not None]
    for legend in figure.legends:
        legend.remove()
    figure.set_size_inches(_TELEPHONE, max(height * len(panels) * 0.92, 2.6))
    figure.set_layout_engine("constrained")
    return finish(figure, title, handles) if handles else figure


def method_look(method: str, among: Sequence[str]) -> tuple[str, str]:
    """Return colour and marker of a method. Methods in `OF_METHOD` have their own; others take the next free ones."""
    if method in OF_METHOD:
        return OF_METHOD[method]
    others = [name for name in among if name not in OF_METHOD]
    free = SERIES[len(OF_METHOD) :]
    return free[others.index(method) % len(free)]


def line(label: str, color: str, marker: str = "", style: Any = "-", size: float | None = None) -> Line2D:
    """Return a legend entry."""
    return Line2D([], [], color=color, marker=marker, linestyle=style, label=label, markersize=size)


def log_axis(axis: Axes, unit: str = "") -> None:
    """Make the x axis logarithmic and at least a factor of four wide, with plain numbers that do not overlap."""
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    if high / low < 4:
        middle = math.sqrt(low * high)
        low, high = middle / 2, middle * 2
        axis.set_xlim(low, high)
    decades = math.log10(high / low)
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 1.6 else (1, 3) if decades < 2.6 else (1,)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{unit}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def size_axis(axis: Axes, sizes: Sequence[float]) -> None:
    """Make the x axis logarithmic, with a tick for every group size."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(sizes), [f"{size:g}" for size in sizes])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlim(min(sizes) / 1.7, max(sizes) * 1.7)
    axis.set_xlabel("group size (points; 1 = single points)")


def share_y(figure: Figure) -> None:
    """Give all panels of a figure the same y axis."""
    limits = [axis.get_ylim() for axis in figure.axes]
    for axis in figure.axes:
        axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
