"""CPU seconds of a method's original and of its group version, for one question.

The original is slow, so it gets as many points as a fixed time allows: 1, 2, 4, … batches of them, until the time is
used up; all points, where these would not take much longer. One that takes longer for a single batch gets 1, 2 and 3 of
them. Where points are left, its time for all of them is extrapolated along a line,

    seconds(N) = seconds(n) + slope · (N − n),

with the slope between the first and the last of the last three sizes: that between two neighbours is mostly noise where
a batch costs little beside what is fixed. `Original.linearity` says how well the line through the two sizes before n
predicts what was measured at n; 1 is perfect. Where it misses, the smallest size is timed once more, as the first call
of an original may warm something up. The group version gets all points. Both take turns, and the best of several turns
counts; where the group version comes out hardly faster, or slower, both get more turns.

What the group version finds out about a model is kept for the next call. Turns are made with that; where the time of a
first call is asked for, up to two are made before, without it, and the better of them counts.
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
"""Share of the time after which twice the points would take too long."""
WHOLE = 6.0
"""All points are timed if they are foretold to take at most so many times the time: nothing is extrapolated then."""
JUMP = 4
"""Times the points that a foretold time is trusted for: what a line through noise predicts may be wrong."""
STRAIGHT = 0.1
"""By how much `Original.linearity` of a line may differ from 1."""
CLOSE, MORE_TURNS = 1.3, 3
"""The ratio of times below which the first turns decide too little, and how many more turns there are then."""
T = TypeVar("T")


class Clock:
    """CPU seconds of calls, without those of Captum's Hessian, which stand apart.

    Attributes:
        hessians: Captum's, and the seconds of the last one.
    """

    def __init__(self) -> None:
        self.hessians = Hessians()

    def timed(self, call: Callable[[], T]) -> tuple[float, T]:
        """CPU seconds of a call, and what it gave."""
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
        points: all training points there are.
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
        """The numbers of points that count: all of them if they were timed, else the three largest, for the line."""
        return [self.points] if self.points in self.seconds else sorted(self.seconds)[-3:]

    @property
    def extrapolated(self) -> float:
        """Seconds for all points; those that were measured, if they were."""
        n = self.timed_points
        if n == self.points or len(self.last) < 2:
            return self.seconds[n]
        return self.seconds[n] + max(0.0, self._slope(self.last[0], n)) * (self.points - n)

    def seconds_for(self, points: int) -> float:
        """Seconds for a number of points that was timed, or for all points."""
        return self.extrapolated if points == self.points else self.seconds[points]

    @property
    def linearity(self) -> float | None:
        """Seconds at the largest number of points as the two sizes before predict them, over those measured.

        None where all points were timed, so that nothing is extrapolated.
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

    Three sizes at least are timed, so that a line can be checked.
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
    """CPU seconds of every group case, best and of a first call, and what it gave.

    The original's last three sizes take turns with them. What has used up `seconds` takes no further turns.

    Args:
        clock: times calls.
        original: times of the original so far; better ones are put in.
        run: the original on a number of points.
        groups: name → group case.
        seconds: after which a case takes no further turns.
        also_first: names of the cases whose first calls are timed as well.
    """
    best, first, given = dict.fromkeys(groups, float("inf")), dict[Any, float](), dict[Any, T]()
    spent = dict.fromkeys(groups, 0.0)
    theirs = {count: original.seconds[count] for count in original.last}  # the climb was their first turn
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
    """The best CPU seconds of a group case of so many points, after more turns of both sides if it is hardly faster.

    Args:
        clock: times calls.
        original: times of the original so far; better ones are put in.
        run: the original on a number of points.
        call: the group case.
        points: that it has.
        best: its best time so far.
        seconds: after which it takes no further turns.
    """
    if original.seconds_for(points) / best >= CLOSE:
        return best
    spent, counts = 0.0, [points] if points == original.timed_points else original.last
    for _ in range(MORE_TURNS):  # all of them, however the first come out: both sides have as many
        if spent > seconds:
            break
        took, _ = clock.timed(call)
        best, spent = min(best, took), spent + took
        for count in counts:
            theirs, _ = clock.timed(lambda: run(count))  # noqa: B023  # called at once
            original.seconds[count] = min(original.seconds[count], theirs)
    return best
