"""The choice of a strategy: which one answers a question and why (`Plan`), and what it is given (`Request`).

`Facts` say what the look at a few examples (`ggda_ext.gradients.proof.probe`) means for a pass over all points: how
many points fit into a batch, how much work they are, and what does not hold for this model. A `Strategy` says what it
can do and what it costs; `ggda_ext.gradients.strategies` lists them all. Costs are multiples of one forward and
backward pass over the training points. They come from a cost model that was fitted to measurements (``python -m
benchmarks speed`` compares the two). In the cost model a pass counts as three forward passes, capturing a and d as
two, and each direction as one more. Memory speed limits how fast rows of length p are formed, so rows pay off only if
the points of a group (or their tokens) share a row. A separate backward pass for every group also has a fixed price.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ggda_ext.data import IndexedData, pick, to_device
from ggda_ext.gradients.errors import NonFinite
from ggda_ext.gradients.layers import Layer
from ggda_ext.gradients.observation import Observer
from ggda_ext.gradients.proof.captured_layers import CapturedLayers
from ggda_ext.gradients.proof.findings import Findings
from ggda_ext.gradients.proof.truth import Subject
from ggda_ext.groups.partition import GroupBatch, Groups
from ggda_ext.losses import ExampleLoss
from ggda_ext.model import ParameterSpace, all_finite, sums_on
from ggda_ext.sharing import share_of_stream, with_progress

LARGEST_BATCH = 2**17
CACHED_BYTES = 13 * 2**20  # activations of a batch that stay near the cache
ENOUGH_WORK = 2**27  # multiplications; a batch with fewer may be twice as large, because each batch has a fixed cost
LARGER = 3  # how many times larger a batch may be if something is read once per batch
ENOUGH_POINTS = 1024  # a batch has at least this many points, if the budget allows
_BYTES_PER_ACTIVATION = 4  # an activation, its gradient, the copy that autograd keeps, and a tangent


def _batch_size(bytes_per_point: int, work_per_point: float, memory_budget: int) -> int:
    light = min(2 * CACHED_BYTES / bytes_per_point, ENOUGH_WORK / work_per_point)
    wanted = max(CACHED_BYTES // bytes_per_point, ENOUGH_POINTS, light)
    size = int(max(1, min(wanted, memory_budget // bytes_per_point, LARGEST_BATCH)))
    step = 16 if size > 64 else 4 if size > 16 else 1
    return size - size % step


@dataclass(frozen=True)
class Facts:
    """What the choice of a strategy depends on."""

    points: int
    groups: int
    parameters: int
    work_per_point: float
    """Multiplications of one forward pass over one point."""
    ghost_work: float
    """Multiplications of `ghost` per pair of a training and a test point."""
    uncovered: Mapping[str, str]
    """Parameters whose gradients the layers do not show: name → why."""
    refused: Mapping[str, str]
    """Strategies that were found not to give the gradients of this model: name → why."""
    compared: frozenset[str]
    """Strategies that were compared with autograd. ``"auto"`` uses a strategy that has a `compare` only if listed."""
    batch_size: int
    working_bytes: int
    """Bytes of the activations of a batch."""
    itemsize: int
    """Bytes of one number."""
    room: int
    """Most points in a batch: more than `batch_size` if the user set no batch size and the budget allows it."""

    @classmethod
    def of(
        cls,
        found: Findings,
        space: ParameterSpace,
        groups: Groups,
        batch_size: int | None,
        at_most: int | None,
        memory_budget: int,
    ) -> Facts:
        """Make the facts for a pass over all points from a look at some examples.

        Args:
            found: the findings of the look.
            space: model and chosen parameters.
            groups: groups of the points of the pass.
            batch_size: the batch size that the user asked for, or None.
            at_most: points in the user's own batches, or None; a batch has no more unless `batch_size` says so.
            memory_budget: bytes for a batch's activations.
        """
        copied = sum(space.parameters[name].numel() for name in found.copied) * space.dtype.itemsize
        bytes_per_point = _BYTES_PER_ACTIVATION * found.activation_bytes + copied
        work, points = max(found.work, 1.0), int(groups.offsets[-1])
        fitting = _batch_size(bytes_per_point, work, memory_budget)
        size = min(batch_size or min(fitting, at_most or fitting), points)
        is_free = batch_size is None and at_most is None
        if is_free and size:  # a last batch of a few points is slow for its size
            size = ceil(points / ceil(points / size))
        return cls(
            points=points, groups=len(groups), parameters=space.size, work_per_point=work,
            ghost_work=found.ghost_work, uncovered=found.uncovered, refused=dict(found.refused),
            compared=frozenset(found.looked_at), batch_size=size, working_bytes=bytes_per_point * size,
            itemsize=space.dtype.itemsize,
            room=min(memory_budget // bytes_per_point, LARGER * fitting) if is_free else size,
        )  # fmt: skip

    @property
    def group_size(self) -> float:
        return self.points / self.groups

    @property
    def sharing(self) -> float:
        """How often a group uses each parameter, on average: the number of its points times their tokens."""
        return max(self.group_size * self.work_per_point / self.parameters, 1e-9)


@dataclass(frozen=True)
class Cost:
    """What a strategy costs, in passes over the data.

    Attributes:
        once: paid once, for any question.
        direction: for each direction.
        pair: for each test point, if a pair of points costs as much as a forward pass.
        row: for a row per group; divided by `Facts.sharing`, because the points and tokens of a group share it.
        point_row: for a row per point, divided in the same way.
        product: for each direction that is multiplied with such rows, divided in the same way.
        call: for each group, as the number of multiplications that take the same time.
    """

    once: float = 0.0
    direction: float = 0.0
    pair: float = 0.0
    row: float = 0.0
    point_row: float = 0.0
    product: float = 0.0
    call: float = 0.0

    def passes(self, facts: Facts, m: int) -> float:
        """Return the estimated cost of m directions."""
        pairs = self.pair * facts.ghost_work / facts.work_per_point
        rows = self.row + self.point_row * facts.group_size + self.product * m
        calls = self.call / (facts.group_size * facts.work_per_point)
        return self.once + (self.direction + pairs) * m + rows / facts.sharing + calls


@dataclass(frozen=True)
class Strategy:
    """A way to sum gradients by group.

    A model may change its buffers when it runs, so a strategy runs it only once inside one ``space.require_gradients``.

    Attributes:
        name: the name that users pass.
        scores: ``scores(request, directions [m, p]) -> [m, k]``; with `of_points` it takes the test points' request
            in place of the directions.
        blocks: ``blocks(request, max_rows)``, which yields the rows by group; None if the strategy never forms rows.
        cost: the costs that ``"auto"`` compares.
        from_layers: whether it takes gradients from layers only. The layers are compared with autograd for all such
            strategies at once.
        of_points: whether the directions must be the gradients of test points.
        compare: ``compare(subject, findings)`` returns why the strategy does not give what autograd gave for some
            examples, or None if it does. Needed unless the strategy is plain autograd or `from_layers`.
    """

    name: str
    scores: Callable[[Request, Any], Tensor]
    cost: Cost
    blocks: Callable[[Request, int], Iterator[tuple[Tensor, Tensor]]] | None = None
    from_layers: bool = False
    of_points: bool = False
    compare: Callable[[Subject, Findings], str | None] | None = None

    def refusal(self, facts: Facts, *, rows: bool, points: bool) -> str | None:
        """Return the reason why the strategy cannot answer the question, or None if it can.

        Args:
            facts: what is known about model, data and groups.
            rows: whether the question asks for the gradients themselves, not only for inner products.
            points: whether the directions are gradients of test points.
        """
        if self.from_layers and facts.uncovered:
            name, why = next(iter(facts.uncovered.items()))
            more = f" (and {len(facts.uncovered) - 1} more parameters)" if len(facts.uncovered) > 1 else ""
            return f"it cannot see the gradient of parameter {name!r}{more}: {why}"
        if rows and self.blocks is None:
            return "it never forms gradients, only inner products with directions"
        if self.name in facts.refused:
            return facts.refused[self.name]
        return "the directions are not gradients of test points" if self.of_points and not points else None


@dataclass(frozen=True)
class Plan:
    """A chosen strategy, with its reason and estimated cost."""

    strategy: str
    reason: str
    passes: float
    facts: Facts
    working_bytes: int
    """Bytes for a batch, the directions and their scores."""

    def explain(self) -> str:
        """Return one readable line: the strategy, the reason, and the estimated cost."""
        facts = self.facts
        return (
            f"{self.strategy}: {self.reason}; about {self.passes:.1f} x one forward+backward pass over "
            f"{facts.points:,} points in batches of {facts.batch_size}, {self.working_bytes / 2**20:.0f} MB of "
            f"working memory ({facts.groups:,} groups, {facts.parameters:,} parameters)"
        )


def check_strategy(asked: str, strategies: Iterable[str]) -> None:
    """Raise an error if `asked` is neither ``"auto"`` nor the name of a strategy."""
    if not isinstance(asked, str) or (asked != "auto" and asked not in strategies):
        raise ValueError(f"strategy={asked!r} is not one of 'auto', {', '.join(map(repr, strategies))}.")


def compare_missing(
    strategies: Mapping[str, Strategy], asked: str, captured: CapturedLayers, name: str, *, fresh: bool = False
) -> None:
    """Compare strategies that do not use layers with autograd, if they may be needed and were not compared before.

    Args:
        strategies: all strategies, by name.
        asked: a name, or ``"auto"``.
        captured: the model and the findings about it; the results are added to the findings.
        name: name of the data.
        fresh: whether the truth was found at the current values of the parameters; if not, it is found again.
    """
    subject, found = captured.subject, captured.found
    for key, strategy in strategies.items():
        if strategy.compare is None or key in found.looked_at or not (found.uncovered or key == asked):
            continue
        if not fresh:
            found.truth, fresh = subject.truth_of_each(found.batches), True
        why = strategy.compare(subject, found)
        for untouched in found.untouched(subject.space)[:1] if why is None else ():
            why = (
                f"no example of {name} was found whose loss depends on parameter {untouched!r}, so its gradient cannot "
                "be compared with autograd"
            )
        found.refused |= {} if why is None else {key: why}
        found.looked_at.add(key)


def choose(
    strategies: Mapping[str, Strategy],
    asked: str,
    facts: Facts,
    m: int,
    *,
    rows: bool = False,
    points: bool = False,
) -> Plan:
    """Return a plan with the strategy named by `asked`, or for ``"auto"`` with the cheapest that can answer.

    It raises an error if the named strategy cannot answer.

    Args:
        strategies: all strategies, by name.
        asked: a name, or ``"auto"``.
        facts: what is known about model, data and groups.
        m: number of directions.
        rows: whether the question asks for the gradients themselves, not only for inner products.
        points: whether the directions are gradients of test points.
    """
    possible = {
        name: strategy.cost.passes(facts, m)
        for name, strategy in strategies.items()
        if strategy.refusal(facts, rows=rows, points=points) is None
    }
    if asked == "auto":
        proven = [name for name in possible if strategies[name].compare is None or name in facts.compared]
        chosen, reason = min(proven, key=lambda name: possible[name]), _reason(facts, m, rows, points)
    elif asked in possible:
        chosen, reason = asked, "asked for by name"
    else:
        why = strategies[asked].refusal(facts, rows=rows, points=points)
        usable = [name for name, one in strategies.items() if one.refusal(facts, rows=True, points=points) is None]
        instead = "".join(f", {name!r}" for name in usable)  # they form gradients, which a method may need as well
        raise ValueError(f"strategy={asked!r} cannot be used here: {why}. Use 'auto'{instead}.")
    own = facts.ghost_work if strategies[chosen].of_points else facts.parameters  # numbers in a direction
    held = m * int((own + facts.batch_size) * facts.itemsize + facts.groups * 8)  # sums are in double precision
    return Plan(chosen, reason, possible[chosen], facts, facts.working_bytes + held)


def _reason(facts: Facts, m: int, rows: bool, points: bool) -> str:
    asked = "gradient rows" if rows else f"{m} test point{'s' * (m > 1)}" if points else f"{m} direction{'s' * (m > 1)}"
    seen = (
        f"{len(facts.uncovered)} parameters are in layers not known to be linear"
        if facts.uncovered
        else "every parameter is in a layer known to be linear"
    )
    return f"{asked}, mean group size {facts.group_size:.4g}, {seen}"


CACHED_BLOCK_BYTES = 8 * 2**20
Indices = np.ndarray | range


@dataclass(frozen=True)
class Request:
    """One question to a strategy. Its batches are on the model's device."""

    space: ParameterSpace
    loss: ExampleLoss
    data: IndexedData
    groups: Groups
    captured: CapturedLayers
    batch_size: int
    memory_budget: int
    show_progress: bool | None = False
    title: str = "ggda"
    within: tuple[int, int] = (0, 0)
    """This rank's points: a range of ``groups.order`` for `grouped_batches`, of the data for `natural_batches`."""
    room: int = 0
    """Most points in a batch, for a strategy that gains from larger batches."""
    weights: Tensor | None = None
    """Weightings of the points `[w, n]`, or None. Rows are then sums of w_i ∇ℓ_i for each weighting `[b, w, p]`."""

    @property
    def layers(self) -> list[Layer]:
        """The layers that `observe` tells the observer about."""
        return self.captured.layers

    def observe(self, batch: Any, observer: Observer) -> None:
        """Run a batch forward and backward under an observer."""
        self.captured.run(batch, observer)

    def weights_of(self, groups: GroupBatch) -> Tensor | None:
        """The weightings of the points of a batch `[w, b]`; None if points are not weighted."""
        if self.weights is None:
            return None
        at = torch.from_numpy(groups.indices.astype(np.int64)).to(self.weights.device)
        return self.weights[:, at].to(self.space.device, self.space.dtype)

    @property
    def rows_in_budget(self) -> int:
        """Number of rows of length p that fit into the memory budget, for consumers that want large blocks."""
        return self._rows_in(self.memory_budget)

    @property
    def rows_near_cache(self) -> int:
        """Number of rows to form at a time if they are used immediately, because large temporaries page-fault."""
        return self._rows_in(min(CACHED_BLOCK_BYTES, self.memory_budget))

    def _rows_in(self, size: int) -> int:
        weightings = 1 if self.weights is None else len(self.weights)
        return int(min(max(1, size // (weightings * self.space.size * self.space.dtype.itemsize)), 1024))

    def empty_scores(self, m: int) -> Tensor:
        """Return zeros `[m, k]` to add scores to, in double precision because a group may have a billion points."""
        return torch.zeros(m, len(self.groups), dtype=torch.float64, device=sums_on(self.space.device))

    def natural_batches(self) -> Iterator[tuple[Indices, Any]]:
        """Yield this rank's points as `(indices of the points, batch)`, in the order of the data set."""
        low, high = self.within
        fits = self.data.is_fit_for(self.space.device)
        for indices, batch in self._bar(self._in_order(), high - low):
            at = range(int(indices[0]), int(indices[-1]) + 1) if self._complete else indices
            yield at, batch if fits else to_device(batch, self.space.device)

    def ids_of(self, points: Indices) -> Tensor:
        """The group ids of points `[b]`."""
        return torch.from_numpy(self.groups.labels_of(points).astype(np.int64)).to(self.space.device)

    @cached_property
    def _points(self) -> int:
        return int(self.groups.sizes.sum())

    @cached_property
    def _complete(self) -> bool:
        return self._points == self.groups.n

    def _in_order(self) -> Iterator[tuple[np.ndarray, Any]]:
        if self.data.is_stream:
            yield from share_of_stream(self._counted())
            return
        if self._complete:
            yield from self.data.my_share(self.batch_size)
            return
        inside = np.flatnonzero(self.groups.labels >= 0)[slice(*self.within)]
        runs = [inside[low : low + self.batch_size] for low in range(0, len(inside), self.batch_size)]
        yield from zip(runs, self.data.batches(runs), strict=True)

    def _counted(self) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield the points of a stream that are in a group; raise an error if it has fewer or more than the groups."""
        seen = 0
        for indices, batch in self.data.sequential(self.batch_size):
            seen += len(indices)
            if seen > self.groups.n:
                raise ValueError(
                    f"groups was built for {self.groups.n} training points, but {self.data.name} gives more: "
                    "build it with one label per point."
                )
            inside = None if self._complete else np.flatnonzero(self.groups.labels_of(indices) >= 0)
            if inside is None or len(inside) == len(indices):
                yield indices, batch
            elif len(inside):
                yield indices[inside], pick(batch, inside.tolist())
        if seen < self.groups.n:
            raise ValueError(
                f"groups was built for {self.groups.n} training points, but {self.data.name} gives only "
                f"{seen}: build it with one label per point."
            )

    def grouped_batches(
        self, most_groups: int | None = None, most_points: int | None = None
    ) -> Iterator[tuple[GroupBatch, Any]]:
        """Yield batches of the points `within`, with groups back to back, each with the segments of its groups."""
        size = min(self.batch_size, most_points or self.batch_size)
        batches = self.data.batches(group.indices for group in self.groups.batches(size, most_groups, self.within))
        pairs = zip(self.groups.batches(size, most_groups, self.within), batches, strict=True)
        low, high = self.within
        for groups, batch in self._bar(pairs, high - low):
            yield groups, to_device(batch, self.space.device)

    def of_groups(self, count: int) -> Request:
        """Return this request with batches of about `count` groups, as far as `room` allows, of about equal size."""
        each = ceil(self._points / len(self.groups))
        batches = ceil(self._points / max(self.batch_size, min(count * each, self.room - each)))
        return replace(self, batch_size=max(self.batch_size, min(ceil(self._points / batches) + each, self.room)))

    def _bar(self, pairs: Iterator[tuple[Any, Any]], total: int) -> Iterator[tuple[Any, Any]]:
        return with_progress(pairs, int(total), self.title, self.show_progress)


def joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    """Concatenate parts; return a single part unchanged, because `cat` would copy it."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def check_finite(found: Tensor, groups: Groups, ids: Tensor | None = None) -> None:
    """Raise an error that names the groups if scores `[m, k]`, or rows `[b, …]` of the groups `ids`, are not finite."""
    if not all_finite(found):
        bad = ~found.isfinite().all(0) if ids is None else ~found.isfinite().flatten(1).all(1)
        wrong = bad.nonzero().flatten().cpu()
        names = wrong if ids is None else ids.cpu()[wrong]
        raise NonFinite(names.tolist(), groups, "scores" if ids is None else "gradients")
