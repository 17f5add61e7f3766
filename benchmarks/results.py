"""Result folders `results/<time>-<name>/`. config.json says how the rows were made; rows.jsonl has one row per line.

Rows are appended and flushed one by one. A run that was stopped, even by kill -9 or a full disk, can be resumed after
its last whole line.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ggda_ext.storage.files import DamagedFile, open_plain, read_json, read_plain, seal, write_sealed_json
from ggda_ext.storage.folder_lock import FolderLock

RESULTS = Path("results")
CHECKSUM = "xxh3"
_PACKAGES = ("ggda-ext", "torch", "captum", "dattri", "traker", "transformers", "scikit-learn", "numpy", "scipy")
_FIXED = ("command", "scale")  # fields that must not change when a run is resumed


class FolderInUse(RuntimeError):
    """The error if another process is writing to the folder."""


class ResultFolder:
    """The config and the rows of a run. Each row is a dict with a unique ``"key"``.

    Use `open` to start a folder or to resume one. No other process can open it to write until the object is deleted.

    Attributes:
        path: the folder.
        config: the content of config.json.
        rows: all rows so far, oldest first.
    """

    def __init__(self, path: Path, config: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.path, self.config, self.rows = path, config, rows
        self._keys = {row["key"] for row in rows}
        self._lock: FolderLock | None = None

    @classmethod
    def open(
        cls, name: str, config: Mapping[str, Any], resume: Path | None = None, base: Path = RESULTS
    ) -> ResultFolder:
        """Make a new folder `<base>/<time>-<name>`, or open the folder `resume` with the rows that it holds.

        Args:
            name: name of the run, e.g. ``"check"``.
            config: command, scale, threads, seeds and data sources of the run. Versions and machine are added here.
            resume: folder of a stopped run with the same command and scale.
            base: where new folders are made.
        """
        given = dict(config) | about_this_machine()
        if resume is None:
            started = {"started": _now(), "finished": None, "row_checksums": True}
            folder = cls(_new_folder(base, name), given | started, [])
            folder._write_config()
            folder._lock = _lock(folder.path)
            return folder
        old = read_config(resume)
        for field in _FIXED:
            if field in given and given[field] != old.get(field):
                raise ValueError(
                    f"{resume} holds a run with {field}={old.get(field)!r}, not {given[field]!r}: resume it with the "
                    f"same {field}, or start a new run without --resume."
                )
        lock = _lock(resume)
        sources = {**old.get("data", {}), **given.get("data", {})}
        known, now = old.get("commit"), given["commit"]
        if known is not None:
            given["commit"] = known if now is None or known.endswith(now) else f"{known}, then {now}"
        folder = cls(resume, old | given | {"data": sources, "finished": None}, read_rows(resume, repair=True))
        folder._lock = lock
        folder._write_config()
        return folder

    @staticmethod
    def latest_unfinished(name: str, base: Path = RESULTS) -> Path:
        """Return the newest folder of this name whose run is not finished."""
        for path in sorted(base.glob(f"*-{name}"), reverse=True):
            if (path / "config.json").exists() and read_config(path)["finished"] is None:
                return path
        raise FileNotFoundError(f"no stopped {name!r} run in {base.resolve()}: nothing to resume.")

    def done(self, key: str) -> bool:
        """Whether the folder has a row with this key."""
        return key in self._keys

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row and write it to disk before returning."""
        key = row["key"]
        if self.done(key):
            raise ValueError(f"row {key!r} is in {self.path} already.")
        plain = json.loads(json.dumps(row, default=_plain, ensure_ascii=False))
        line = json.dumps(plain | {CHECKSUM: seal(plain)}, ensure_ascii=False)
        with os.fdopen(open_plain(self.path / "rows.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(plain)
        self._keys.add(key)

    def add_source(self, data: str, source: str, stand_in: bool) -> None:
        """Write to the config where a data set came from."""
        known, found = self.config.setdefault("data", {}), {"source": source, "stand_in": stand_in}
        if known.get(data) != found:
            known[data] = found
            self._write_config()

    def finish(self) -> None:
        """Mark the run as finished, so that `--resume` without a folder does not choose it."""
        self.config["finished"] = _now()
        self._write_config()

    def _write_config(self) -> None:
        plain = json.loads(json.dumps(self.config, default=_plain))
        write_sealed_json(self.path / "config.json", plain)


def read_config(path: Path) -> dict[str, Any]:
    """Return the config of a folder, checked against its checksum."""
    try:
        found = read_json(path / "config.json")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is no result folder: it has no config.json.") from None
    if not isinstance(found, dict) or "command" not in found:
        raise DamagedFile(f"{path / 'config.json'} is damaged: it holds no JSON object with a command.")
    checksum = found.pop("xxh3", None)
    if (checksum is not None or "row_checksums" in found) and checksum != seal(found):
        raise DamagedFile(f"{path / 'config.json'} is damaged: it does not have the checksum it was written with.")
    return found


def read_rows(path: Path, repair: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a folder.

    A killed run may leave an incomplete line at the end of the file. It is ignored; with `repair` it is also cut off.

    Raises:
        ValueError: a line is not a row, or its checksum is wrong. Folders of earlier versions have no checksums.
    """
    file = path / "rows.jsonl"
    try:
        content = read_plain(file)
    except FileNotFoundError:
        return []
    whole, newline, half = content.rpartition(b"\n")
    if half and repair:
        handle = open_plain(file, os.O_WRONLY)
        os.ftruncate(handle, len(whole) + len(newline))
        os.close(handle)
    sealed = bool((path / "config.json").exists() and read_config(path).get("row_checksums"))
    parsed = [_parsed(file, number, line) for number, line in enumerate(whole.split(b"\n") if whole else [], 1)]
    rows: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(parsed, 1):
        checksum = row.pop(CHECKSUM, None)
        if (sealed or checksum is not None) and checksum != seal(row):
            raise ValueError(
                f"{file}, line {number}, does not have the checksum it was written with: delete the line to go on."
            )
        if row["key"] in rows:
            raise ValueError(f"{file}, line {number}, has the key of an earlier line: delete the line to go on.")
        rows[row["key"]] = row
    return list(rows.values())


def _parsed(file: Path, number: int, line: bytes) -> dict[str, Any]:
    """Return the row that a line holds."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"{file}, line {number}, is not JSON ({reason}): delete the line to go on.") from None
    if not isinstance(row, dict) or not isinstance(row.get("key"), str):
        raise ValueError(f"{file}, line {number}, is no row with a key: delete the line to go on.")
    return row


def about_this_machine() -> dict[str, Any]:
    """Return the commit, the versions of packages and facts about the machine, for config.json."""
    versions = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    machine = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    return {"commit": _commit(), "versions": versions, "machine": machine}


def _commit() -> str | None:
    """Return the commit of this checkout, with a mark if files differ from it; None outside of a checkout."""
    here = Path(__file__).parent
    try:
        found = [
            subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
            for command in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{found[0]} with changes" if found[1] else found[0]


def _processor() -> str:
    names = Path("/proc/cpuinfo")
    if names.exists():
        for line in names.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _lock(path: Path) -> FolderLock:
    try:
        return FolderLock(path, reentrant=True)
    except RuntimeError as error:
        raise FolderInUse(
            f"{path} belongs to a run that is still going: wait for it, or start another without --resume ({error})"
        ) from error


def _new_folder(base: Path, name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for count in range(1, 1000):
        path = base / (f"{stamp}-{name}" if count == 1 else f"{stamp}.{count}-{name}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{base} already holds 999 folders {stamp}-{name}.")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")


def _plain(value: Any) -> Any:
    """Convert NumPy and torch numbers and arrays, and paths, into values that JSON can hold."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} does not fit into a row: {value!r}")
