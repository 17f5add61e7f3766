"""Tiny data sets in the layouts of the published ones, and checksums to match."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from benchmarks.data import checksums, formats, prepare
from benchmarks.data.contents import HELOC_FEATURES, Content

IDX_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CIFAR10_NAMES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
PARTS = ("x_train", "y_train", "x_test", "y_test")


def tiny(name: str) -> Content:
    """A tiny content, the same at every call."""
    rng = np.random.default_rng(1)
    if name == "heloc":
        return tiny_heloc(rng)
    if name == "qnli":
        return {**tiny_pairs(rng, "train", 12), **tiny_pairs(rng, "test", 6)}
    shape, train, test = ((28, 28), 30, 10) if name == "mnist" else ((3, 32, 32), 10, 2)
    return {
        "x_train": rng.integers(0, 256, (train, *shape), dtype=np.uint8),
        "y_train": rng.integers(0, 10, train),
        "x_test": rng.integers(0, 256, (test, *shape), dtype=np.uint8),
        "y_test": rng.integers(0, 10, test),
    }


def tiny_heloc(rng: np.random.Generator) -> Content:
    """Forty rows with codes here and there, two of them empty."""
    x = rng.integers(0, 90, (40, 23)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = -7
    x[rng.random(x.shape) < 0.1] = -8
    x[[3, 17]] = -9
    return {"x_raw": x, "y_raw": rng.integers(0, 2, 40)}


def tiny_pairs(rng: np.random.Generator, part: str, n: int) -> Content:
    """Pairs with signs that a csv reader would trip over."""
    return {
        f"{part}_question": np.array([f'What is "{part} {i}?' for i in range(n)], dtype=object),
        f"{part}_sentence": np.array([f"It's é {i}, \"no end." for i in range(n)], dtype=object),
        f"{part}_label": rng.integers(0, 2, n),
    }


def publish(monkeypatch: pytest.MonkeyPatch, name: str, content: Content) -> None:
    """Make a content's checksums the published ones."""
    if name == "mnist":
        sums = {part: hashlib.md5(formats.idx_bytes(content[part])).hexdigest() for part in PARTS}
        monkeypatch.setattr(checksums, "MNIST_MD5", sums)
    elif name == "cifar10":
        rows = formats.cifar_binary_bytes(content["x_train"], content["y_train"])
        batches = [rows[start : start + 2 * formats.CIFAR_ROW] for start in range(0, len(rows), 2 * formats.CIFAR_ROW)]
        test = formats.cifar_binary_bytes(content["x_test"], content["y_test"])
        monkeypatch.setattr(checksums, "CIFAR10_BATCH", 2)
        monkeypatch.setattr(checksums, "CIFAR10_TRAIN_MD5", tuple(hashlib.md5(batch).hexdigest() for batch in batches))
        monkeypatch.setattr(checksums, "CIFAR10_TEST_MD5", hashlib.md5(test).hexdigest())
    elif name == "heloc":
        file = formats.heloc_csv_bytes(HELOC_FEATURES, content["x_raw"], content["y_raw"])
        imputed = prepare.impute_by_class(*prepare.heloc_rows(content)).tobytes()
        monkeypatch.setattr(checksums, "HELOC_SHA256", hashlib.sha256(file).hexdigest())
        monkeypatch.setattr(checksums, "HELOC_OPENXAI_SHA256", hashlib.sha256(imputed).hexdigest())
    else:
        dev = formats.glue_tsv_bytes(*(content[f"test_{field}"] for field in ("question", "sentence", "label")))
        monkeypatch.setattr(checksums, "QNLI_DEV_MD5", hashlib.md5(dev).hexdigest())


def write_layout(layout: str, folder: Path, content: Content) -> None:
    """Write a content the way it is published, without the readers' own writers where there is another way."""
    folder.mkdir(parents=True, exist_ok=True)
    WRITERS[layout](folder, content)


def write_npz(folder: Path, content: Content) -> None:
    name = "mnist.npz" if content["x_train"].ndim == 3 else "cifar10.npz"
    np.savez(folder / name, **content)


