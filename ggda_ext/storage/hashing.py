"""Hashes of bytes, tensors and parts put together: XXH3, the fastest there is, but no proof against forgers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

hash_of_bytes = xxhash.xxh3_128_digest


def joined(*parts: Any) -> bytes:
    """The hash of numbers, texts and other hashes, each in its place."""
    return xxhash.xxh3_128_digest(repr(parts).encode())  # which tells where a part ends, and texts from bytes


def bytes_of(value: Tensor) -> memoryview:
    """The values of a tensor in one piece, as hashes read them, without a copy where it lies so on the CPU."""
    plain = value.detach()
    try:
        return np.ascontiguousarray(plain.numpy()).data
    except (TypeError, RuntimeError):  # on a GPU, a view of conjugates, a number that NumPy does not know: bfloat16
        plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8).numpy().data
