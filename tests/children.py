"""Work in a forked child, which may be killed or end the process without harm to the tests."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ggda_trak
from torch.distributed import TCPStore

import ggda_ext


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


def tree_under_test(*more: Path) -> str:
    """The path by which other processes import the very code that is tested here, before any that is installed."""
    packages = [Path(module.__file__ or "").resolve().parents[1] for module in (ggda_ext, ggda_trak)]
    return os.pathsep.join(map(str, dict.fromkeys([*packages, *more])))


def ranks(count: int, work: Callable[[], Any]) -> None:
    """Do `work` on so many ranks, with the environment that `torchrun` gives them; the first that fails ends all.

    A fork has imported everything already: what takes longest of a rank that `torchrun` starts.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    given |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}

    def as_rank(j: int) -> None:
        os.environ.update({name: str(value) for name, value in (given | {"RANK": j, "LOCAL_RANK": j}).items()})
        os.dup2(said.fileno(), sys.__stderr__.fileno())
        faulthandler.dump_traceback_later(800, exit=True, file=said)  # where ranks wait for each other, if they do
        sys.stderr = sys.__stderr__
        work()

    with tempfile.TemporaryFile("w+") as said:
        children = [start(lambda j=j: as_rank(j)) for j in range(count)]
        for child in children:
            os.setpgid(child, children[0])  # so that they can be waited for, and for no other child
        try:
            status = [os.waitpid(-children[0], 0)[1]]
            while not status[-1] and len(status) < count:
                status.append(os.waitpid(-children[0], 0)[1])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(children[0], signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-children[0], 0)
        said.seek(0)
        assert status == [0] * count, said.read()
