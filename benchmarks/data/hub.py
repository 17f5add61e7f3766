"""The public hubs as a source: Hugging Face through `datasets` (if installed), OpenML through scikit-learn.

Both libraries wait for minutes where there is no network, so each hub is asked first whether it answers at all.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import downloads
from benchmarks.data.contents import Content
from benchmarks.data.errors import DataError, NoAnswerError, NoRoomError, UnreachableError
from benchmarks.data.folders import images
from benchmarks.data.registry import BERT_MEMBERS

HUGGING_FACE, OPENML = "Hugging Face", "OpenML"
OPENML_ADDRESS = "https://www.openml.org"
OPENML_MNIST, MNIST_TRAIN = "mnist_784", 60000
HF_SETS = {"mnist": ("ylecun/mnist", None), "cifar10": ("uoft-cs/cifar10", None), "qnli": ("nyu-mll/glue", "qnli")}
HF_BERT = "sentence-transformers/all-MiniLM-L6-v2"
Hub = tuple[str, Callable[[str], Content]]


def hubs(name: str) -> list[Hub]:
    """The hubs that publish a data set, and how to ask each."""
    listed: list[Hub] = []
    if name in HF_SETS:
        listed.append((HUGGING_FACE, from_hugging_face))
    if name == "mnist":  # OpenML has CIFAR-10 too, as 650 MB of text; the registry's 139 MB are the better source
        listed.append((OPENML, from_openml))
    return listed


def require_answer(hub: str) -> None:
    """Raise `NoAnswerError` if a hub does not answer within a few seconds."""
    address = hugging_face_address() if hub == HUGGING_FACE else OPENML_ADDRESS
    if not downloads.answers(address):
        raise NoAnswerError(f"{address} does not answer")


def hugging_face_address() -> str:
    """The hub or the mirror the user has set."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def from_hugging_face(name: str) -> Content:
    """A data set by the library `datasets`."""
    if importlib.util.find_spec("datasets") is None:
        raise UnreachableError("pip install datasets to use it")
    require_answer(HUGGING_FACE)
    datasets = importlib.import_module("datasets")  # not among the extras, so it may be missing

    repository, configuration = HF_SETS[name]
    parts = asked(HUGGING_FACE, lambda: datasets.load_dataset(repository, configuration))
    if name == "qnli":
        return hugging_face_pairs(parts["train"], parts["validation"])
    picture = "image" if name == "mnist" else "img"
    (x_train, y_train), (x_test, y_test) = (hugging_face_images(parts[part], picture) for part in ("train", "test"))
    return images(x_train, y_train, x_test, y_test)


def hugging_face_pairs(train: Any, dev: Any) -> Content:
    """QNLI's columns as a content, in the order of GLUE's index."""
    content: dict[str, np.ndarray] = {}
    for part, rows in (("train", train), ("test", dev)):
        order = np.argsort(np.asarray(rows["idx"]), kind="stable")
        content[f"{part}_question"] = np.array(list(rows["question"]), dtype=object)[order]
        content[f"{part}_sentence"] = np.array(list(rows["sentence"]), dtype=object)[order]
        content[f"{part}_label"] = np.asarray(rows["label"], dtype=np.int64)[order]
    return content


def hugging_face_images(rows: Any, picture: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [n, 28, 28] or [n, 3, 32, 32] and labels [n] of one part."""
    x = np.stack([np.asarray(image) for image in rows[picture]])
    return (x.transpose(0, 3, 1, 2) if x.ndim == 4 else x), np.asarray(rows["label"], dtype=np.int64)


def from_openml(name: str) -> Content:
    """MNIST by scikit-learn; OpenML keeps training and test images in one table, training images first."""
    require_answer(OPENML)
    from sklearn.datasets import fetch_openml

    table = asked(OPENML, lambda: fetch_openml(OPENML_MNIST, version=1, as_frame=False, parser="auto", n_retries=1))
    x, y = table.data.astype(np.uint8).reshape(-1, 28, 28), table.target.astype(np.int64)
    return images(x[:MNIST_TRAIN], y[:MNIST_TRAIN], x[MNIST_TRAIN:], y[MNIST_TRAIN:])


def fetch_bert(into: Path) -> None:
    """The small BERT by `huggingface_hub`, which comes with `transformers`; its files are put in a folder."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UnreachableError("pip install huggingface_hub to use it")
    require_answer(HUGGING_FACE)
    from huggingface_hub import snapshot_download

    folder = asked(HUGGING_FACE, lambda: snapshot_download(HF_BERT, allow_patterns=list(BERT_MEMBERS)))
    for file in BERT_MEMBERS:
        shutil.copyfile(Path(folder) / file, into / file)


def asked(hub: str, question: Callable[[], Any]) -> Any:
    """The answer of a hub's library; whatever it raises means the hub cannot be used."""
    try:
        return question()
    except OSError as error:
        kind = NoRoomError if error.errno in downloads.NO_ROOM else NoAnswerError
        raise kind(f"{hub}: {error}") from error
    except Exception as error:  # each library has its own errors for a set that is gone, renamed or refused
        raise DataError(f"{hub}: {type(error).__name__}: {error}") from error
