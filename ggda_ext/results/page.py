"""A page about a result: one HTML file for offline use, without scripts, from the template `page.html.jinja`.

This module turns everything into plain texts and data addresses. The template escapes all of them.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ggda_ext.results import ranking, sentences
from ggda_ext.results.drawing import refuse_empty
from ggda_ext.results.members import Carried, carried, members_of
from ggda_ext.results.table import number, shown
from ggda_ext.results.thumbnails import checked_count, place_of, png_address, row_cells, svg_address, text
from ggda_ext.results.times import as_times

if TYPE_CHECKING:
    from ggda_ext.results.attribution import Attribution

TOP_ROWS, MOST_ROWS = 20, 1000
"""Number of table rows that are visible at first, and the maximum number of rows in the page."""
EACH_WAY, MOST_MEMBERS, MOST_LABELS, MOST_PROPERTIES = 3, 6, 6, 4
_WIDTH = 4.2  # inches; text stays readable on a phone
_MARKS = {"helps": "▲", "hurts": "▼", "rises": "↗", "falls": "↘", "unclear": "?", "none": "·", "unknown": "?"}


def written(result: Attribution, path: Path, *, title: str | None, **about: Any) -> Path:
    """Write the page, completely or not at all; see `Attribution.to_html`."""
    from ggda_ext.storage.files import written_whole  # late: only writing needs it

    page = rendered(result, title=title, **about)
    with written_whole(path) as file:
        file.write(page.encode("utf-8", "replace"))
    return path


def rendered(
    result: Attribution, *, rows: Any = None, images: Any = None, labels: Any = None, member_scores: Any = None,
    title: str | None = None,
) -> str:  # fmt: skip
    """Return the page as text."""
    try:
        import matplotlib  # noqa: F401  # checked here too: one extra installs both
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError("to_html needs Jinja2 and matplotlib: pip install 'ggda-ext[plot]'.") from error
    refuse_empty(result)
    for name, values in (("rows", rows), ("images", images), ("labels", labels)):
        if values is not None:
            checked_count(values, name, result.groups.n)
    known = member_scores is not None or result.member_scores is not None
    members = members_of(result, member_scores) if known else None
    named = None if labels is None else _as_texts(labels)
    source = (Path(__file__).parent / "page.html.jinja").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    order, matter = ranking.order(result), _that_matter(result)
    told = _told(result, {*order[:MOST_ROWS], *matter})
    return template.from_string(source).render(
        title=text(title) if title is not None else _title(result),
        question=sentences.question(result),
        answers=_answers(result),
        magnitude=sentences.magnitude(result),
        columns=[shown(name) for name in result.properties[:MOST_PROPERTIES]],
        table=[told[j] | {"place": place} for place, j in enumerate(order[:MOST_ROWS], 1)],
        in_sight=TOP_ROWS,
        left_out=max(0, len(order) - MOST_ROWS),
        pictures=_pictures(result, members),
        cards=[told[j] | _card(result, j, members, rows, images, named) for j in matter],
        facts=_facts(result),
        notes=[text(note) for note in result.notes],
    )


def _title(result: Attribution) -> str:
    m = len(result.properties)
    return (
        f"What made {shown(result.properties[0])} what it is" if m == 1 else f"What made {m} properties what they are"
    )


def _answers(result: Attribution) -> list[tuple[str, list[sentences.Sentence]]]:
    """Return the answer sentences for each property, with the property's name if there are several properties."""
    several = len(result.properties) > 1
    return [
        (shown(name) if several else "", sentences.answers(result, j))
        for j, name in enumerate(result.properties[:MOST_PROPERTIES])
    ]


