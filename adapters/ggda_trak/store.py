"""Group sums on disk that survive being killed, beside TRAK's own store of a checkpoint.

TRAK's `grads.mmap` holds the numerators of the groups, one row per group, and `_is_featurized.mmap` whether a group
is complete. Beside them stand which points are in the sums, a hash of each, and what the Fisher is made of. Sums do not
bear repeating, so a change is first written to a journal as the new values, and the journal is replayed when a store is
opened. Every row has a checksum, in a file that is replaced after each change; without that file the store is empty.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from torch import nn

from ggda_ext.distributed import rank
from ggda_ext.groups import Groups
from ggda_ext.storage.files import (
    DamagedFile,
    create_array,
    open_array,
    read_json,
    read_sealed_arrays,
    write_json,
    write_sealed_arrays,
    write_sealed_json,
)
from ggda_ext.storage.fingerprint import of_parameters
from ggda_ext.storage.folder import StoreMismatch, clear_errors, difference
from ggda_ext.storage.folder_lock import FolderLock
from ggda_trak.checked_parts import row_hashes
from ggda_trak.checked_saver import damage_named, read_ours

SETTINGS, CHECKPOINT = "ggda.json", "ggda_checkpoint.json"
_FILES = {"numerators": "grads.mmap", "fisher_rows": "fisher_rows.mmap"}


class GroupStore:
    """The group sums of one checkpoint.

    Args:
        folder: TRAK's folder of the checkpoint.
        current: TRAK's arrays of the checkpoint: ``grads``, ``out_to_loss``, ``is_featurized``.
        groups: the groups.
        fisher: ``"batched"`` keeps summed output gradients, ``"exact"`` the Fisher itself, ``"paper"`` nothing more.
        reset: whether to begin anew.

    Until it is closed (or nobody holds it any more), other processes are refused this checkpoint; they may work on
    others of the same TRAK store.
    """

    def __init__(self, folder: Path, current: dict[str, Any], groups: Groups, fisher: str, reset: bool) -> None:
        self.folder, self.groups = folder, groups
        self._journal, self._checksums = folder / "_journal.npz", folder / "_checksums.npz"
        with damage_named(folder):
            self._lock = FolderLock(folder, reentrant=True)
            if reset:
                self._journal.unlink(missing_ok=True)
                self._checksums.unlink(missing_ok=True)
            self.flags = current["is_featurized"]
            self.sums = {"numerators": current["grads"]}
            k, p = self.sums["numerators"].shape
            if fisher == "batched":
                self.sums["fisher_rows"] = self._open("fisher_rows.mmap", (k, p), self.sums["numerators"].dtype, reset)
            self.fisher = self._open("fisher.mmap", (p, p), np.float32, reset) if fisher == "exact" else None
            self.points = self._open("_points.mmap", (groups.n,), np.int8, reset)
            self.hashes = self._open("_hashes.mmap", (groups.n,), np.uint64, reset)
            self.recover()

    def _open(self, name: str, shape: tuple[int, ...], dtype: Any, reset: bool) -> np.ndarray:
        path = self.folder / name
        if not reset:
            try:
                found = open_array(path, "r+")
            except FileNotFoundError:
                self._journal.unlink(missing_ok=True)
                self._checksums.unlink(missing_ok=True)  # without one of its arrays a store is empty
            else:
                if found.shape != shape or found.dtype != dtype:
                    raise DamagedFile(f"{path} is damaged: it holds {found.dtype} {found.shape}, not {dtype} {shape}.")
                return found
        with clear_errors(self.folder, name):
            return create_array(path, shape, dtype)

    def add(
        self,
        indices: np.ndarray,
        ids: np.ndarray,
        sums: dict[str, np.ndarray],
        fisher: np.ndarray | None = None,
        hashes: np.ndarray | None = None,
    ) -> None:
        """Add sums of the points `indices` to the rows `ids`, all or nothing.

        Args:
            indices: the points.
            ids: the groups.
            sums: by name, a row for each of the groups.
            fisher: what to add to the Fisher, if that is kept.
            hashes: of the points' content; 0 where not known.

        Raises:
            ValueError: if a sum does not fit the store's dtype; the store is left as it was.
        """
        change: dict[str, Any] = {"ids": ids, "points": np.array(self.points), "hashes": np.array(self.hashes)}
        change["points"][indices] = 1
        change["hashes"][indices] = 0 if hashes is None else hashes
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
        with clear_errors(self.folder, "the sums of a batch"):
            write_sealed_arrays(self._journal, change)
            self._carry_out(change)

    def recover(self) -> None:
        """Check all that is there, and carry out what the journal says, however much of it was done before.

        Raises:
            DamagedFile: a file is not what was written.
        """
        checks, change = self._read(self._checksums), self._read(self._journal)
        if checks is None:
            self.clear()
            return
        self._checks = checks
        self._verify(np.empty(0, np.int64) if change is None else change["ids"], whole=change is None)
        if change is not None:
            self._carry_out(change)
        self.flags[:, 0] = self.missing == 0

    def _read(self, path: Path) -> dict[str, np.ndarray] | None:
        try:
            return read_sealed_arrays(path)
        except FileNotFoundError:
            return None

    def _verify(self, ids: np.ndarray, *, whole: bool) -> None:
        """Compare with the checksums: the rows of all groups but `ids`, and what is checked as a whole."""
        for name, rows in self.sums.items():
            wrong = np.flatnonzero(row_hashes(np.asarray(rows)) != self._checks[name])
            wrong = wrong[~np.isin(wrong, ids)]
            if len(wrong):
                raise DamagedFile(
                    f"{self.folder / _FILES[name]} is damaged: {len(wrong)} rows, first {wrong[0]}, are not those that "
                    "were written."
                )
        for name, values, file in self._whole if whole else ():
            if _whole_hash(values) != self._checks[name]:
                raise DamagedFile(f"{self.folder / file} is damaged: it is not what was written.")

    @property
    def _whole(self) -> list[tuple[str, np.ndarray, str]]:
        """Arrays that are checked as a whole: name, values, file."""
        fisher = [] if self.fisher is None else [("fisher", self.fisher, "fisher.mmap")]
        return [("points", self.points, "_points.mmap"), ("hashes", self.hashes, "_hashes.mmap"), *fisher]

    def _carry_out(self, change: dict[str, np.ndarray]) -> None:
        ids = change["ids"]
        for name, rows in self.sums.items():
            rows[ids] = change[name]
            self._checks[name][ids] = row_hashes(change[name])
        for name, values, _ in self._whole:
            values[:] = change[name]
            self._checks[name] = np.asarray(_whole_hash(change[name]))
        self.flags[:, 0] = self.missing == 0
        write_sealed_arrays(self._checksums, self._checks)
        self._journal.unlink()

    def clear(self) -> None:
        """Forget all sums, and which points are in them."""
        self._journal.unlink(missing_ok=True)
        self._checksums.unlink(missing_ok=True)  # now it counts as empty, whatever is in the arrays
        for values in (*self.sums.values(), *(values for _, values, _ in self._whole)):
            values[:] = 0
        self._checks = {name: row_hashes(np.asarray(rows)) for name, rows in self.sums.items()}
        self._checks |= {name: np.asarray(_whole_hash(values)) for name, values, _ in self._whole}
        with clear_errors(self.folder, "the checksums"):
            write_sealed_arrays(self._checksums, self._checks)
        self.flags[:, 0] = self.missing == 0

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


def _whole_hash(values: np.ndarray) -> np.uint64:
    return np.uint64(xxhash.xxh3_64_intdigest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data))


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder that holds files, but no store of TRAK's."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if names and not {"metadata.json", SETTINGS, "scores"} & set(names):
        raise StoreMismatch(
            f"save_dir={str(folder)!r} is not empty and not a store of TRAK's (it holds {names[0]!r}): pass a new or "
            "empty folder."
        )


def check_settings(folder: Path, settings: dict[str, Any], *, compare: bool) -> None:
    """Refuse a store made with other settings, naming the first that differs.

    Args:
        folder: the store.
        settings: name → value, of this run.
        compare: whether to use what is in the folder; otherwise it is overwritten.
    """
    path = folder / SETTINGS
    if not compare or not (path.exists() or path.is_symlink() or (folder / "metadata.json").exists()):
        return
    if not path.exists():
        raise ValueError(f"save_dir={str(folder)!r} holds a store made without groups: pass another save_dir.")
    before = read_ours(path)
    differing = difference({name: before.get(name) for name in settings}, settings)
    if differing is not None:
        raise StoreMismatch(f"save_dir={str(folder)!r} {differing}")


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Record what a store was made with."""
    folder.mkdir(parents=True, exist_ok=True)
    write_sealed_json(folder / SETTINGS, settings)


