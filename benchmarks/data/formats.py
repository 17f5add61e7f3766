"""Readers of the file formats the data sets are published in, none of which runs code found in a file.

Images come out as uint8 [n, 28, 28] or [n, 3, 32, 32], labels as int64 [n], text as object arrays of str [n].
A file that is damaged or of another kind raises `DataError` naming it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.errors import DataError

Array = np.ndarray
NUMPY_CORE = "numpy._core" if hasattr(np, "_core") else "numpy.core"  # renamed in NumPy 2
IDX_UINT8 = 8
CIFAR_ROW = 1 + 3 * 32 * 32
GOOD = "Good"
QNLI_LABELS = ("entailment", "not_entailment")


DAMAGE = (  # what the readers raise on bytes they did not expect
    *(ValueError, KeyError, IndexError, EOFError, OSError, TypeError, AttributeError),
    *(zlib.error, zipfile.BadZipFile, pickle.UnpicklingError, csv.Error),
)


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Turn whatever a damaged file raises into one error that names it."""
    try:
        yield
    except DAMAGE as error:
        raise DataError(f"{path.name} is not readable as {kind} ({error}); replace or remove {path}.") from error


def read_bytes(path: Path) -> bytes:
    """The content of a file, unpacked if its name ends in .gz."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def read_npz(path: Path, names: Iterable[str]) -> dict[str, Array]:
    """The named arrays of an .npz file; pickled objects are refused."""
    with reading(path, "npz"), np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in names}


def read_idx(path: Path) -> Array:
    """An array of bytes in the idx format of MNIST, packed (.gz) or not."""
    with reading(path, "idx"):
        return parse_idx(read_bytes(path))


def parse_idx(content: bytes) -> Array:
    """An array of bytes in the idx format: two zeros, type 8, number of axes, sizes (big-endian), values."""
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != IDX_UINT8:
        raise ValueError("it does not begin with the idx signature for bytes")
    start = 4 + 4 * content[3]
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
    if len(content) - start != int(np.prod(shape)):
        raise ValueError(f"its header promises {np.prod(shape)} values and {len(content) - start} follow")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def idx_bytes(values: Array) -> bytes:
    """The idx file that holds `values`; the inverse of `parse_idx`."""
    header = bytes([0, 0, IDX_UINT8, values.ndim]) + np.array(values.shape, dtype=">u4").tobytes()
    return header + values.astype(np.uint8).tobytes()


def read_cifar_binary(path: Path) -> tuple[Array, Array]:
    """Images [n, 3, 32, 32] and labels [n] of one file of cifar-10-batches-bin."""
    with reading(path, "a CIFAR-10 binary batch"):
        rows = np.frombuffer(path.read_bytes(), dtype=np.uint8).reshape(-1, CIFAR_ROW)
        return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)


def cifar_binary_bytes(images: Array, labels: Array) -> bytes:
    """The file of cifar-10-batches-bin that holds `images` and `labels`; the inverse of `read_cifar_binary`."""
    rows = np.empty((len(images), CIFAR_ROW), dtype=np.uint8)
    rows[:, 0], rows[:, 1:] = labels, images.reshape(len(images), -1)
    return rows.tobytes()


def read_cifar_pickle(path: Path) -> tuple[Array, Array]:
    """Images [n, 3, 32, 32] and labels [n] of one file of cifar-10-batches-py."""
    with reading(path, "a CIFAR-10 python batch"), path.open("rb") as file:
        batch = ArrayUnpickler(file, encoding="bytes").load()
        batch = {key if isinstance(key, bytes) else key.encode(): value for key, value in batch.items()}
        images = np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
        return images, np.asarray(batch[b"labels"], dtype=np.int64)


class ArrayUnpickler(pickle.Unpickler):
    """Reads pickles of plain containers and NumPy arrays, and refuses to look up anything else."""

    allowed = frozenset({"_reconstruct", "ndarray", "dtype", "_frombuffer"})

    def find_class(self, module: str, name: str) -> Any:
        """The function or class a pickle asks for, if it is one that an array needs."""
        if (module == "numpy" or module.startswith(("numpy.core.", "numpy._core."))) and name in self.allowed:
            return super().find_class(module.replace("numpy.core.", f"{NUMPY_CORE}."), name)
        if (module, name) == ("_codecs", "encode"):  # bytes pickled by Python 3 for Python 2
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")


def read_cifar_png(path: Path) -> Array:
    """Images [n, 3, 32, 32] from a PNG of one image per row of 1024 pixels."""
    from PIL import Image

    with reading(path, "a PNG of CIFAR-10 images"), Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
        return np.ascontiguousarray(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))


def read_json_labels(path: Path) -> Array:
    """Labels [n] from a JSON list of numbers."""
    with reading(path, "a list of labels"):
        return np.asarray(json.loads(path.read_bytes()), dtype=np.int64)


def read_mnist_csv(path: Path) -> tuple[Array, Array]:
    """Images [n, 28, 28] and labels [n] from lines ``label,pixel,...``, with or without a line of names."""
    with reading(path, "MNIST as csv"):
        content = path.read_bytes()
        if not content[:1].isdigit():
            content = content[content.index(b"\n") + 1 :]
        rows = np.loadtxt(io.BytesIO(content), delimiter=",", dtype=np.uint8, ndmin=2)
        return rows[:, 1:].reshape(-1, 28, 28), rows[:, 0].astype(np.int64)


def read_heloc_csv(path: Path) -> tuple[list[str], Array, Array]:
    """Names of the features, features [n, 23] with the codes −7/−8/−9, and labels [n] (1 = good) of FICO's file."""
    with reading(path, "FICO's csv"):
        lines = list(csv.reader(io.StringIO(path.read_text("utf-8-sig"))))
        label = lines[0].index("RiskPerformance")
        names = [name for column, name in enumerate(lines[0]) if column != label]
        rows = [line for line in lines[1:] if line]
        features = np.array([line[:label] + line[label + 1 :] for line in rows], dtype=np.float32)
        return names, features, np.array([line[label] == GOOD for line in rows], dtype=np.int64)


