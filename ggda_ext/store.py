"""A folder of finished arrays that survives being killed, and refuses what does not belong to it.

Every array is a `.npy` file, written to a `.part` file first and renamed, so a file that exists is whole. A small
`store.json` holds what the arrays were made with (the *fingerprint*) and a checksum for each. Opened again, a store
hands back what is finished; an array that is missing, truncated or changed on disk counts as not made.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import re
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

FORMAT = 1
CONTENTS, LOCK = "store.json", "store.lock"
SKETCH_TOLERANCE = 1e-6
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_logger = logging.getLogger(__name__)


class StoreMismatch(ValueError):
    """The folder holds a store that was made with something else."""


class Store:
    """Arrays by name in a folder, with one writer at a time.

    Use it as a context manager, or `close` it: until then other processes are refused. After a kill the system itself
    gives the lock back. Arrays that were read stay valid after closing.

    Args:
        folder: made if it does not exist; must be empty or a store.
        fingerprint: what the arrays depend on, as JSON values by name. Another value than the stored one is refused,
            except that lists of floats (sketches of numbers) may differ by rounding.
        lock: False for a store inside the folder of another one that is locked.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with Store(folder, {"seed": 0}) as store:
    ...     block = store.block("scores-0", lambda: np.arange(3.0))
    >>> with Store(folder, {"seed": 0}) as store:  # nothing is made again
    ...     store.block("scores-0", lambda: 1 / 0).tolist(), "scores-1" in store
    ([0.0, 1.0, 2.0], False)
    >>> Store(folder, {"seed": 1})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ggda_ext.store.StoreMismatch: save_dir='...' was made with seed = 0, now it is 1: pass what it was made with, ...
    """

    def __init__(self, folder: str | Path, fingerprint: Mapping[str, Any], *, lock: bool = True) -> None:
        self.folder = Path(folder)
        self.fingerprint: dict[str, Any] = json.loads(json.dumps(dict(fingerprint)))
        self._blocks: dict[str, dict[str, Any]] = {}
        self._checked: set[str] = set()
        with self._clear_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.folder) if lock else None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        found = read_contents(self.folder)
        if found is None:
            foreign = sorted(path.name for path in self.folder.iterdir() if not _is_leftover(path))
            if foreign:
                raise StoreMismatch(
                    f"save_dir={str(self.folder)!r} is not empty and not a store (it holds {foreign[0]!r}): pass a new "
                    "or empty folder."
                )
            self._write_contents()
            return
        differing = difference(found["fingerprint"], self.fingerprint)
        if differing is not None:
            raise StoreMismatch(f"save_dir={str(self.folder)!r} {differing}")
        self._blocks = found["blocks"]

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes use the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __contains__(self, name: str) -> bool:
        """Whether an array is finished and intact; its checksum is looked at once."""
        known = self._blocks.get(name)
        if known is None:
            return False
        if name not in self._checked:
            if _checksum(self._path(name)) != known["crc32"]:
                _logger.warning("%s is damaged or missing and will be made again.", self._path(name))
                return False
            self._checked.add(name)
        return True

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def names(self) -> list[str]:
        """Names of the arrays that were finished, in the order they were."""
        return list(self._blocks)

    def block(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """The array `name` as a memory map; made and saved first if it is not finished."""
        if name not in self:
            self.save(name, make())
        return self.load(name)

    def load(self, name: str) -> np.ndarray:
        """A finished array as a memory map; changes to it stay in memory."""
        if name not in self:
            raise KeyError(f"{name!r} is not finished in save_dir={str(self.folder)!r}.")
        return open_array(self._path(name))

    def save(self, name: str, array: np.ndarray) -> None:
        """Write a whole array, and only then count it as finished."""
        array = np.asarray(array)
        self.save_parts(name, array.shape, array.dtype, [array])

    def save_parts(self, name: str, shape: tuple[int, ...], dtype: Any, parts: Iterable[np.ndarray]) -> None:
        """Write an array larger than memory, from consecutive runs of its rows."""
        path = self._path(name)
        if np.dtype(dtype).hasobject:
            raise TypeError(f"{name!r} has dtype {np.dtype(dtype)}: only plain numbers are stored.")
        described = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
        with self._clear_errors(name), replaced(path) as file:
            counted = _Counted(file)
            np.lib.format.write_array_header_2_0(counted, described)
            for part in parts:
                counted.write(np.ascontiguousarray(part, dtype))
        self._blocks[name] = {"crc32": counted.crc, "shape": list(shape), "dtype": np.dtype(dtype).name}
        self._checked.add(name)
        self._write_contents(name)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"name={name!r}: use letters, digits, '.', '_' and '-' only.")
        return self.folder / f"{name}.npy"

    def _write_contents(self, name: str = CONTENTS) -> None:
        with self._clear_errors(name):
            write_json(
                self.folder / CONTENTS, {"format": FORMAT, "fingerprint": self.fingerprint, "blocks": self._blocks}
            )

    def _clear_errors(self, name: str = CONTENTS) -> AbstractContextManager[None]:
        return clear_errors(self.folder, name, f"The {len(self._blocks)} arrays finished before are intact")


@contextmanager
def clear_errors(folder: Path, name: str, intact: str = "What was finished before is intact") -> Iterator[None]:
    """Say what could not be written, where and why, and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"{name} cannot be written to save_dir={str(folder)!r} ({error.strerror}): free space or make it "
            f"writable, and run again. {intact}",
        ) from error


