"""Helpers for all pictures of a result: axes, colours with hatches, names as plain text, choice of the groups shown.

Effects differ in colour and also in hatch or marker, so pictures can be read in black and white.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ggda_ext.results.table import number, shown
from ggda_ext.words import check_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ggda_ext.results.attribution import Attribution


WIDEST_NAME = 22
_NUMBERS = 240
"""A heat map with more cells than this shows signs in its cells, not numbers."""
_ALWAYS_FIT = 3
"""A heat map with more columns than this shows signs, not numbers, if numbers would run together."""


@dataclass(frozen=True)
class Style:
    """How groups with one effect are drawn."""

    colour: str
    hatch: str
    marker: str


STYLES = {
    "helps": Style("#4a86c5", "", "o"),
    "hurts": Style("#d9742b", "////", "X"),
    "rises": Style("#7a9e3f", "", "^"),
    "falls": Style("#9d6bb0", "////", "v"),
    "unclear": Style("#bdbdbd", "....", "s"),
    "none": Style("#bdbdbd", "", "s"),
    "unknown": Style("#ffffff", "xxxx", "d"),
}
MEANINGS = {
    "rises": "rises without it", "falls": "falls without it", "unclear": "unclear", "none": "no effect",
    "unknown": "not a number",
}  # fmt: skip


def new_axes(ax: Any, width: float, height: float) -> Axes:
    """Return the caller's axes, or the axes of a new figure of this size in inches."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'ggda-ext[plot]'.") from error
    if ax is not None:
        if not hasattr(ax, "barh"):
            raise TypeError(f"ax is a {type(ax).__name__}: pass matplotlib axes, e.g. from fig, ax = plt.subplots().")
        return ax
    return plt.subplots(figsize=(width, height), layout="constrained")[1]


@dataclass(frozen=True)
class Shown:
    """The groups that are drawn, and the words about the rest.

    Attributes:
        ids: group ids from the top of the picture to its bottom, with None in the place of groups that are left out.
        words: text about the groups that are left out.
    """

    ids: list[int | None]
    words: str


def both_ends(values: np.ndarray, most: int, higher_is_better: bool | None) -> Shown:
    """Choose both ends: most harmful at the top, most helpful at the bottom; highest at the top if not known."""
    check_whole(most=most)
    if most < 2:
        raise ValueError(f"most={most}: show at least 2 groups.")
    order = np.argsort(values if higher_is_better is False else -values, kind="stable")
    order = np.concatenate([order[np.isfinite(values[order])], order[~np.isfinite(values[order])]])
    ids = order.tolist()
    if len(ids) <= most:
        return Shown(ids, "")
    finite = int(np.isfinite(values).sum())
    first, last = ids[: -(-most // 2)], ids[max(finite - most // 2, -(-most // 2)) : finite]
    left = values[[j for j in ids if j not in {*first, *last}]]
    return Shown([*first, None, *last], rest_in_words(left))


def largest(values: np.ndarray, most: int) -> Shown:
    """Choose the groups with the largest absolute values, largest first."""
    check_whole(most=most)
    if most < 1:
        raise ValueError(f"most={most}: show at least 1 group.")
    order = np.argsort(-np.abs(values), kind="stable").tolist()
    words = rest_in_words(values[order[most:]]) if len(order) > most else ""
    return Shown(order[:most], words)


def rest_in_words(values: np.ndarray) -> str:
    """Return a text about the groups that are left out: their number, range and sum."""
    count, finite = len(values), values[np.isfinite(values)]
    words = f"{count:,} more group{'s' * (count != 1)}"
    if count == 1 and len(finite):
        return f"{words}: {number(finite[0])}"
    if len(finite):
        words += f": {number(finite.min())} to {number(finite.max())}, sum {number(finite.sum())}"
    return words if len(finite) == count else f"{words}; {count - len(finite)} not a number"


def is_wide(ax: Axes) -> bool:
    """Whether the figure has room for long labels: more than 5 inches."""
    return bool(ax.figure.bbox.width / ax.figure.dpi > 5)


def in_room(ax: Axes, words: str) -> str:
    """Return the words about groups that are left out, shortened if there is little room."""
    return words if is_wide(ax) else words.partition(":")[0]


def plain_ticks(axis: Any, positions: Any, texts: list[str], **options: Any) -> None:
    """Set ticks with names from data; dollar signs are not read as mathematics."""
    axis.set_ticks(positions, labels=texts, parse_math=False, **options)


def plain_title(ax: Axes, text: str) -> None:
    """Set a title at the left, with names from data as plain text."""
    ax.set_title(text, loc="left", fontsize="medium", parse_math=False, wrap=True)


def score_label(result: Attribution, j: int, *, what: str = "the group") -> str:
    """Return the label for the axis of the scores: unit and direction. A long name of a property has its own line."""
    name = shown(result.properties[j])
    name = f"{' ' if len(name) <= WIDEST_NAME else chr(10)}{name}"
    if result.method is not None and result.method.unit == "property":
        words = f"{'measured' if result.method.measured else 'predicted'} change of{name}\nwithout {what}"
    elif result.method is not None:
        words = f"score for{name}\n(ranks only, no unit)"
    else:
        words = f"score for{name}"
    direction = result.higher_is_better[j]
    if direction is None:
        return f"{words}\n← falls without it  |  rises without it →"
    return f"{words}\n{'← helps  |  hurts →' if direction else '← hurts  |  helps →'}"


def name_rows(ax: Axes, names: list[str], label: str, above: float) -> None:
    """Name the rows, draw a line at score 0, and label the axis of the scores.

    Args:
        ax: axes with the rows; the first row is at height 0.
        names: names of the rows.
        label: label of the score axis. It ends at the right end of the axis; a long label extends below the names.
        above: room above the first row.
    """
    ax.axvline(0, color="black", lw=0.8)
    plain_ticks(ax.yaxis, range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -above)
    # few ticks, so that long numbers do not overlap; and no power of ten next to the axis
    ax.locator_params(axis="x", nbins=4 if is_wide(ax) else 2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))
    ax.set_xlabel(label, parse_math=False, loc="right", multialignment="center")
    tidy(ax)


def legend(ax: Axes, effects: set[str]) -> None:
    """Add a legend with an entry for each effect that is drawn, if there is more than one."""
    from matplotlib.patches import Patch

    found = [effect for effect in STYLES if effect in effects]
    if len(found) > 1:
        handles = [
            Patch(facecolor=STYLES[e].colour, hatch=STYLES[e].hatch, edgecolor="black", label=MEANINGS.get(e, e))
            for e in found
        ]
        legend_above(ax, handles=handles, ncols=min(len(handles), 3))


def legend_above(ax: Axes, **options: Any) -> None:
    """Add a legend above the picture, where it hides nothing."""
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize="small", frameon=False, borderaxespad=0.2, **options)


