"""Treat numbers below the smallest normal float as zero while a model is trained.

The weights of dead units decay towards zero for the rest of a training. Below about 1e-38 they become denormal numbers.
A processor is ten to a hundred times slower with denormal numbers, and they do not change the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def flushes_denormals() -> bool:
    """Whether this thread treats denormal numbers as zero; PyTorch can set this flag, but not read it."""
    smallest = np.array([np.finfo(np.float32).tiny])
    return not bool((smallest / np.float32(4)).any())


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Treat denormal numbers as zero inside the context and restore the flag afterwards, if the processor supports it.

    The flag belongs to the current thread; PyTorch's other threads keep their own flag.
    """
    before = flushes_denormals()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
