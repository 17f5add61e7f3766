"""A page about a result: one HTML file, offline, without scripts, from the template `page.html.jinja`.

Everything here is turned into plain texts and data addresses; the template escapes all of them.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ggda_ext.results import ranking, sentences
from ggda_ext.results.drawing import refuse_empty
from ggda_ext.results.members import carried, members_of
from ggda_ext.results.table import number, shown
from ggda_ext.results.thumbnails import checked_count, png_address, row_cells, svg_address, text
from ggda_ext.results.times import as_times

if TYPE_CHECKING:
    from ggda_ext.results.attribution import Attribution

TOP_ROWS, MOST_ROWS = 20, 1000
"""Rows of the table in sight, and in the page at all."""
EACH_WAY, MOST_MEMBERS, MOST_LABELS, MOST_PROPERTIES = 3, 6, 6, 4
_WIDTH = 4.2  # inches: text keeps its size on a telephone
_MARKS = {"helps": "▲", "hurts": "▼", "rises": "↗", "falls": "↘", "unclear": "?", "none": "·", "unknown": "?"}


@dataclass(frozen=True)
class Member:
    """A training point of a group."""

    index: int
    score: str
    label: str
    image: str
    cells: list[tuple[str, str]]


@dataclass(frozen=True)
class Label:
    """A label's share in a group and in all data."""

    name: str
    here: float
    everywhere: float


@dataclass(frozen=True)
class GroupCard:
    """What the page tells about one of the groups that matter."""

    name: str
    size: int
    share: str
    scores: list[dict[str, str]]
    warnings: tuple[str, ...]
    labels: list[Label] = field(default_factory=list)
    carries: str = ""
    members: list[Member] = field(default_factory=list)


def written(result: Attribution, path: Path, *, title: str | None, **about: Any) -> Path:
    """Write the page, as a whole or not at all; see `Attribution.to_html`."""
    from ggda_ext.storage.files import replaced  # only who writes something needs it

    page = rendered(result, title=title, **about)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as file:
        file.write(page.encode("utf-8", "replace"))
    return path


def rendered(
    result: Attribution, *, rows: Any = None, images: Any = None, labels: Any = None, member_scores: Any = None,
    title: str | None = None,
) -> str:  # fmt: skip
    """The page as text."""
    try:
        import matplotlib  # noqa: F401  # both at once: the extra brings both
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError("to_html needs Jinja2 and matplotlib: pip install 'ggda-ext[plot]'.") from error
    refuse_empty(result)
    for name, values in (("rows", rows), ("images", images), ("labels", labels)):
        if values is not None:
            checked_count(values, name, result.groups.n)
    known = member_scores is not None or result.member_scores is not None
    members = members_of(result, member_scores) if known else None
    cards = _Cards(result, members, rows, images, None if labels is None else _as_texts(labels))
    source = (Path(__file__).parent / "page.html.jinja").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    order = ranking.order(result)
    return template.from_string(source).render(
        title=text(title) if title is not None else _title(result),
        question=sentences.question(result),
        answers=_answers(result),
        magnitude=sentences.magnitude(result),
        columns=_columns(result),
        table=[_table_row(result, place, j) for place, j in enumerate(order[:MOST_ROWS], 1)],
        in_sight=TOP_ROWS,
        left_out=max(0, len(order) - MOST_ROWS),
        pictures=_pictures(result, members),
        cards=[cards.of(j) for j in _that_matter(result)],
        facts=_facts(result),
        notes=[text(note) for note in result.notes],
    )


def _title(result: Attribution) -> str:
    m = len(result.properties)
    return (
        f"What made {shown(result.properties[0])} what it is" if m == 1 else f"What made {m} properties what they are"
    )


def _answers(result: Attribution) -> list[tuple[str, list[sentences.Sentence]]]:
    """Sentences by property; the name of the property only where there are several."""
    several = len(result.properties) > 1
    return [
        (shown(result.properties[j]) if several else "", sentences.answers(result, j))
        for j in range(min(len(result.properties), MOST_PROPERTIES))
    ]


def _columns(result: Attribution) -> list[str]:
    return [shown(name) for name in result.properties[:MOST_PROPERTIES]]


def _table_row(result: Attribution, place: int, group: int) -> dict[str, Any]:
    name = result.groups.name(group)
    return {
        "place": place, "name": shown(name), "size": int(result.sizes[group]), "scores": _scores(result, group),
        "warnings": [text(one) for one in result.warnings.get(name, ())],
    }  # fmt: skip


def _scores(result: Attribution, group: int) -> list[dict[str, str]]:
    """Score, interval and effect of a group for each property shown."""
    found = []
    for j in range(min(len(result.properties), MOST_PROPERTIES)):
        score, ends = float(result.scores[j, group]), None
        if result.low is not None and result.high is not None:
            ends = float(result.low[j, group]), float(result.high[j, group])
        effect = ranking.effect_of(score, result.higher_is_better[j], ends)
        found.append(
            {
                "property": shown(result.properties[j]), "score": number(score), "effect": effect,
                "ends": " to ".join(map(number, ends or ())), "mark": _MARKS[effect],
            }
        )  # fmt: skip
    return found


