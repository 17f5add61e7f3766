"""A lock that lets one process at a time use a folder. The system gives it back when the process ends in any way.

The package `filelock` is not used, because torch installs it in any version. Its recent versions do the same (tried
with 4.2.10: it follows no link, truncates nothing, and forked children of a killed process do not keep the lock).
Earlier versions follow links, truncate files, and leave the lock to forked workers of a DataLoader. No version says
which process holds the lock, as the errors here do.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path

from ggda_ext.storage.files import open_plain

LOCK = "store.lock"
_FLOCK = {
    "linux": ("hhqqi4x", 0, 4),
    "darwin": ("qqihh", 3, 2),
}  # layout of the 64-bit struct flock, and the positions of the lock's kind and process in it

if sys.platform == "win32":
    import msvcrt

    def _take(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

    def _owner(handle: int) -> str:
        return "another process"
else:
    import fcntl

    def _take(handle: int) -> None:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _owner(handle: int) -> str:
        """The process that holds the lock, according to the system, which knows no processes on other machines."""
        if sys.platform not in _FLOCK or sys.maxsize < 2**32:
            return "another process"
        layout, kind, process = _FLOCK[sys.platform]
        asked = [0] * 5
        asked[kind] = fcntl.F_WRLCK
        found = struct.unpack(layout, fcntl.fcntl(handle, fcntl.F_GETLK, struct.pack(layout, *asked)))[process]
        return f"process {found}" if found > 0 else "another process"


class FolderLock:
    """A lock on a folder; child processes do not inherit it.

    Args:
        folder: the folder to lock.
        reentrant: whether this process may lock the folder again while it already holds the lock.
    """

    _held: dict[tuple[int, int], _Holder] = {}  # noqa: RUF012  # the system's lock does not work within one process

    def __init__(self, folder: Path, *, reentrant: bool = False) -> None:
        found = os.stat(folder)
        key = found.st_dev, found.st_ino
        mine = _Holder(os.getpid())
        holder = self._held.setdefault(key, mine)  # in one step, because other threads may do the same
        if holder.process != mine.process:  # the holder is the process that this one was forked from
            holder = self._held[key] = mine
        if holder is mine:
            try:
                mine.handle = _locked(folder)
            except BaseException:
                del self._held[key]
                raise
        elif not reentrant:
            raise RuntimeError(
                f"save_dir={str(folder)!r} is in use by this process: close the store that is open, or pass another "
                "save_dir."
            )
        holder.count += 1
        self.release = weakref.finalize(self, _release, self._held, key, holder)


@dataclass
class _Holder:
    """A process that holds a lock, and how often it holds it; the handle is None in a read-only folder."""

    process: int
    handle: int | None = None
    count: int = 0


def _release(held: dict[tuple[int, int], _Holder], key: tuple[int, int], holder: _Holder) -> None:
    holder.count -= 1
    if holder.count == 0 and holder.process == os.getpid():
        held.pop(key, None)
        if holder.handle is not None:
            os.close(holder.handle)


def _locked(folder: Path) -> int | None:
    """Open and lock the lock file of a folder; return its handle, or None in a read-only folder, which needs no lock.

    Nothing is written to the file: a foreign file of that name, or a hard link to one, is left unchanged.
    """
    try:
        handle = open_plain(f"{folder}{os.sep}{LOCK}", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return None
        raise
    try:
        _take(handle)
    except OSError as error:
        owner = _owner(handle) if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK) else None
        os.close(handle)
        if owner is None:
            raise
        raise RuntimeError(
            f"save_dir={str(folder)!r} is in use by {owner}: wait until it has finished, or pass another save_dir to "
            "each process."
        ) from None
    return handle