def tidy(ax: Axes) -> None:
    """Remove the top and right lines of the box around the picture."""
    ax.spines[["top", "right"]].set_visible(False)


def few_dates(ax: Axes) -> None:
    """Write a few dates below the picture, without repeating the parts they share."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator(minticks=2, maxticks=6)
    ax.xaxis.set_major_locator(locator)
    ax.xaxis.set_major_formatter(ConciseDateFormatter(locator))


def refuse_empty(result: Attribution) -> None:
    """Raise an error if the result has no groups to show, e.g. the result of ``.harmful()`` if no group hurts."""
    if not len(result.groups):
        raise ValueError("there is no group to show: the result is of none, as .harmful() is where no group hurts.")


def scores_of(result: Attribution, property: str | int) -> tuple[int, np.ndarray]:
    """Return the row of a property, and its scores `[k]`; raise an error if there is no group."""
    refuse_empty(result)
    j = result.property_id(property)
    return j, result.scores[j].detach().cpu().double().numpy()


def group_name(result: Attribution, group: int, *, size: bool = False) -> str:
    """Return the name of a group, with the size if `size`, as text on one line, short enough to leave room to draw."""
    return shown(result.groups.name(group), WIDEST_NAME) + (f" ({result.sizes[group]:,})" if size else "")


def name_sides(ax: Axes, rows: list[str], columns: list[str], steep: int) -> None:
    """Write the names of rows and columns; if there are many columns, only some of their names."""
    plain_ticks(ax.yaxis, range(len(rows)), rows)
    step = max(1, -(-len(columns) // 40))
    slanted = {"rotation": steep, "ha": "right", "rotation_mode": "anchor"}
    plain_ticks(ax.xaxis, range(0, len(columns), step), columns[::step], **slanted)


def write_cells(ax: Axes, scores: np.ndarray, relative: np.ndarray) -> None:
    """Write the number into every cell that has one, or its sign if there are many cells; white on dark colours."""
    size = 7 if is_wide(ax) else 5.5
    room = ax.figure.bbox.width / ax.figure.dpi - 3  # inches: names and the colour bar take about three
    many = scores.size > _NUMBERS or scores.shape[1] > max(_ALWAYS_FIT, room / (0.058 * size))  # seven digits
    if scores.size > 20 * _NUMBERS:
        return
    for row, column in np.argwhere(~np.isnan(scores)):
        value = scores[row, column]
        text = ("+" if value > 0 else "−" if value < 0 else "") if many else number(value)
        dark = abs(relative[row, column]) > 0.65
        ax.text(column, row, text, ha="center", va="center", fontsize=size, color="white" if dark else "black")
