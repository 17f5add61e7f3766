"""TRAK's saver over files that nobody can break: no link is followed, space is had before it is used, damage is named.

TRAK opens its arrays as they are. Here an array that is cut, of another shape or a link is refused by its name, and a
new one has its space on the disk, so that a full disk is an error and not the death of the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from trak.savers import MmapSaver

from ggda_ext.storage.files import DamagedFile, create_array, open_array, read_sealed_json
from ggda_ext.storage.folder import StoreDamaged, clear_errors


class CheckedSaver(MmapSaver):
    """`trak.savers.MmapSaver` with checked files."""

    def _load(self, fname: Path, shape: tuple[int, ...], mode: str, dtype: Any = None) -> np.ndarray | None:
        path, kind = Path(fname), np.dtype(dtype or (np.float16 if self.use_half_precision else np.float32))
        if mode == "w+":
            with clear_errors(self.save_dir, path.name):
                return create_array(path, shape, kind)
        with damage_named(path.parent):
            try:
                found = open_array(path, "r+")
            except FileNotFoundError:
                return None  # as TRAK does: its gradients may be deleted
            if found.shape != shape or found.dtype != kind:
                raise DamagedFile(f"{path} is damaged: it holds {found.dtype} {found.shape}, not {kind} {shape}.")
        return found


@contextmanager
def damage_named(folder: Path) -> Iterator[None]:
    """Say what to do about a damaged file of a checkpoint."""
    try:
        yield
    except DamagedFile as error:
        raise StoreDamaged(f"{error} Delete {str(folder)!r} and its id_*.json, or pass another save_dir.") from None


def refuse_links(folder: Path) -> None:
    """Refuse a folder that holds a symbolic link: TRAK would write through it."""
    for path in [folder / "scores", *folder.glob("*"), *folder.glob("*/*")]:
        if path.is_symlink():
            raise StoreDamaged(f"save_dir holds {str(path)!r}, a symbolic link, which is not followed here: remove it.")


def read_ours(path: Path) -> dict[str, Any]:
    """A JSON file of ours, refused if it is damaged."""
    try:
        return read_sealed_json(path)
    except DamagedFile as error:
        raise StoreDamaged(f"{error} Delete the folder {str(path.parent)!r}, or pass another save_dir.") from None