def check_checkpoint(folder: Path, model: nn.Module, *, new: bool) -> None:
    """Refuse another model than the one whose sums are in the folder of a checkpoint; remember a new one."""
    path, found = folder / CHECKPOINT, {"values of the parameters": of_parameters(model)}
    if new or not path.exists():
        if rank() == 0:
            write_sealed_json(path, found)
        return
    differing = difference(read_ours(path), found)
    if differing is not None:
        raise StoreMismatch(f"save_dir, in {str(folder)!r}, {differing}")


def mend(folder: Path) -> None:
    """Mend the JSON files that TRAK itself may have left half written when it was killed.

    A checkpoint whose file is damaged counts as not finalized; its sums say what is in them.
    """
    for path in (folder / "metadata.json", folder / "experiments.json", *folder.glob("id_*.json")):
        try:
            whole = _is_record(path.name, read_json(path))
        except FileNotFoundError:
            continue
        except DamagedFile:
            whole = False
        number = path.stem.removeprefix("id_")
        if not whole and number.isdigit():
            write_json(path, {number: {"is_featurized": 0, "is_finalized": 0}})
        elif not whole:
            path.unlink()


_RECORDS: dict[str, dict[str, type]] = {  # what TRAK reads of its own records
    "experiments.json": {"num_targets": int, "scores_path": str, "scores_finalized": int},
    "id": {"is_featurized": int, "is_finalized": int},
}


def _is_record(name: str, found: Any) -> bool:
    """Whether a JSON file of TRAK's has the entries it should have."""
    if not isinstance(found, dict):
        return False
    if name == "metadata.json":
        return {"JL dimension", "JL matrix type", "train set size"} <= set(found)
    kinds = _RECORDS["experiments.json" if name == "experiments.json" else "id"]
    return all(
        isinstance(record, dict)
        and all(isinstance(record.get(entry), kind) for entry, kind in kinds.items())
        and (name == "experiments.json" or key.isdecimal())
        for key, record in found.items()
    )


def mend_experiment(folder: Path, model_id: int, name: str) -> None:
    """Let TRAK begin the targets of an experiment anew if it was killed while it made their files."""
    rows, scores = folder / str(model_id) / f"{name}_grads.mmap", folder / "scores" / f"{name}.mmap"
    if rows.exists() and not (_is_whole(rows) and _is_whole(scores)):
        rows.unlink()


def _is_whole(path: Path) -> bool:
    try:
        open_array(path, "r")
    except (OSError, ValueError):
        return False
    return True
