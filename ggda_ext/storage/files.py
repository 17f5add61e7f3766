"""Files in a folder that may come from a stranger: no link is followed, sizes are checked, writing is all or nothing.

A file is opened without following a link, and it is read only if it is a plain file. A file is written to a new file in
the same folder, and then renamed.
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
_END_BYTES = 8 + 16 + 16  # length of the text after an array, checksum of the text, checksum of the whole file
_USUAL = re.compile(
    rb"\x93NUMPY\x02\x00(....){'descr': '([<|][biuf][1-8])', 'fortran_order': False, "
    rb"'shape': \(([0-9, ]{0,80})\), } *\n",
    re.DOTALL,
)
_UNREADABLE = (ValueError, SyntaxError, TokenError, OverflowError, RecursionError, MemoryError, EOFError)  # bad headers


def plain_number(value: Any) -> Any:
    """The plain number of one of NumPy or PyTorch, for JSON."""
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"a {type(value).__name__} is no JSON value")


as_text = json.JSONEncoder(sort_keys=True, default=plain_number).encode
"""Return a JSON value as text, also with numbers of NumPy; the order of entries in objects makes no difference."""


class DamagedFile(ValueError):
    """A file was cut or changed, is of another kind, or is a link."""


def open_plain(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a plain file that is not a symbolic link, and return its handle.

    Raises:
        FileNotFoundError: the file does not exist.
        DamagedFile: it is a link, a folder, a pipe or a device.
    """
    try:
        handle = os.open(path, flags | _FLAGS | _NO_WAITING, mode)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) or os.path.islink(path):
            raise DamagedFile(f"{path} is a symbolic link, which is not followed here: remove it.") from None
        if error.errno in (errno.EISDIR, errno.ENXIO):
            raise _not_plain(path) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _not_plain(path)
    return handle


def _not_plain(path: str | Path) -> DamagedFile:
    what = "a folder" if os.path.isdir(path) else "no plain file"
    return DamagedFile(f"{path} is {what}: pass a file, or move it away if a file belongs there.")


def read_plain(path: str | Path, most: int = JSON_BYTES) -> bytes:
    """Return the content of a plain file; raise `DamagedFile` if it has more than `most` bytes."""
    with os.fdopen(open_plain(path), "rb") as file:
        content = file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
    if len(content) > most:
        raise DamagedFile(f"{path} has more than {most} bytes, which is too much for what it should hold: remove it.")
    return content


def read_json(path: str | Path, most: int = JSON_BYTES) -> Any:
    """Return the value in a JSON file.

    Raises:
        FileNotFoundError: the file does not exist.
        DamagedFile: it is not JSON, or it is nested too deeply.
    """
    return _parsed(path, read_plain(path, most))


