"""Made data with the shapes of the real data sets, for machines that cannot get the real ones.

A model can learn them (each class has its own pattern plus noise), so every experiment runs. The resulting numbers mean
nothing, and `DataSet.stand_in` marks them in every table.
"""

from __future__ import annotations

import numpy as np

from benchmarks.data.contents import Content

SEED = 0
SIZES = {"heloc": (7896, 1975), "mnist": (60000, 10000), "cifar10": (50000, 10000), "qnli": (50000, 5463)}


def make(name: str) -> Content:
    """Return a stand-in for the data set `name`, with the published size. It is the same on every machine."""
    rng = np.random.default_rng(SEED)
    train, test = SIZES[name]
    if name == "heloc":
        return table(rng, train + test)
    if name == "qnli":
        return {**pairs(rng, train, "train"), **pairs(rng, test, "test")}
    shape = (28, 28) if name == "mnist" else (3, 32, 32)
    x, y = pictures(rng, train + test, shape)
    return {"x_train": x[:train], "y_train": y[:train], "x_test": x[train:], "y_test": y[train:]}


def table(rng: np.random.Generator, n: int) -> Content:
    """Make integer features [n, 23] that predict the label [n] about as well as FICO's do; some are missing."""
    y = rng.integers(0, 2, n)
    x = rng.normal(size=(n, 23)) + 0.25 * (2 * y[:, None] - 1) * np.linspace(-1, 1, 23)
    x = np.rint(40 + 12 * x).clip(0)
    x[rng.random(x.shape) < 0.03] = -8
    return {"x_raw": x.astype(np.float32), "y_raw": y.astype(np.int64)}


def pictures(rng: np.random.Generator, n: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Make noisy copies uint8 [n, *shape] of ten smooth patterns, and return them with their patterns' numbers [n]."""
    y = rng.integers(0, 10, n)
    coarse = rng.uniform(40, 215, size=(10, *shape[:-2], 4, 4))
    patterns = coarse.repeat(shape[-2] // 4, axis=-2).repeat(shape[-1] // 4, axis=-1).astype(np.int16)
    x = np.empty((n, *shape), dtype=np.uint8)
    for start in range(0, n, 5000):  # in pieces: the noise of all pictures at once would need gigabytes
        part = y[start : start + 5000]
        noise = rng.integers(-90, 91, size=(len(part), *shape), dtype=np.int16)
        x[start : start + 5000] = (patterns[part] + noise).clip(0, 255)
    return x, y.astype(np.int64)


def pairs(rng: np.random.Generator, n: int, part: str) -> Content:
    """Make questions and sentences of made words; if the label is 0, the sentence has the question's first word."""
    words = np.array([a + b + c for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u") for c in ("n", "lo", "ra")])
    labels = rng.integers(0, 2, n)
    questions, sentences = rng.choice(words, size=(n, 5)), rng.choice(words, size=(n, 9))
    place = rng.integers(0, 9, n)
    answered = labels == 0
    sentences[np.flatnonzero(answered), place[answered]] = questions[answered, 0]
    return {
        f"{part}_question": np.array([f"what is {' '.join(row)}?" for row in questions], dtype=object),
        f"{part}_sentence": np.array([f"{' '.join(row)}." for row in sentences], dtype=object),
        f"{part}_label": labels.astype(np.int64),
    }
