"""TRAK's savers under TRAK's names, and `CheckedSaver`, which is used with groups and checks every file.

TRAK opens its files without checks. Here a new array gets its space on the disk before it is used, so that a full disk
raises an error and does not kill the process. Links are not followed. The content of files must be what was written:
arrays have checksums beside them, and each record in TRAK's own JSON files has a checksum (`xxh3`, which TRAK ignores).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from trak.savers import AbstractSaver, MmapSaver, ModelIDException

from ggda_ext.storage.files import (
    DamagedFile,
    checksum_of,
    create_array,
    open_array,
    read_json,
    read_sealed_json,
    seal,
    write_json,
    write_sealed_json,
)
from ggda_ext.storage.folder import StoreDamaged, StoreMismatch, clear_errors, difference
from ggda_trak.hashes import hash_of, row_hashes
from ggda_trak.save_dir import METADATA, checked_kind, damage_named, to_delete

__all__ = ["AbstractSaver", "MmapSaver", "ModelIDException"]

_NEW = {"is_featurized": 0, "is_finalized": 0}
_ROWS, _FINISHED = ("grads", "out_to_loss"), ("features", "out_to_loss")
_MADE_AGAIN = ("_is_featurized.mmap", "features.mmap", "out_to_loss.mmap")  # when missing; finished ones have checksums


class CheckedSaver(MmapSaver):
    """`trak.savers.MmapSaver` with checked files.

    If a record of TRAK is damaged, or was half written when TRAK was killed, it is made anew. A checkpoint then counts
    as not finalized, and its rows tell which points are done; an experiment counts as not begun.

    Attributes:
        sealed_at_once: number of rows of single points, written by TRAK's own code, that get their checksums at once;
            None if rows are group sums.
        notes: maps each model id to the entries that its record has beside TRAK's entries.
    """

    def __init__(self, save_dir: Path, metadata: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        self.sealed_at_once: int | None = None
        self.notes, self._seen = dict[int, dict[str, Any]](), set[int]()
        self._opened_for: int | None = None
        self._features_of: Mapping[str, Any] = {}
        self._sealed = 0
        self._arrays: dict[Path, tuple[tuple[int, ...], np.ndarray]] = {}
        folder = Path(save_dir).resolve()
        with clear_errors(folder, METADATA):
            folder.mkdir(parents=True, exist_ok=True)
            if kwargs.get("load_from_save_dir", True):
                _mend(folder, metadata)
            super().__init__(save_dir, metadata, *args, **kwargs)
        for model_id, record in self.model_ids.items():
            self.notes[model_id] = {name: record.pop(name) for name in set(record) - set(_NEW)}
            del self.notes[model_id]["xxh3"]
        if not self.experiments_file.exists():
            write_json(self.experiments_file, {}, sync=False)
        for name, record in self.experiments.items():
            del record["xxh3"]
            path = self._scores_file(name)
            if record["scores_finalized"] and path.exists() and checksum_of(path) != record.get("scores_xxh3"):
                raise StoreDamaged(
                    f"{path} is damaged: it is not what finalize_scores wrote. Delete it, and call that again."
                )

    def make_features_with(self, settings: Mapping[str, Any]) -> None:
        """Set the settings that features depend on; raise an error if finished features were made with others."""
        self._features_of = dict(settings)
        for model_id, kept in self.notes.items():
            is_finished = self.model_ids[model_id]["is_finalized"]
            differing = difference(kept.get("features_of", {}), settings) if is_finished else None
            if differing is not None:
                raise StoreMismatch(
                    f"save_dir={str(self.save_dir)!r}, in the features of model id {model_id}, {differing}"
                )

    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        """As TRAK's, with checksums of new rows, of finished features, and of the record itself."""
        if self.sealed_at_once is not None:
            self._seal_rows(self.sealed_at_once)
        model_id = self.current_model_id
        with clear_errors(self.save_dir, f"id_{model_id}.json"):
            super().serialize_current_model_id_metadata(already_exists)
        record, notes = self.model_ids[model_id], self.notes.setdefault(model_id, {})
        if record["is_finalized"]:
            notes |= {f"{name}_xxh3": self._hash_of(name) for name in _FINISHED} | {"features_of": self._features_of}
        if record["is_featurized"] == 1 or not already_exists:
            _write_records(self.save_dir / f"id_{model_id}.json", {str(model_id): record | notes})

    def load_current_store(self, model_id: int, exp_name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As TRAK's. Check once per checkpoint that rows and features are what was written; if not, raise an error."""
        if model_id != self._opened_for:
            self._opened_for = model_id
            self._arrays.clear()  # keep the memory maps of one checkpoint only
        super().load_current_store(model_id, exp_name, *args, **kwargs)
        if exp_name is not None:
            return
        if self.sealed_at_once is not None:
            path = self._folder / "_row_hashes.mmap"
            mode = "r+" if path.exists() and model_id in self.notes else "w+"
            self.current_store["row_hashes"] = known = self._load(path, (self.train_set_size, 2), mode, np.uint64)
            self._sealed = 0 if known is None else int(np.count_nonzero(np.asarray(known)[:, 1]))
        if model_id not in self._seen and model_id in self.notes:
            self._check(model_id)
        self.notes.setdefault(model_id, {})
        self._seen.add(model_id)

    def init_experiment(self, exp_name: str, num_targets: int, model_id: int) -> None:
        """As TRAK's, with a checksum. Targets whose files are incomplete are begun anew."""
        rows, scores = self.save_dir / str(model_id) / f"{exp_name}_grads.mmap", self._scores_file(exp_name)
        if rows.exists() and not (_is_whole(rows) and _is_whole(scores)):
            with clear_errors(self.save_dir, rows.name):
                rows.unlink()
        with clear_errors(self.save_dir, self.experiments_file.name):
            super().init_experiment(exp_name, num_targets, model_id)
        _write_records(self.experiments_file, self.experiments)

    def begin_scores(self, exp_name: str) -> None:
        """Mark the scores of an experiment as not finished, until `end_scores` is called."""
        if exp_name in self.experiments:
            self.experiments[exp_name]["scores_finalized"] = 0
            self.experiments[exp_name].pop("scores_xxh3", None)
            _write_records(self.experiments_file, self.experiments)

    def end_scores(self, exp_name: str) -> None:
        """Record the checksum of the scores of an experiment."""
        self.current_store[f"{exp_name}_scores"].flush()
        self.experiments[exp_name]["scores_xxh3"] = checksum_of(self._scores_file(exp_name))
        _write_records(self.experiments_file, self.experiments)

    @property
    def _folder(self) -> Path:
        return self.save_dir / str(self.current_model_id)

    def _scores_file(self, exp_name: str) -> Path:
        return self.save_dir / "scores" / f"{exp_name}.mmap"

    def _hash_of(self, name: str) -> str | None:
        values = self.current_store[name]
        return None if values is None else f"{hash_of(values):016x}"

    def _hashes_of(self, name: str, indices: np.ndarray) -> np.ndarray:
        """Checksums of rows of single points; none is 0."""
        return np.maximum(row_hashes(self.current_store[name][indices]), np.uint64(1))

    def _seal_rows(self, at_once: int) -> None:
        done, known = np.asarray(self.current_store["is_featurized"])[:, 0] == 1, self.current_store["row_hashes"]
        count = int(np.count_nonzero(done))
        if count < len(done) and count - self._sealed < at_once:
            return  # after a kill, rows without a checksum are computed again
        new = np.flatnonzero(done & (np.asarray(known)[:, 1] == 0))
        for column, name in enumerate(_ROWS):
            known[new, column] = self._hashes_of(name, new)
        self._sealed = count

    def _check(self, model_id: int) -> None:
        """Compare rows of points and features with their checksums. A point without a checksum has to be done again."""
        if self.sealed_at_once is not None and self.current_store["grads"] is not None:
            known = self.current_store["row_hashes"]
            at = np.flatnonzero(known[:, 1])
            self.current_store["is_featurized"][:, 0] = known[:, 1] != 0
            for column, name in enumerate(_ROWS):
                wrong = at[self._hashes_of(name, at) != known[at, column]]
                if len(wrong):
                    raise StoreDamaged(
                        f"{self._folder / f'{name}.mmap'} is damaged: {len(wrong)} rows, first {wrong[0]}, are not "
                        f"those that were written (or _row_hashes.mmap is). {to_delete(self._folder)}"
                    )
        for name in _FINISHED:
            expected = self.notes[model_id].get(f"{name}_xxh3")
            if expected is not None and self._hash_of(name) != expected:
                raise StoreDamaged(
                    f"{self._folder / f'{name}.mmap'} is damaged: it is not what finalize_features wrote. "
                    f"{to_delete(self._folder)}"
                )

    def _load(self, fname: Path, shape: tuple[int, ...], mode: str, dtype: Any = None) -> np.ndarray | None:
        path, kind = Path(fname), np.dtype(dtype or (np.float16 if self.use_half_precision else np.float32))
        if mode == "w+":
            with clear_errors(self.save_dir, path.name):
                created = create_array(path, shape, kind)
            self._arrays[path] = _identity(path), created
            return created
        with damage_named(path.parent):
            try:
                return checked_kind(self._opened(path), path, shape, kind)
            except FileNotFoundError:
                if path.name in _MADE_AGAIN:
                    return self._load(fname, shape, "w+", dtype)
                return None  # as in TRAK, whose gradients may have been deleted

    def _opened(self, path: Path) -> np.ndarray:
        """The array of a file. It is opened again only if the file was replaced, because TRAK asks for it often."""
        identity, known = _identity(path), self._arrays.get(path)
        if known is None or known[0] != identity:
            self._arrays[path] = known = identity, open_array(path, "r+")
        return known[1]


def _identity(path: Path) -> tuple[int, ...]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mode


def _write_records(path: Path, records: Mapping[str, Mapping[str, Any]]) -> None:
    sealed = {name: {**record, "xxh3": seal({"name": name, **record})} for name, record in records.items()}
    with clear_errors(path.parent, path.name):
        write_json(path, sealed, sync=False)


def _mend(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Replace damaged or incomplete JSON files of TRAK before TRAK reads them."""
    plain = {name: getattr(value, "value", value) for name, value in metadata.items()}
    path = folder / METADATA
    try:
        read_sealed_json(path)
    except (FileNotFoundError, DamagedFile):
        write_sealed_json(path, plain, sync=False)
    for path in (folder / "experiments.json", *folder.glob("id_*.json")):
        number = path.stem.removeprefix("id_")
        made_anew = {number: dict(_NEW)} if number.isdecimal() else {}
        found = _whole_records(path)
        if found is None or (number.isdecimal() and set(found) != {number}):
            _write_records(path, made_anew)


def _whole_records(path: Path) -> dict[str, Any] | None:
    """The records of one of TRAK's JSON files; None if a record is not what was written."""
    try:
        found = read_json(path)
    except (FileNotFoundError, DamagedFile):
        return None
    if not isinstance(found, dict):
        return None
    for name, record in found.items():
        if not isinstance(record, dict):
            return None
        content = {key: value for key, value in record.items() if key != "xxh3"}
        if record.get("xxh3") != seal({"name": name, **content}):
            return None
    return found


def _is_whole(path: Path) -> bool:
    try:
        open_array(path, "r")
    except (OSError, ValueError):
        return False
    return True
