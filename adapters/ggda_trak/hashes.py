"""Checksums of arrays and of their rows: xxh3, or for short rows a sum of mixed words, for all rows at once."""

from __future__ import annotations

import numpy as np
import xxhash

_SHORT = 1024
"""Rows with up to this many bytes are short: one xxh3 call for each row would take longer than the hash itself."""
_STEP, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def row_hashes(rows: np.ndarray) -> np.ndarray:
    """Checksums of the rows `[b]`; 0 for a row of zeros."""
    if not len(rows):
        return np.empty(0, np.uint64)
    plain = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    if plain.shape[1] <= _SHORT:
        found = _short(plain)
    else:
        found = np.fromiter((xxhash.xxh3_64_intdigest(row.data) for row in plain), np.uint64, len(plain))
    return np.where(plain.any(1), found, np.uint64(0))


def hash_of(values: np.ndarray) -> np.uint64:
    """Checksum of a whole array."""
    return np.uint64(xxhash.xxh3_64_intdigest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data))


def _short(rows: np.ndarray) -> np.ndarray:
    """Sums over each row's 64-bit words. Each word is mixed with its place, so a change of any single word shows."""
    size = rows.shape[1]
    words = np.zeros((len(rows), -(-size // 8) * 8), np.uint8)
    words[:, :size] = rows
    mixed = words.view(np.uint64)
    mixed += np.arange(1, mixed.shape[1] + 1, dtype=np.uint64) * _STEP + np.uint64(size)
    return _mix(_mix(mixed).sum(1, dtype=np.uint64))


def _mix(values: np.ndarray) -> np.ndarray:
    """Apply the last steps of splitmix64 in place; different numbers stay different."""
    values ^= values >> np.uint64(30)
    values *= _FIRST
    values ^= values >> np.uint64(27)
    values *= _SECOND
    values ^= values >> np.uint64(31)
    return values
