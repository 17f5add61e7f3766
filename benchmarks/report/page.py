"""report.html, made from `page.html.jinja`: one file that works offline, on a phone and in print; and as Markdown."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from benchmarks.report.charts import Chart
from benchmarks.report.formats import Table, plain_markdown
from benchmarks.report.headlines import Headlines
from benchmarks.report.rows import Run
from benchmarks.report.style import Picture

TITLE = "Group data attribution: benchmark report"
ABOUT = (
    "Which training data made a model what it is? Captum, dattri and TRAK score single training points, one by one; "
    "ggda-ext scores groups of them, for less."
)
SECTIONS = {
    "Equality: checks against the original toolkits": ("check",),
    "Speed: against the original toolkits": ("speed",),
    "Retraining score": ("retraining", "runtime"),
    "Pruning": ("pruning",),
    "Noisy labels": ("noisy", "detection"),
    "Fidelity to real retraining": ("lds", "leave-group-out", "what-if", "dattri"),
    "Cost": ("cost",),
    "Reviewers' questions": ("review",),
}
_IN_SIGHT = 14  # largest number of rows of a table that is not folded


@dataclass(frozen=True)
class Content:
    """The content of a report, for all formats.

    Attributes:
        headlines: the sentences at the top.
        charts: the small charts below them.
        runs: result folders with machine, command and versions.
        sources: the table of data.
        real: a sentence that says which data are real and which are made up.
        takeaways: first prefix of a section → a sentence that sums it up.
        advice: the table that says which method to use; None if no rows answer this.
        tables: all other tables.
        pictures: all figures.
        missing: one line for each kind of figure without rows.
    """

    headlines: Headlines
    charts: Sequence[Chart]
    runs: Sequence[Run]
    sources: Table
    real: str
    takeaways: Mapping[str, str]
    advice: Table | None
    tables: Sequence[Table]
    pictures: Sequence[Picture]
    missing: Sequence[str]

    def sections(self) -> Iterator[tuple[str, str, list[Picture], list[Table]]]:
        """Yield title, takeaway, figures and tables of every section that has figures or tables."""
        for title, prefixes in SECTIONS.items():
            pictures = [one for one in self.pictures if one.name.startswith(prefixes)]
            tables = [one for one in self.tables if one.name.startswith(prefixes)]
            if pictures or tables:
                yield title, self.takeaways.get(prefixes[0], ""), pictures, tables


def html(content: Content) -> str:
    """Return the whole page, which loads nothing from elsewhere."""
    sections = [
        {
            "title": title, "anchor": _anchor(title), "takeaway": takeaway,
            "pictures": [_shown(one) for one in pictures], "tables": tables,
        }
        for title, takeaway, pictures, tables in content.sections()
    ]  # fmt: skip
    links = [("Data", "data"), *((str(one["title"]), str(one["anchor"])) for one in sections)]
    links += [("Which method should I use?", "advice")] if content.advice else []
    source = (Path(__file__).parent / "page.html.jinja").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template.filters["code"] = _code
    return template.from_string(source).render(
        title=TITLE,
        about=ABOUT,
        lead=[line for line in content.headlines.lines if line != content.headlines.method],
        charts=content.charts,
        links=[*links, ("How it was run", "runs")],
        missing=content.missing,
        data_takeaway=content.real,
        sources=content.sources,
        sections=sections,
        advice=content.advice,
        runs=[{"name": run.path.name, "facts": _facts(run)} for run in content.runs],
        in_sight=_IN_SIGHT,
    )


def markdown(content: Content, figures: str) -> str:
    """Return the report as Markdown, with links to the figures in the folder `figures`."""
    parts = [f"# {TITLE}", "\n".join(f"- {plain_markdown(line)}" for line in content.headlines.lines)]
    parts += map(plain_markdown, content.missing)
    parts += ["## Data", plain_markdown(content.real), content.sources.markdown()]
    for title, takeaway, pictures, tables in content.sections():
        parts += [f"## {plain_markdown(title)}", *([plain_markdown(takeaway)] if takeaway else [])]
        parts += [
            f"![{plain_markdown(one.title)}]({figures}/{one.svg.name})\n\n{plain_markdown(one.caption)}"
            for one in pictures
        ]
        parts += [one.markdown() for one in tables]
    if content.advice:
        parts += [f"## {content.advice.title}", content.advice.markdown()]
    parts += ["## How it was run", runs_text(content.runs)]
    return "\n\n".join(parts) + "\n"


def runs_text(runs: Sequence[Run]) -> str:
    """Return machine, commands and versions as paragraphs of Markdown: what all runs share, then the rest of each."""
    facts = [dict(_facts(run)) for run in runs]
    shared = {name: text for name, text in facts[0].items() if all(one.get(name) == text for one in facts)}
    if len(runs) == 1:
        shared = {}
    own = [{name: text for name, text in one.items() if name not in shared} for one in facts]
    titled = [("All runs", shared)] if shared else []
    titled += [(run.path.name, one) for run, one in zip(runs, own, strict=True)]
    return "\n\n".join(f"**{plain_markdown(title)}**: {_facts_text(one)}." for title, one in titled)


def _facts_text(facts: Mapping[str, str]) -> str:
    return "; ".join(
        f"{plain_markdown(name)}: {plain_markdown(text)}".replace("; ", ", ") for name, text in facts.items()
    )


def _shown(picture: Picture) -> dict[str, str]:
    """Return title and caption of a picture, and both its SVG files as data URLs."""
    return {
        "title": picture.title,
        "caption": picture.caption,
        "wide": _data(picture.svg),
        "narrow": _data(picture.narrow),
    }


def _data(file: Path) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(file.read_bytes()).decode()}"


def _facts(run: Run) -> list[tuple[str, str]]:
    """Return the config of a run as pairs of text; nested values are on one line."""
    return [(name.replace("_", " "), _text(value)) for name, value in run.config.items() if value is not None]


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} {_text(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(_text(inner) for inner in value)
    return str(value)


def _code(text: str) -> Markup:
    """Return text as HTML in which the parts between backticks are code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _anchor(title: str) -> str:
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter == "-")
