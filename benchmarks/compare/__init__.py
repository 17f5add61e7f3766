"""`python -m benchmarks compare`: how much faster the group versions are than the original toolkits, at real size.

There are two questions: one property, which is the mean loss of the test points, and test points one by one (20; 4 of
QNLI). The group version scores all training points of the scale (at `quick`, half of CIFAR-10's), in groups of 1, 64
and 1,024. The original scores as many points as a fixed time allows, see `benchmarks.compare.measure`. The times of
grouping, and of the Hessian that Captum computes for both sides, are reported separately. For groups of one and test
points, the drop-ins run the code of their toolkit, so there is nothing to compare. `benchmarks.check` checks that the
scores are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import check
from benchmarks.compare import table
from benchmarks.compare.sizes import SIZES, CompareSize
from benchmarks.names import DEFAULT_MODE, EXACT_MODE, ONE_PROPERTY, TEST_POINTS
from benchmarks.side_by_side import SideBySide
from benchmarks.sizes import Scale

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.check.case import Case, Method, Score
    from benchmarks.compare.measure import Clock, Original

QUESTIONS = (ONE_PROPERTY, TEST_POINTS)


@dataclass(frozen=True)
class Comparison:
    """One task, prepared for both questions.

    Attributes:
        clock: times calls.
        size: size of the comparison.
        grouped: question → group size → the case with all training points in groups of this size.
        grouping: group size → CPU seconds of the grouping.
        common: fields that all rows of the task share.
    """

    clock: Clock
    size: CompareSize
    grouped: dict[str, dict[int, Case]]
    grouping: dict[int, float]
    common: dict[str, Any]

    @classmethod
    def of(cls, name: str, scale: Scale, data_dir: Path | None) -> Comparison:
        """Load the data of a task at a scale, train its model and make its groups."""
        from benchmarks.compare.measure import Clock

        clock, size = Clock(), SIZES[scale.name][name]
        numbers = replace(scale.check[name], points=size.points, tests=None, batch=size.batch)
        whole, common = check.prepared(name, scale, data_dir, numbers)
        points = len(whole.train[0])
        grouping: dict[int, float] = {}
        grouped: dict[str, dict[int, Case]] = {question: {} for question in QUESTIONS}
        for group_size in (one for one in table.GROUP_SIZES if one == 1 or one <= points // 2):
            case = whole.grouped_by(group_size)
            grouping[group_size], _ = clock.timed(lambda: case.groups)  # noqa: B023  # called at once
            grouped[ONE_PROPERTY][group_size] = case.asking(size.property_tests, True)
            grouped[TEST_POINTS][group_size] = case.asking(size.tests, False)
        return cls(clock, size, grouped, grouping, common | {"experiment": "speed", "train_points": points})

    def rows(self, method: Method) -> Iterator[dict[str, Any]]:
        """Yield one row per question. If either side raises an error, the status of the row is `failed`."""
        from benchmarks.check.measure import failed

        for question in QUESTIONS:
            cases = self.grouped[question]
            if method.solves_each_test:
                tests, asks_one = self.size.solved_tests, question == ONE_PROPERTY
                cases = {size: case.asking(tests, asks_one) for size, case in cases.items()}
            row = self.common | {
                "toolkit": method.toolkit,
                "method": method.name,
                "question": question,
                "test_points": len(next(iter(cases.values())).test[0]),
                "grouping_seconds": {str(size): self.grouping[size] for size in cases},
            }
            try:
                yield row | {
                    "settings": method.settings(cases[1]),
                    "status": "measured",
                    **self._measured(method, cases),
                }
            except Exception as failure:
                yield row | failed(failure)

    def _measured(self, method: Method, cases: dict[int, Case]) -> dict[str, Any]:
        from benchmarks.compare.measure import climb, decide, take_turns

        any_size = cases[1]

        def original(count: int) -> Tensor:
            return method.original(any_size.first(count))

        found = climb(self.clock, original, self.size.batch, len(any_size.train[0]), self.size.seconds)
        hessian = self.clock.hessians.apart
        own_code = [size for size, case in cases.items() if size == 1 and method.own_code and not case.one_property]
        asked = {size: self._asked(method, size, case, found) for size, case in cases.items() if size not in own_code}
        calls = {
            (size, mode): partial(score, asked[size])
            for size, case in sorted(asked.items(), key=lambda item: item[0] != table.HEADLINE_SIZE)
            for mode, score in _modes(method, size, case).items()
        }  # the headline size comes first, because the other sizes reuse what its first call finds out
        headline = [name for name in calls if any_size.one_property and name[0] == table.HEADLINE_SIZE]
        best, first, scores = take_turns(self.clock, found, original, calls, self.size.seconds, headline[:1])
        for (size, mode), call in calls.items():
            points = len(asked[size].train[0])
            best[size, mode] = decide(
                self.clock, found, original, call, points, best[size, mode], self.size.seconds
            )  # fmt: skip
        cells = []
        for (size, mode), seconds in best.items():
            points = len(asked[size].train[0])
            theirs, exact = found.seconds_for(points), scores.get((size, EXACT_MODE))
            cells.append(
                {
                    "group_size": size,
                    "mode": mode,
                    "points": points,
                    "seconds": seconds,
                    "speed_up": theirs / seconds,
                    "speed_up_first": theirs / first[size, mode] if (size, mode) in first else None,
                    "speed_up_with_hessian": (theirs + hessian) / (seconds + hessian),
                    "agreement": None if exact is None or mode == EXACT_MODE else _agreement(scores[size, mode], exact),
                }
            )
        return {
            "original_points": found.timed_points,
            "original_timed_seconds": found.seconds[found.timed_points],
            "original_seconds": found.extrapolated,
            "hessian_seconds": hessian,
            "linearity": found.linearity,
            "own_code": own_code,
            "cells": cells,
        }

    def _asked(self, method: Method, size: int, case: Case, original: Original) -> Case:
        """Return the case with all points, or with the points of the original if both sides form a row per point.

        Both sides do so for groups of one, if test points are asked for or the method has `row_per_point`.
        """
        same_work = size == 1 and (method.row_per_point or not case.one_property)
        return case.first(original.timed_points) if same_work else case


def _modes(method: Method, size: int, case: Case) -> dict[str, Score]:
    """Return mode → function: the drop-in's default mode, and the exact mode if the default is an approximation.

    The exact mode is measured for one size only, because it takes the same time at all sizes.
    """
    if method.default is None:
        return {EXACT_MODE: method.grouped}
    exact = {EXACT_MODE: method.grouped} if case.one_property and size == table.HEADLINE_SIZE else {}
    return {DEFAULT_MODE: method.default} | exact


def _agreement(found: Tensor, expected: Tensor) -> float | None:
    """Return the Spearman correlation of the scores of two modes over groups, averaged over test points.

    It is None for fewer than three groups.
    """
    from benchmarks.fidelity import mean_rank_correlation

    return None if found.shape[1] < 3 else mean_rank_correlation(found.T, expected.T)


SIDE = SideBySide(
    __name__, lambda: check.methods(), "method", table.heading, table.source, table.line,
    lambda task, method: [f"speed/{task}/{method.toolkit}/{method.name}/{question}" for question in QUESTIONS],
    lambda *given: Comparison.of(*given), lambda _, method, compared: compared.rows(method),
)  # fmt: skip
run = SIDE.run
