"""An `Attribution` as a table: text, HTML for notebooks, a pandas frame."""

from __future__ import annotations

from collections.abc import Container, Sequence
from datetime import datetime, time
from typing import TYPE_CHECKING, Any
from unicodedata import combining, east_asian_width

import numpy as np
import torch
from torch import Tensor

from ggda_ext.results import ranking

if TYPE_CHECKING:
    import pandas

    from ggda_ext.results.attribution import Attribution

MOST_ROWS, WIDEST_NAME = 20, 40
_WORDS = {None: "direction not known", True: "higher is better", False: "lower is better"}


def as_text(result: Attribution) -> str:
    """Return a title, the ranked table, and the notes about it, as text."""
    header, rows, aligned_left = _cells(result)
    lines = aligned_lines([header, *rows], {at for at, left in enumerate(aligned_left) if left})
    return "\n".join([_title(result), "", *(lines if rows else ["none"]), *_below(result)])


def aligned_lines(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> list[str]:
    """Return rows of cells as lines of text. The columns in `left` are aligned left, all other columns right."""
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    room = [[" " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return [
        "  ".join(
            cell + gap if at in left else gap + cell for at, (cell, gap) in enumerate(zip(*both, strict=True))
        ).rstrip()
        for both in zip(rows, room, strict=True)
    ]


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes: Chinese letters and emoji two, combining accents none."""
    return sum(0 if combining(letter) else 1 + (east_asian_width(letter) in "WF") for letter in text)


def as_html(result: Attribution) -> str:
    """Return the content of `as_text` as HTML; everything that comes from data is escaped."""
    from html import escape  # only notebooks need it

    header, rows, aligned_left = _cells(result)

    def line(row: Sequence[str], tag: str) -> str:
        cells = (
            f'<{tag} style="text-align:{"left" if left else "right"}">{escape(cell)}</{tag}>'
            for cell, left in zip(row, aligned_left, strict=True)
        )
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    below = "".join(f"<div>{escape(text)}</div>" for text in _below(result) if text)
    return (
        f"<div><b>{escape(_title(result))}</b>"
        f"<table><thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table>{below}</div>"
    )


def as_frame(result: Attribution) -> pandas.DataFrame:
    """Return a pandas table with a row for each property and group."""
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError("to_frame needs pandas: pip install pandas.") from error
    m, k = result.scores.shape
    names = list(result.groups.all_names)
    columns: dict[str, Any] = {
        "property": np.repeat(np.array(result.properties, dtype=object), k),
        "group": pd.Series(names * m, dtype=None if k else object),
        "size": np.tile(result.sizes, m),
        "score": _column(result.scores),
    }
    if result.low is not None and result.high is not None:
        columns |= {"low": _column(result.low), "high": _column(result.high)}
    columns["effect"] = [effect for j in range(m) for effect in ranking.effects(result, j)]
    columns["warnings"] = ["; ".join(result.warnings.get(name, ())) for name in names] * m
    return pd.DataFrame(columns)


def _column(values: Tensor) -> np.ndarray:
    wide = values.to("cpu", torch.promote_types(values.dtype, torch.float32))  # NumPy does not know bfloat16
    return wide.reshape(-1).numpy()


def _title(result: Attribution) -> str:
    m, k = result.scores.shape
    groups = f"{k} group{'s' * (k != 1)} of {result.groups.n} points"
    if m == 1:
        return f"Attribution of {result.properties[0]} ({_WORDS[result.higher_is_better[0]]}) to {groups}"
    if ranking.by_mean(result):
        return f"Attribution of {m} properties ({_WORDS[result.higher_is_better[0]]} for all) to {groups}"
    return f"Attribution of {m} properties to {groups}"


def _cells(result: Attribution) -> tuple[list[str], list[list[str]], list[bool]]:
    """Return the header, the rows, and for each column whether it is aligned left."""
    ids = ranking.order(result)[:MOST_ROWS]
    columns: list[tuple[str, list[str], bool]] = [
        ("group", [shown(result.groups.name(j)) for j in ids], True),
        ("size", [str(result.sizes[j]) for j in ids], False),
    ]
    if ranking.by_mean(result):
        mean = result.scores.mean(0).tolist()
        direction = result.higher_is_better[0]
        columns.append(("mean score", [number(mean[j]) for j in ids], False))
        columns.append(("", [ranking.effect_of(mean[j], direction) for j in ids], True))
    else:
        for row in range(min(len(result.properties), ranking.SHOWN_PROPERTIES)):
            columns += _of_property(result, row, ids)
    if result.warnings:
        columns.append(("", ["; ".join(result.warnings.get(result.groups.name(j), ())) for j in ids], True))
    return (
        [title for title, _, _ in columns],
        [[cells[at] for _, cells, _ in columns] for at in range(len(ids))],
        [left for _, _, left in columns],
    )


def _of_property(result: Attribution, row: int, ids: Sequence[int]) -> list[tuple[str, list[str], bool]]:
    scores, effects = result.scores[row].tolist(), ranking.effects(result, row)
    title = "score" if len(result.properties) == 1 else shown(result.properties[row])
    columns, ends = [(title, [number(scores[j]) for j in ids], False)], ranking.ends(result, row)
    if ends is not None:
        columns.append(("interval", [" … ".join(map(number, ends[j])) for j in ids], True))
    return [*columns, ("", [effects[j] for j in ids], True)]


def _below(result: Attribution) -> list[str]:
    m, k = result.scores.shape
    lines = []
    if k > MOST_ROWS:
        lines.append(f"… and {k - MOST_ROWS} more groups: see .ranked(), .harmful(), .helpful(), .to_frame()")
    if m > ranking.SHOWN_PROPERTIES and not ranking.by_mean(result):
        lines.append(f"… and {m - ranking.SHOWN_PROPERTIES} more properties: see .of_property(name)")
    if None in result.higher_is_better and k:
        measured = result.method is not None and result.method.measured
        lines.append(f"rises, falls: what the property {'did' if measured else 'is predicted to do'} without the group")
    if result.low is not None and result.interval:
        lines.append(f"interval: {result.interval}")
    if result.method is not None:
        lines.append(f"method: {result.method}")
    lines += [f"note: {note}" for note in result.notes]
    return ["", *lines] if lines else []


def number(value: float) -> str:
    """Return a score as text, with its sign."""
    return f"{value:+.3g}" if value == value else "nan"


def shown(name: Any, widest: int = WIDEST_NAME) -> str:
    """Return a name as text on one line. The middle of a long name is cut, because names often differ at their ends."""
    text = "".join(letter if letter.isprintable() else " " if letter.isspace() else "�" for letter in plainly(name))
    end = widest // 3
    return text if len(text) <= widest else f"{text[: widest - end - 1]}…{text[-end:]}"


def plainly(name: Any) -> str:
    """Return a name as people write it: dates without midnight, no types inside tuples, and an empty name in quotes."""
    if isinstance(name, tuple):
        return f"({', '.join(repr(part) if isinstance(part, str) else plainly(part) for part in name)})"
    if isinstance(name, datetime) and name.time() == time():
        return name.date().isoformat()
    return str(name) if str(name).strip() else repr(str(name))
