"""`python -m benchmarks report FOLDER...`: result folders as report.html, Markdown, LaTeX tables and figures.

`write` does the work; `command` is the same for the command line.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report.check_tables import source_table
from benchmarks.report.document import refresh
from benchmarks.report.figures import draw_all
from benchmarks.report.headlines import Headlines, headlines
from benchmarks.report.page import Content, html, markdown
from benchmarks.report.rows import read
from benchmarks.report.tables import all_tables

__all__ = ["Headlines", "add_arguments", "command", "write"]


def write(folders: Sequence[Path], out: Path, document: Path | None = None, show_progress: bool = True) -> Headlines:
    """Write report.html, report.md, tables/*.tex and figures/*.{svg,png} to `out`.

    Args:
        folders: result folders; where two hold the same row, the later one's counts.
        out: folder to write to; made if need be, files of an earlier report are replaced.
        document: a Markdown file whose tables and figures are brought up to date as well; see `report.document`.
        show_progress: a bar while figures are drawn.

    Returns:
        The three headline lines.
    """
    results = read([Path(folder) for folder in folders])
    tables = list(all_tables(results))
    pictures, missing = draw_all(results, out / "figures", show_progress)
    content = Content(headlines(results), results.runs, source_table(results), tables, pictures, missing)
    (out / "tables").mkdir(parents=True, exist_ok=True)
    for table in (content.sources, *tables):
        (out / "tables" / f"{table.name}.tex").write_text(table.latex(), encoding="utf-8")
    (out / "report.md").write_text(markdown(content, "figures"), encoding="utf-8")
    (out / "report.html").write_text(html(content), encoding="utf-8")
    if document is not None:
        refresh(document, content)
    return content.headlines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `report`."""
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="result folders, e.g. results/*")
    parser.add_argument("--out", type=Path, help="where to write; the last folder's own `report` by default")
    parser.add_argument(
        "--document", type=Path, help="also bring tables and figures of this Markdown file up to date, e.g. RESULTS.md"
    )


def command(options: argparse.Namespace) -> None:
    """Run `report` as the command line asks, and print the headlines and where the page is."""
    out = options.out or options.folders[-1] / "report"
    try:
        found = write(options.folders, out, options.document)
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from None
    print(found)
    print(f"report: {out / 'report.html'}")
