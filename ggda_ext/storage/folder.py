"""A folder of finished arrays that survives a kill and raises an error for arrays that do not belong to it.

Every array is a `.npy` file. After its numbers come a JSON text that says what the array was made with (the
*fingerprint*), a checksum of this text and a checksum of the file. A file is first written as a `.part` file and then
renamed. There is no other record: the fingerprint of a store is read from its arrays. A store that is opened again
returns the finished arrays; an array that is missing or was changed on disk counts as not made.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ggda_ext.storage.files import (
    DamagedFile,
    as_text,
    is_sealed_array,
    open_array,
    plain_number,
    read_made_with,
    write_sealed_array,
)
from ggda_ext.storage.folder_lock import LOCK, FolderLock

FORMAT = 7
SUMS_TOLERANCE = 1e-6
SYNC_SECONDS = 1.0
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_ARRAY = re.compile(r"(?:([A-Za-z0-9][\w.-]*)\+)?([A-Za-z0-9][\w.-]*)\.npy")
_logger = logging.getLogger(__name__)


class StoreMismatch(ValueError):
    """The folder holds a store that was made with something else, or files that are not a store."""


class StoreDamaged(StoreMismatch):
    """The folder holds a file that was cut or changed, or a link."""


class Arrays:
    """Finished arrays by name in the folder of a store: the store's own arrays, or the arrays of a `Store.part`.

    Args:
        folder: the folder of the store.
        part: the name of the part, which file names begin with; empty for the store's own arrays.
        made_with: everything that the arrays depend on, as JSON text.
        before_writing: called before each write; returns whether to wait for the disk.
    """

    def __init__(self, folder: Path, part: str, made_with: str, before_writing: Callable[[], bool]) -> None:
        self.folder, self._part, self.made_with, self._before_writing = folder, part, made_with, before_writing
        self._checked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Whether an array is finished and intact; the checksum of an intact array is verified only once."""
        if name in self._checked:
            return True
        try:
            intact = is_sealed_array(self._path(name), self.made_with)
        except FileNotFoundError:
            return False
        if intact:
            self._checked.add(name)
        else:
            _logger.warning("%s is damaged and will be made again.", self._path(name))
        return intact

    def __len__(self) -> int:
        return len(self.names)

    @property
    def names(self) -> list[str]:
        """Names of the arrays in the folder; use `in` to check whether one of them is intact."""
        return [name for part, name in _arrays_among(os.listdir(self.folder)) if part == self._part]

    def load(self, name: str) -> np.ndarray:
        """Return a finished array as a memory map; changes to it stay in memory."""
        if name not in self:
            raise KeyError(f"{name!r} is not finished in save_dir={str(self.folder)!r}.")
        return read_array(self.folder, name, self._part)

    def save(self, name: str, array: np.ndarray) -> None:
        """Write a whole array; it counts as finished only after all of it is written."""
        array = np.asarray(array)
        self.save_parts(name, array.shape, array.dtype, [array])

    def save_parts(self, name: str, shape: tuple[int, ...], dtype: Any, parts: Iterable[np.ndarray]) -> None:
        """Write an array that may be larger than memory, from consecutive runs of its rows."""
        path = self._path(name)
        dtype = np.dtype(dtype)
        if dtype.kind not in "biufc":
            raise TypeError(f"{name!r} has dtype {dtype}: only plain numbers are stored.")
        with clear_errors(self.folder, name, self._how_many):
            write_sealed_array(path, self.made_with, shape, dtype, parts, sync=self._before_writing())
        self._checked.add(name)

    def _how_many(self) -> str:
        return f"The {len(self)} arrays finished before are intact"

    def _path(self, name: str) -> str:
        return _path(self.folder, _checked_name(name), self._part)