def write_idx(folder: Path, content: Content, packed: bool = False) -> None:
    for name, part in zip(IDX_NAMES, PARTS, strict=True):
        values = content[part].astype(np.uint8)
        header = b"\0\0\x08" + bytes([values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
        data = header + values.tobytes()
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(data) if packed else data)


def write_mnist_csv(folder: Path, content: Content) -> None:
    for part in ("train", "test"):
        rows = np.column_stack([content[f"y_{part}"], content[f"x_{part}"].reshape(-1, 784)])
        header = ",".join(["label", *(f"p{i}" for i in range(784))]) if part == "train" else ""
        np.savetxt(folder / f"mnist_{part}.csv", rows, fmt="%d", delimiter=",", header=header, comments="")


def cifar10_batches(content: Content) -> list[tuple[np.ndarray, np.ndarray]]:
    """Five training batches of two images and one test batch, flattened."""
    train = [(content["x_train"][i : i + 2], content["y_train"][i : i + 2]) for i in range(0, 10, 2)]
    return [(x.reshape(2, -1), y) for x, y in [*train, (content["x_test"], content["y_test"])]]


def write_cifar10_pickle(folder: Path, content: Content, protocol: int = 2) -> None:
    (folder / "cifar-10-batches-py").mkdir()
    for name, (x, y) in zip(CIFAR10_NAMES, cifar10_batches(content), strict=True):
        batch = {b"batch_label": name.encode(), b"labels": y.tolist(), b"data": x, b"filenames": [b"a.png", b"b.png"]}
        (folder / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(batch, protocol=protocol))


def write_cifar10_binary(folder: Path, content: Content) -> None:
    (folder / "cifar-10-batches-bin").mkdir()
    for name, (x, y) in zip(CIFAR10_NAMES, cifar10_batches(content), strict=True):
        rows = b"".join(bytes([label]) + image.tobytes() for image, label in zip(x, y.tolist(), strict=True))
        (folder / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(rows)


def write_cifar10_png(folder: Path, content: Content) -> None:
    from PIL import Image

    for name, (x, _) in zip(CIFAR10_NAMES, cifar10_batches(content), strict=True):
        Image.fromarray(x.reshape(2, 3, 1024).transpose(0, 2, 1)).save(folder / f"{name}.png")
    (folder / "train_lables.json").write_text(json.dumps(content["y_train"].tolist()))
    (folder / "test_lables.json").write_text(json.dumps(content["y_test"].tolist()))


def write_heloc_npz(folder: Path, content: Content) -> None:
    np.savez(folder / "heloc.npz", X_raw=content["x_raw"], y_raw=content["y_raw"], feature_names=HELOC_FEATURES)


def write_heloc_csv(folder: Path, content: Content) -> None:
    with (folder / "heloc_dataset_v1.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["RiskPerformance", *HELOC_FEATURES])
        for values, label in zip(content["x_raw"].astype(int), content["y_raw"], strict=True):
            writer.writerow(["Good" if label else "Bad", *values])


def write_glue(folder: Path, content: Content) -> None:
    (folder / "QNLI").mkdir()
    for part, name in (("train", "train.tsv"), ("test", "dev.tsv")):
        lines = ["index\tquestion\tsentence\tlabel"]
        for i, label in enumerate(content[f"{part}_label"].tolist()):
            word = ("entailment", "not_entailment")[label]
            lines.append(f"{i}\t{content[f'{part}_question'][i]}\t{content[f'{part}_sentence'][i]}\t{word}")
        (folder / "QNLI" / name).write_text("\n".join(lines) + "\n", "utf-8")


def write_qnli_tsv(folder: Path, content: Content) -> None:
    lines = ["split\tlabel\tidx\tsource\tquestion\tsentence"]
    for part, split in (("train", "train"), ("test", "dev")):
        for i, label in enumerate(content[f"{part}_label"].tolist()):
            pair = f"{content[f'{part}_question'][i]}\t{content[f'{part}_sentence'][i]}"
            lines.append(f"{split}\t{label}\t{i}\tmade\t{pair}")
    (folder / "qnli.tsv.gz").write_bytes(gzip.compress("\n".join(lines).encode() + b"\n"))


WRITERS = {
    "npz": write_npz,
    "idx": write_idx,
    "idx.gz": lambda folder, content: write_idx(folder, content, packed=True),
    "csv": write_mnist_csv,
    "batches-py": write_cifar10_pickle,
    "batches-py, protocol 4": lambda folder, content: write_cifar10_pickle(folder, content, protocol=4),
    "batches-bin": write_cifar10_binary,
    "png": write_cifar10_png,
    "heloc.npz": write_heloc_npz,
    "FICO csv": write_heloc_csv,
    "GLUE": write_glue,
    "qnli.tsv.gz": write_qnli_tsv,
}
LAYOUTS = [
    *[("mnist", layout) for layout in ("npz", "idx", "idx.gz", "csv")],
    *[("cifar10", layout) for layout in ("npz", "batches-py", "batches-py, protocol 4", "batches-bin", "png")],
    *[("heloc", layout) for layout in ("heloc.npz", "FICO csv")],
    *[("qnli", layout) for layout in ("GLUE", "qnli.tsv.gz")],
]


def write_bert(folder: Path, kind: str = "bert") -> None:
    """The files of a BERT with one tiny tensor and a tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder.mkdir(parents=True, exist_ok=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "what", "is", "it", "no"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
