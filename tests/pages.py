"""The code blocks of README and docs/: run page by page, and what they print compared with what the page shows.

A ``python`` block runs in the names of the blocks above it on its page. A ``text`` block right below it shows what it
prints: words must be the same, numbers close (another processor rounds and trains a little differently), and a line of
``…`` stands for any lines. ``python tests/pages.py`` writes the outputs of all pages anew; look at the diff.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]
RELATIVE, LAST_DIGITS = 0.05, 2.0

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"[-+−]?\d+(?:[_,]\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?%?")


@dataclass(frozen=True)
class Block:
    """A python block, the line it starts in, and where the output that is shown for it stands; None if none is."""

    code: str
    line: int
    shown: str | None
    span: tuple[int, int] | None


def blocks(text: str) -> list[Block]:
    """The python blocks of a page, with the outputs shown below them."""
    fences = list(_FENCE.finditer(text))
    found = []
    for at, fence in enumerate(fences):
        if fence[1] != "python":
            continue
        below = fences[at + 1] if at + 1 < len(fences) else None
        shown = below is not None and below[1] == "text" and not text[fence.end() : below.start()].strip()
        line = text.count("\n", 0, fence.start(2)) + 1
        found.append(Block(fence[2], line, below[2] if shown else None, below.span(2) if shown else None))  # type: ignore[index, union-attr]
    return found


def printed(page: Path) -> Iterator[tuple[Block, str]]:
    """Run a page in the current folder; every block with what it printed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page.read_text(encoding="utf-8")):
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        yield block, out.getvalue()


def difference(shown: str, came: str) -> str | None:
    """The first line in which a shown output is not what came; None if there is none."""
    expected, actual = _lines(shown), _lines(came)
    at = 0
    for number, line in enumerate(expected):
        if line == "…":
            rest = expected[number + 1 :]
            return difference("\n".join(rest), "\n".join(actual[len(actual) - len(rest) :])) if rest else None
        if at >= len(actual) or not _alike(line, actual[at]):
            return f"the page shows {line!r}, and {actual[at] if at < len(actual) else 'nothing more'!r} came"
        at += 1
    return None if at == len(actual) else f"{actual[at]!r} came after all that the page shows"


def _lines(text: str) -> list[str]:
    return [line for line in (" ".join(one.split()) for one in text.splitlines()) if line]


def _alike(shown: str, came: str) -> bool:
    if _NUMBER.sub("#", shown) != _NUMBER.sub("#", came):
        return False
    return all(_close(a, b) for a, b in zip(_NUMBER.findall(shown), _NUMBER.findall(came), strict=True))


def _close(shown: str, came: str) -> bool:
    a, b = (float(re.sub("[_,%]", "", text).replace("−", "-")) for text in (shown, came))
    mantissa, _, exponent = shown.rstrip("%").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    if mantissa == shown and "." not in shown:
        return a == b  # a count
    return abs(a - b) <= max(LAST_DIGITS * unit, RELATIVE * abs(a))


def rewrite(page: Path) -> None:
    """Write the outputs of a page anew, except those with a line of ``…``, and the pictures that it saves and shows."""
    text = page.read_text(encoding="utf-8")
    for block, out in reversed(list(printed(page))):
        if block.span is not None and "…" not in _lines(block.shown or ""):
            text = (
                text[: block.span[0]]
                + "\n".join(line.rstrip() for line in out.splitlines())
                + "\n"
                + text[block.span[1] :]
            )
    page.write_text(text, encoding="utf-8")
    for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        drawn = Path(target).name
        if Path(drawn).exists():
            shutil.copyfile(drawn, page.parent / target)


if __name__ == "__main__":
    wanted = [Path(name).resolve() for name in sys.argv[1:]] or PAGES
    for each in wanted:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            rewrite(each)
            os.chdir(ROOT)
        print(each.relative_to(ROOT))
