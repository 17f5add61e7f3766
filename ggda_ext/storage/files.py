"""Files in a folder that may come from a stranger: no link is followed, no size is believed, writing is all or nothing.

A file is read by a handle that was opened without following a link, and only if it is a plain file. A file is written
beside its place under a name that must be new, and renamed.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np
import xxhash

JSON_BYTES = 256 * 2**20
_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_NO_WAITING = getattr(os, "O_NONBLOCK", 0)
_HEADER_BYTES, _USUAL_BYTES = 10_000, 256
_END_BYTES = 8 + 16 + 16  # the length of the text behind an array, its checksum, and that of the whole file
_USUAL = re.compile(
    rb"\x93NUMPY\x02\x00(....){'descr': '([<|][biuf][1-8])', 'fortran_order': False, "
    rb"'shape': \(([0-9, ]{0,80})\), } *\n",
    re.DOTALL,
)
_UNREADABLE = (ValueError, SyntaxError, TokenError, OverflowError, RecursionError, MemoryError, EOFError)  # of a header


as_text = json.JSONEncoder(sort_keys=True).encode
"""A JSON value as text, whatever the order of entries in objects."""


class DamagedFile(ValueError):
    """A file that is cut, changed, of another kind, or a link."""


def open_plain(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """A handle of a plain file that is not a symbolic link.

    Raises:
        FileNotFoundError: there is none.
        DamagedFile: it is a link, a folder, a pipe, a device.
    """
    try:
        handle = os.open(path, flags | _FLAGS | _NO_WAITING, mode)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) or os.path.islink(path):
            raise DamagedFile(f"{path} is a symbolic link, which is not followed here: remove it.") from None
        if error.errno in (errno.EISDIR, errno.ENXIO):
            raise DamagedFile(f"{path} is not a plain file: remove it.") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DamagedFile(f"{path} is not a plain file: remove it.")
    return handle


def read_plain(path: str | Path, most: int = JSON_BYTES) -> bytes:
    """The content of a plain file of at most `most` bytes."""
    with os.fdopen(open_plain(path), "rb") as file:
        content = file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
    if len(content) > most:
        raise DamagedFile(f"{path} has more than {most} bytes, which is too much for what it should hold: remove it.")
    return content


def read_json(path: str | Path, most: int = JSON_BYTES) -> Any:
    """What a JSON file holds.

    Raises:
        FileNotFoundError: there is none.
        DamagedFile: it is not JSON, or nested too deeply.
    """
    return _parsed(path, read_plain(path, most))


def _parsed(path: str | Path, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise DamagedFile(f"{path} is damaged: it is not JSON ({reason}).") from None


def write_json(path: str | Path, content: Mapping[str, Any], *, sync: bool = True) -> None:
    """Write a JSON object as a whole or not at all."""
    with replaced(path, sync=sync) as file:
        file.write(json.dumps(content).encode())


@contextmanager
def replaced(path: str | Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once it is written.

    Args:
        path: where it ends up.
        sync: whether to wait for the disk, so that it is there even if the power fails; a kill needs no waiting.
    """
    part = f"{path}.part"
    try:
        with os.fdopen(_new(part), "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with suppress(FileNotFoundError):
            os.unlink(part)
        if isinstance(error, OSError) and os.path.isdir(path):
            raise IsADirectoryError(f"{str(path)!r} is a folder: pass the path of a file.") from None
        raise
    if sync:
        sync_folder(os.path.dirname(path) or ".")


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that a user asked for, in a folder that is made if there is none; see `replaced`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotADirectoryError(f"{str(path)!r} lies below a file: pass a path in a folder.") from None
    with replaced(path) as file:
        yield file


def _new(path: str) -> int:
    """A handle of a new file; what stands in its place, a link for example, is removed and not written to."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS
    try:
        return os.open(path, flags, 0o666)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, 0o666)


def seal(content: Any) -> str:
    """The checksum of a JSON value, whatever the order of entries in objects."""
    return xxhash.xxh3_128_hexdigest(as_text(content).encode())


def write_sealed_json(path: str | Path, content: Mapping[str, Any], *, sync: bool = True) -> None:
    """Write a JSON object with a checksum of itself."""
    write_json(path, {**content, "xxh3": seal(content)}, sync=sync)


def read_sealed_json(path: str | Path) -> dict[str, Any]:
    """A JSON object that was written with a checksum of itself.

    Raises:
        FileNotFoundError: there is none.
        DamagedFile: it is not what was written.
    """
    found = read_json(path)
    if not isinstance(found, dict) or found.pop("xxh3", None) != seal(found):
        raise DamagedFile(f"{path} is damaged: it does not have the checksum it was written with.")
    return found


def write_sealed_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name as one file, with a checksum, as a whole or not at all."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    with replaced(path, sync=False) as file:
        file.write(xxhash.xxh3_128_digest(buffer.getbuffer()))
        file.write(buffer.getbuffer())


def read_sealed_arrays(path: Path) -> dict[str, np.ndarray]:
    """Arrays by name that `write_sealed_arrays` wrote.

    Raises:
        FileNotFoundError: there is none.
        DamagedFile: it is not what was written.
    """
    content = read_plain(path, sys.maxsize)
    if xxhash.xxh3_128_digest(memoryview(content)[16:]) != content[:16]:
        raise DamagedFile(f"{path} is damaged: it does not have the checksum it was written with.")
    with np.load(io.BytesIO(content[16:]), allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def write_sealed_array(
    path: str | Path,
    made_with: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    parts: Iterable[np.ndarray],
    *,
    sync: bool = True,
) -> None:
    """Write a `.npy` file, from consecutive runs of its rows, and behind them what they were made with and checksums.

    Args:
        path: the file.
        made_with: a JSON object as text.
        shape: of the array.
        dtype: of the array.
        parts: its rows.
        sync: as in `replaced`.
    """
    name, text = os.path.basename(path).encode(), made_with.encode()
    end = (text, len(text).to_bytes(8, "little"), xxhash.xxh3_128_digest(name + text))
    rows: Iterable[Any] = (np.ascontiguousarray(part, dtype).reshape(-1).view(np.uint8).data for part in parts)
    found = xxhash.xxh3_128(name)
    with replaced(path, sync=sync) as file:
        for plain in chain([_header(shape, dtype)], rows, end):
            found.update(plain)
            file.write(plain)
        file.write(found.digest())


def read_made_with(path: str | Path) -> dict[str, Any]:
    """What an array was made with, as `write_sealed_array` was told; the array itself is not looked at.

    Raises:
        FileNotFoundError: there is none.
        DamagedFile: it has no such end.
    """
    with os.fdopen(open_plain(path), "rb") as file:
        text = _end(path, file)
    found = _parsed(path, text)
    if not isinstance(found, dict):
        raise DamagedFile(f"{path} is damaged: what it was made with is not told.")
    return found


def _end(path: str | Path, file: BinaryIO) -> bytes:
    """The text behind a sealed array of this name."""
    whole = os.fstat(file.fileno()).st_size - _END_BYTES
    file.seek(max(whole, 0))
    length, checksum = int.from_bytes(file.read(8), "little"), file.read(16)
    file.seek(max(whole - length, 0))
    text = file.read(min(length, JSON_BYTES, max(whole, 0)))
    if len(text) != length or xxhash.xxh3_128_digest(os.path.basename(path).encode() + text) != checksum:
        raise DamagedFile(f"{path} is damaged: it does not end as it was written.")
    return text


def _header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """The beginning of a `.npy` file of plain numbers, as NumPy writes it."""
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {tuple(map(int, shape))!r}, }}"
    text += " " * (-(len(text) + 13) % 64) + "\n"
    return b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little") + text.encode()


def is_sealed_array(path: str | Path, made_with: str) -> bool:
    """Whether a file is what `write_sealed_array` wrote under this name, made with the same.

    Raises:
        FileNotFoundError: there is none.
    """
    found = xxhash.xxh3_128(os.path.basename(path).encode())
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            told = _end(path, file)
            file.seek(0)
            rest = os.fstat(file.fileno()).st_size - 16
            while rest > 0 and (chunk := file.read(min(rest, 2**20))):
                found.update(chunk)
                rest -= len(chunk)
            return rest == 0 and file.read() == found.digest() and told == made_with.encode()
    except DamagedFile:
        return False


def create_array(path: Path, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A `.npy` file of zeros as a memory map that is written through, with all its space on the disk.

    A memory map of a sparse file kills the process (SIGBUS) when the disk is full; here that is an OSError before.
    """
    header = _header(shape, np.dtype(dtype))
    with replaced(path, sync=False) as file:
        file.write(header)
        file.flush()
        size = len(header) + math.prod(shape) * np.dtype(dtype).itemsize
        os.ftruncate(file.fileno(), size)
        _reserve(file.fileno(), size)
    with os.fdopen(open_plain(path, os.O_RDWR), "r+b") as file:
        return _mapped(path, file, "r+", len(header), shape, dtype)


def _reserve(handle: int, size: int) -> None:
    try:
        os.posix_fallocate(handle, 0, size)
    except AttributeError:  # not on this system
        pass
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def open_array(path: str | Path, mode: Any = "c", *, sealed: bool = False) -> np.ndarray:
    """A `.npy` file as a memory map, without pickle and without links.

    Args:
        path: the file.
        mode: copy on write unless it says otherwise.
        sealed: whether it is of `write_sealed_array`; the checksum of the array is not looked at here.
    """
    flags = os.O_RDONLY if mode in ("c", "r") else os.O_RDWR
    with os.fdopen(open_plain(path, flags), "rb" if flags == os.O_RDONLY else "r+b") as file:
        shape, fortran, dtype, start = _read_header(path, file, len(_end(path, file)) + _END_BYTES if sealed else 0)
        return _mapped(path, file, mode, start, shape, dtype, "F" if fortran else "C")


def _mapped(
    path: str | Path, file: BinaryIO, mode: Any, start: int, shape: tuple[int, ...], dtype: Any, order: Any = "C"
) -> np.ndarray:
    found = np.memmap(file, dtype, mode, start, shape, order=order)
    found.filename = os.path.abspath(path)  # known to NumPy only where it opens the file itself
    return found


def _described(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """What a header says; the usual ones are not left to NumPy, which parses them as Python."""
    file.seek(0)
    usual = _USUAL.match(file.read(_USUAL_BYTES))
    if usual is not None and len(usual[0]) == 12 + int.from_bytes(usual[1], "little"):
        file.seek(len(usual[0]))
        shape = tuple(map(int, usual[3].decode().replace(",", " ").split()))
        return shape, False, np.dtype(usual[2].decode())
    file.seek(0)
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    return read(file, max_header_size=_HEADER_BYTES)


def _read_header(path: str | Path, file: BinaryIO, behind: int) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    try:
        shape, fortran, dtype = _described(file)
        if dtype.hasobject:
            raise ValueError("it holds pickled objects, which are not read")
        start, found = file.tell(), os.fstat(file.fileno()).st_size
        promised = start + math.prod(int(size) for size in shape) * dtype.itemsize + behind
        if min(shape, default=0) < 0 or promised != found:
            raise ValueError(f"its header promises {promised} bytes, it has {found}")
    except (*_UNREADABLE, TypeError, KeyError) as error:
        raise DamagedFile(f"{path} is damaged: it is not a whole array ({error}).") from None
    return shape, fortran, dtype, start


def checksum_of(path: Path) -> str | None:
    """The checksum of a file, None if there is no plain one."""
    found = xxhash.xxh3_128()
    try:
        with os.fdopen(open_plain(path), "rb", buffering=0) as file:
            while chunk := file.read(2**20):
                found.update(chunk)
    except (FileNotFoundError, DamagedFile):
        return None
    return found.hexdigest()


def sync_folder(folder: str) -> None:
    """Wait until the names in a folder are on the disk."""
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
