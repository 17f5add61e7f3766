"""The numbers that the GGDA paper prints, to compare with ours: noisy-label tables, pruning tables and their runtimes.

The paper shows retraining scores (figures 1 and 2 and the appendix) only as pictures, so there are no numbers to quote,
and it has no LDS. The runtimes here were measured on the paper's GPU; ours are CPU seconds on the machine named in the
report.
"""

from __future__ import annotations

from typing import NamedTuple

RETRAINING_NOTE = "The paper shows its retraining scores as pictures only, without numbers."
LDS_NOTE = "The paper measures no LDS."


class Detection(NamedTuple):
    """A cell of the noisy-label tables: mean AUC, and the runtime in seconds."""

    auc: float
    seconds: float


class Measured(NamedTuple):
    """A mean and the paper's ± (standard error over ten seeds, as far as its captions say)."""

    mean: float
    stderr: float


class Pruned(NamedTuple):
    """A cell of the pruning tables: single points (DA) and groups (GGDA)."""

    points: Measured
    groups: Measured


NOISY_SIZES = (1, 4, 16, 64, 256)
PRUNED_PERCENT = (25, 50, 75)
PRUNING_GROUP_SIZE = {"HELOC": 256, "MNIST": 1024, "CIFAR-10": 1024, "QNLI": 1024}

_NOISY = """
HELOC    / LR       | TracIn        | 0.555 7.44   0.545 1.96   0.539 0.54   0.541 0.18   0.539 0.08
HELOC    / LR       | Inf. (Fisher) | 0.614 7.43   0.581 1.95   0.558 0.52   0.520 0.17   0.512 0.08
HELOC    / LR       | Inf. (LiSSA)  | 0.575 13.54  0.572 7.38   0.571 5.78   0.572 5.39   0.573 5.30
HELOC    / ANN-S    | TracIn        | 0.580 10.6   0.572 2.95   0.568 0.90   0.566 0.40   0.566 0.28
HELOC    / ANN-S    | Inf. (Fisher) | 0.604 9.25   0.582 2.51   0.552 0.76   0.495 0.34   0.510 0.23
HELOC    / ANN-S    | Inf. (LiSSA)  | 0.650 18.5   0.631 11.9   0.627 10.2   0.621 9.77   0.620 9.65
HELOC    / ANN-S    | TRAK          | 0.504 46.4   0.549 12.0   0.528 3.92   0.512 1.22   0.503 0.77
HELOC    / ANN-M    | TracIn        | 0.597 11.44  0.560 3.44   0.553 1.29   0.549 0.75   0.550 0.60
HELOC    / ANN-M    | Inf. (Fisher) | 0.597 13.39  0.571 4.05   0.563 1.47   0.536 0.81   0.533 0.63
HELOC    / ANN-M    | Inf. (LiSSA)  | 0.636 24.10  0.601 16.70  0.595 14.43  0.592 13.75  0.592 13.70
MNIST    / ANN-L    | TracIn        | 0.637 208    0.646 55.9   0.650 18.1   0.642 8.18   0.529 5.69
MNIST    / ANN-L    | Inf. (Fisher) | 0.509 287    0.551 90.7   0.586 27.8   0.554 9.49   0.502 4.58
MNIST    / ANN-L    | Inf. (LiSSA)  | 0.640 220    0.647 71.7   0.647 35.2   0.639 25.5   0.534 23.2
MNIST    / ANN-L    | TRAK          | 0.495 868    0.501 240    0.502 87.7   0.504 23.9   0.501 33.0
CIFAR-10 / ResNet18 | TracIn        | 0.700 558    0.702 172    0.704 59.0   0.705 31.6   0.707 24.1
CIFAR-10 / ResNet18 | Inf. (Fisher) | 0.630 497    0.614 172    0.602 69.8   0.573 40.5   0.569 35.0
CIFAR-10 / ResNet18 | Inf. (LiSSA)  | 0.656 835    0.657 544    0.661 468    0.678 452    0.685 447
CIFAR-10 / ResNet18 | TRAK          | 0.501 1814   0.490 674    0.486 319    0.482 210    0.497 188
QNLI     / BERT     | TracIn        | 0.543 1743   0.539 427    0.537 172    0.536 136    0.536 119
QNLI     / BERT     | Inf. (Fisher) | 0.667 2207   0.695 493    0.684 187    0.605 145    0.508 135
QNLI     / BERT     | Inf. (LiSSA)  | 0.501 2043   0.504 686    0.489 395    0.490 403    0.512 392
QNLI     / BERT     | TRAK          | 0.500 4947   0.498 1698   0.497 841    0.507 739    0.502 788
"""

