"""As many threads as `OMP_NUM_THREADS` (one) and a fixed seed for every test; any order of tests.

Tests of the benchmarks touch no network and no user's files.
"""

from __future__ import annotations

import gc
import os
import random
import threading

import pytest
import torch
from hypothesis import HealthCheck, settings
from tqdm import tqdm

tqdm.monitor_interval = 0  # the toolkits' bars, too, have no lock that a killed child could leave locked
tqdm.set_lock(threading.RLock())

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))  # OpenMP's other threads do not survive a fork
settings.register_profile("no clocks", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clocks")

LONG = ("test_unusual.py", "test_distributed.py", "test_transformers_tracker.py", "test_examples.py",
        "test_transformers_story.py", "test_transformers_attribution.py", "test_package.py", "test_types.py",
        "test_kills.py", "test_faults.py", "test_store_content.py", "test_experiments.py")  # fmt: skip
"""Files that begin before the others, in this order, so that no core waits for the last of them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order", metavar="SEED", help="run files and the tests in them in random order, or 'reversed'")


@pytest.hookimpl(tryfirst=True)  # before pytest puts tests that share a costly fixture side by side
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reorder the tests; a file's stay together, as `--dist loadfile` needs."""
    order = config.getoption("order")
    if order is None:
        items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    elif order == "reversed":
        items.reverse()
    else:
        rng = random.Random(order)
        rng.shuffle(items)
        place = {path: rng.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    """Leave all that is imported out of later collections of garbage: a Trainer asks for one in every training."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed writes down the stack for each kind of absent device


@pytest.fixture(autouse=True)
def _nothing_from_outside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "benchmarks" in request.path.parts:
        monkeypatch.setenv("GGDA_OFFLINE", "1")
        monkeypatch.setenv("GGDA_CACHE_DIR", str(request.getfixturevalue("tmp_path") / "cache"))
        monkeypatch.delenv("GGDA_DATA_DIR", raising=False)
