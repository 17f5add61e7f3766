"""The published checksums, and the check of a content against them.

The checksums belong to the original files. For a content from any source, the bytes of the original file are built
again and hashed, so the order of the rows is checked too.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from benchmarks.data.contents import HELOC_FEATURES, Content
from benchmarks.data.errors import DataError
from benchmarks.data.formats import (
    LABELS_MOST,
    cifar_binary_bytes,
    glue_tsv_bytes,
    heloc_csv_bytes,
    idx_bytes,
    read_bytes,
    reading,
)
from benchmarks.data.prepare import heloc_rows, impute_by_class

MNIST_MD5 = {
    "x_train": "6bbc9ace898e44ae57da46a324031adb",  # train-images-idx3-ubyte
    "y_train": "a25bea736e30d166cdddb491f175f624",  # train-labels-idx1-ubyte
    "x_test": "2646ac647ad5339dbf082846283269ea",  # t10k-images-idx3-ubyte
    "y_test": "27ae3e4e09519cfbb04c329615203637",  # t10k-labels-idx1-ubyte
}
CIFAR10_BATCH = 10000
CIFAR10_TRAIN_MD5 = (  # data_batch_1.bin to data_batch_5.bin
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
)
CIFAR10_TEST_MD5 = "803d5f7f4d78ea53de84dbe85f74fb6d"  # test_batch.bin
HELOC_SHA256 = "3ac25654f80c5ce724e2a9528e3cf3bd3f9369e44b4a5f7723eff46c330c2dfb"  # heloc_dataset_v1.csv
HELOC_OPENXAI_SHA256 = "a843489013cba6f3ae29a65b0250c4b90d4437aa131bf74125d3a8da47d8206f"  # X as float32 [9871, 23]
QNLI_TRAIN_MD5 = "5e6063f407b08d1f7c7074d049ace94a"  # train.tsv
QNLI_DEV_MD5 = "1e81e211959605f144ba6c0ad7dc948b"  # dev.tsv
QNLI_TRAIN_ROWS = 104743
BERT_SHA256 = {  # sentence-transformers/all-MiniLM-L6-v2
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}


def verify(name: str, content: Content) -> tuple[str, ...]:
    """Check a content against the published checksums.

    Returns:
        The checks that passed, one sentence each.

    Raises:
        DataError: a checksum or a shape differs.
    """
    checks = {"mnist": verify_mnist, "cifar10": verify_cifar10, "heloc": verify_heloc, "qnli": verify_qnli}
    try:
        return checks[name](content)
    except (ValueError, IndexError, TypeError) as error:
        raise DataError(f"{name} does not have the published shape ({error}).") from error


def verify_mnist(content: Content) -> tuple[str, ...]:
    """Check the MD5 of the four idx files."""
    for part, expected in MNIST_MD5.items():
        expect(hashlib.md5(idx_bytes(content[part])).hexdigest(), expected, f"MNIST {part}")
    return ("MD5 of the four idx files equal to the published",)


def verify_cifar10(content: Content) -> tuple[str, ...]:
    """Check the MD5 of the six files of cifar-10-batches-bin."""
    parts = [("train", batch, expected) for batch, expected in enumerate(CIFAR10_TRAIN_MD5)]
    for part, batch, expected in [*parts, ("test", 0, CIFAR10_TEST_MD5)]:
        rows = slice(batch * CIFAR10_BATCH, (batch + 1) * CIFAR10_BATCH)
        found = hashlib.md5(cifar_binary_bytes(content[f"x_{part}"][rows], content[f"y_{part}"][rows])).hexdigest()
        expect(found, expected, f"CIFAR-10 {part} batch {batch + 1}")
    return ("MD5 of the six binary batches equal to the published",)


def verify_heloc(content: Content) -> tuple[str, ...]:
    """Check the SHA-256 of FICO's csv, and of the features that OpenXAI made from it."""
    file = heloc_csv_bytes(HELOC_FEATURES, content["x_raw"], content["y_raw"])
    expect(hashlib.sha256(file).hexdigest(), HELOC_SHA256, "HELOC, FICO's file")
    imputed = impute_by_class(*heloc_rows(content)).astype("<f4").tobytes()
    expect(hashlib.sha256(imputed).hexdigest(), HELOC_OPENXAI_SHA256, "HELOC, imputed and ordered as OpenXAI's")
    return ("SHA-256 of FICO's raw file equal to the published", "imputed rows and their order equal to OpenXAI's")


def verify_qnli(content: Content) -> tuple[str, ...]:
    """Check the MD5 of GLUE's dev.tsv, and of train.tsv if it has all rows; else check that no row is also in dev."""
    parts = {
        part: [content[f"{part}_{field}"] for field in ("question", "sentence", "label")] for part in ("train", "test")
    }
    expect(hashlib.md5(glue_tsv_bytes(*parts["test"])).hexdigest(), QNLI_DEV_MD5, "QNLI dev.tsv")
    dev = "MD5 of GLUE's dev.tsv equal to the published"
    rows = len(content["train_label"])
    if rows == QNLI_TRAIN_ROWS:
        expect(hashlib.md5(glue_tsv_bytes(*parts["train"])).hexdigest(), QNLI_TRAIN_MD5, "QNLI train.tsv")
        return (dev, "MD5 of GLUE's train.tsv equal to the published")
    pairs = {part: set(zip(*fields[:2], strict=True)) for part, fields in parts.items()}
    if doubled := pairs["train"] & pairs["test"]:
        raise DataError(
            f"{len(doubled)} QNLI training rows are in the dev set too; take them out of the training rows."
        )
    return (dev, f"{rows:,} of GLUE's {QNLI_TRAIN_ROWS:,} training rows, none of them in dev")


def verify_bert(folder: Path, *, published: bool = True) -> tuple[str, ...]:
    """Check that a folder holds a complete BERT; with `published`, also that it is exactly all-MiniLM-L6-v2."""
    with reading(folder / "config.json", "a configuration"):
        kind = json.loads(read_bytes(folder / "config.json", LABELS_MOST))["model_type"]
    if kind != "bert":
        raise DataError(f"the model in {folder} is a {kind}, not a bert; replace or remove it.")
    weights = folder / "model.safetensors"
    with reading(weights, "safetensors"), weights.open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
        if header > min(weights.stat().st_size, 10**7):
            raise ValueError("its header is longer than the file")
        tensors = json.loads(stream.read(header))
        end = max(entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__")
        if weights.stat().st_size != 8 + header + end:
            raise ValueError(f"{8 + header + end} bytes expected, {weights.stat().st_size} found")
    if not published:
        return ("configuration and weights complete",)
    for file, expected in BERT_SHA256.items():
        expect(hashlib.sha256((folder / file).read_bytes()).hexdigest(), expected, f"BERT's {file}")
    return ("SHA-256 of weights and tokenizer equal to the published",)


def expect(found: str, expected: str, what: str) -> None:
    """Raise an error if two checksums differ."""
    if found != expected:
        raise DataError(f"{what} is not the published data: checksum {found}, published {expected}.")
