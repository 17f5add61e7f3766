"""`python -m benchmarks report FOLDER...`: makes report.html, Markdown, LaTeX tables and figures from result folders.

`write` does the work; `command` calls it for the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report.advice import advice_table
from benchmarks.report.charts import charts
from benchmarks.report.check_tables import source_table, what_is_real
from benchmarks.report.document import refresh, refresh_timings
from benchmarks.report.figures import draw_all
from benchmarks.report.headlines import Headlines, headlines
from benchmarks.report.page import Content, html, markdown
from benchmarks.report.rows import read
from benchmarks.report.tables import all_tables
from benchmarks.report.takeaways import OF_SECTION
from benchmarks.report.timing_tables import FILE, timing_tables

__all__ = ["Headlines", "command", "write"]


def write(folders: Sequence[Path], out: Path, documents: Sequence[Path] = (), show_progress: bool = True) -> Headlines:
    """Write report.html, report.md, tables/*.tex and figures/*.{svg,png} to `out`.

    Args:
        folders: result folders; if two hold the same row, the row of the later folder counts.
        out: folder to write to. It is made if it does not exist; files of an earlier report are replaced.
        documents: Markdown files whose tables and figures are updated as well; see `report.document`.
        show_progress: show a bar while figures are drawn.

    Returns:
        The headlines.
    """
    results = read([Path(folder) for folder in folders])
    tables = list(all_tables(results))
    pictures, missing = draw_all(results, out / "figures", show_progress)
    content = Content(
        headlines(results), charts(results), results.runs, source_table(results), what_is_real(results),
        {name: say(results) for name, say in OF_SECTION.items()}, advice_table(results), tables, pictures, missing,
    )  # fmt: skip
    (out / "tables").mkdir(parents=True, exist_ok=True)
    for table in (content.sources, *tables):
        (out / "tables" / f"{table.name}.tex").write_text(table.latex(), encoding="utf-8")
    (out / "report.md").write_text(markdown(content, "figures"), encoding="utf-8")
    (out / "report.html").write_text(html(content), encoding="utf-8")
    refresh(documents, content)
    return content.headlines


def command(folders: Sequence[Path], out: Path | None = None, documents: Sequence[Path] = ()) -> int:
    """Run the command `report`, and print the headlines and where the page is.

    Folders of `speed` have no rows for the page; their tables are written into the documents.
    """
    timings = [folder for folder in folders if (folder / FILE).exists()]
    runs = [folder for folder in folders if folder not in timings]
    try:
        for document in documents:
            if not document.is_file():
                raise ValueError(
                    f"--document {document} is no file: name a Markdown file whose tables are to be updated."
                )
        if timings:
            if not documents:
                raise ValueError(
                    f"{timings[0]} is of `speed`, whose tables go into a document: name one by --document."
                )
            refresh_timings(documents, timing_tables(timings))
        if runs:
            out = out or runs[-1] / "report"
            print(write(runs, out, documents))
            print(f"The page: {(out / 'report.html').resolve()}")
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from None
    return 0
