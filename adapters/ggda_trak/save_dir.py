"""What stands beside TRAK's files in a `save_dir`: what it was made with, so that nothing else is mixed into it.

``ggda.json`` holds the settings, each checkpoint's folder the values of its parameters, and checksums of its targets.
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
_LEFTOVERS = (LOCK, f"{SETTINGS}.part", f"{METADATA}.part")  # of a process that was killed inside its first write


def check_save_dir(folder: Path, *, load: bool) -> None:
    """Refuse a folder that TRAK should not write to.

    Args:
        folder: the `save_dir`.
        load: whether to go on with what is in it.
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
    """A JSON file of ours, refused if it is damaged."""
    try:
        return read_sealed_json(path)
    except DamagedFile as error:
        raise StoreDamaged(f"{error} Delete the folder {str(path.parent)!r}, or pass another save_dir.") from None


def keep_settings(folder: Path, settings: Mapping[str, Any], *, load: bool) -> None:
    """Record what a store is made with; refuse one made with other settings, naming the first that differs.

    Args:
        folder: the store.
        settings: name → value, of this run.
        load: whether to go on with what is in the folder; otherwise it is overwritten.
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
    """Remember the parameters of a new checkpoint; refuse other ones than those whose sums are in its folder."""
    path, found = folder / CHECKPOINT, {"values of the parameters": of_parameters(model)}
    if new or not path.exists():
        with clear_errors(folder, CHECKPOINT):
            write_sealed_json(path, found)
        return
    differing = difference(_read_ours(path), found)
    if differing is not None:
        raise StoreMismatch(f"save_dir, in {str(folder)!r}, {differing}")


def keep_targets(folder: Path, experiment: str, rows: np.ndarray, indices: np.ndarray) -> None:
    """Record checksums of the targets `indices` that were just scored."""
    path = folder / f"{experiment}_targets.npz"
    known = _target_hashes(path, len(rows))
    known[indices] = row_hashes(np.asarray(rows[indices]))
    with clear_errors(folder, path.name):
        write_sealed_arrays(path, {"rows": known})


def check_targets(folder: Path, experiment: str, rows: np.ndarray | None) -> None:
    """Refuse targets that are not those that were scored, if there are any; those that were not scored are zero."""
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
    """The array of a file, if it has the shape and the dtype that were written."""
    if found.shape != shape or found.dtype != dtype:
        raise DamagedFile(f"{path} is damaged: it holds {found.dtype} {found.shape}, not {np.dtype(dtype)} {shape}.")
    return found


@contextmanager
def damage_named(folder: Path) -> Iterator[None]:
    """Say what to do about a damaged file of a checkpoint."""
    try:
        yield
    except DamagedFile as error:
        raise StoreDamaged(f"{error} {to_delete(folder)}") from None


def to_delete(folder: Path) -> str:
    """What to do about a checkpoint whose files are damaged."""
    return f"Delete {str(folder)!r} and its id_*.json, or pass another save_dir."