def difference(stored: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """How a store's fingerprint differs from the given one, and what to do; None if it does not."""
    for name in (*given, *(name for name in stored if name not in given)):
        before, now = stored.get(name), given.get(name)
        if not _same(before, now):
            return (
                f"was made with {name} = {_short(before, now)}, now it is {_short(now, before)}: pass what it was made "
                "with, another save_dir, or delete the folder."
            )
    return None


def read_contents(folder: Path) -> dict[str, Any] | None:
    """What `store.json` says, None if there is none."""
    try:
        found = json.loads((folder / CONTENTS).read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StoreMismatch(
            f"save_dir={str(folder)!r} has a damaged {CONTENTS} ({error}): delete the folder."
        ) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise StoreMismatch(
            f"save_dir={str(folder)!r} has a {CONTENTS} of another format: pass another save_dir, or delete the folder."
        )
    return found


def open_array(path: Path) -> np.ndarray:
    """A `.npy` file as a memory map, copy on write, without pickle."""
    return np.load(path, mmap_mode="c", allow_pickle=False)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file as a whole or not at all."""
    with replaced(path) as file:
        file.write(json.dumps(content, indent=1).encode())


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once it is written, also if the power fails meanwhile."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    os.replace(part, path)
    _sync_folder(path.parent)


def digest(*arrays: np.ndarray) -> str:
    """A short text that differs for other arrays: a fingerprint of labels, parameters, …"""
    found = hashlib.sha256()
    for array in arrays:
        array = np.ascontiguousarray(array)
        found.update(f"{array.dtype.str}{array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()[:16]


class _Counted:
    """A file that keeps the checksum of what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.crc = file, 0

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        self.crc = zlib.crc32(view, self.crc)
        self.file.write(view)


def _checksum(path: Path) -> int | None:
    """The checksum of a file, None if there is none."""
    found = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(2**22):
                found = zlib.crc32(chunk, found)
    except FileNotFoundError:
        return None
    return found


def _same(before: Any, now: Any) -> bool:
    sketches = all(isinstance(value, list) and value and isinstance(value[0], float) for value in (before, now))
    if not sketches:
        return before == now
    scale = max(map(abs, (*before, *now)))
    return len(before) == len(now) and all(
        math.isclose(a, b, rel_tol=0, abs_tol=SKETCH_TOLERANCE * scale) for a, b in zip(before, now, strict=True)
    )


def _short(value: Any, other: Any) -> str:
    """A value as text; of a long one the part where it differs from the other."""
    text = repr(value)
    same = next((at for at, (a, b) in enumerate(zip(text, repr(other), strict=False)) if a != b), len(text))
    low = max(0, same - 40)
    part = text[low : low + 80]
    return f"{'…' * (low > 0)}{part}{'…' * (low + 80 < len(text))}" if len(text) > 80 else text


def _is_leftover(path: Path) -> bool:
    """Whether a file may stand in a folder that was killed before its `store.json` was written."""
    return path.name in (LOCK, CONTENTS + ".part")


def _sync_folder(folder: Path) -> None:
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


if sys.platform == "win32":
    import msvcrt

    def _take(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _take(handle: int) -> None:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


class FolderLock:
    """A lock that the system gives back when its process ends, however it ends; children do not inherit it.

    Args:
        folder: what is locked.
        reentrant: whether this process may lock the folder while it holds it already.
    """

    _held: dict[Path, _Holder] = {}  # noqa: RUF012  # the system's lock is blind within one process

    def __init__(self, folder: Path, *, reentrant: bool = False) -> None:
        self.folder = folder.resolve()
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


def _release(held: dict[Path, _Holder], folder: Path, holder: _Holder) -> None:
    holder.count -= 1
    if holder.count == 0 and holder.process == os.getpid():
        held.pop(folder, None)
        if holder.handle is not None:
            os.close(holder.handle)


def _locked(folder: Path) -> int | None:
    """The open and locked lock file of a folder; None in a folder that can only be read, which needs no lock."""
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
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
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()}".encode(), 0)
    return handle
