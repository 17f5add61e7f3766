"""Work in a forked child, which may be killed or end the process without harm to the tests."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any


def start(work: Callable[[], Any]) -> int:
    """Run `work` in a child that ends at once after it, with 0, or 1 if it raises; the child's process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def end(child: int) -> int:
    """Wait for a child; what it ended with, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def said(say: Callable[[], str]) -> tuple[str, int]:
    """The text that a child comes to, and what it ended with."""
    read, write = os.pipe()
    child = start(lambda: os.write(write, say().encode()[:60_000]))
    os.close(write)
    with os.fdopen(read, encoding="utf-8", errors="replace") as pipe:
        return pipe.read(), end(child)