def _parsed(path: str | Path, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise DamagedFile(f"{path} is damaged: it is not JSON ({reason}).") from None


def write_json(path: str | Path, content: Mapping[str, Any], *, sync: bool = True) -> None:
    """Write a JSON object to a file, as a whole or not at all."""
    with replaced(path, sync=sync) as file:
        file.write(json.dumps(content).encode())


@contextmanager
def replaced(path: str | Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a new file for writing; it takes the place of `path` after it is written without an error.

    Args:
        path: the final path of the file.
        sync: whether to wait until the file is on the disk, for safety against a power failure. For safety against a
            kill, waiting is not necessary.
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
    """Open a file that the user asked for, as `replaced` does; its folder is made if it does not exist."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotADirectoryError(f"{str(path)!r} lies below a file: pass a path in a folder.") from None
    with replaced(path) as file:
        yield file


def _new(path: str) -> int:
    """Open a new file and return its handle; an existing file or link of that name is removed, never written to."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS
    try:
        return os.open(path, flags, 0o666)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, 0o666)


def seal(content: Any) -> str:
    """The checksum of a JSON value; the order of entries in objects makes no difference."""
    return xxhash.xxh3_128_hexdigest(as_text(content).encode())


def write_sealed_json(path: str | Path, content: Mapping[str, Any], *, sync: bool = True) -> None:
    """Write a JSON object with a checksum of itself."""
    write_json(path, {**content, "xxh3": seal(content)}, sync=sync)


def read_sealed_json(path: str | Path) -> dict[str, Any]:
    """Return a JSON object that `write_sealed_json` wrote.

    Raises:
        FileNotFoundError: the file does not exist.
        DamagedFile: the checksum does not match.
    """
    found = read_json(path)
    if not isinstance(found, dict) or found.pop("xxh3", None) != seal(found):
        raise DamagedFile(f"{path} is damaged: it does not have the checksum it was written with.")
    return found


def write_sealed_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name to one file with a checksum, as a whole or not at all."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    with replaced(path, sync=False) as file:
        file.write(xxhash.xxh3_128_digest(buffer.getbuffer()))
        file.write(buffer.getbuffer())


def read_sealed_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays by name that `write_sealed_arrays` wrote.

    Raises:
        FileNotFoundError: the file does not exist.
        DamagedFile: the checksum does not match.
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
    """Write an array to a `.npy` file, and after its rows what the array was made with, and checksums.

    Args:
        path: the file.
        made_with: what the array was made with, a JSON object as text.
        shape: shape of the array.
        dtype: dtype of the array.
        parts: the rows of the array, in consecutive runs.
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
    """Return the `made_with` that was given to `write_sealed_array`, as a dict; the array itself is not read.

    Raises:
        FileNotFoundError: the file does not exist.
        DamagedFile: the end of the file is not what `write_sealed_array` writes.
    """
    with os.fdopen(open_plain(path), "rb") as file:
        text = _end(path, file)
    found = _parsed(path, text)
    if not isinstance(found, dict):
        raise DamagedFile(f"{path} is damaged: what it was made with is not told.")
    return found


def _end(path: str | Path, file: BinaryIO) -> bytes:
    """The text after a sealed array; its checksum includes the name of the file."""
    whole = os.fstat(file.fileno()).st_size - _END_BYTES
    file.seek(max(whole, 0))
    length, checksum = int.from_bytes(file.read(8), "little"), file.read(16)
    file.seek(max(whole - length, 0))
    text = file.read(min(length, JSON_BYTES, max(whole, 0)))
    if len(text) != length or xxhash.xxh3_128_digest(os.path.basename(path).encode() + text) != checksum:
        raise DamagedFile(f"{path} is damaged: it does not end as it was written.")
    return text


def _header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """The header of a `.npy` file of plain numbers, as NumPy writes it."""
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {tuple(map(int, shape))!r}, }}"
    text += " " * (-(len(text) + 13) % 64) + "\n"
    return b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little") + text.encode()


def is_sealed_array(path: str | Path, made_with: str) -> bool:
    """Whether `write_sealed_array` wrote this file, under this name, with this `made_with`, and it is unchanged.

    Raises:
        FileNotFoundError: the file does not exist.
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
    """Create a `.npy` file of zeros, reserve all its disk space, and return it as a memory map that writes to the file.

    A memory map of a sparse file kills the process (SIGBUS) when the disk is full. Here a full disk raises an OSError
    at the start.
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
    except AttributeError:  # this system has no such function
        pass
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def open_array(path: str | Path, mode: Any = "c", *, sealed: bool = False, made_with: str | None = None) -> np.ndarray:
    """Open a `.npy` file as a memory map; raise an error if it holds pickled objects or is a link.

    Args:
        path: the file.
        mode: mode of the memory map; by default copy on write.
        sealed: whether `write_sealed_array` wrote the file; the checksum of the array is not verified here.
        made_with: what a sealed array has to be made with; otherwise it raises `DamagedFile`.
    """
    flags = os.O_RDONLY if mode in ("c", "r") else os.O_RDWR
    with os.fdopen(open_plain(path, flags), "rb" if flags == os.O_RDONLY else "r+b") as file:
        end = _end(path, file) if sealed else b""
        if made_with is not None and end != made_with.encode():
            raise DamagedFile(f"{path} was made with something else.")
        shape, fortran, dtype, start = _read_header(path, file, len(end) + _END_BYTES if sealed else 0)
        return _mapped(path, file, mode, start, shape, dtype, "F" if fortran else "C")


def _mapped(
    path: str | Path, file: BinaryIO, mode: Any, start: int, shape: tuple[int, ...], dtype: Any, order: Any = "C"
) -> np.ndarray:
    found = np.memmap(file, dtype, mode, start, shape, order=order)
    found.filename = os.path.abspath(path)  # NumPy knows it only if it opens the file itself
    return found


def _described(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read shape, Fortran order and dtype from a header.

    NumPy reads only unusual headers, because it parses them as Python.
    """
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
    """The checksum of a file; None if it does not exist or is not a plain file."""
    found = xxhash.xxh3_128()
    try:
        with os.fdopen(open_plain(path), "rb", buffering=0) as file:
            while chunk := file.read(2**20):
                found.update(chunk)
    except (FileNotFoundError, DamagedFile):
        return None
    return found.hexdigest()


def sync_folder(folder: str) -> None:
    """Wait until the names of the files in a folder are on the disk."""
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