def _that_matter(result: Attribution) -> list[int]:
    """The groups with the largest scores of either sign, those that hurt first."""
    scores = result.scores[0].detach().cpu().double().numpy()
    order = [j for j in ranking.order(result, 0) if np.isfinite(scores[j])]
    hurts = -1 if result.higher_is_better[0] is False else 1
    sides = [[j for j in order if np.sign(scores[j]) == side][:EACH_WAY] for side in (hurts, -hurts)]
    return sides[0] + sides[1]


class _Cards:
    """Makes the cards of groups from what the caller gave."""

    def __init__(
        self, result: Attribution, members: np.ndarray | None, rows: Any, images: Any, labels: np.ndarray | None
    ) -> None:
        self.result, self.members, self.rows, self.images, self.labels = result, members, rows, images, labels

    def of(self, group: int) -> GroupCard:
        """The card of one group."""
        result, name = self.result, self.result.groups.name(group)
        points = result.groups[group]
        return GroupCard(
            shown(name), len(points), f"{len(points) / result.groups.n:.1%}", _scores(result, group),
            tuple(text(one) for one in result.warnings.get(name, ())), self._mix(points), self._carries(points),
            self._members(points),
        )  # fmt: skip

    def _mix(self, points: np.ndarray) -> list[Label]:
        """The most common labels of the group, and their shares in all data."""
        if self.labels is None:
            return []
        names, counts = np.unique(self.labels[points], return_counts=True)
        most = MOST_LABELS if len(names) > MOST_LABELS + 1 else len(names)  # "1 other" takes the room of its name
        first = np.argsort(-counts, kind="stable")[:most]
        found = [Label(str(names[i]), counts[i] / len(points), float((self.labels == names[i]).mean())) for i in first]
        rest = 1 - sum(label.here for label in found)
        if len(names) > most:
            found.append(Label(f"{len(names) - most} others", rest, 1 - sum(one.everywhere for one in found)))
        return found

    def _carries(self, points: np.ndarray) -> str:
        if self.members is None:
            return ""
        found, count = carried(self.members[0][points]), f"{len(points):,} members"
        if not found.half:
            return ""
        who = f"{found.half:,} of {count} carry" if found.half != 1 else f"One of {count} carries"
        return (
            f"{who} half of what pulls the group’s way, the largest {found.largest:.0%} of it. "
            f"{found.same_way:.0%} of the members pull that way."
        )

    def _members(self, points: np.ndarray) -> list[Member]:
        """The members that carry the group, or its first ones where that is not known."""
        if self.members is not None:
            points = points[carried(self.members[0][points]).order]
        elif self.rows is None and self.images is None:
            return []
        return [self._member(int(i)) for i in points[:MOST_MEMBERS]]

    def _member(self, i: int) -> Member:
        return Member(
            i,
            "" if self.members is None else number(float(self.members[0][i])),
            "" if self.labels is None else str(self.labels[i]),
            "" if self.images is None else png_address(self.images[i]),
            [] if self.rows is None else row_cells(self.rows, i),
        )


def _as_texts(labels: Any) -> np.ndarray:
    values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    return np.array([text(value) for value in values], dtype=object).astype(str)


def _pictures(result: Attribution, members: np.ndarray | None) -> list[dict[str, str]]:
    """Bars, and what else there is something to show for, as data addresses with a caption."""
    several = len(result.properties) > 1
    shown_properties = range(min(len(result.properties), MOST_PROPERTIES))
    pictures: list[tuple[str, Any]] = [
        (
            f"Scores{' for ' + shown(result.properties[j]) if several else ''}",
            lambda ax, j=j: result.plot.bars(j, ax=ax),
        )
        for j in shown_properties
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
    """A picture as high as its rows need, without pyplot's list of open figures."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, 3.2), layout="constrained")
    ax = draw(figure.add_subplot())
    lines = len(ax.get_yticks()) if ax.yaxis_inverted() else 0
    if lines:
        figure.set_size_inches(_WIDTH, 1.4 + max(0.27 * lines, 1.0))
    return svg_address(figure)


def _dated(result: Attribution) -> bool:
    """Whether the groups are named by dates, three at least."""
    names = result.names
    if len(names) < 3 or not any(isinstance(name, str) or hasattr(name, "year") for name in names[:1]):
        return False
    try:
        return as_times(names, len(names)).dtype.kind == "M"
    except ValueError:
        return False


def _facts(result: Attribution) -> list[tuple[str, str]]:
    """Method, cost, and what was running."""
    from ggda_ext import __version__

    facts = []
    if result.method is not None:
        facts += [("method", str(result.method.name))]
        facts += [
            (text(name), f"{v:.4g}" if isinstance(v, float) else text(v)) for name, v in result.method.settings.items()
        ]
        facts += [("scores", result.method.meaning.removeprefix("scores "))]
        facts += [("cost", result.method.cost)] if result.method.cost else []
    if result.interval:
        facts.append(("interval", text(result.interval)))
    versions = f"ggda-ext {__version__}, PyTorch {torch.__version__}, NumPy {np.__version__}"
    versions += f", Python {platform.python_version()}"
    return [*facts, ("versions", versions), ("written", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"))]
