"""Sizes of the comparison of speed, by scale and task. Data and models are those of the scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CompareSize:
    """Size of one task's comparison.

    Attributes:
        seconds: CPU seconds that the original may take; it gets as many points as fit into them.
        property_tests: number of test points whose mean loss is the property.
        tests: number of test points for the question that asks for each test point.
        solved_tests: the same for methods that solve a system of equations for each test point.
        batch: training points in a batch of the original, and of the group version if it takes batches.
        points: largest number of training points; None for all points of the scale.
    """

    seconds: float
    property_tests: int
    batch: int
    tests: int = 20
    solved_tests: int = 20
    points: int | None = None


def _sizes(
    seconds: float, heloc: int, mnist: int, cifar10: int, qnli: int, images: int | None = None
) -> dict[str, CompareSize]:
    """Return task → size, from the time for every task, the test points of the property for every data set, and the
    number of CIFAR-10 points (`images`)."""
    return {
        **dict.fromkeys(
            ("heloc-lr", "heloc-ann-s", "heloc-ann-m"), CompareSize(seconds, heloc, batch=512, solved_tests=5)
        ),
        "mnist-ann-l": CompareSize(seconds, mnist, batch=64, solved_tests=5),
        "cifar10-resnet18": CompareSize(seconds, cifar10, batch=16, solved_tests=1, points=images),
        "qnli-bert": CompareSize(seconds, qnli, batch=4, tests=4, solved_tests=1),
    }


SIZES: Mapping[str, Mapping[str, CompareSize]] = {
    "smoke": _sizes(0.02, 32, 32, 8, 8),
    "quick": _sizes(0.2, 1_000, 100, 20, 4, images=512),
    "laptop": _sizes(10.0, 1_975, 1_000, 200, 50),
    "paper": _sizes(60.0, 1_975, 10_000, 1_000, 200),
}
