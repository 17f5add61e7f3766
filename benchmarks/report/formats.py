"""A table as Markdown, LaTeX (booktabs) and cells for the page: one frame of text, shown three ways."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

_TEX_SIGNS = {sign: f"\\{sign}" for sign in "&%$#_{}"} | {
    "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}",
}  # fmt: skip
_MANY_ROWS = 40  # beyond, a LaTeX table runs over pages
_TEX_SIZES = (  # characters in a line, and how a LaTeX table up to that width is set
    (70, "\\small"),
    (110, "\\scriptsize\\setlength{\\tabcolsep}{3pt}"),
    (float("inf"), "\\tiny\\setlength{\\tabcolsep}{2pt}"),
)

STDERR = "± is the standard error over model seeds"
RUNTIME = "runtime in CPU seconds, grouping included; the paper's is on its GPU"
"""What more than one table says."""


@dataclass(frozen=True)
class Cell:
    """A cell of the page's tables: its text, and whether it repeats the one above."""

    text: str
    again: bool = False


@dataclass(frozen=True)
class Table:
    """A table of a report.

    Attributes:
        name: file name without its end.
        title: caption.
        frame: cells as text; columns of one or two levels.
        keys: how many leading columns name the row; repeated names there are left blank.
        notes: sentences under the table.
    """

    name: str
    title: str
    frame: pd.DataFrame
    keys: int = 1
    notes: Sequence[str] = field(default_factory=tuple)

    def markdown(self) -> str:
        """The table as GitHub Markdown, title above and notes below."""
        frame = self._blanked()
        header = [_cell(_flat(name)) for name in frame.columns]
        rule = ["---"] * self.keys + ["---:"] * (len(header) - self.keys)
        lines = [header, rule, *([_cell(text) for text in row] for row in frame.itertuples(index=False))]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        notes = "".join(f"\n\n{plain_markdown(note)}" for note in self.notes)
        return f"**{plain_markdown(self.title)}**\n\n{table}{notes}\n"

    def latex(self) -> str:
        """The table as a LaTeX float, one of many rows as a longtable; needs booktabs, and longtable for those."""
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
        """Characters of the longest cell of every column, or of its title's last level, in all."""
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
    """A share as percent with its standard error, e.g. ``"72.4 ± 0.3"``; a dash if there is none."""
    return plus_minus(100 * mean, 100 * stderr, 1)


def plus_minus(mean: float, stderr: float, digits: int) -> str:
    """A number with its standard error, which is left out where there is only one value."""
    if pd.isna(mean):
        return "–"
    return f"{mean:.{digits}f}" + ("" if pd.isna(stderr) else f" ± {stderr:.{digits}f}")


def interval(mean: float, low: float, high: float) -> str:
    """A number with its confidence interval, e.g. ``"0.71 [0.65, 0.77]"``."""
    if pd.isna(mean):
        return "–"
    return f"{mean:.2f}" + ("" if pd.isna(low) or pd.isna(high) else f" [{low:.2f}, {high:.2f}]")


def three_digits(value: float, unit: str = "") -> str:
    """A number with three significant digits and no exponent, e.g. ``"0.0123"``, ``"4.56"``, ``"1230"``."""
    if pd.isna(value):
        return "–"
    if value == 0:
        return f"0{unit}"
    rounded = float(f"{value:.3g}")
    text = f"{rounded:.0f}" if abs(rounded) >= 100 else f"{value:#.3g}"
    return (f"{value:.1e}" if abs(value) < 1e-3 else text.rstrip(".")) + unit


def size_names(sizes: Sequence[float]) -> list[str]:
    """Group sizes as column titles, as in the paper."""
    return ["1 (DA)" if size == 1 else f"{size:g}" for size in sizes]


def _flat(name: object) -> str:
    """A column of two levels as one line."""
    parts = name if isinstance(name, tuple) else (name,)
    return " ".join(str(part) for part in parts if str(part))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def plain_markdown(text: str) -> str:
    """A text as one line of Markdown that shows it as it is: no links, pictures, headings or HTML come of it."""
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
