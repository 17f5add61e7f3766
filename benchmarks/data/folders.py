"""A folder as a source of data: the layouts in which it may hold a data set or the small BERT, and their readers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.data import formats
from benchmarks.data.contents import Content
from benchmarks.data.errors import DataError

FOLDER_VARIABLE = "GGDA_DATA_DIR"
IMAGE_PARTS = ("x_train", "y_train", "x_test", "y_test")
MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
CIFAR10_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
BERT_FOLDERS = ("bert-minilm-l6", "bert", "")
BERT_FILES = ("config.json", "model.safetensors", "tokenizer.json")
Found = tuple[str, Callable[[], Content]]  # name of the file or layout, and a function that reads it


def chosen(folder: Path | str | None) -> Path | None:
    """Return the folder that the user named, or the one in the environment variable GGDA_DATA_DIR, or None.

    Raises:
        DataError: the path is not a folder.
    """
    named = folder or os.environ.get(FOLDER_VARIABLE)
    if not named:
        return None
    path = Path(named).expanduser()
    if not path.is_dir():
        raise DataError(f"the data folder {path} does not exist; correct --data-dir or {FOLDER_VARIABLE}.")
    return path


def read(name: str, folder: Path) -> tuple[Content, str] | None:
    """Return the content of the data set `name` in a folder, from the first layout that is there, and the name of its
    file; None if the folder has none."""
    found = next(LAYOUTS[name](folder), None)
    return None if found is None else (found[1](), found[0])


def existing(folder: Path, *names: str) -> Path | None:
    """Return the first of the named files that the folder has; None if it has none."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def mnist(folder: Path) -> Iterator[Found]:
    """MNIST as npz, as idx (compressed or not; in the folder, in mnist/, in MNIST/raw/ or in data/), or as csv."""
    if path := existing(folder, "mnist.npz"):
        yield path.name, partial(npz_images, path)
    for inner in (folder, folder / "mnist", folder / "MNIST" / "raw", folder / "data"):
        files = [existing(inner, name, f"{name}.gz") for name in MNIST_FILES]
        if all(files):
            yield "idx files", partial(idx_images, [file for file in files if file])
        train, test = existing(inner, "mnist_train.csv"), existing(inner, "mnist_test.csv")
        if train and test:
            yield train.name, partial(batches, formats.read_mnist_csv, [train, test])


def cifar10(folder: Path) -> Iterator[Found]:
    """CIFAR-10 as npz, as the official binary or python batches, or as PNGs with one image per row."""
    if path := existing(folder, "cifar10.npz"):
        yield path.name, partial(npz_images, path)
    for inner in (folder / "cifar-10-batches-bin", folder):
        files = [inner / f"{name}.bin" for name in CIFAR10_BATCHES]
        if all(file.is_file() for file in files):
            yield "cifar-10-batches-bin", partial(batches, formats.read_cifar_binary, files)
    for inner in (folder / "cifar-10-batches-py", folder):
        files = [inner / name for name in CIFAR10_BATCHES]
        if all(file.is_file() for file in files):
            yield "cifar-10-batches-py", partial(batches, formats.read_cifar_pickle, files)
        pictures = [inner / f"{name}.png" for name in CIFAR10_BATCHES]
        labels = [inner / "train_lables.json", inner / "test_lables.json"]  # the package spells it this way
        if all(file.is_file() for file in [*pictures, *labels]):
            yield "PNG batches", partial(cifar10_pictures, pictures, labels)


def heloc(folder: Path) -> Iterator[Found]:
    """HELOC as npz with the raw rows, or as FICO's csv."""
    if path := existing(folder, "heloc.npz"):
        yield path.name, partial(heloc_npz, path)
    if file := existing(folder, "heloc_dataset_v1.csv", "heloc.csv"):
        yield file.name, partial(heloc_csv, file)


