"""Readers of the file formats that the data sets are published in. No reader runs code found in a file.

Images are uint8 [n, 28, 28] or [n, 3, 32, 32], labels int64 [n], and text object arrays of str [n]. A file that is
damaged or of another kind raises `DataError`, which names the file.
"""

from __future__ import annotations

import csv
import io
import json
import math
import pickle
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from benchmarks.data.array_pickle import ArrayUnpickler
from benchmarks.data.errors import DataError

Array = np.ndarray
IDX_UINT8 = 8
CIFAR_ROW = 1 + 3 * 32 * 32
GOOD = "Good"
QNLI_LABELS = ("entailment", "not_entailment")


MB = 10**6
IDX_MOST, TSV_MOST, CSV_MOST = 48 * MB, 64 * MB, 160 * MB  # the published files are 47, 25, 110
CIFAR_MOST, NPZ_MOST, LABELS_MOST, HELOC_MOST = 40 * MB, 200 * MB, MB, 4 * MB  # 31, 184, 0.2, 0.7
_HEADER = 10_000

DAMAGE = (  # errors that the readers raise on unexpected bytes
    *(ValueError, KeyError, IndexError, EOFError, OSError, TypeError, AttributeError, SyntaxError),
    *(OverflowError, RecursionError, MemoryError, NotImplementedError, struct.error, UserWarning, TokenError),
    *(zlib.error, zipfile.BadZipFile, tarfile.TarError, pickle.UnpicklingError, csv.Error),
)


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Turn any error that a damaged file causes into a `DataError` that names the file."""
    try:
        yield
    except DAMAGE as error:
        reason = str(error) or type(error).__name__
        raise DataError(f"{path.name} is not readable as {kind} ({reason}); replace or remove {path}.") from error


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes, decompressed if its name ends in .gz.

    Raises:
        ValueError: the content is longer, so it is not the published file.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if path.suffix == ".gz":
        content = unpacked(content, most)
    if len(content) > most:
        raise ValueError(f"it has more than the {most:,} bytes that the published file may have")
    return content


def unpacked(content: bytes, most: int) -> bytes:
    """Decompress gzip data, and return no more than `most` + 1 bytes."""
    found = bytearray()
    while content:
        machine = zlib.decompressobj(wbits=31)
        found += machine.decompress(content, most + 1 - len(found))
        if len(found) > most:
            break
        if not machine.eof:
            raise EOFError("it ends in the middle")
        content = machine.unused_data.lstrip(b"\0")
    return bytes(found)


def read_npz(path: Path, names: Iterable[str], most: int = NPZ_MOST) -> dict[str, Array]:
    """Read the named arrays of an .npz file; raise an error for pickled objects and for more than `most` bytes."""
    with reading(path, "npz"), zipfile.ZipFile(path) as archive:
        members = [archive.getinfo(f"{name}.npy") for name in names]
        size = sum(member.file_size for member in members)
        if size > most:
            raise ValueError(f"it unpacks to {size:,} bytes, the published data have at most {most:,}")
        return {member.filename.removesuffix(".npy"): parse_npy(archive.read(member)) for member in members}


def parse_npy(content: bytes) -> Array:
    """Return the array of numbers in a complete .npy file."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, is_fortran, dtype = read(file, max_header_size=_HEADER)
    if dtype.kind not in "biuf":
        raise ValueError(f"it holds {dtype}, not numbers")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(content) - file.tell():
        raise ValueError(f"its header promises {shape} of {dtype}, and {len(content) - file.tell()} bytes follow")
    return np.frombuffer(content, dtype, offset=file.tell()).reshape(shape, order="F" if is_fortran else "C")


def read_idx(path: Path) -> Array:
    """Read an array of bytes in the idx format of MNIST, compressed (.gz) or not."""
    with reading(path, "idx"):
        return parse_idx(read_bytes(path, IDX_MOST))


def parse_idx(content: bytes) -> Array:
    """Parse an array of bytes in the idx format: two zeros, type 8, number of axes, sizes (big-endian), values."""
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != IDX_UINT8:
        raise ValueError("it does not begin with the idx signature for bytes")
    if content[3] > 4:
        raise ValueError(f"its header promises {content[3]} axes")
    start = 4 + 4 * content[3]
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
    if len(content) - start != math.prod(shape):
        raise ValueError(f"its header promises {math.prod(shape)} values and {len(content) - start} follow")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def idx_bytes(values: Array) -> bytes:
    """Return the idx file that holds `values`; the inverse of `parse_idx`."""
    header = bytes([0, 0, IDX_UINT8, values.ndim]) + np.array(values.shape, dtype=">u4").tobytes()
    return header + values.astype(np.uint8).tobytes()


def read_cifar_binary(path: Path) -> tuple[Array, Array]:
    """Read images [n, 3, 32, 32] and labels [n] from one file of cifar-10-batches-bin."""
    with reading(path, "a CIFAR-10 binary batch"):
        rows = np.frombuffer(read_bytes(path, CIFAR_MOST), dtype=np.uint8).reshape(-1, CIFAR_ROW)
        return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)


