"""What a call leaves behind: no batch stays alive after it, and many calls take no more address space than few."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from ggda_ext import STRATEGIES, GroupGradients, PointGradients, WhatIf, attribute, properties
from ggda_ext.methods import METHODS

LOSS = nn.CrossEntropyLoss()


@contextmanager
def no_tensor_in_cycles() -> Iterator[None]:
    """What is part of a cycle stays in memory until Python looks for cycles: no tensor may be."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        assert not [tuple(left.shape) for left in gc.garbage if isinstance(left, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


DATA = torch.randn(60, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_no_batch_outlives_its_pass(strategy):
    provider = GroupGradients(small_model(), LOSS, DATA, torch.arange(60) % 7, strategy=strategy, batch_size=8)
    asked = PointGradients(LOSS, DATA) if strategy == "ghost" else torch.randn(1, provider.p)
    provider.plan(asked)
    with no_tensor_in_cycles():
        provider.scores(asked)


@pytest.mark.parametrize("method", METHODS)
def test_no_batch_outlives_a_first_call(method):
    model, explained = small_model(), properties.mean_loss(DATA, LOSS)
    with no_tensor_in_cycles():
        attribute(model, LOSS, DATA, torch.arange(60) % 7, explained, method=method)


def test_no_batch_outlives_a_what_if():
    model, explained = small_model(), properties.mean_loss(DATA, LOSS)
    with no_tensor_in_cycles():
        WhatIf(model, LOSS, DATA, torch.arange(60) % 7, weight_decay=0.1).without([1, 2]).change(explained)


@pytest.mark.skipif(
    sys.platform != "linux", reason="reads /proc; where the address space grows, starting workers fails"
)
def test_many_calls_take_no_more_address_space_than_few():
    code = """
import gc, torch
from pathlib import Path
from ggda_ext import attribute, properties
gc.disable()
def call():
    model, data = torch.nn.Linear(6, 3), (torch.randn(60, 6), torch.arange(60) % 3)
    explained = properties.mean_loss(data, loss)
    return model, attribute(model, loss, data, torch.arange(60) % 7, explained, method="tracin")
def megabytes():
    return int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) / 1024
loss = torch.nn.CrossEntropyLoss()
kept = [call() for _ in range(5)]
before = megabytes()
kept += [call() for _ in range(20)]
print(megabytes() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 200