class Store(Arrays):
    """Arrays by name in a folder, with one writer at a time.

    Use it as a context manager, or `close` it: until then other processes that open the folder get an error. After a
    kill the system itself gives the lock back. Arrays that were read stay valid after closing.

    Args:
        folder: the folder; it is made if it does not exist, and has to be empty or a store.
        fingerprint: everything that the arrays depend on, as JSON values by name. A value that differs from the stored
            one raises an error, but lists of floats (a few sums of many numbers) may differ by rounding.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with Store(folder, {"seed": 0}) as store:
    ...     store.save("scores-0", np.arange(3.0))
    >>> with Store(folder, {"seed": 0}) as store:
    ...     store.load("scores-0").tolist(), "scores-1" in store
    ([0.0, 1.0, 2.0], False)
    >>> Store(folder, {"seed": 1})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ggda_ext.storage.folder.StoreMismatch: save_dir='...' was made with seed = 0, now it is 1: pass what it was made...
    """

    def __init__(self, folder: str | Path, fingerprint: Mapping[str, Any]) -> None:
        folder = Path(folder)
        with clear_errors(folder, LOCK):
            try:
                os.mkdir(folder)
            except OSError:
                check_folder(folder)
                folder.mkdir(parents=True, exist_ok=True)
                read_store(folder)  # raises for a foreign folder before a lock file is left there
            self._lock = _take_lock(folder)
        try:
            found, self.parts = read_store(folder)
            self._held_before, self._last_sync = found is not None, time.monotonic()
            self.fingerprint: Mapping[str, Any] = fingerprint if found is None else found
            differing = difference(self.fingerprint, fingerprint)
            if differing is not None:
                raise StoreMismatch(f"save_dir={str(folder)!r} {differing}")
        except BaseException:
            self.close()
            raise
        self._text = as_text(self.fingerprint)
        super().__init__(folder, "", self._told("null"), self._must_wait)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes use the folder."""
        self._lock.release()

    def part(self, name: str, fingerprint: Mapping[str, Any]) -> Arrays:
        """Return the arrays of the part `name`; raise an error if the part was made with another fingerprint."""
        known = self.parts.get(_checked_name(name))
        if known is None:
            known = self.parts[name] = fingerprint
        else:
            self._refuse(name, known, fingerprint)
        return Arrays(self.folder, name, self._told(as_text(known)), self._must_wait)

    def check(self, within: str, fingerprint: Mapping[str, Any]) -> None:
        """Raise an error if the parts whose names begin with `within` were made with other values than `fingerprint`.

        These parts all have the same values there, so only one part is compared.
        """
        known = next((part for name, part in self.parts.items() if name.startswith(f"{within}-")), None)
        if known is not None:
            self._refuse(within, {name: known.get(name) for name in fingerprint}, fingerprint)

    def _refuse(self, name: str, known: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
        differing = difference(known, fingerprint)
        if differing is not None:
            raise StoreMismatch(f"save_dir={str(self.folder)!r}, in {name}, {differing}")

    def _told(self, part: str) -> str:
        """The JSON text in the arrays that says what they were made with."""
        return f'{{"fingerprint": {self._text}, "format": {FORMAT}, "part": {part}}}'

    def _must_wait(self) -> bool:
        """Whether to wait for the disk: if a power failure could destroy arrays from before, or long work.

        For safety against a kill, waiting is not necessary.
        """
        now = time.monotonic()
        sync = self._held_before or now - self._last_sync > SYNC_SECONDS
        self._last_sync = now if sync else self._last_sync
        return sync


def read_array(folder: Path, name: str, part: str = "", made_with: str | None = None) -> np.ndarray:
    """Return a finished array of a store, or of one of its parts, as a memory map; the checksum is not verified.

    With the `Arrays.made_with` that it was found with, an array that took its place since then raises `DamagedFile`.
    """
    return open_array(_path(folder, name, part), sealed=True, made_with=made_with)


def _path(folder: Path, name: str, part: str) -> str:
    return f"{folder}{os.sep}{part}{'+' if part else ''}{name}.npy"


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"name={name!r}: use letters, digits, '.', '_' and '-' only.")
    return name


def _arrays_among(files: list[str]) -> list[tuple[str, str]]:
    """The part and the name of every array among the files of a folder, sorted."""
    return sorted((found[1] or "", found[2]) for found in map(_ARRAY.fullmatch, files) if found)


def check_folder(folder: Path) -> None:
    """Raise an error if a `save_dir` is a file, or is below a file."""
    try:
        mode = os.stat(folder).st_mode
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise StoreMismatch(f"save_dir={str(folder)!r} lies below a file: pass a new or empty folder.") from None
    if not stat.S_ISDIR(mode):
        raise StoreMismatch(f"save_dir={str(folder)!r} is a file: pass a new or empty folder.")


def _take_lock(folder: Path) -> FolderLock:
    try:
        return FolderLock(folder)
    except DamagedFile as error:
        raise StoreDamaged(f"save_dir={str(folder)!r}: {error}") from None


@contextmanager
def clear_errors(folder: Path, name: str, intact: Callable[[], str] | None = None) -> Iterator[None]:
    """Context that turns an OSError into one that says which file could not be written, where, why, and what to do."""
    try:
        yield
    except OSError as error:
        if "cannot be written to save_dir" in str(error):  # an inner context has said it already
            raise
        raise OSError(
            error.errno,
            f"{name} cannot be written to save_dir={str(folder)!r} ({error.strerror}): free space or make it "
            f"writable, and run again. {intact() if intact else 'What was finished before is intact'}",
        ) from error


def difference(stored: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """A text that says how a store's fingerprint differs from the given one, and what to do; None if they agree."""
    if stored == given:
        return None
    given = json.loads(json.dumps(given, default=plain_number))  # as it is read from JSON: a tuple becomes a list
    for name in (*given, *(name for name in stored if name not in given)):
        before, now = stored.get(name), given.get(name)
        if not _same(before, now):
            return (
                f"was made with {name} = {_short(before, now)}, now it is {_short(now, before)}: pass what it was made "
                "with, another save_dir, or delete the folder."
            )
    return None


