"""Group sums on disk, beside TRAK's own store of a checkpoint. They survive a kill of the process.

TRAK's `grads.mmap` holds the numerators of the groups, one row per group, and `_is_featurized.mmap` says whether a
group is complete. Further files hold the points that are in the sums, a hash of each point, and the parts of the
Fisher. No point may be added twice. So a change is first written to a journal, as the new values, and the journal is
replayed when a store is opened. Every row has a checksum in a file that is replaced after each change; without this
file the store counts as empty.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from trak.savers import ModelIDException

from ggda_ext.curvature.fisher import FisherKind
from ggda_ext.groups import Groups
from ggda_ext.storage.files import DamagedFile, create_array, open_array, read_sealed_arrays, write_sealed_arrays
from ggda_ext.storage.folder import clear_errors
from ggda_ext.storage.folder_lock import FolderLock
from ggda_trak.hashes import hash_of, row_hashes
from ggda_trak.save_dir import checked_kind, damage_named

_FILES = {"numerators": "grads.mmap", "fisher_rows": "fisher_rows.mmap"}
_MEAN = np.dtype([("mean", np.float32), ("check", np.uint32)])


class GroupStore:
    """The group sums of one checkpoint.

    Args:
        folder: TRAK's folder of the checkpoint.
        current: TRAK's arrays of the checkpoint: ``grads``, ``out_to_loss``, ``is_featurized``.
        groups: the groups.
        fisher: ``"batched"`` also keeps summed output gradients, ``"exact"`` the Fisher, ``"paper"`` nothing more.
        reset: whether to begin anew.

    Until the store is closed or garbage-collected, other processes get an error for this checkpoint. They may work on
    other checkpoints of the same TRAK store.
    """

    def __init__(self, folder: Path, current: dict[str, Any], groups: Groups, fisher: FisherKind, reset: bool) -> None:
        self.folder, self.groups, self.kind = folder, groups, fisher
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
                self._checksums.unlink(missing_ok=True)  # a store that lacks an array counts as empty
            else:
                return checked_kind(found, path, shape, dtype)
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
        """Add the sums of the points `indices` to the rows `ids`. Either all or nothing is written.

        Args:
            indices: the points.
            ids: the groups.
            sums: arrays by name, with a row for each of the groups.
            fisher: the matrix to add to the Fisher, if the store keeps a Fisher.
            hashes: hashes of the points' content; 0 if not known.

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
        """Check the store, and carry out the change in the journal, even if a part of it was carried out before.

        Raises:
            DamagedFile: if the content of a file is not what was written.
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
        """Compare checksums: of the rows of all groups except `ids`, and with `whole` of the arrays in `_whole`."""
        for name, rows in self.sums.items():
            wrong = np.flatnonzero(row_hashes(np.asarray(rows)) != self._checks[name])
            wrong = wrong[~np.isin(wrong, ids)]
            if len(wrong):
                raise DamagedFile(
                    f"{self.folder / _FILES[name]} is damaged: {len(wrong)} rows, first {wrong[0]}, are not those that "
                    "were written."
                )
        for name, values, file in self._whole if whole else ():
            if hash_of(values) != self._checks[name]:
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
            self._checks[name] = np.asarray(hash_of(change[name]))
        self.flags[:, 0] = self.missing == 0
        write_sealed_arrays(self._checksums, self._checks)
        self._journal.unlink()

    def clear(self) -> None:
        """Delete all sums, and the record of the points in them."""
        self._journal.unlink(missing_ok=True)
        self._checksums.unlink(missing_ok=True)  # from now on the store counts as empty
        for values in (*self.sums.values(), *(values for _, values, _ in self._whole)):
            values[:] = 0
        self._checks = {name: row_hashes(np.asarray(rows)) for name, rows in self.sums.items()}
        self._checks |= {name: np.asarray(hash_of(values)) for name, values, _ in self._whole}
        with clear_errors(self.folder, "the checksums"):
            write_sealed_arrays(self._checksums, self._checks)
        self.flags[:, 0] = self.missing == 0

    @property
    def missing(self) -> np.ndarray:
        """Number of points of every group that are not in the sums yet `[k]`."""
        labels = self.groups.labels
        inside = labels[(np.asarray(self.points) == 1) & (labels >= 0)]
        return self.groups.sizes - np.bincount(inside, minlength=len(self.groups))

    def check_complete(self, model_id: int) -> None:
        """Raise an error if some points of the groups are not in the sums."""
        missing = self.missing
        if missing.any():
            absent = np.flatnonzero((np.asarray(self.points) == 0) & (self.groups.labels >= 0))
            raise ModelIDException(
                f"model id {model_id}: {(missing > 0).sum()} of {len(missing)} groups are incomplete, {len(absent)} "
                f"training points are missing, first {absent[:5].tolist()}: featurize them first."
            )

    def close(self) -> None:
        """Let other processes work on this checkpoint."""
        self._lock.release()

    def delete_rows(self) -> None:
        """Delete files that are not needed once features are made."""
        for name in ("fisher_rows.mmap", "fisher.mmap"):
            (self.folder / name).unlink(missing_ok=True)


class PointMeans:
    """One number per point `[n]` on disk, NaN if it is not known. Each number has a checksum of its own.

    Args:
        folder: the store.
        n: number of points.
        reset: whether to begin anew.
    """

    def __init__(self, folder: Path, n: int, reset: bool) -> None:
        path = folder / "out_to_loss_mean.mmap"
        kept: np.ndarray | None = None
        if not reset:
            try:
                kept = open_array(path, "r+")
            except (FileNotFoundError, DamagedFile):
                kept = None  # the means are computed again
        usable = kept is not None and kept.shape == (n,) and kept.dtype == _MEAN
        with clear_errors(folder, path.name):
            self._kept = kept if kept is not None and usable else create_array(path, (n,), _MEAN)

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        found = np.asarray(self._kept[indices])
        intact = found["check"] == _checks(indices, found["mean"])
        return np.where(intact, found["mean"], np.float32(np.nan))

    def __setitem__(self, indices: np.ndarray, values: np.ndarray) -> None:
        entries = np.empty(len(indices), _MEAN)
        entries["mean"] = values
        entries["check"] = _checks(indices, entries["mean"])
        self._kept[indices] = entries


def _checks(indices: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A checksum of every number and its place. It is never 0, because 0 marks a place that was not written."""
    placed = np.empty(len(indices), [("place", np.int64), ("value", np.float32)])
    placed["place"], placed["value"] = indices, values
    return row_hashes(placed).astype(np.uint32) | np.uint32(1)
