"""Files that are kept beside TRAK's in a `save_dir`. They record its settings, so that other results are not mixed in.

``ggda.json`` holds the settings. The folder of each checkpoint holds a record of the values of its parameters, and
checksums of its targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ggda_ext.storage.files import (
    DamagedFile,
    read_sealed_arrays,
    read_sealed_json,
    write_sealed_arrays,
    write_sealed_json,
)
from ggda_ext.storage.fingerprint import of_parameters
from ggda_ext.storage.folder import StoreDamaged, StoreMismatch, check_folder, clear_errors, difference
from ggda_ext.storage.folder_lock import LOCK
from ggda_trak.hashes import row_hashes

SETTINGS, CHECKPOINT, METADATA = "ggda.json", "ggda_checkpoint.json", "metadata.json"
_LEFTOVERS = (LOCK, f"{SETTINGS}.part", f"{METADATA}.part")  # left by a process that was killed in its first write


def check_save_dir(folder: Path, *, load: bool) -> None:
    """Raise an error for a folder that TRAK should not write to.

    Args:
        folder: the `save_dir`.
        load: whether to continue with its content.
    """
    check_folder(folder)
    for path in [folder / "scores", *folder.glob("*"), *folder.glob("*/*")]:
        if path.is_symlink():  # TRAK would write through it
            raise StoreDamaged(f"save_dir holds {str(path)!r}, a symbolic link, which is not followed here: remove it.")
    names = sorted(path.name for path in folder.iterdir()) if load and folder.is_dir() else []
    names = [name for name in names if name not in _LEFTOVERS]
    if names and not {METADATA, SETTINGS, "scores"} & set(names):
        raise StoreMismatch(
            f"save_dir={str(folder)!r} is not empty and not a store of TRAK's (it holds {names[0]!r}): pass a new or "
            "empty folder."
        )


def _read_ours(path: Path) -> dict[str, Any]:
    """Read a JSON file that this package wrote. Raise an error if it is damaged."""
    try:
        return read_sealed_json(path)
    except DamagedFile as error:
        raise StoreDamaged(f"{error} Delete the folder {str(path.parent)!r}, or pass another save_dir.") from None


def keep_settings(folder: Path, settings: Mapping[str, Any], *, load: bool) -> None:
    """Record the settings of a store. If it was made with others, raise an error that names the first that differs.

    Args:
        folder: the store.
        settings: the settings of this run, by name.
        load: whether to continue with the content of the folder; otherwise the settings are overwritten.
    """
    path = folder / SETTINGS
    if load and (path.exists() or path.is_symlink() or (folder / METADATA).exists()):
        if not path.exists():
            raise ValueError(f"save_dir={str(folder)!r} holds a store made without groups: pass another save_dir.")
        before = _read_ours(path)
        differing = difference({name: before.get(name) for name in settings}, settings)
        if differing is not None:
            raise StoreMismatch(f"save_dir={str(folder)!r} {differing}")
    with clear_errors(folder, SETTINGS):
        folder.mkdir(parents=True, exist_ok=True)
        write_sealed_json(path, settings)


def keep_checkpoint(folder: Path, model: nn.Module, *, new: bool) -> None:
    """Record the parameters of a new checkpoint; raise an error if its folder holds sums for other parameters."""
    path, found = folder / CHECKPOINT, {"values of the parameters": of_parameters(model)}
    if new or not path.exists():
        with clear_errors(folder, CHECKPOINT):
            write_sealed_json(path, found)
        return
    differing = difference(_read_ours(path), found)
    if differing is not None:
        raise StoreMismatch(f"save_dir, in {str(folder)!r}, {differing}")


def keep_targets(folder: Path, experiment: str, rows: np.ndarray, indices: np.ndarray) -> None:
    """Record checksums of the targets `indices`, which were just scored."""
    path = folder / f"{experiment}_targets.npz"
    known = _target_hashes(path, len(rows))
    known[indices] = row_hashes(np.asarray(rows[indices]))
    with clear_errors(folder, path.name):
        write_sealed_arrays(path, {"rows": known})


def check_targets(folder: Path, experiment: str, rows: np.ndarray | None) -> None:
    """Raise an error if targets are not the rows that were scored. The rows of targets not scored so far are zero."""
    if rows is None:
        return
    known = _target_hashes(folder / f"{experiment}_targets.npz", len(rows))
    wrong = np.flatnonzero(row_hashes(np.asarray(rows)) != known)
    if len(wrong):
        raise StoreDamaged(
            f"{folder / f'{experiment}_grads.mmap'} is damaged: {len(wrong)} targets, first {wrong[0]}, are not those "
            "that were scored: score them again."
        )


def _target_hashes(path: Path, count: int) -> np.ndarray:
    try:
        found = read_sealed_arrays(path)["rows"]
    except (FileNotFoundError, DamagedFile):
        found = np.empty(0, np.uint64)
    return found if len(found) == count else np.zeros(count, np.uint64)


def checked_kind(found: np.ndarray, path: Path, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return the array of a file; raise an error if its shape or dtype is not the one that was written."""
    if found.shape != shape or found.dtype != dtype:
        raise DamagedFile(f"{path} is damaged: it holds {found.dtype} {found.shape}, not {np.dtype(dtype)} {shape}.")
    return found


@contextmanager
def damage_named(folder: Path) -> Iterator[None]:
    """Turn errors about damaged files of a checkpoint into errors that say what to do."""
    try:
        yield
    except DamagedFile as error:
        raise StoreDamaged(f"{error} {to_delete(folder)}") from None


def to_delete(folder: Path) -> str:
    """A sentence that says what to do about a checkpoint with damaged files."""
    return f"Delete {str(folder)!r} and its id_*.json, or pass another save_dir."