def read_store(folder: Path) -> tuple[Mapping[str, Any] | None, dict[str, Mapping[str, Any]]]:
    """Return the fingerprint of a store (None if there is no array) and the fingerprints of its parts, by name.

    They are read from the arrays. An array that does not say what it was made with is damaged and is left out.

    Raises:
        StoreMismatch: the folder holds something else than a store, or a store of another format.
    """
    fingerprint: Mapping[str, Any] | None = None
    parts: dict[str, Mapping[str, Any]] = {}
    files = os.listdir(folder)
    for part, name in _arrays_among(files):
        if part not in parts:
            try:
                told = read_made_with(_path(folder, name, part))
            except (DamagedFile, FileNotFoundError):
                continue
            if told.get("format") != FORMAT:
                raise StoreMismatch(
                    f"save_dir={str(folder)!r} holds a {name}.npy of another format: pass another save_dir, or delete "
                    "the folder."
                )
            of_all, of_part = told.get("fingerprint"), told.get("part")
            if isinstance(of_all, dict) and isinstance(of_part, dict if part else None.__class__):
                fingerprint = of_all if fingerprint is None else fingerprint
                if of_all == fingerprint:
                    parts[part] = of_part or {}
    if fingerprint is None:
        _refuse_foreign(folder, files)
    parts.pop("", None)
    return fingerprint, parts


def _refuse_foreign(folder: Path, files: list[str]) -> None:
    """Raise an error if a folder holds more than the files of a store that was killed before its first array."""
    ours = [LOCK, *(name for name in files if LOCK in files and _ARRAY.fullmatch(name.removesuffix(".part")))]
    foreign = sorted(set(files).difference(ours))
    if foreign:
        raise StoreMismatch(
            f"save_dir={str(folder)!r} is not empty and not a store (it holds {foreign[0]!r}): pass a new or empty "
            "folder."
        )


def digest(*arrays: np.ndarray) -> str:
    """A short text that differs for other arrays, as a fingerprint of labels, parameters, …"""
    found = xxhash.xxh3_128()
    for array in arrays:
        array = np.ascontiguousarray(array)
        found.update(f"{array.dtype.str}{array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()[:16]


def _same(before: Any, now: Any) -> bool:
    if not all(isinstance(value, list) and value for value in (before, now)) or len(before) != len(now):
        return before == now
    if not all(isinstance(value, float) for value in (*before, *now)):
        return all(map(_same, before, now))
    scale = SUMS_TOLERANCE * max(map(abs, (*before, *now)))
    return all(math.isclose(a, b, rel_tol=0, abs_tol=scale) for a, b in zip(before, now, strict=True))


def _short(value: Any, other: Any) -> str:
    """A value as text; for a long text only the part where it differs from the text of `other`."""
    text = repr(value)
    same = next((at for at, (a, b) in enumerate(zip(text, repr(other), strict=False)) if a != b), len(text))
    low = max(0, same - 40)
    part = text[low : low + 80]
    return f"{'…' * (low > 0)}{part}{'…' * (low + 80 < len(text))}" if len(text) > 80 else text
