"""Peak memory of a call: how much the process grows beyond its size before, as the kernel reports it (Linux)."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(run: Callable[[], Any]) -> int | None:
    """Return the growth of the resident set during the call, in bytes; None if the kernel does not report it."""
    if not _RESET.exists():
        return None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _RESET.write_text("5")  # resets the peak to the current resident set
    before = _field("VmRSS")
    run()
    return max(0, _field("VmHWM") - before)


def _field(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
