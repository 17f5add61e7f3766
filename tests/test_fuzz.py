"""A few mutated inputs for every reader; see `tests/fuzz.py` for the full number."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests import fuzz
from tests.children import said


@pytest.mark.parametrize("name", fuzz.READERS)
def test_mutated_inputs_are_refused_or_read_as_they_were(name: str) -> None:
    assert fuzz.in_child(name, 60) == []


def compute(folder: Path) -> dict[str, Any]:
    return {str(number): number for number in count() if number < 0}


def wait(folder: Path) -> dict[str, Any]:
    return {"": os.read(os.pipe()[0], 1)}


@pytest.mark.parametrize("work", [compute, wait])
def test_a_reader_that_hangs_is_trouble(
    work: Callable[[Path], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"TICK": 0.01, "CPU_SECONDS": 0.1, "WAITING_SECONDS": 0.1}.items():
        monkeypatch.setattr(fuzz, name, value)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").write_text("text")
    (tmp_path / "space").mkdir()
    reader = fuzz.Reader(lambda folder: None, work)
    text, status = said(lambda: str(fuzz.trouble(reader, tmp_path / "made", {}, "0", tmp_path / "space")))
    assert (text, status) == ("a raw AssertionError: it hangs", 0)
