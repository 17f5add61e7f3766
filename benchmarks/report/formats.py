"""A table as Markdown, as LaTeX (booktabs) and as cells for the page, all from one frame of text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

_TEX_SIGNS = {sign: f"\\{sign}" for sign in "&%$#_{}"} | {
    "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}",
}  # fmt: skip
_MANY_ROWS = 40  # a LaTeX table with more rows goes over several pages
_TEX_SIZES = (  # characters in a line, and the font and spacing of a LaTeX table up to this width
    (70, "\\small"),
    (110, "\\scriptsize\\setlength{\\tabcolsep}{3pt}"),
    (float("inf"), "\\tiny\\setlength{\\tabcolsep}{2pt}"),
)

STDERR = "± is the standard error over model seeds"
RUNTIME = "runtime in CPU seconds, grouping included; the paper's is on its GPU"
"""Notes that more than one table has."""


@dataclass(frozen=True)
class Cell:
    """A cell of the page's tables: its text, and whether it repeats the one above."""

    text: str
    again: bool = False


@dataclass(frozen=True)
class Table:
    """A table of a report.

    Attributes:
        name: file name without its extension.
        title: caption.
        frame: cells as text; columns have one or two levels.
        keys: number of leading columns that name the row; repeated names in them are left blank.
        notes: sentences under the table.
    """

    name: str
    title: str
    frame: pd.DataFrame
    keys: int = 1
    notes: Sequence[str] = field(default_factory=tuple)

    def markdown(self) -> str:
        """Return the table as GitHub Markdown, with the title above and the notes below."""
        frame = self._blanked()
        header = [_cell(_flat(name)) for name in frame.columns]
        rule = ["---"] * self.keys + ["---:"] * (len(header) - self.keys)
        lines = [header, rule, *([_cell(text) for text in row] for row in frame.itertuples(index=False))]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        notes = "".join(f"\n\n{plain_markdown(note)}" for note in self.notes)
        return f"**{plain_markdown(self.title)}**\n\n{table}{notes}\n"

    def latex(self) -> str:
        """Return the table as a LaTeX float, or as a longtable if it has many rows.

        It needs the package booktabs, and longtable for many rows.
        """
        caption = _tex(" ".join([self.title + ".", *self.notes]))
        columns = "l" * self.keys + "r" * self._values
        size = next(command for limit, command in _TEX_SIZES if self._width <= limit)
        if len(self.frame) > _MANY_ROWS:
            body = self._blanked().to_latex(
                index=False, escape=True, multicolumn_format="c", column_format=columns, longtable=True,
                caption=f"\\small {caption}", label=f"tab:{self.name}",
            )  # fmt: skip
            return f"{{{size}\n{_signs(body)}}}\n"
        body = self._blanked().to_latex(index=False, escape=True, multicolumn_format="c", column_format=columns)
        return (
            f"\\begin{{table}}[ht]\n\\caption{{\\small {caption}}}\n\\label{{tab:{self.name}}}\n"
            f"{size}\n\\begin{{center}}\n{_signs(body)}\\end{{center}}\n\\end{{table}}\n"
        )

    @property
    def columns(self) -> list[str]:
        """Titles of the columns, each on one line."""
        return [_flat(name) for name in self.frame.columns]

    @property
    def rows(self) -> list[list[Cell]]:
        """Cells of every row, for the page."""
        full, blanked = self.frame.astype(str).to_numpy().tolist(), self._blanked().to_numpy().tolist()
        return [
            [Cell(text, again=text != shown) for text, shown in zip(*lines, strict=True)]
            for lines in zip(full, blanked, strict=True)
        ]

    @property
    def words(self) -> bool:
        """Whether the cells are sentences rather than numbers."""
        return self._values == 0

    @property
    def _values(self) -> int:
        return self.frame.shape[1] - self.keys

    @property
    def _width(self) -> int:
        """Sum over columns of the characters of the longest cell, or of the last level of the title if it is longer."""
        titles = [str(name[-1] if isinstance(name, tuple) else name) for name in self.frame.columns]
        cells = self.frame.astype(str).map(len).max().tolist()
        return sum(max(len(title), cell) for title, cell in zip(titles, cells, strict=True))

    def _blanked(self) -> pd.DataFrame:
        frame = self.frame.astype(str)
        shown = frame.copy()
        repeated = pd.Series(True, index=frame.index)
        for at in range(self.keys - 1):
            column = frame.iloc[:, at]
            repeated &= column.eq(column.shift())
            shown.isetitem(at, column.mask(repeated, ""))
        return shown


def percent(mean: float, stderr: float = float("nan")) -> str:
    """Return a share as percent with its standard error, e.g. ``"72.4 ± 0.3"``; a dash if there is no value."""
    return plus_minus(100 * mean, 100 * stderr, 1)


def plus_minus(mean: float, stderr: float, digits: int) -> str:
    """Return a number with its standard error, which is left out if it is nan."""
    if pd.isna(mean):
        return "–"
    return f"{mean:.{digits}f}" + ("" if pd.isna(stderr) else f" ± {stderr:.{digits}f}")


def interval(mean: float, low: float, high: float) -> str:
    """Return a number with its confidence interval, e.g. ``"0.71 [0.65, 0.77]"``."""
    if pd.isna(mean):
        return "–"
    return f"{mean:.2f}" + ("" if pd.isna(low) or pd.isna(high) else f" [{low:.2f}, {high:.2f}]")


def three_digits(value: float, unit: str = "") -> str:
    """Return a number with three significant digits, e.g. ``"0.0123"``, ``"4.56"``, ``"1230"``.

    Numbers below 0.001 have two digits and an exponent.
    """
    if pd.isna(value):
        return "–"
    if value == 0:
        return f"0{unit}"
    rounded = float(f"{value:.3g}")
    text = f"{rounded:.0f}" if abs(rounded) >= 100 else f"{value:#.3g}"
    return (f"{value:.1e}" if abs(value) < 1e-3 else text.rstrip(".")) + unit


def size_names(sizes: Sequence[float]) -> list[str]:
    """Return group sizes as column titles, as in the paper."""
    return ["1 (DA)" if size == 1 else f"{size:g}" for size in sizes]


def _flat(name: object) -> str:
    """Return the title of a column with two levels as one line."""
    parts = name if isinstance(name, tuple) else (name,)
    return " ".join(str(part) for part in parts if str(part))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def plain_markdown(text: str) -> str:
    """Return a text as one line of Markdown that shows it literally, without links, pictures, headings or HTML."""
    line = " ".join(text.split())
    line = re.sub(r"([\\`*_\[\]!|~])", r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))
    return re.sub(r"^([#+-]|\d+[.)])(?= )", r"\\\1", line)


def _tex(text: str) -> str:
    plain = "".join(_TEX_SIGNS.get(sign, sign) for sign in " ".join(text.split()))
    return _signs(plain)


def _signs(text: str) -> str:
    for sign, command in {"±": "$\\pm$", "×": "$\\times$", "–": "--", "≥": "$\\geq$", "≤": "$\\leq$"}.items():
        text = text.replace(sign, command)
    return text