def heloc_csv_bytes(names: Iterable[str], features: Array, labels: Array) -> bytes:
    """FICO's csv that holds `features` and `labels`; the inverse of `read_heloc_csv`."""
    lines = [",".join(["RiskPerformance", *names])]
    for values, label in zip(features.astype(int).tolist(), labels.tolist(), strict=True):
        lines.append(",".join([GOOD if label else "Bad", *map(str, values)]))
    return "\n".join(lines).encode()  # the published file has no newline at its end


def read_tsv(path: Path) -> list[dict[str, str]]:
    """The rows of a tab-separated file without quoting, packed (.gz) or not, by the names in its first line."""
    with reading(path, "tab-separated text"):
        lines = read_bytes(path).decode("utf-8").rstrip("\r\n").split("\n")
        names = lines[0].rstrip("\r").split("\t")
        rows = [line.rstrip("\r").split("\t") for line in lines[1:]]
        for number, row in enumerate(rows, start=2):
            if len(row) != len(names):
                raise ValueError(f"line {number} has {len(row)} fields, the first line has {len(names)}")
        return [dict(zip(names, row, strict=True)) for row in rows]


def glue_tsv_bytes(questions: Array, sentences: Array, labels: Array) -> bytes:
    """GLUE's QNLI file that holds the pairs, numbered from 0; labels are 0 for entailment, 1 for none."""
    lines = ["index\tquestion\tsentence\tlabel"]
    for index, row in enumerate(zip(questions, sentences, labels.tolist(), strict=True)):
        lines.append(f"{index}\t{row[0]}\t{row[1]}\t{QNLI_LABELS[row[2]]}")
    return "".join(f"{line}\n" for line in lines).encode()
