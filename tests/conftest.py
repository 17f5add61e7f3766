"""One thread and a fixed seed for every test; those of the benchmarks touch no network and no user's files."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_from_outside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "benchmarks" in request.path.parts:
        monkeypatch.setenv("GGDA_OFFLINE", "1")
        monkeypatch.setenv("GGDA_CACHE_DIR", str(request.getfixturevalue("tmp_path") / "cache"))
        monkeypatch.delenv("GGDA_DATA_DIR", raising=False)
