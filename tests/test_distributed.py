"""Laws of ranks: every rank ends with the same bits, and with what one process gives, up to rounding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import distributed_script
import numpy as np
import pytest
import torch

from ggda_ext.distributed import alone, my_share, rank, world_size

RANKS = (2, 3)
DIFFERENT = ("error: one rank fails", "error: other groups", "error: other parameters", "error: test data not finite")
"""What one process does not notice, or what other ranks report of the one that failed."""


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process finds."""
    return distributed_script.everything(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module", params=RANKS, ids=lambda count: f"{count} ranks")
def by_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank finds when `torchrun` starts the script."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(distributed_script.__file__)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={request.param}", "--master_port=0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parent)}
    done = subprocess.run([*command, script, folder], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [torch.load(folder / f"rank{j}.pt", weights_only=False) for j in range(request.param)]
    return [result | {"files": sorted(path.name for path in folder.iterdir())} for result in found]


def flat(value: Any) -> list[Any]:
    """Tensors, numbers and texts in a result, in order."""
    if isinstance(value, dict):
        return [part for key in value for part in flat(value[key])]
    if isinstance(value, tuple | list):
        return [part for item in value for part in flat(item)]
    return [torch.from_numpy(value) if isinstance(value, np.ndarray) else value]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b


def close(found: Any, expected: Any) -> bool:
    """Up to rounding of sums."""
    if not isinstance(expected, torch.Tensor):
        return found == expected
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    tolerance = 1e-10 if expected.dtype == torch.float64 else 2e-4
    size = float(expected.double().abs().max()) if expected.numel() else 0.0
    return bool(((found.double() - expected.double()).abs() <= tolerance * size).all())


def test_every_rank_ends_with_the_same_bits(by_ranks: list[dict[str, Any]]) -> None:
    for name in by_ranks[0]:
        if not name.startswith("error"):
            for other in by_ranks[1:]:
                assert all(map(equal, flat(other[name]), flat(by_ranks[0][name]), strict=True)), name


def test_ranks_end_with_what_one_process_gives(by_ranks: list[dict[str, Any]], by_one: dict[str, Any]) -> None:
    for name, expected in by_one.items():
        if name not in DIFFERENT:
            assert all(map(close, flat(by_ranks[0][name]), flat(expected), strict=True)), name
