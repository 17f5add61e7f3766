"""Tests of the benchmarks touch neither the network nor the user's own data and cache."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _nothing_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGDA_OFFLINE", "1")
    monkeypatch.setenv("GGDA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("GGDA_DATA_DIR", raising=False)
