"""Features and targets of a TRAK store with their checksums: what is scored is what was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from ggda_ext.storage.files import DamagedFile, read_sealed_arrays, write_sealed_arrays, write_sealed_json
from ggda_ext.storage.folder import StoreDamaged
from ggda_trak.checked_saver import read_ours


def write_features(folder: Path, damping: float, features: np.ndarray) -> None:
    """Record the ridge and a checksum of the features of a finalized checkpoint."""
    write_sealed_json(folder / "damping.json", {"damping": damping, "features": _text_hash(features)})


def read_damping(folder: Path) -> float | None:
    """The ridge of a finalized checkpoint; None if it is not finalized."""
    try:
        return float(read_ours(folder / "damping.json")["damping"])
    except FileNotFoundError:
        return None


def check_features(folder: Path, features: np.ndarray | None) -> None:
    """Refuse features that are not those of `finalize_features`."""
    path = folder / "damping.json"
    if features is None or not path.exists() or read_ours(path)["features"] != _text_hash(features):
        raise StoreDamaged(
            f"{folder / 'features.mmap'} is damaged: it is not what finalize_features wrote. Delete {str(folder)!r} "
            "and its id_*.json, or pass another save_dir."
        )


def write_targets(folder: Path, experiment: str, rows: np.ndarray, indices: np.ndarray) -> None:
    """Record checksums of the targets `indices` that were just scored."""
    path = folder / f"{experiment}_targets.npz"
    known = _target_hashes(path, len(rows))
    known[indices] = row_hashes(np.asarray(rows[indices]))
    write_sealed_arrays(path, {"rows": known})


def check_targets(folder: Path, experiment: str, rows: np.ndarray) -> None:
    """Refuse targets that are not those that were scored; those that were not are zero."""
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


def row_hashes(rows: np.ndarray) -> np.ndarray:
    """A checksum of every row `[b]`; 0 for a row of zeros."""
    plain = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    found = np.array([xxhash.xxh3_64_intdigest(row.data) for row in plain], np.uint64)
    return np.where(plain.any(1), found, np.uint64(0))


def _text_hash(values: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
