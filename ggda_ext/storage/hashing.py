"""Hashes of bytes, tensors and several parts together, by XXH3: the fastest hash, but not safe against forgery."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

hash_of_bytes = xxhash.xxh3_128_digest


def joined(*parts: Any) -> bytes:
    """The hash of numbers, texts and other hashes together; their order matters."""
    return xxhash.xxh3_128_digest(repr(parts).encode())  # `repr` shows where a part ends, and separates text and bytes


def bytes_of(value: Tensor) -> memoryview:
    """The values of a tensor as contiguous bytes for hashing; no copy is made if they are contiguous on the CPU."""
    plain = value.detach()
    try:
        return np.ascontiguousarray(plain.numpy()).data
    except (TypeError, RuntimeError):  # on a GPU, a conjugate view, or a dtype that NumPy lacks (bfloat16)
        plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8).numpy().data
