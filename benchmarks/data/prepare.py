"""Turns a content into tensors that a model can train on: HELOC's two imputations, scaling of images, sampling.

HELOC comes in two versions, because the published one leaks the label. FICO's codes say why a value is missing:
−7 (the event never happened), −8 (no usable record), −9 (no record at all). The paper uses OpenXAI's files. OpenXAI
drops the 588 rows in which every value is −9. It replaces −7 by the column's maximum, and −8 and −9 by the column's
mean *within the row's class*, over training and test rows. So an imputed value tells the label (gradient boosting
reaches 0.83 with this leak, 0.72 without it). ``heloc`` repeats this exactly, so that numbers can be compared with the
paper's. ``heloc-clean`` keeps the same rows and split, and replaces every code by the median of the training rows,
which does not depend on the label.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.data.contents import Content

Part = tuple[np.ndarray, Callable[[np.ndarray], Tensor]]  # labels [n], and a function: chosen points → their inputs
HELOC_TRAIN = 7896
NEVER, MISSING = -7, (-8, -9)
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
QNLI_TRAIN = 50000


def published_order(rows: int) -> np.ndarray:
    """Return the positions [rows] of OpenXAI's rows among the raw rows that are kept: training rows first, then test.

    The order was drawn at random (stratified by label) before publication and follows no rule, so it is stored here
    as a list. Data of another size, which can only be a stand-in, keep their order.
    """
    order = np.load(Path(__file__).with_name("heloc_order.npy"), allow_pickle=False).astype(np.int64)
    return order if len(order) == rows else np.arange(rows)


def heloc_rows(content: Content) -> tuple[np.ndarray, np.ndarray]:
    """Return features with their codes [n, 23] and labels [n], in the published order.

    Rows in which every value is −9 are left out.
    """
    kept = ~(content["x_raw"] == -9).all(axis=1)
    x, y = content["x_raw"][kept], content["y_raw"][kept]
    order = published_order(len(x))
    return x[order], y[order]


def impute_by_class(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Impute as OpenXAI does [n, 23]: −7 by the column's maximum, −8 and −9 by the column's mean within the class."""
    filled = x.astype(np.float64)
    for column in range(x.shape[1]):
        values = x[:, column].astype(np.float64)
        for label in np.unique(y):
            same = y == label
            seen = values[same & (values >= 0)]
            filled[same & np.isin(values, MISSING), column] = seen.mean() if len(seen) else 0.0
        filled[values == NEVER, column] = values.max()
    return filled.astype(np.float32)


def impute_by_median(x: np.ndarray, train: int) -> np.ndarray:
    """Replace every code by the median of the column in the first `train` rows [n, 23]; labels are not used."""
    seen = np.where(x < 0, np.nan, x)
    empty = np.isnan(seen[:train]).all(axis=0)
    medians = np.zeros(x.shape[1], dtype=np.float32)
    medians[~empty] = np.nanmedian(seen[:train, ~empty], axis=0)
    return np.where(x < 0, medians, x).astype(np.float32)


def heloc(content: Content, clean: bool) -> tuple[Part, Part]:
    """Return the training and test part of HELOC, float32 [n, 23].

    Every column is scaled to 0..1 by its range in the training rows, as OpenXAI does.
    """
    x, y = heloc_rows(content)
    train = HELOC_TRAIN if len(x) > HELOC_TRAIN else int(0.8 * len(x))
    filled = impute_by_median(x, train) if clean else impute_by_class(x, y)
    lowest, span = filled[:train].min(axis=0), np.ptp(filled[:train], axis=0)
    scaled = torch.tensor((filled - lowest) / np.where(span > 0, span, 1.0), dtype=torch.float32)
    return (y[:train], lambda pick: scaled[:train][pick]), (y[train:], lambda pick: scaled[train:][pick])


def qnli_sample(rows: int) -> np.ndarray:
    """Return the positions of the 50,000 training rows of the paper's protocol, in order; all if there are fewer."""
    if rows <= QNLI_TRAIN:
        return np.arange(rows)
    return np.sort(np.random.default_rng(0).permutation(rows)[:QNLI_TRAIN])


def mnist_images(x: np.ndarray) -> Tensor:
    """Convert images uint8 [n, 28, 28] to float32 [n, 784] in 0..1."""
    return torch.tensor(x.reshape(len(x), -1), dtype=torch.float32).div_(255)


def cifar10_images(x: np.ndarray) -> Tensor:
    """Convert images uint8 [n, 3, 32, 32] to float32, normalised per channel by the statistics of the training set."""
    images = torch.tensor(x, dtype=torch.float32).div_(255)
    return images.sub_(torch.tensor(CIFAR10_MEAN)[:, None, None]).div_(torch.tensor(CIFAR10_STD)[:, None, None])


def balanced(labels: np.ndarray, size: int | None, seed: int) -> np.ndarray:
    """Draw `size` points at random, the same number from every class, and return their positions in order.

    None draws all points. A class with too few points gives all of them, and the rest is drawn from the other classes.
    """
    if size is None or size >= len(labels):
        return np.arange(len(labels))
    if size < 1:
        raise ValueError(f"size={size}: ask for at least one point, or None for all {len(labels)}.")
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    rank = np.empty(len(labels), dtype=np.int64)  # position of the point within its class
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        rank[members] = np.arange(len(members))
    return np.sort(shuffled[np.argsort(rank[shuffled], kind="stable")[:size]])