def qnli(folder: Path) -> Iterator[Found]:
    """QNLI as one tsv with a column for the split, or as GLUE's train.tsv and dev.tsv."""
    if path := existing(folder, "qnli.tsv.gz", "qnli.tsv"):
        yield path.name, partial(one_tsv, path)
    for inner in (folder / "QNLI", folder / "qnli", folder):
        train, dev = existing(inner, "train.tsv"), existing(inner, "dev.tsv")
        if train and dev:
            yield "GLUE tsv", partial(glue_tsv, train, dev)


LAYOUTS: dict[str, Callable[[Path], Iterator[Found]]] = {
    "heloc": heloc,
    "mnist": mnist,
    "cifar10": cifar10,
    "qnli": qnli,
}


def find_bert(folder: Path) -> Path | None:
    """Return the folder with pre-trained BERT weights and tokenizer, in or below `folder`; None if there is none."""
    inner = (folder / name for name in BERT_FOLDERS)
    return next((path for path in inner if all((path / file).is_file() for file in BERT_FILES)), None)


def npz_images(path: Path) -> Content:
    """Read images and labels from one npz."""
    return images(*formats.read_npz(path, IMAGE_PARTS).values())


def idx_images(files: list[Path]) -> Content:
    """Read images and labels from four idx files."""
    return images(*(formats.read_idx(file) for file in files))


def batches(reader: Callable[[Path], tuple[np.ndarray, np.ndarray]], files: list[Path]) -> Content:
    """Read batches of images and labels; the last batch is the test set."""
    parts = [reader(file) for file in files]
    x, y = (np.concatenate(column) for column in zip(*parts[:-1], strict=True))
    return images(x, y, *parts[-1])


def images(x_train: np.ndarray, y_train: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> Content:
    """Return training and test images and labels as a content."""
    arrays = (x_train, y_train.astype(np.int64), x_test, y_test.astype(np.int64))
    return dict(zip(IMAGE_PARTS, arrays, strict=True))


def cifar10_pictures(pictures: list[Path], labels: list[Path]) -> Content:
    """Read CIFAR-10 from six PNGs and two lists of labels."""
    x = [formats.read_cifar_png(file) for file in pictures]
    train, test = (formats.read_json_labels(file) for file in labels)
    return images(np.concatenate(x[:-1]), train, x[-1], test)


def heloc_npz(path: Path) -> Content:
    """Read FICO's rows from an npz."""
    arrays = formats.read_npz(path, ("X_raw", "y_raw"))
    return {"x_raw": arrays["X_raw"].astype(np.float32), "y_raw": arrays["y_raw"].astype(np.int64)}


def heloc_csv(path: Path) -> Content:
    """Read FICO's rows from its csv."""
    _, features, labels = formats.read_heloc_csv(path)
    return {"x_raw": features, "y_raw": labels}


def one_tsv(path: Path) -> Content:
    """Read QNLI from one file with columns split (train or dev), label (0 = entailment), question, sentence."""
    rows = formats.read_tsv(path)
    with formats.reading(path, "QNLI"):
        parts = {"train": [r for r in rows if r["split"] == "train"], "test": [r for r in rows if r["split"] == "dev"]}
        return {name: value for part, rows in parts.items() for name, value in columns(part, rows).items()}


def glue_tsv(train: Path, dev: Path) -> Content:
    """Read QNLI from GLUE's two files, with columns question, sentence, label (a word)."""
    content: dict[str, np.ndarray] = {}
    for part, path in (("train", train), ("test", dev)):
        rows = formats.read_tsv(path)
        with formats.reading(path, "QNLI"):
            for row in rows:
                row["label"] = str(formats.QNLI_LABELS.index(row["label"]))
            content.update(columns(part, rows))
    return content


def columns(part: str, rows: list[dict[str, str]]) -> Content:
    """Return questions, sentences and labels of `rows` under the names of a content."""
    return {
        f"{part}_question": np.array([row["question"] for row in rows], dtype=object),
        f"{part}_sentence": np.array([row["sentence"] for row in rows], dtype=object),
        f"{part}_label": np.array([row["label"] for row in rows], dtype=np.int64),
    }
