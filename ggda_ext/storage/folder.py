"""A folder of finished arrays that survives being killed, and refuses what does not belong to it.

Every array is a `.npy` file, written to a `.part` file first and renamed, so a file that exists is whole. A small
`store.json` holds what the arrays were made with (the *fingerprint*) and a checksum for each, and one of its own.
Opened again, a store hands back what is finished; an array that is missing or changed on disk counts as not made.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from ggda_ext.storage.files import DamagedFile, checksum_of, open_array, read_json, replaced, seal, write_sealed_json
from ggda_ext.storage.folder_lock import LOCK, FolderLock

FORMAT = 2
CONTENTS = "store.json"
_LEFTOVERS = (LOCK, CONTENTS + ".part")  # of a process that was killed before its first store.json
SUMS_TOLERANCE = 1e-6
SYNC_SECONDS = 1.0
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_KINDS = {"fingerprint": dict, "parts": dict, "blocks": dict}
_logger = logging.getLogger(__name__)


class StoreMismatch(ValueError):
    """The folder holds a store that was made with something else."""


class StoreDamaged(StoreMismatch):
    """The folder holds a file that was cut or changed, or a link."""


class Store:
    """Arrays by name in a folder, with one writer at a time.

    Use it as a context manager, or `close` it: until then other processes are refused. After a kill the system itself
    gives the lock back. Arrays that were read stay valid after closing.

    Args:
        folder: made if it does not exist; must be empty or a store.
        fingerprint: what the arrays depend on, as JSON values by name. Another value than the stored one is refused,
            except that lists of floats (a few sums of many numbers) may differ by rounding.
        lock: False for a store inside the folder of another one that is locked.
        parts: inner folders, and what they were made with; see `part`.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with Store(folder, {"seed": 0}) as store:
    ...     block = store.block("scores-0", lambda: np.arange(3.0))
    >>> with Store(folder, {"seed": 0}) as store:  # nothing is made again
    ...     store.block("scores-0", lambda: 1 / 0).tolist(), "scores-1" in store
    ([0.0, 1.0, 2.0], False)
    >>> Store(folder, {"seed": 1})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ggda_ext.storage.folder.StoreMismatch: save_dir='...' was made with seed = 0, now it is 1: pass what it was made...
    """

    def __init__(
        self,
        folder: str | Path,
        fingerprint: Mapping[str, Any],
        *,
        lock: bool = True,
        parts: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.fingerprint: dict[str, Any] = json.loads(json.dumps(dict(fingerprint)))
        self._parts: dict[str, dict[str, Any]] = {}
        self._blocks: dict[str, dict[str, Any]] = {}
        self._checked: set[str] = set()
        self._lock: FolderLock | None = None
        self._held_before = False
        self._synced = time.monotonic()
        check_folder(self.folder, is_inner=not lock)
        with self._clear_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
        if lock:
            self._refuse_foreign()  # before a lock file is left there
            with self._clear_errors():
                self._lock = _take_lock(self.folder)
        try:
            self._open(json.loads(json.dumps(parts or {})))
        except BaseException:
            self.close()
            raise

    def _open(self, parts: dict[str, dict[str, Any]]) -> None:
        found = read_contents(self.folder)
        if found is None:
            self._parts = parts
            if self._lock is not None:
                self._write_contents()
            return  # in a folder of our own it is written with the first array
        differing = difference(found["fingerprint"], self.fingerprint)
        if differing is not None:
            raise StoreMismatch(f"save_dir={str(self.folder)!r} {differing}")
        self._parts, self._blocks = found["parts"], found["blocks"]
        self._held_before = True
        for name, made_with in parts.items():
            self.part(name, made_with)

    def _refuse_foreign(self) -> None:
        names = os.listdir(self.folder)
        foreign = [] if CONTENTS in names else sorted(name for name in names if name not in _LEFTOVERS)
        if foreign:
            raise StoreMismatch(
                f"save_dir={str(self.folder)!r} is not empty and not a store (it holds {foreign[0]!r}): pass a new or "
                "empty folder."
            )

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
            if checksum_of(self._path(name)) != known["xxh3"]:
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

    def part(self, name: str, fingerprint: Mapping[str, Any]) -> Path:
        """The inner folder `name`, refused if it was made with something else than now."""
        given = json.loads(json.dumps(dict(fingerprint)))
        if name not in self._parts:
            self._parts[name] = given
            self._write_contents()
        differing = difference(self._parts[name], given)
        if differing is not None:
            raise StoreMismatch(f"save_dir={str(self.folder)!r}, in {name}, {differing}")
        return self.folder / name

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
        with self._clear_errors(name), replaced(path, sync=self._is_much_at_stake) as file:
            counted = _Counted(file)
            np.lib.format.write_array_header_2_0(counted, described)
            for part in parts:
                counted.write(np.ascontiguousarray(part, dtype))
        self._blocks[name] = {"xxh3": counted.hash.hexdigest(), "shape": list(shape), "dtype": np.dtype(dtype).name}
        self._checked.add(name)
        self._write_contents(name)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"name={name!r}: use letters, digits, '.', '_' and '-' only.")
        return self.folder / f"{name}.npy"

    def _write_contents(self, name: str = CONTENTS) -> None:
        content = {"format": FORMAT, "fingerprint": self.fingerprint, "parts": self._parts, "blocks": self._blocks}
        with self._clear_errors(name):
            sync = self._is_much_at_stake
            write_sealed_json(self.folder / CONTENTS, content, sync=sync)
        self._synced = time.monotonic() if sync else self._synced

    @property
    def _is_much_at_stake(self) -> bool:
        """Whether to wait for the disk: a power failure must not cost what was there before, or long work."""
        return self._held_before or time.monotonic() - self._synced > SYNC_SECONDS

    def _clear_errors(self, name: str = CONTENTS) -> AbstractContextManager[None]:
        return clear_errors(self.folder, name, f"The {len(self._blocks)} arrays finished before are intact")


def check_folder(folder: Path, *, is_inner: bool = False) -> None:
    """Refuse a `save_dir` that is a file, and a folder inside of a store that is a link to elsewhere."""
    if is_inner and folder.is_symlink():
        raise StoreDamaged(f"save_dir holds {str(folder)!r}, a symbolic link, which is not followed here: remove it.")
    if folder.exists() and not folder.is_dir():
        raise StoreMismatch(f"save_dir={str(folder)!r} is a file: pass a new or empty folder.")


def _take_lock(folder: Path) -> FolderLock:
    try:
        return FolderLock(folder)
    except DamagedFile as error:
        raise StoreDamaged(f"save_dir={str(folder)!r}: {error}") from None


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
    """What `store.json` says, None if there is none.

    Raises:
        StoreDamaged: it does not hold what it was written with.
        StoreMismatch: it is of another format.
    """
    try:
        found = read_json(folder / CONTENTS)
    except FileNotFoundError:
        return None
    except DamagedFile as error:
        raise StoreDamaged(f"save_dir={str(folder)!r} has a damaged {CONTENTS} ({error}): delete the folder.") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise StoreMismatch(
            f"save_dir={str(folder)!r} has a {CONTENTS} of another format: pass another save_dir, or delete the folder."
        )
    missing = [name for name, kind in _KINDS.items() if not isinstance(found.get(name), kind)]
    if missing or found.pop("xxh3", None) != seal(found):
        reason = f"it has no {missing[0]}" if missing else "its checksum is another"
        raise StoreDamaged(f"save_dir={str(folder)!r} has a damaged {CONTENTS} ({reason}): delete the folder.")
    return found


def digest(*arrays: np.ndarray) -> str:
    """A short text that differs for other arrays: a fingerprint of labels, parameters, …"""
    found = xxhash.xxh3_128()
    for array in arrays:
        array = np.ascontiguousarray(array)
        found.update(f"{array.dtype.str}{array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()[:16]


class _Counted:
    """A file that keeps the checksum of what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.hash = file, xxhash.xxh3_128()

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        self.hash.update(view)
        self.file.write(view)


def _same(before: Any, now: Any) -> bool:
    are_sums = all(isinstance(value, list) and value and isinstance(value[0], float) for value in (before, now))
    if not are_sums:
        return before == now
    scale = max(map(abs, (*before, *now)))
    return len(before) == len(now) and all(
        math.isclose(a, b, rel_tol=0, abs_tol=SUMS_TOLERANCE * scale) for a, b in zip(before, now, strict=True)
    )


def _short(value: Any, other: Any) -> str:
    """A value as text; of a long one the part where it differs from the other."""
    text = repr(value)
    same = next((at for at, (a, b) in enumerate(zip(text, repr(other), strict=False)) if a != b), len(text))
    low = max(0, same - 40)
    part = text[low : low + 80]
    return f"{'…' * (low > 0)}{part}{'…' * (low + 80 < len(text))}" if len(text) > 80 else text
