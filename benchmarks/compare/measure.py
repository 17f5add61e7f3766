"""CPU seconds of a method's original and of its group version, for one question.

The original is slow, so it gets as many points as a fixed time allows: 1, 2, 4, … batches, until the time is used up.
It gets all points if they would not take much longer. If a single batch takes longer than the fixed time, it gets 1, 2
and 3 batches. If points are left, the time for all points is extrapolated along a line,

    seconds(N) = seconds(n) + slope · (N − n),

with the slope between the first and the last of the last three sizes. The slope between two neighbouring sizes is
mostly noise if a batch costs little compared with the fixed costs. `Original.linearity` says how well the line through
the two sizes before n predicts the time measured at n; 1 is perfect. If the line misses, the smallest size is timed
once more, because the first call of an original may include some warm-up. The group version gets all points. Both sides
take turns, and the best of several turns counts. If the group version is hardly faster, or slower, both sides get more
turns.

The group version keeps what it finds out about a model for the next call, and the turns use it. If the time of a first
call is needed, up to two calls are made without it, each before a turn, and the better one counts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks.check.measure import quiet
from benchmarks.compare.hessians import Hessians
from ggda_ext.gradients.proof.findings import forget

TURNS, FIRST_CALLS = 4, 2
LEFT_ALONE = 0.7
"""No more points are added if the last size took more than this share of the time: twice the points take too long."""
WHOLE = 6.0
"""All points are timed, and nothing is extrapolated, if they are expected to take at most this many times the time."""
JUMP = 4
"""An expected time is trusted up to this many times the points, because a line through noise may predict wrongly."""
STRAIGHT = 0.1
"""`Original.linearity` may differ from 1 by this much."""
CLOSE, MORE_TURNS = 1.3, 3
"""If the ratio of times is below `CLOSE`, the first turns do not decide, and there are `MORE_TURNS` more turns."""
T = TypeVar("T")


class Clock:
    """Measures the CPU seconds of calls, without the seconds of Captum's Hessian, which are reported separately.

    Attributes:
        hessians: Captum's Hessians, and the seconds of the last one.
    """

    def __init__(self) -> None:
        self.hessians = Hessians()

    def timed(self, call: Callable[[], T]) -> tuple[float, T]:
        """Return the CPU seconds of a call, and its result."""
        gc.collect()
        self.hessians.reset()
        with quiet(), self.hessians.shared():
            start = time.process_time()
            given = call()
            return time.process_time() - start - self.hessians.inside, given


@dataclass
class Original:
    """Times of an original at several numbers of points.

    Attributes:
        points: number of all training points.
        seconds: number of points → best time.
    """

    points: int
    seconds: dict[int, float] = field(default_factory=dict)

    @property
    def timed_points(self) -> int:
        """The largest number of points that was timed."""
        return max(self.seconds)

    @property
    def last(self) -> list[int]:
        """The numbers of points that are used: all points if they were timed, else the three largest, for the line."""
        return [self.points] if self.points in self.seconds else sorted(self.seconds)[-3:]

    @property
    def extrapolated(self) -> float:
        """Seconds for all points: measured if all points were timed, else extrapolated."""
        n = self.timed_points
        if n == self.points or len(self.last) < 2:
            return self.seconds[n]
        return self.seconds[n] + max(0.0, self._slope(self.last[0], n)) * (self.points - n)

    def seconds_for(self, points: int) -> float:
        """Seconds for a number of points that was timed, or for all points."""
        return self.extrapolated if points == self.points else self.seconds[points]

    @property
    def linearity(self) -> float | None:
        """Seconds at the largest number of points as the two sizes before predict them, divided by the measured ones.

        It is None if nothing is extrapolated because all points were timed, or if fewer than three sizes were timed.
        """
        if self.timed_points == self.points or len(self.last) < 3:
            return None
        first, half, n = self.last
        return (self.seconds[half] + self._slope(first, half) * (n - half)) / self.seconds[n]

    def _slope(self, low: int, high: int) -> float:
        """Seconds per point between two sizes."""
        return (self.seconds[high] - self.seconds[low]) / (high - low)


def climb(clock: Clock, run: Callable[[int], Any], first: int, points: int, seconds: float) -> Original:
    """Time an original at 1, 2, 4, … times `first` points, until `seconds` are used up or all `points` are timed.

    At least three sizes are timed, so that the line can be checked, unless fewer sizes reach all points.
    """
    found, count = Original(points), min(first, points)
    while True:
        found.seconds[count], _ = clock.timed(lambda: run(count))  # noqa: B023  # called at once
        if count == points:
            return found
        last = found.seconds[count]
        if len(found.seconds) > 2 and found.extrapolated <= WHOLE * seconds:
            count = min(JUMP * count, points)
        elif len(found.seconds) > 2 and last > LEFT_ALONE * seconds:
            break
        else:
            count = min(count + (first if found.seconds[min(first, points)] > seconds else count), points)
    if abs((found.linearity or 1.0) - 1) > STRAIGHT and first in found.last:
        again, _ = clock.timed(lambda: run(first))
        found.seconds[first] = min(found.seconds[first], again)
    return found


def take_turns(
    clock: Clock, original: Original, run: Callable[[int], Any], groups: Mapping[Any, Callable[[], T]], seconds: float,
    also_first: Container[Any] = (),
) -> tuple[dict[Any, float], dict[Any, float], dict[Any, T]]:  # fmt: skip
    """Return the best CPU seconds of every group case, the seconds of first calls, and the results of the cases.

    The sizes `original.last` take turns with the cases. A case or size that has used up its time takes no more turns.

    Args:
        clock: times calls.
        original: times of the original so far; better times replace them.
        run: runs the original on a number of points.
        groups: name → function that runs the group case.
        seconds: time of a case, after which it takes no more turns.
        also_first: names of the cases whose first calls are timed as well.
    """
    best, first, given = dict.fromkeys(groups, float("inf")), dict[Any, float](), dict[Any, T]()
    spent = dict.fromkeys(groups, 0.0)
    theirs = {count: original.seconds[count] for count in original.last}  # `climb` was the first turn of the original
    allowed = 2 * seconds if len(theirs) == 1 else seconds
    for turn in range(TURNS):
        for name, call in groups.items():
            if name in also_first and turn < FIRST_CALLS and (not turn or first[name] < seconds):
                forget()
                took, _ = clock.timed(call)
                first[name] = min(first.get(name, took), took)
            if spent[name] < seconds:
                took, given[name] = clock.timed(call)
                spent[name] += took
                best[name] = min(best[name], first.get(name, took), took)
        for count in theirs if turn else ():
            if theirs[count] < allowed:
                took, _ = clock.timed(lambda: run(count))  # noqa: B023  # called at once
                theirs[count] += took
                original.seconds[count] = min(original.seconds[count], took)
    return best, first, given


def decide(
    clock: Clock, original: Original, run: Callable[[int], Any], call: Callable[[], Any], points: int, best: float,
    seconds: float,
) -> float:  # fmt: skip
    """Return the best CPU seconds of a group case, after more turns of both sides if it is hardly faster.

    Args:
        clock: times calls.
        original: times of the original so far; better times replace them.
        run: runs the original on a number of points.
        call: runs the group case.
        points: number of points of the group case.
        best: best time of the group case so far.
        seconds: time after which the group case takes no more turns.
    """
    if original.seconds_for(points) / best >= CLOSE:
        return best
    spent, counts = 0.0, [points] if points == original.timed_points else original.last
    for _ in range(MORE_TURNS):  # no early end after good turns, so that both sides have the same number
        if spent > seconds:
            break
        took, _ = clock.timed(call)
        best, spent = min(best, took), spent + took
        for count in counts:
            theirs, _ = clock.timed(lambda: run(count))  # noqa: B023  # called at once
            original.seconds[count] = min(original.seconds[count], theirs)
    return best