def _told(result: Attribution, ids: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return group id → what the table and the cards show about the group."""
    found: dict[int, dict[str, Any]] = {}
    for j in ids:
        name = result.groups.name(j)
        warnings = [text(one) for one in result.warnings.get(name, ())]
        found[j] = {"name": shown(name), "size": int(result.sizes[j]), "scores": [], "warnings": warnings}
    for row, name in enumerate(result.properties[:MOST_PROPERTIES]):
        scores, effects, ends = result.scores[row].tolist(), ranking.effects(result, row), ranking.ends(result, row)
        for j, group in found.items():
            around = "" if ends is None else " to ".join(map(number, ends[j]))
            about = {"effect": effects[j], "mark": _MARKS[effects[j]], "ends": around}
            group["scores"].append({"property": shown(name), "score": number(scores[j])} | about)
    return found


def _that_matter(result: Attribution) -> list[int]:
    """Return the ids of the groups with the largest scores of either sign, those that hurt first."""
    scores = result.scores[0].detach().cpu().double().numpy()
    order = [j for j in ranking.order(result, 0) if np.isfinite(scores[j])]
    hurts = -1 if result.higher_is_better[0] is False else 1
    sides = [[j for j in order if np.sign(scores[j]) == side][:EACH_WAY] for side in (hurts, -hurts)]
    return sides[0] + sides[1]


def _card(
    result: Attribution, group: int, members: np.ndarray | None, rows: Any, images: Any, labels: np.ndarray | None
) -> dict[str, Any]:
    """Return what a card adds about a group that matters: its labels, and the members that carry it."""
    points = result.groups[group]
    found = None if members is None else carried(members[0][points])
    nothing_to_show = found is None and rows is None and images is None
    first = [] if nothing_to_show else points if found is None else points[found.order]
    return {
        "share": f"{len(points) / result.groups.n:.1%}",
        "labels": [] if labels is None else _mix(labels, points),
        "carries": "" if found is None else _who_carries(found, len(points)),
        "members": [
            {
                "index": place_of(rows, i),
                "score": "" if members is None else number(float(members[0][i])),
                "label": "" if labels is None else str(labels[i]),
                "image": "" if images is None else png_address(images[i]),
                "cells": [] if rows is None else row_cells(rows, i),
            }
            for i in map(int, first[:MOST_MEMBERS])
        ],
    }


def _mix(labels: np.ndarray, points: np.ndarray) -> list[dict[str, Any]]:
    """Return the most common labels of a group, with their shares in the group and in all data."""
    names, counts = np.unique(labels[points], return_counts=True)
    most = MOST_LABELS if len(names) > MOST_LABELS + 1 else len(names)  # "1 other" needs as much room as that label
    found = [
        {"name": str(names[i]), "here": counts[i] / len(points), "everywhere": float((labels == names[i]).mean())}
        for i in np.argsort(-counts, kind="stable")[:most]
    ]
    if len(names) > most:
        rest = {share: 1 - sum(one[share] for one in found) for share in ("here", "everywhere")}
        found.append({"name": f"{len(names) - most} others"} | rest)
    return found


def _who_carries(found: Carried, size: int) -> str:
    if not found.half:
        return ""
    who = f"{found.half:,} of {size:,} members carry" if found.half != 1 else f"One of {size:,} members carries"
    return (
        f"{who} half of what pulls the group’s way, the largest {found.largest:.0%} of it. "
        f"{found.same_way:.0%} of the members pull that way."
    )


def _as_texts(labels: Any) -> np.ndarray:
    values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    return np.array([text(value) for value in values], dtype=object).astype(str)


def _pictures(result: Attribution, members: np.ndarray | None) -> list[dict[str, str]]:
    """Return the pictures that the result has data for, each as a caption and a data address; always the bars."""
    several = len(result.properties) > 1
    pictures: list[tuple[str, Any]] = [
        (f"Scores for {shown(name)}" if several else "Scores", lambda ax, j=j: result.plot.bars(j, ax=ax))
        for j, name in enumerate(result.properties[:MOST_PROPERTIES])
    ]
    if several:
        pictures.append(("Groups and properties", lambda ax: result.plot.heatmap(ax=ax)))
    if members is not None:
        pictures.append(
            ("Does one point carry a group?", lambda ax: result.plot.members(member_scores=members, most=6, ax=ax))
        )
    if _dated(result):
        pictures.append(("Over time", lambda ax: result.plot.timeline(ax=ax)))
    return [{"caption": caption, "address": _drawn(draw)} for caption, draw in pictures]


def _drawn(draw: Any) -> str:
    """Draw a picture as high as its rows need, without pyplot, which would keep the figure open."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, 3.2), layout="constrained")
    ax = draw(figure.add_subplot())
    lines = len(ax.get_yticks()) if ax.yaxis_inverted() else 0
    if lines:
        figure.set_size_inches(_WIDTH, 1.4 + max(0.27 * lines, 1.0))
    return svg_address(figure)


def _dated(result: Attribution) -> bool:
    """Whether the group names are dates and no digits alone, such as zip codes, and there are at least three groups."""
    names = result.names
    if len(names) < 3 or not any(isinstance(name, str) or hasattr(name, "year") for name in names[:1]):
        return False
    if any(isinstance(name, str) and name.isdigit() for name in names):
        return False
    try:
        return as_times(names, len(names)).dtype.kind == "M"
    except ValueError:
        return False


def _facts(result: Attribution) -> list[tuple[str, str]]:
    """Return pairs of name and fact: method, settings, cost, interval, software versions and time of writing."""
    from ggda_ext import __version__

    facts = []
    if result.method is not None:
        settings = result.method.settings.items()
        facts += [
            ("method", str(result.method.name)),
            *((text(name), f"{v:.4g}" if isinstance(v, float) else text(v)) for name, v in settings),
            ("scores", result.method.meaning.removeprefix("scores ")),
            ("cost", result.method.cost),
        ]
    versions = f"ggda-ext {__version__}, PyTorch {torch.__version__}, NumPy {np.__version__}"
    versions += f", Python {platform.python_version()}"
    written = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    facts += [("interval", text(result.interval)), ("versions", versions), ("written", written)]
    return [(name, fact) for name, fact in facts if fact]
