"""Numbers below the smallest normal float count as zero while a model is trained.

The weights of dead units decay towards zero for the rest of a training. Below about 1e-38 they become denormal numbers,
with which a processor computes ten to a hundred times slower, and which change no loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def flushes_denormals() -> bool:
    """Whether this thread takes denormal numbers for zero; PyTorch sets the flag, but does not tell it."""
    smallest = np.array([np.finfo(np.float32).tiny])
    return not bool((smallest / np.float32(4)).any())


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Take denormal numbers for zero inside; the flag is as it was afterwards. Without effect where unsupported.

    The flag belongs to a thread: PyTorch's other threads keep theirs.
    """
    before = flushes_denormals()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