# mean and ±: DA then GGDA, after removing 25, 50 and 75 %, then the runtime in seconds
_PRUNING = """
HELOC / LR          | TracIn        | 70.8 0.0 72.4 0.0 | 56.3 0.0 72.6 0.0 | 47.9 0.0 71.6 0.0 | 6.18 0.36 0.09 0.03
HELOC / LR          | Inf. (Fisher) | 57.0 0.0 72.5 0.0 | 50.7 0.0 71.7 0.0 | 42.5 0.0 72.6 0.0 | 6.15 0.45 0.08 0.00
HELOC / LR          | Inf. (LiSSA)  | 70.8 0.0 72.4 0.0 | 56.5 0.0 72.6 0.0 | 47.9 0.0 71.6 0.0 | 10.7 0.30 4.30 0.04
HELOC / ANN-S       | TracIn        | 70.7 0.1 73.9 0.3 | 53.6 0.0 72.8 0.4 | 47.9 0.0 71.4 0.6 | 7.81 0.53 0.25 0.05
HELOC / ANN-S       | Inf. (Fisher) | 68.0 0.8 73.9 0.2 | 54.2 0.7 73.2 0.4 | 45.3 0.8 71.9 0.8 | 7.33 0.67 0.24 0.04
HELOC / ANN-S       | Inf. (LiSSA)  | 68.5 0.2 73.8 0.3 | 52.1 0.0 72.8 0.4 | 52.3 0.2 70.8 0.8 | 14.8 0.64 8.06 0.05
HELOC / ANN-M       | TracIn        | 71.2 0.2 73.3 0.2 | 52.9 0.1 72.5 0.4 | 47.9 0.0 68.0 0.5 | 9.51 0.03 0.52 0.03
HELOC / ANN-M       | Inf. (Fisher) | 71.0 0.4 73.7 0.3 | 56.1 0.4 72.4 0.2 | 49.3 0.3 69.7 0.6 | 7.77 0.48 0.54 0.05
HELOC / ANN-M       | Inf. (LiSSA)  | 68.7 0.2 72.6 0.2 | 51.2 0.0 71.4 0.2 | 48.3 0.1 70.3 0.7 | 16.5 0.67 9.72 0.08
MNIST / ANN-L       | TracIn        | 95.8 0.1 97.5 0.0 | 93.6 0.2 97.1 0.1 | 85.8 3.3 96.1 0.1 | 311 5.8 6.59 0.07
MNIST / ANN-L       | Inf. (Fisher) | 96.7 0.1 97.4 0.0 | 96.3 0.1 97.1 0.1 | 95.6 0.1 95.9 0.1 | 227 3.3 5.09 0.04
MNIST / ANN-L       | Inf. (LiSSA)  | 96.0 0.1 97.4 0.1 | 94.0 0.3 97.0 0.1 | 92.6 0.6 95.9 0.1 | 307 1.7 25.9 0.70
CIFAR-10 / ResNet18 | TracIn        | 89.9 0.1 92.1 0.1 | 84.4 0.2 90.7 0.1 | 74.4 0.3 87.5 0.1 | 493 73 35.2 0.07
CIFAR-10 / ResNet18 | Inf. (Fisher) | 90.9 0.2 92.1 0.1 | 89.0 0.1 90.6 0.2 | 86.9 0.2 87.6 0.3 | 469 41.3 33.6 0.15
CIFAR-10 / ResNet18 | Inf. (LiSSA)  | 90.1 0.1 92.0 0.2 | 88.1 0.3 90.7 0.1 | 83.4 0.3 87.5 0.2 | 827 4.1 443 0.61
QNLI / BERT         | TracIn        | 74.9 4.4 85.9 1.2 | 64.8 4.3 84.2 1.6 | 46.4 5.3 83.3 3.5 | 1043 14.3 100.2 0.11
QNLI / BERT         | Inf. (Fisher) | 85.2 1.5 85.0 1.7 | 83.3 1.7 84.7 1.2 | 75.2 4.0 82.7 1.5 | 2191 48.4 114.9 0.83
"""


def noisy(data: str, model: str, method: str) -> dict[int, Detection]:
    """Return group size → AUC and runtime with Grad-K-Means groups (size 1: single points); empty if the paper has
    none."""
    return _NOISY_CELLS.get((data, _model(model), method), {})


def pruning(data: str, model: str, method: str) -> dict[int, Pruned]:
    """Return percent removed → test accuracy in percent, for single points and groups; empty if the paper has none.

    The groups have `PRUNING_GROUP_SIZE` points. The captions do not name the grouping; the names of the paper's table
    files (``heloc_lr_random_1024``, …) say that it is random.
    """
    return _PRUNING_CELLS.get((data, _model(model), method), {})


def pruning_runtime(data: str, model: str, method: str) -> Pruned | None:
    """Return the runtime in seconds with single points and with groups, or None if the paper has none."""
    return _PRUNING_RUNTIMES.get((data, _model(model), method))


def _model(name: str) -> str:
    return name.replace("ResNet-18", "ResNet18")


_Key = tuple[str, str, str]


def _lines(text: str) -> list[tuple[_Key, list[list[float]]]]:
    found = []
    for line in text.strip().splitlines():
        where, method, *cells = (part.strip() for part in line.split("|"))
        data, model = (part.strip() for part in where.split("/"))
        found.append(((data, model, method), [[float(number) for number in cell.split()] for cell in cells]))
    return found


def _pruned(numbers: list[float]) -> Pruned:
    mean, stderr, group_mean, group_stderr = numbers
    return Pruned(Measured(mean, stderr), Measured(group_mean, group_stderr))


_NOISY_CELLS: dict[_Key, dict[int, Detection]] = {
    key: {size: Detection(*numbers[2 * i : 2 * i + 2]) for i, size in enumerate(NOISY_SIZES)}
    for key, [numbers] in _lines(_NOISY)
}
_PRUNING_CELLS: dict[_Key, dict[int, Pruned]] = {
    key: {percent: _pruned(cell) for percent, cell in zip(PRUNED_PERCENT, cells, strict=False)}
    for key, cells in _lines(_PRUNING)
}
_PRUNING_RUNTIMES: dict[_Key, Pruned] = {key: _pruned(cells[-1]) for key, cells in _lines(_PRUNING)}