def cifar_binary_bytes(images: Array, labels: Array) -> bytes:
    """Return the file of cifar-10-batches-bin that holds `images` and `labels`; the inverse of `read_cifar_binary`."""
    rows = np.empty((len(images), CIFAR_ROW), dtype=np.uint8)
    rows[:, 0], rows[:, 1:] = labels, images.reshape(len(images), -1)
    return rows.tobytes()


def read_cifar_pickle(path: Path) -> tuple[Array, Array]:
    """Read images [n, 3, 32, 32] and labels [n] from one file of cifar-10-batches-py."""
    with reading(path, "a CIFAR-10 python batch"):
        batch = ArrayUnpickler(io.BytesIO(read_bytes(path, CIFAR_MOST))).load()
        batch = {key if isinstance(key, bytes) else str(key).encode(): value for key, value in batch.items()}
        images, labels = batch[b"data"], batch[b"labels"]
        if not isinstance(images, np.ndarray):
            raise ValueError("its data are no array")
        return images.reshape(-1, 3, 32, 32), checked_labels(labels)


def checked_labels(labels: Any) -> Array:
    """Return labels [n] from a list of small whole numbers; raise an error for anything else."""
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 256 for label in labels):
        raise ValueError("its labels are no list of small whole numbers")
    return np.array(labels, dtype=np.int64)


def read_cifar_png(path: Path) -> Array:
    """Read images [n, 3, 32, 32] from a PNG with one image per row of 1024 pixels."""
    from PIL import Image

    with reading(path, "a PNG of CIFAR-10 images"), no_bombs(), Image.open(path) as picture:
        width, height = picture.size
        if width != 1024 or height > 10_000 or picture.format != "PNG":
            raise ValueError(f"it is a {picture.format} of {width} × {height} pixels, not of one image per row of 1024")
        pixels = np.asarray(picture.convert("RGB"))
        return np.ascontiguousarray(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))


@contextmanager
def no_bombs() -> Iterator[None]:
    """Turn Pillow's warning or error about a picture that is far too large into a `ValueError`."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(str(error)) from error


def read_json_labels(path: Path) -> Array:
    """Read labels [n] from a JSON list of numbers."""
    with reading(path, "a list of labels"):
        return checked_labels(json.loads(read_bytes(path, LABELS_MOST)))


def read_mnist_csv(path: Path) -> tuple[Array, Array]:
    """Read images [n, 28, 28] and labels [n] from lines ``label,pixel,...``, with or without a header line."""
    with reading(path, "MNIST as csv"):
        content = read_bytes(path, CSV_MOST)
        if not content[:1].isdigit():
            content = content[content.index(b"\n") + 1 :]
        rows = np.loadtxt(io.BytesIO(content), delimiter=",", dtype=np.uint8, ndmin=2)
        return rows[:, 1:].reshape(-1, 28, 28), rows[:, 0].astype(np.int64)


def read_heloc_csv(path: Path) -> tuple[list[str], Array, Array]:
    """Read FICO's file: names of the features, features [n, 23] with codes −7/−8/−9, and labels [n] (1 = good)."""
    with reading(path, "FICO's csv"):
        lines = list(csv.reader(io.StringIO(read_bytes(path, HELOC_MOST).decode("utf-8-sig"))))
        label = lines[0].index("RiskPerformance")
        names = [name for column, name in enumerate(lines[0]) if column != label]
        rows = [line for line in lines[1:] if line]
        features = np.array([line[:label] + line[label + 1 :] for line in rows], dtype=np.float32)
        return names, features, np.array([line[label] == GOOD for line in rows], dtype=np.int64)


def heloc_csv_bytes(names: Iterable[str], features: Array, labels: Array) -> bytes:
    """Return FICO's csv that holds `features` and `labels`; the inverse of `read_heloc_csv`."""
    lines = [",".join(["RiskPerformance", *names])]
    for values, label in zip(features.astype(int).tolist(), labels.tolist(), strict=True):
        lines.append(",".join([GOOD if label else "Bad", *map(str, values)]))
    return "\n".join(lines).encode()  # the published file has no newline at its end


def read_tsv(path: Path) -> list[dict[str, str]]:
    """Read the rows of a tab-separated file without quoting, compressed (.gz) or not, as dicts.

    The keys are the names in the first line.
    """
    with reading(path, "tab-separated text"):
        lines = read_bytes(path, TSV_MOST).decode("utf-8").rstrip("\r\n").split("\n")
        names = lines[0].rstrip("\r").split("\t")
        rows = [line.rstrip("\r").split("\t") for line in lines[1:]]
        for number, row in enumerate(rows, start=2):
            if len(row) != len(names):
                raise ValueError(f"line {number} has {len(row)} fields, the first line has {len(names)}")
        return [dict(zip(names, row, strict=True)) for row in rows]


def glue_tsv_bytes(questions: Array, sentences: Array, labels: Array) -> bytes:
    """Return GLUE's QNLI file that holds the pairs, numbered from 0; label 0 is entailment, 1 is no entailment."""
    lines = ["index\tquestion\tsentence\tlabel"]
    for index, row in enumerate(zip(questions, sentences, labels.tolist(), strict=True)):
        lines.append(f"{index}\t{row[0]}\t{row[1]}\t{QNLI_LABELS[row[2]]}")
    return "".join(f"{line}\n" for line in lines).encode()
