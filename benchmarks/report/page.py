"""report.html: one file that opens offline, on a phone and on paper; and the same content as Markdown."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.report.formats import Table, plain_markdown
from benchmarks.report.headlines import Headlines
from benchmarks.report.rows import Run
from benchmarks.report.style import Picture

TITLE = "Group data attribution: benchmark report"
_PREFIXES = {
    "Checks against the original toolkits": ("check", "speed-up"),
    "Retraining score": ("retraining", "runtime"),
    "Pruning": ("pruning",),
    "Noisy labels": ("noisy", "detection"),
    "Fidelity to real retraining": ("lds", "leave-group-out"),
    "Cost": ("cost",),
    "Reviewers' questions": ("review",),
}
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 68rem; margin: 0 auto;
  padding: 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 2px solid #0072b2; }
a { color: #005a8c; }
.headlines { background: #eef5fa; border-left: 4px solid #0072b2; padding: .6rem 1rem; list-style: none;
  margin: 1rem 0; }
.headlines li { font-weight: 600; margin: .3rem 0; }
.headlines li::first-letter { text-transform: uppercase; }
.missing { color: #7a3b00; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; list-style: none; }
figure { margin: 1.5rem 0; }
.table figcaption { font-weight: 600; margin-bottom: .3rem; }
.note { color: #444; font-size: .85rem; margin: .3rem 0 0; }
.box { overflow: auto; max-height: 34rem; border: 1px solid #ddd; }
.picture .box { max-height: none; border: 0; }
.picture img { display: block; width: 100%; min-width: 34rem; height: auto; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #eee; }
thead { position: sticky; top: 0; }
thead th { background: #f3f3f3; }
thead th[colspan] { text-align: center; }
.words :is(th, td) { text-align: left; white-space: normal; overflow-wrap: normal; }
.keys1 :is(td, th):nth-child(-n+1), .keys2 :is(td, th):nth-child(-n+2), .keys3 :is(td, th):nth-child(-n+3),
.keys4 :is(td, th):nth-child(-n+4) { text-align: left; }
pre { overflow-x: auto; background: #f6f6f6; padding: .6rem; font-size: .82rem; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1rem; }
@media (max-width: 40rem) {
  table { font-size: .75rem; } th, td { padding: .2rem .35rem; }
}
@page { margin: 14mm; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; }
  .box { overflow: visible; max-height: none; border: 0; }
  .picture img { min-width: 0; }
  .picture, tr { break-inside: avoid; }
  h2, figcaption { break-after: avoid; }
  table { font-size: 6.5pt; } th, td { padding: 1px 3px; white-space: normal; } thead { position: static; }
}
"""


@dataclass(frozen=True)
class Content:
    """What a report says, in whatever format.

    Attributes:
        headlines: the three lines on top.
        runs: folders with machine, command and versions.
        sources: the table of data.
        tables: all other tables.
        pictures: all figures.
        missing: one line per kind of figure that had no rows.
    """

    headlines: Headlines
    runs: Sequence[Run]
    sources: Table
    tables: Sequence[Table]
    pictures: Sequence[Picture]
    missing: Sequence[str]

    def sections(self) -> Iterator[tuple[str, list[Picture], list[Table]]]:
        """Title, figures and tables of every section that has any."""
        for title, prefixes in _PREFIXES.items():
            pictures = [one for one in self.pictures if one.name.startswith(prefixes)]
            tables = [one for one in self.tables if one.name.startswith(prefixes)]
            if pictures or tables:
                yield title, pictures, tables


def html(content: Content) -> str:
    """The whole page, nothing loaded from elsewhere."""
    sections = list(content.sections())
    links = [("Data", "data"), *((title, _anchor(title)) for title, _, _ in sections), ("How it was run", "runs")]
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(TITLE)}</title>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<style>{_STYLE}</style></head><body><main><h1>{escape(TITLE)}</h1>",
        "<ul class='headlines'>" + "".join(f"<li>{escape(line)}</li>" for line in content.headlines.lines) + "</ul>",
        "<nav><ul>" + "".join(f"<li><a href='#{anchor}'>{escape(title)}</a></li>" for title, anchor in links),
        "</ul></nav>",
        *(f"<p class='missing'>{escape(line)}</p>" for line in content.missing),
        f"<h2 id='data'>Data</h2>{content.sources.html()}",
    ]
    for title, pictures, tables in sections:
        parts.append(f"<h2 id='{_anchor(title)}'>{escape(title)}</h2>")
        parts += [_picture(one) for one in pictures]
        parts += [one.html() for one in tables]
    parts.append("<h2 id='runs'>How it was run</h2>")
    for run in content.runs:
        facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _facts(run))
        parts.append(f"<h3>{escape(run.path.name)}</h3><dl>{facts}</dl>")
    parts.append("</main></body></html>\n")
    return "\n".join(parts)


def markdown(content: Content, figures: str) -> str:
    """The same as Markdown, with links to the figures in the folder `figures`."""
    parts = [f"# {TITLE}", "\n".join(f"- {plain_markdown(line)}" for line in content.headlines.lines)]
    parts += map(plain_markdown, content.missing)
    parts += ["## Data", content.sources.markdown()]
    for title, pictures, tables in content.sections():
        parts.append(f"## {plain_markdown(title)}")
        parts += [
            f"![{plain_markdown(one.title)}]({figures}/{one.svg.name})\n\n{plain_markdown(one.caption)}"
            for one in pictures
        ]
        parts += [one.markdown() for one in tables]
    parts += ["## How it was run", *(run_lines(run) for run in content.runs)]
    return "\n\n".join(parts) + "\n"


def run_lines(run: Run) -> str:
    """A run's machine, command and versions as a Markdown list."""
    facts = (f"- {plain_markdown(name)}: {plain_markdown(value)}" for name, value in _facts(run))
    return f"**{plain_markdown(run.path.name)}**\n\n" + "\n".join(facts)


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.svg.read_bytes()).decode()
    image = f"<img alt='{escape(picture.title)}' src='data:image/svg+xml;base64,{data}'>"
    return (
        f"<figure class='picture'><div class='box' tabindex='0'>{image}</div>"
        f"<figcaption class='note'>{escape(picture.caption)}</figcaption></figure>"
    )


def _facts(run: Run) -> list[tuple[str, str]]:
    """A run's config as pairs of text, nested values on one line."""
    return [(name.replace("_", " "), _text(value)) for name, value in run.config.items() if value is not None]


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} {_text(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(_text(inner) for inner in value)
    return str(value)


def _anchor(title: str) -> str:
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter == "-")
