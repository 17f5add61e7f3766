"""A hand-written Markdown document with generated parts: tables between markers, and figures in a folder next to it.

``<!-- table NAME -->`` … ``<!-- end -->`` is filled with the report's table NAME, ``<!-- headlines -->`` … ``<!-- end
-->`` with its headlines, and ``<!-- runs -->`` … ``<!-- end -->`` with machine, commands and versions. Every linked
``figures/NAME.svg`` or ``.png`` is copied. All other text is left unchanged. Tables ``timing-PART`` come from the files
of `python -m benchmarks speed`, all others from rows; filling one kind leaves the other unchanged.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.report.formats import Table, plain_markdown
from benchmarks.report.page import Content, run_lines
from benchmarks.report.timing_tables import PREFIX

_MARKED = re.compile(r"<!-- (?P<what>table (?P<name>[\w-]+)|headlines|runs) -->\n.*?<!-- end -->", re.DOTALL)
_FIGURE = re.compile(r"\(figures/(?P<name>[\w-]+)\.(?P<kind>svg|png)\)")


def refresh(document: Path, content: Content) -> None:
    """Fill the generated parts of a document.

    Raises:
        ValueError: the document names a table or figure that the rows do not give; nothing is written then.
    """
    tables = {table.name: table for table in (content.sources, *content.tables)}
    pictures = {picture.name: picture for picture in content.pictures}
    text = document.read_text(encoding="utf-8")
    wanted = {match["name"] for match in _MARKED.finditer(text) if match["name"] and not _is_timing(match)}
    figures = {(match["name"], match["kind"]) for match in _FIGURE.finditer(text)}
    unknown = sorted((wanted - set(tables)) | {name for name, _ in figures if name not in pictures})
    if unknown:
        raise ValueError(
            f"{document} shows {', '.join(unknown)}, which these result folders do not give: add the folder that has "
            f"the rows, or take them out of the document."
        )

    def body(match: re.Match[str]) -> str | None:
        if match["name"]:
            return None if _is_timing(match) else tables[match["name"]].markdown()
        if match["what"] == "headlines":
            return "\n".join(f"- {plain_markdown(line)}" for line in content.headlines.lines)
        return "\n\n".join(run_lines(run) for run in content.runs)

    _fill(document, body)
    folder = document.parent / "figures"
    folder.mkdir(exist_ok=True)
    for name, kind in figures:
        shutil.copyfile(pictures[name].svg.with_suffix(f".{kind}"), folder / f"{name}.{kind}")


def refresh_timings(document: Path, tables: Iterable[Table]) -> None:
    """Fill the tables of `python -m benchmarks speed`; tables of parts that were not run are left unchanged."""
    found = {table.name: table.markdown() for table in tables}
    _fill(document, lambda match: found.get(match["name"]))


def _fill(document: Path, body: Callable[[re.Match[str]], str | None]) -> None:
    """Put a text between the markers of each generated part; parts for which it is None are left unchanged."""

    def filled(match: re.Match[str]) -> str:
        text = body(match)
        return match[0] if text is None else f"<!-- {match['what']} -->\n{text.strip()}\n<!-- end -->"

    document.write_text(_MARKED.sub(filled, document.read_text(encoding="utf-8")), encoding="utf-8")


def _is_timing(match: re.Match[str]) -> bool:
    return bool(match["name"]) and match["name"].startswith(PREFIX)
