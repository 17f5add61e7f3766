"""One process at a time in a folder: a lock that the system gives back when its process ends, however it ends.

Not by the package `filelock`, which torch brings along in any version. Its recent ones do as much (tried with 4.2.10:
no link is followed, nothing truncated, and forked children of a killed process do not keep the lock). Earlier ones
follow links and truncate, and leave the lock to forked workers of a DataLoader. None says which process holds the lock,
as the errors here do.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path

from ggda_ext.storage.files import open_plain

LOCK = "store.lock"
_OURS = re.compile(rb"(process \d+)?")

if sys.platform == "win32":
    import msvcrt

    def _take(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _take(handle: int) -> None:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


class FolderLock:
    """A lock on a folder; children do not inherit it.

    Args:
        folder: what is locked.
        reentrant: whether this process may lock the folder while it holds it already.
    """

    _held: dict[str, _Holder] = {}  # noqa: RUF012  # the system's lock is blind within one process

    def __init__(self, folder: Path, *, reentrant: bool = False) -> None:
        self.folder = os.path.realpath(folder)
        holder = self._held.get(self.folder)
        if holder is None or holder.process != os.getpid():
            holder = _Holder(os.getpid(), _locked(folder))
            self._held[self.folder] = holder
        elif not reentrant:
            raise RuntimeError(
                f"save_dir={str(folder)!r} is in use by this process: close the store that is open, or pass another "
                "save_dir."
            )
        holder.count += 1
        self.release = weakref.finalize(self, _release, self._held, self.folder, holder)


@dataclass
class _Holder:
    """A process that holds a lock, and how often."""

    process: int
    handle: int | None
    count: int = 0


def _release(held: dict[str, _Holder], folder: str, holder: _Holder) -> None:
    holder.count -= 1
    if holder.count == 0 and holder.process == os.getpid():
        held.pop(folder, None)
        if holder.handle is not None:
            os.close(holder.handle)


def _locked(folder: Path) -> int | None:
    """The open and locked lock file of a folder; None in a folder that can only be read, which needs no lock."""
    try:
        handle = open_plain(f"{folder}{os.sep}{LOCK}", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return None
        raise
    try:
        _take(handle)
    except OSError as error:
        owner = os.read(handle, 32).decode(errors="replace") or "another process"
        os.close(handle)
        if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            raise
        raise RuntimeError(
            f"save_dir={str(folder)!r} is in use by {owner}: wait until it has finished, or pass another save_dir to "
            "each process."
        ) from None
    found = os.read(handle, 64)
    if _OURS.fullmatch(found):  # another file of that name, or a hard link to one, stays as it is
        mine = f"process {os.getpid()}".encode()
        if found:
            os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, mine)
        if len(found) > len(mine):  # not to 0 before: some file systems wait for the disk then on closing
            os.ftruncate(handle, len(mine))
    return handle
