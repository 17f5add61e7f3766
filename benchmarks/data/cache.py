"""The local cache. Every file is written completely or not at all, and is removed if its checksum is wrong.

The files have the layouts of `benchmarks.data.folders`, so the cache can also be passed as a data folder. For
``mnist.npz`` there is ``mnist.npz.json``, which holds the SHA-256 and the source of the stored file.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import folders
from benchmarks.data.contents import Content
from benchmarks.data.errors import DataError
from ggda_ext.storage.files import replaced

LOG = logging.getLogger(__name__)
CACHE_VARIABLE = "GGDA_CACHE_DIR"
FILES = {"heloc": "heloc.npz", "mnist": "mnist.npz", "cifar10": "cifar10.npz", "qnli": "qnli.tsv.gz", "bert": "bert"}
PART = ".part-"
STALE_SECONDS = 24 * 3600
NOTE_BYTES = 10_000


def root() -> Path:
    """Return the cache folder: GGDA_CACHE_DIR, or ggda-ext in the user's cache folder."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ggda-ext"


def read(name: str) -> tuple[Content, str] | None:
    """Return the cached content of a data set and its first source; None if it is missing or damaged."""
    source = intact(name)
    if source is None:
        return None
    try:
        found = folders.read(name, root())
    except DataError as error:
        discard(name, str(error))
        return None
    return None if found is None else (found[0], source)


def intact(name: str) -> str | None:
    """Return the source of a cached file (or folder) if its checksum is right.

    Return None if it is missing or damaged. A damaged one is removed.
    """
    path = root() / FILES[name]
    note = note_path(path)
    if not path.exists() or not note.is_file():
        return None
    if link := next((file for file in (path, note, *files_of(path, links=True)) if file.is_symlink()), None):
        discard(name, f"{link.name} is a symbolic link, which is not followed here")
        return None
    try:
        kept = json.loads(note.read_bytes()[:NOTE_BYTES])
        expected, source = kept["sha256"], str(kept["source"])
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        discard(name, f"its checksum file is not readable ({error})")
        return None
    try:
        found = fingerprint(path)
    except OSError as error:
        discard(name, f"it cannot be read: {error.strerror}")
        return None
    if found != expected:
        discard(name, f"SHA-256 {found[:12]}…, stored {str(expected)[:12]}…")
        return None
    return source


def discard(name: str, reason: str) -> None:
    """Remove the file or folder that is cached under a name, and log the reason."""
    path = root() / FILES[name]
    LOG.warning("the cached %s is damaged (%s); it is removed and fetched again.", path.name, reason)
    try:
        note_path(path).unlink(missing_ok=True)
        remove(path)
    except OSError as error:
        LOG.warning("%s cannot be removed (%s); remove it by hand.", path, error.strerror)


def write(name: str, content: Content, source: str) -> None:
    """Write a content to the cache. If the disk has no room, log a warning and leave the cache unchanged."""
    store(name, source, lambda part: WRITERS[name](part, content))


def store(name: str, source: str, fill: Callable[[Path], None]) -> Path | None:
    """Let `fill` write a file or folder, sync it to disk, and move it to its place with its checksum.

    Returns:
        The path; None if it could not be stored.
    """
    path = root() / FILES[name]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(path.parent)
        with unfinished(path) as part:
            fill(part)
            for file in files_of(part):
                with file.open("rb+") as stream:
                    os.fsync(stream.fileno())
            note = {"sha256": fingerprint(part), "source": source, "stored": time.strftime("%Y-%m-%d %H:%M:%S")}
            note_path(path).unlink(missing_ok=True)
            if path.is_dir():
                remove(path)
            part.replace(path)
        with replaced(note_path(path)) as new:
            new.write(json.dumps(note, indent=1).encode())
    except OSError as error:
        LOG.warning(
            "%s could not be kept in the cache %s (%s); it will be fetched again.", name, root(), error.strerror
        )
        return None
    return path


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Give a temporary path next to `path` to write to; a file that is left there at the end is removed."""
    part = path.with_name(f"{path.name}{PART}{os.getpid()}")
    remove(part)  # something else may be there, for example a link
    try:
        yield part
    finally:
        remove(part)


@contextmanager
def workspace() -> Iterator[Path]:
    """Give an empty folder for downloads, inside the cache if possible; it is removed afterwards."""
    try:
        root().mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=f"download{PART}", dir=root())
    except OSError:
        folder = tempfile.mkdtemp(prefix="ggda-download")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def note_path(path: Path) -> Path:
    """Return the path of the checksum file of a cached file."""
    return path.with_name(path.name + ".json")


def files_of(path: Path, *, links: bool = False) -> list[Path]:
    """Return the file itself, or all files in a folder in a fixed order; with `links`, also all links."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() or (links and file.is_symlink()))


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of all files in a folder."""
    digest = hashlib.sha256()
    for file in files_of(path):
        if path.is_dir():
            digest.update(f"{file.relative_to(path).as_posix()}\n{file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def remove(path: Path) -> None:
    """Remove a file or folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_stale(folder: Path) -> None:
    """Remove unfinished files that a killed process left more than a day ago."""
    for path in folder.glob(f"*{PART}*"):
        if time.time() - path.lstat().st_mtime > STALE_SECONDS:
            remove(path)


def write_npz(path: Path, content: Content) -> None:
    """Write images as an npz; labels are stored as bytes, so the file is hardly larger than the pixels."""
    arrays: dict[str, Any] = {part: value.astype(np.uint8) for part, value in content.items()}
    with path.open("xb") as file:
        np.savez(file, **arrays)


def write_heloc(path: Path, content: Content) -> None:
    """Write FICO's rows as a compressed npz."""
    with path.open("xb") as file:
        np.savez_compressed(file, X_raw=content["x_raw"], y_raw=content["y_raw"])


def write_qnli(path: Path, content: Content) -> None:
    """Write pairs as one compressed tsv."""
    lines = ["split\tlabel\tquestion\tsentence"]
    for part, split in (("train", "train"), ("test", "dev")):
        columns = (content[f"{part}_{field}"].tolist() for field in ("label", "question", "sentence"))
        lines += [
            f"{split}\t{label}\t{question}\t{sentence}" for label, question, sentence in zip(*columns, strict=True)
        ]
    with path.open("xb") as file:
        file.write(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))


WRITERS: dict[str, Callable[[Path, Content], None]] = {
    "mnist": write_npz,
    "cifar10": write_npz,
    "heloc": write_heloc,
    "qnli": write_qnli,
}
