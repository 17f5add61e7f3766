"""Group sums on disk that survive being killed, beside TRAK's own store of a checkpoint.

TRAK's `grads.mmap` holds the numerators of the groups, one row per group, and `_is_featurized.mmap` whether a group
is complete. Beside them stand which points are in the sums, and what the Fisher is made of. Sums are not idempotent,
so a change is first written to a journal as the new values, and the journal is replayed when a store is opened.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from torch import nn

from ggda_ext.distributed import rank
from ggda_ext.files import replaced, write_json
from ggda_ext.fingerprint import of_parameters
from ggda_ext.folder_lock import FolderLock
from ggda_ext.groups import Groups
from ggda_ext.store import StoreMismatch, clear_errors, difference

SETTINGS, CHECKPOINT = "ggda.json", "ggda_checkpoint.json"


class GroupStore:
    """The group sums of one checkpoint.

    Args:
        folder: TRAK's folder of the checkpoint.
        current: TRAK's arrays of the checkpoint: ``grads``, ``out_to_loss``, ``is_featurized``.
        groups: the groups.
        fisher: ``"batched"`` keeps summed output gradients, ``"exact"`` the Fisher itself, ``"loss"`` nothing more.
        reset: whether to begin anew.

    Until it is closed (or nobody holds it any more), other processes are refused this checkpoint; they may work on
    others of the same TRAK store.
    """

    def __init__(self, folder: Path, current: dict[str, Any], groups: Groups, fisher: str, reset: bool) -> None:
        self.folder, self.groups, self._journal = folder, groups, folder / "_journal.npz"
        self._lock = FolderLock(folder, reentrant=True)
        if reset:
            self._journal.unlink(missing_ok=True)
        self.flags = current["is_featurized"]
        self.sums = {"numerators": current["grads"]}
        k, p = self.sums["numerators"].shape
        dtype = self.sums["numerators"].dtype
        if fisher == "batched":
            self.sums["fisher_rows"] = self._open("fisher_rows.mmap", (k, p), dtype, reset)
        self.fisher = self._open("fisher.mmap", (p, p), np.float32, reset) if fisher == "exact" else None
        self.points = self._open("_points.mmap", (groups.n,), np.int8, reset)
        self.recover()

    def _open(self, name: str, shape: tuple[int, ...], dtype: Any, reset: bool) -> np.memmap:
        path = self.folder / name
        return open_memmap(path, mode="w+" if reset or not path.exists() else "r+", shape=shape, dtype=dtype)

    def add(
        self, indices: np.ndarray, ids: np.ndarray, sums: dict[str, np.ndarray], fisher: np.ndarray | None = None
    ) -> None:
        """Add sums of the points `indices` to the rows `ids`, all or nothing.

        Raises:
            ValueError: if a sum does not fit the store's dtype; the store is left as it was.
        """
        change: dict[str, Any] = {"indices": indices, "ids": ids}
        for name, values in sums.items():
            with np.errstate(over="ignore"):
                change[name] = (self.sums[name][ids].astype(values.dtype) + values).astype(self.sums[name].dtype)
            if not np.isfinite(change[name]).all():
                raise ValueError(
                    f"the {name} of a group do not fit {self.sums[name].dtype}: leave use_half_precision=False, "
                    "the default with groups."
                )
        if fisher is not None:
            assert self.fisher is not None
            change["fisher"] = self.fisher + fisher
        with clear_errors(self.folder, "the sums of a batch"), replaced(self._journal) as file:
            np.savez(file, **change)
        self.recover()

    def recover(self) -> None:
        """Carry out what the journal says, however much of it was done before."""
        if self._journal.exists():
            with np.load(self._journal, allow_pickle=False) as change:
                ids = change["ids"]
                for name, rows in self.sums.items():
                    rows[ids] = change[name]
                if self.fisher is not None:
                    self.fisher[:] = change["fisher"]
                self.points[change["indices"]] = 1
            self._journal.unlink()
        self.flags[:, 0] = self.missing == 0

    def clear(self) -> None:
        """Forget all sums, and which points are in them."""
        self._journal.unlink(missing_ok=True)
        self.points[:] = 0  # first: sums that are not said to hold a point are not used
        for values in (*self.sums.values(), *([] if self.fisher is None else [self.fisher])):
            values[:] = 0
        self.recover()

    @property
    def missing(self) -> np.ndarray:
        """How many points of every group are not in the sums yet `[k]`."""
        labels = self.groups.labels
        inside = labels[(np.asarray(self.points) == 1) & (labels >= 0)]
        return self.groups.sizes - np.bincount(inside, minlength=len(self.groups))

    def close(self) -> None:
        """Let other processes work on this checkpoint."""
        self._lock.release()

    def delete_rows(self) -> None:
        """Delete what is not needed once features are made."""
        for name in ("fisher_rows.mmap", "fisher.mmap"):
            (self.folder / name).unlink(missing_ok=True)


def check_settings(folder: Path, settings: dict[str, Any], *, compare: bool) -> None:
    """Refuse a store made with other settings, naming the first that differs.

    Args:
        folder: the store.
        settings: name → value, of this run.
        compare: whether to use what is in the folder; otherwise it is overwritten.
    """
    path = folder / SETTINGS
    if not compare or not (path.exists() or (folder / "metadata.json").exists()):
        return
    if not path.exists():
        raise ValueError(f"save_dir={str(folder)!r} holds a store made without groups: pass another save_dir.")
    before = json.loads(path.read_text())
    differing = difference({name: before.get(name) for name in settings}, settings)
    if differing is not None:
        raise StoreMismatch(f"save_dir={str(folder)!r} {differing}")


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Record what a store was made with."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SETTINGS, settings)


def check_checkpoint(folder: Path, model: nn.Module, *, new: bool) -> None:
    """Refuse another model than the one whose sums are in the folder of a checkpoint; remember a new one."""
    path, found = folder / CHECKPOINT, {"values of the parameters": of_parameters(model)}
    if new or not path.exists():
        if rank() == 0:
            write_json(path, found)
        return
    differing = difference(json.loads(path.read_text()), found)
    if differing is not None:
        raise StoreMismatch(f"save_dir, in {str(folder)!r}, {differing}")


def mend(folder: Path) -> None:
    """Mend the JSON files that TRAK itself may have left half written when it was killed.

    A checkpoint whose file is damaged counts as not finalized; its sums say what is in them.
    """
    for path in folder.glob("*.json"):
        try:
            json.loads(path.read_text())
        except ValueError:
            if path.name.startswith("id_"):
                number = path.stem.removeprefix("id_")
                write_json(path, {number: {"is_featurized": 0, "is_finalized": 0}})
            else:
                path.unlink()


def mend_experiment(folder: Path, model_id: int, name: str) -> None:
    """Let TRAK begin the targets of an experiment anew if it was killed while it made their files."""
    rows, scores = folder / str(model_id) / f"{name}_grads.mmap", folder / "scores" / f"{name}.mmap"
    if rows.exists() and not (_is_whole(rows) and _is_whole(scores)):
        rows.unlink()


def _is_whole(path: Path) -> bool:
    try:
        open_memmap(path, mode="r")
    except (OSError, ValueError):
        return False
    return True


def open_means(folder: Path, n: int, reset: bool) -> np.memmap:
    """Numbers of all points `[n]`, NaN where not known yet."""
    path = folder / "out_to_loss_mean.mmap"
    if path.exists() and not reset:
        return open_memmap(path, mode="r+")
    with replaced(path) as file:
        np.save(file, np.full(n, np.nan, np.float32), allow_pickle=False)
    return open_memmap(path, mode="r+")
