"""A hand-written Markdown document with generated parts: tables between markers, and figures in a folder next to it.

``<!-- table NAME -->`` … ``<!-- end -->`` is filled with the report's table NAME, ``<!-- headlines -->`` … ``<!-- end
-->`` with its headlines, and ``<!-- runs -->`` … ``<!-- end -->`` with machine, commands and versions of all runs.
Every linked ``figures/NAME.svg`` or ``.png`` is copied. All other text is left unchanged. Tables ``timing-PART`` come
from the files of `python -m benchmarks speed`, all others from rows; filling one kind leaves the other unchanged.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.report.formats import Table, plain_markdown
from benchmarks.report.page import Content, runs_text
from benchmarks.report.timing_tables import PREFIX

_MARKED = re.compile(r"<!-- (?P<what>table (?P<name>[\w-]+)|headlines|runs) -->\n.*?<!-- end -->", re.DOTALL)
_FIGURE = re.compile(r"\(figures/(?P<name>[\w-]+)\.(?P<kind>svg|png)\)")


def refresh(documents: Sequence[Path], content: Content) -> None:
    """Fill the generated parts of documents.

    Raises:
        ValueError: a document names a table or figure that the rows do not give; nothing is written then.
    """
    tables = {table.name: table for table in (content.sources, *content.tables)}
    pictures = {picture.name: picture for picture in content.pictures}
    figures = {document: _known(document, set(tables), set(pictures)) for document in documents}

    def body(match: re.Match[str]) -> str | None:
        if match["name"]:
            return None if _is_timing(match) else tables[match["name"]].markdown()
        if match["what"] == "headlines":
            return "\n".join(f"- {plain_markdown(line)}" for line in content.headlines.lines)
        return runs_text(content.runs)

    for document, shown in figures.items():
        _fill(document, body)
        folder = document.parent / "figures"
        for name, kind in shown:
            folder.mkdir(exist_ok=True)
            shutil.copyfile(pictures[name].svg.with_suffix(f".{kind}"), folder / f"{name}.{kind}")


def _known(document: Path, tables: set[str], pictures: set[str]) -> set[tuple[str, str]]:
    """Return names and kinds of the figures of a document; raise a ValueError if it shows what is not there."""
    text = document.read_text(encoding="utf-8")
    wanted = {match["name"] for match in _MARKED.finditer(text) if match["name"] and not _is_timing(match)}
    figures = {(match["name"], match["kind"]) for match in _FIGURE.finditer(text)}
    unknown = sorted((wanted - tables) | ({name for name, _ in figures} - pictures))
    if unknown:
        raise ValueError(
            f"{document} shows {', '.join(unknown)}, which these result folders do not give: add the folder that has "
            f"the rows, or take them out of the document."
        )
    return figures


def refresh_timings(documents: Sequence[Path], tables: Iterable[Table]) -> None:
    """Fill the tables of `python -m benchmarks speed`; tables of parts that were not run are left unchanged."""
    found = {table.name: table.markdown() for table in tables}
    for document in documents:
        _fill(document, lambda match: found.get(match["name"]))


def _fill(document: Path, body: Callable[[re.Match[str]], str | None]) -> None:
    """Put a text between the markers of each generated part; parts for which it is None are left unchanged."""

    def filled(match: re.Match[str]) -> str:
        text = body(match)
        return match[0] if text is None else f"<!-- {match['what']} -->\n{text.strip()}\n<!-- end -->"

    document.write_text(_MARKED.sub(filled, document.read_text(encoding="utf-8")), encoding="utf-8")


def _is_timing(match: re.Match[str]) -> bool:
    return bool(match["name"]) and match["name"].startswith(PREFIX)
