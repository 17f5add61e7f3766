"""The provider of group-summed gradients: it checks the model once, plans, and hands the work to a strategy.

With several ranks (see `ggda_ext.sharing`) each rank does a share of every pass over the training data.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.data import DataLike, IndexedData, to_device
from ggda_ext.gradients.errors import Unproven
from ggda_ext.gradients.observation import Observer
from ggda_ext.gradients.plan import (
    LARGEST_BATCH,
    Facts,
    Plan,
    Request,
    Strategy,
    check_finite,
    check_strategy,
    choose,
    compare_missing,
)
from ggda_ext.gradients.points import Directions, PointGradients
from ggda_ext.gradients.proof.captured_layers import CapturedLayers
from ggda_ext.gradients.proof.findings import recall, remember
from ggda_ext.gradients.proof.probe import look
from ggda_ext.gradients.proof.truth import Subject
from ggda_ext.gradients.strategies import BY_NAME
from ggda_ext.gradients.strategies.ghost import squared_norms
from ggda_ext.groups.partition import GroupBatch, Groups, GroupsLike
from ggda_ext.losses import as_example_loss
from ggda_ext.model import (
    ParameterChoice,
    ParameterSpace,
    all_finite,
    check_deterministic_modules,
    only_thread,
    training_kernels,
    unwrapped,
)
from ggda_ext.sharing import add_up, adding_up, anywhere, checksum, in_order, my_share, together, world_size
from ggda_ext.tables import aligned, tensor_of
from ggda_ext.words import check_counts, whole_bytes


class GroupGradients:
    """Gradients of the loss summed over groups of training points, at the model's current parameters.

    It answers two questions. `scores(directions)` gives inner products with directions, without forming gradients
    if that can be avoided. `blocks()` gives the gradients themselves, streamed. The values of the parameters may
    change between calls (other checkpoints). Every call leaves the model as it was.

    Under ``torchrun``, every rank makes the same provider and calls the same methods, and each does a share of the
    work. All methods except `blocks`, `small_blocks` and `observe` give the whole result, the same on every rank.

    Args:
        model: any `nn.Module`, in eval mode if it has dropout or BatchNorm; a DistributedDataParallel is unwrapped.
        loss_fn: ``loss_fn(output, target)`` of any reduction, or an `ExampleLoss`; None for a model that returns its
            own loss.
        data: the training set: a DataLoader that does not shuffle, a Dataset, tensors, arrays, pandas frames, or a dict
            of these.
        groups: a `Groups` or anything it accepts; None for groups of one.
        parameters: the parameters that the gradients are taken for: names of parameters or modules, or the modules or
            parameters themselves; by default all parameters that require a gradient.
        strategy: ``"auto"``, or the name of a strategy (see `plan`).
        batch_size: points per batch; by default the batch size of a DataLoader, otherwise as many points as run fast
            and fit the memory budget.
        memory_budget: bytes for one batch's activations and for one block of rows.
        show_progress: whether to show a progress bar for passes over the data; by default for those over 5 seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any,
        data: DataLike,
        groups: GroupsLike | None = None,
        *,
        parameters: ParameterChoice = None,
        strategy: str = "auto",
        batch_size: int | None = None,
        memory_budget: int = 256 * 2**20,
        show_progress: bool | None = None,
    ) -> None:
        check_strategy(strategy, BY_NAME)
        check_counts(batch_size=batch_size)
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}: pass the trained torch.nn.Module itself.")
        self.model, self.loss = unwrapped(model), as_example_loss(loss_fn)
        self.data = data if isinstance(data, IndexedData) else IndexedData(data, "the training data")
        self.data.suit(self.model)
        if groups is None and self.data.n is None:
            raise TypeError(f"{self.data.name} is a stream without a length: pass groups with one label per point.")
        self.groups = self._groups_of(groups)
        with only_thread(model):  # another thread may have frozen some of the parameters
            self.space = ParameterSpace(model, parameters)
        self.strategy, self.memory_budget, self.show_progress = strategy, whole_bytes(memory_budget), show_progress
        self._batch_size = batch_size
        self._at_most = None if isinstance(data, IndexedData) else self.data.batch_size
        self._last_tests: tuple[PointGradients, GroupGradients] | None = None

    @property
    def p(self) -> int:
        """Total size of the chosen parameters, which is the length of a row."""
        return self.space.size

    @property
    def batch_size(self) -> int:
        """Number of points that are run at once."""
        return self._facts.batch_size

    def on(self, data: DataLike, groups: GroupsLike | None = None) -> GroupGradients:
        """Return a copy of this provider for other data of the same kind; it keeps what is known about the model."""
        other = copy.copy(self)
        other.data = data if isinstance(data, IndexedData) else IndexedData(data, self.data.name)
        other.data.suit(other.model)
        other.groups = other._groups_of(groups)
        other._captured = self._captured
        return other

    def _groups_of(self, groups: GroupsLike | None) -> Groups:
        """Make the groups of the data; a pandas column is put into the order of the data's index."""
        if groups is None:
            return Groups.singletons(self.data.n or 0)
        if self.data.index is not None:
            groups = aligned(groups, self.data.index, "groups", self.data.name)
        try:
            return Groups.of(groups, self.data.n)
        except ValueError as error:
            if not self.data.dropped:
                raise
            raise ValueError(
                f"{error} {self.data.name} is a DataLoader with drop_last=True, which leaves out {self.data.dropped} "
                "points: pass one with drop_last=False, or the data set itself."
            ) from error

    def plan(self, directions: int | Directions | np.ndarray | None = 1) -> Plan:
        """Return the plan for a number of directions, for given directions or test points, or (None) for rows."""
        directions = directions if directions is None else _checked_kind(directions)
        with only_thread(self.model):
            facts, points = self._facts, isinstance(directions, PointGradients)
            if isinstance(directions, PointGradients) and "ghost" not in facts.refused and not facts.uncovered:
                why = self.tests(directions)._not_ghost()
                facts = facts if why is None else replace(facts, refused={**facts.refused, "ghost": why})
            return choose(BY_NAME, self.strategy, facts, _count(directions), rows=directions is None, points=points)

    def _not_ghost(self) -> str | None:
        """The reason why `ghost` cannot be used with these test points, or None if it can."""
        facts = self._facts
        if facts.uncovered:
            name, why = next(iter(facts.uncovered.items()))
            return f"the loss of the test points has a gradient of parameter {name!r} that layers do not show: {why}"
        return f"for the test points, {facts.refused['ghost']}" if "ghost" in facts.refused else None

    def tests(self, points: PointGradients, groups: GroupsLike | None = None) -> GroupGradients:
        """Return a provider of the gradients of test points, one row per point or summed by `groups`.

        It has the same model, parameters and limits. The provider of single points is kept until this method is
        called with other points.
        """
        if groups is None and self._last_tests is not None and self._last_tests[0] is points:
            return self._last_tests[1]
        provider = points.provider(
            self.model, groups, parameters=self.space.parameters.values(), batch_size=self._batch_size,
            at_most=self._at_most, memory_budget=self.memory_budget,
        )  # fmt: skip
        if groups is None:
            self._last_tests = points, provider
        return provider

    def scores(self, directions: Directions | np.ndarray) -> Tensor:
        """Return the inner products of directions with every group's summed gradient.

        Args:
            directions: a tensor or array `[m, p]`, or the `PointGradients` of m test points.

        Returns:
            Scores `[m, k]`, on the model's device, in the model's dtype (float32 for a model of half precision).
        """
        given = _checked_kind(directions)
        if isinstance(given, int):
            raise TypeError(f"directions={given}: pass the directions themselves, a tensor [m, {self.p}].")
        directions = given
        with only_thread(self.model):
            check_deterministic_modules(self.model)
            with together(partial(self._same, directions)), training_kernels():
                part = self._proven_scores(directions)
            if anywhere(part is None):
                assert isinstance(directions, PointGradients)
                blocks = self.tests(directions).all_blocks()  # each block takes a pass over the training data
                return torch.cat([self.scores(rows) for _, rows in blocks])
            return self._summed(part)

    def _proven_scores(self, directions: Directions) -> Tensor | None:
        """Return this rank's part of the scores; choose another strategy if a pass meets something unproven.

        Returns None if the chosen strategy takes the gradients of test points and not the points themselves.
        """
        while True:
            plan = self.plan(directions)
            strategy, request = BY_NAME[plan.strategy], self._request(plan, self._share())
            try:
                if isinstance(directions, Tensor):
                    return strategy.scores(request, self._checked(directions))
                if not strategy.of_points:
                    return None
                tests = self.tests(directions)
                return strategy.scores(request, tests._request(tests.plan(None)))
            except Unproven as error:
                self._give_up(plan, error)

    def _give_up(self, plan: Plan, error: Unproven) -> None:
        """Stop using the layers of some parameters and choose again; raise an error if the user named the strategy."""
        if self.strategy != "auto":
            raise ValueError(f"strategy={plan.strategy!r} cannot be used here: {error}. Use 'auto'.") from error
        self.do_without(error.why, error.refused)

    def do_without(self, why: Mapping[str, str], refused: Mapping[str, str]) -> None:
        """Stop using the layers and strategies that do not give the gradient, as reported by an `Unproven`.

        Args:
            why: parameters whose layers do not give it: name → why.
            refused: strategies that do not give it: name → why.
        """
        found = self._captured.found
        found.refused |= refused
        found.uncovered = {**found.uncovered, **why}
        compare_missing(BY_NAME, "auto", self._captured, self.data.name)

    def blocks(
        self,
        max_rows: int | None = None,
        weights: Tensor | np.ndarray | None = None,
        through: Callable[[Tensor], Tensor] | Tensor | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the group-summed gradients as `(group ids [b], rows [b, p])`; each rank yields its own groups.

        Every group is whole and on one rank, and the ranks do not wait for each other. So a sum over all groups must
        also be added up over the ranks (`ggda_ext.sharing.add_up`). See also `all_blocks`.

        Args:
            max_rows: most rows in a block; by default as many as fit the memory budget. Small blocks are faster
                to form. Large blocks are for consumers that have a cost per block, such as random projections.
            weights: weightings of the points `[w, n]`. Rows are then `[b, w, p]`, for each weighting the sums of
                w_i ∇ℓ_i, all from one pass.
            through: a linear map of the last dimension, such as a projection, or its matrix `[p, d]`. Its results are
                yielded in place of the rows, and only they are checked for numbers that are not finite, because they
                are much shorter. A matrix is faster, because the rows need not be formed as a whole; all results may
                then come as one block.
        """
        check_counts(max_rows=max_rows)
        if isinstance(weights, np.ndarray):
            weights = tensor_of(weights, "weights")
        if weights is not None and not isinstance(weights, Tensor):
            raise TypeError(
                f"weights is a {type(weights).__name__}: pass a tensor [w, {self.groups.n}], a row for each weighting."
            )
        if weights is not None and (weights.dim() != 2 or weights.shape[1] != self.groups.n):
            raise ValueError(
                f"weights has shape {list(weights.shape)}: pass [w, {self.groups.n}], a row for each weighting."
            )
        if isinstance(through, Tensor) and (through.dim() != 2 or len(through) != self.p):
            raise ValueError(f"through has shape {list(through.shape)}: pass a matrix [{self.p}, d], or a function.")
        return self._blocks(max_rows, range(len(self.groups)), weights, through)

    def small_blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `blocks()` of few rows, which stay in the cache: the fastest way if each row is used once."""
        return self.blocks(self._request(self.plan(None)).rows_near_cache)

    def all_blocks(self, max_rows: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `blocks()` of all groups on every rank: the ranks form shares of each block and exchange them."""
        if world_size() == 1:
            yield from self.blocks(max_rows)
            return
        k, step = len(self.groups), max_rows or self._request(self.plan(None)).rows_in_budget
        for low in range(0, k, step):
            ids = torch.arange(low, min(low + step, k))
            rows = torch.zeros(len(ids), self.p, dtype=self.space.dtype, device=self.space.device)
            with adding_up(rows, same=self._same):
                for some, block in self._blocks(max_rows, range(low, low + len(ids))):
                    rows[(some - low).to(rows.device)] = block
            yield ids, rows

    def _blocks(
        self,
        max_rows: int | None,
        ids: range,
        weights: Tensor | None = None,
        through: Callable[[Tensor], Tensor] | Tensor | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        with only_thread(self.model):
            check_deterministic_modules(self.model)
            within = self._share(ids)
            while True:
                plan = self.plan(None)
                request = replace(self._request(plan, within), weights=weights)
                try:
                    for some, given in self._formed(BY_NAME[plan.strategy], request, max_rows, through):
                        check_finite(given, self.groups, some)
                        yield some, given
                        within = int(self.groups.offsets[int(some[-1]) + 1]), within[1]
                    return
                except Unproven as error:
                    self._give_up(plan, error)

    def _formed(
        self,
        strategy: Strategy,
        request: Request,
        max_rows: int | None,
        through: Callable[[Tensor], Tensor] | Tensor | None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks of rows after `through`; products with a matrix come as scores if these fit into the budget."""
        if isinstance(through, Tensor):
            low, high = np.searchsorted(self.groups.offsets, request.within).tolist()
            fits = len(self.groups) * through.shape[1] * 8 <= self.memory_budget and through.dtype == self.space.dtype
            if strategy.from_layers and request.weights is None and fits and low < high:
                scores = strategy.scores(request, self._checked(through.T))
                yield torch.arange(low, high), scores[:, low:high].T.to(self.space.device, through.dtype)
                return
        form = strategy.blocks
        assert form is not None  # the plan only chooses strategies that form rows
        for some, rows in form(request, max_rows or request.rows_in_budget):
            if isinstance(through, Tensor):
                yield some, (rows.to(through.dtype) @ through).to(rows.dtype)
            else:
                yield some, rows if through is None else through(rows)

    @torch.inference_mode(False)
    def rows(self) -> Tensor:
        """Return all group-summed gradients at once `[k, p]`; use it only if they fit into memory."""
        with only_thread(self.model):
            rows = torch.zeros(len(self.groups), self.p, dtype=self.space.dtype, device=self.space.device)
            with adding_up(rows, same=self._same):
                for ids, block in self.small_blocks():
                    rows[ids.to(rows.device)] = block
            return rows

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply ``function(rows [b, p]) -> [b, …]`` to all groups, block by block; results in group order `[k, …]`.

        Every rank forms the rows of its own groups and gets the whole result.
        """
        with only_thread(self.model):
            return in_order((ids, function(rows)) for ids, rows in self.small_blocks())

    def sum_rows(self, function: Callable[[Tensor, Tensor], Tensor], max_rows: int | None = None) -> Tensor:
        """Add up ``function(ids [b], rows [b, p])``, a tensor of fixed shape, over blocks of all groups and ranks."""
        total: Tensor | None = None
        with together():
            for ids, rows in self.blocks(max_rows):
                part = function(ids, rows)
                total = part if total is None else total.add_(part)
        return add_up(total)

    @torch.inference_mode(False)
    def squared_norms(self) -> Tensor:
        """Return the squared norm of every group's summed gradient `[k]`.

        If all layers are Linear with one token per example, no gradient is formed. Otherwise the norms come from
        `blocks()`, in bounded memory, at the price of a gradient row per group.
        """
        with only_thread(self.model):
            check_deterministic_modules(self.model)
            with together(self._same):
                result = self._factored_norms()
                if result is None:
                    result = torch.zeros(len(self.groups), dtype=self.score_dtype, device=self.space.device)
                    for ids, rows in self.small_blocks():
                        result[ids.to(result.device)] = rows.to(result).square().sum(1)
            return self._summed(result[None])[0]

    def _factored_norms(self) -> Tensor | None:
        """Squared norms from layer inputs and output gradients, or None if they cannot be computed that way."""
        facts = self._facts
        seen = not facts.uncovered and "ghost" not in facts.refused
        if not seen or self.strategy != "auto" or int(self.groups.sizes.max()) > facts.batch_size:
            return None
        plan = self.plan(None)
        try:
            return squared_norms(self._request(plan, self._share(range(len(self.groups)))))
        except Unproven as error:
            self._give_up(plan, error)
            return None

    def observe(self, watch: Callable[[GroupBatch], Observer]) -> Iterator[GroupBatch]:
        """Run batches of groups forward and backward, each under the observer that `watch` returns; yield the batches.

        A group that does not fit into a batch comes in pieces. With several ranks, each rank runs its own groups, as
        in `blocks`.
        """
        with only_thread(self.model):
            check_deterministic_modules(self.model)
            if self._facts.uncovered:
                raise Unproven(dict(self._facts.uncovered))
            plan = choose(BY_NAME, "segmented", self._facts, 0, rows=True)
            request = self._request(plan, self._share(range(len(self.groups))))
            for groups, batch in request.grouped_batches():
                request.observe(batch, watch(groups))
                yield groups

    def _summed(self, part: Tensor | None) -> Tensor:
        """Add up scores `[m, k]` over the ranks; check them afterwards, so that all ranks raise the same error."""
        scores = add_up(part).to(self.space.device, self.score_dtype)
        check_finite(scores, self.groups)
        return scores

    @property
    def score_dtype(self) -> torch.dtype:
        """The dtype of scores; for parameters of half precision it is float32, as sums would overflow."""
        return torch.promote_types(self.space.dtype, torch.float32)

    def _same(self, directions: Directions | None = None) -> dict[str, Any]:
        """Values that must be the same on all ranks; otherwise the sum of their shares has no meaning."""
        return {
            "the number of directions": _count(directions),
            "the number of training points": self.data.n,
            "the groups": f"{zlib.crc32(self.groups.labels.data):08x}",
            "the parameters": checksum(self.model.parameters()),
            "the buffers": checksum(self.model.buffers()),
            "the chosen parameters": list(self.space.parameters),
            "the strategy": self.strategy,
        }

    def _checked(self, directions: Tensor) -> Tensor:
        if directions.dim() != 2 or directions.shape[1] != self.p:
            raise ValueError(
                f"directions has shape {list(directions.shape)}: pass [m, {self.p}], one row per direction."
            )
        directions = to_device(directions.detach(), self.space.device).to(self.space.dtype)
        if not all_finite(directions):
            raise ValueError(
                "directions holds NaN or infinite numbers: look at the property or test point they are of."
            )
        return directions

    def _request(self, plan: Plan, within: tuple[int, int] = (0, 0)) -> Request:
        """Make the request for a strategy, with the batch size of the plan and this rank's share of the points."""
        return Request(
            self.space, self.loss, self.data, self.groups, self._captured, plan.facts.batch_size,
            self.memory_budget, self.show_progress, f"{plan.strategy} group scores", within, plan.facts.room,
        )  # fmt: skip

    def _share(self, whole: range | None = None) -> tuple[int, int]:
        """Bounds of this rank's share of the points, group after group; with `whole`, of whole groups in that range."""
        offsets = self.groups.offsets
        if whole is None:
            share = my_share(int(offsets[-1]))
            return share.start, share.stop
        first, last = int(offsets[whole.start]), int(offsets[whole.stop])
        share = my_share(last - first)
        low, high = np.searchsorted(offsets, [first + share.start, first + share.stop])
        return int(offsets[low]), int(offsets[high])

    @property
    def _facts(self) -> Facts:
        """The facts that the choice of a strategy depends on."""
        found = self._captured.found
        return Facts.of(found, self.space, self.groups, self._batch_size, self._at_most, self.memory_budget)

    @cached_property
    def _captured(self) -> CapturedLayers:
        """The layers to observe, and what is known about the model: from an earlier call, or from a new look at it."""
        check_deterministic_modules(self.model)
        about = self.space, self.loss, self.data, (self._batch_size, self._at_most, self.data.is_stream)
        with together(), torch.inference_mode(False):
            known = recall(*about)
            most = max(2, self._batch_size or self._at_most or LARGEST_BATCH)
            found = known or look(self.space, self.loss, self.data, self.groups, most)
            if known is None:
                remember(found, *about)
            self.space.changing = found.changing
            captured = CapturedLayers(Subject(self.space, self.loss, found.allowed), found)
            compare_missing(BY_NAME, self.strategy, captured, self.data.name, fresh=known is None)
        return captured


def _count(directions: int | Directions | None) -> int:
    """Number of directions."""
    if isinstance(directions, PointGradients):
        return directions.n
    return len(directions) if isinstance(directions, Tensor) else directions or 0


def _checked_kind(directions: Any) -> int | Directions:
    """Return directions, with an array as a tensor, or their number; raise an error for anything else."""
    if isinstance(directions, np.ndarray):
        return tensor_of(directions, "directions")
    if isinstance(directions, Tensor | PointGradients):
        return directions
    if isinstance(directions, Integral) and not isinstance(directions, bool):
        if directions < 0:
            raise ValueError(f"directions={directions}: pass how many there are, from 0 on.")
        return int(directions)
    what = "None" if directions is None else f"a {type(directions).__name__}"
    raise TypeError(
        f"directions is {what}: pass a tensor [m, p], e.g. property_gradient(property, model, parameters), or "
        "PointGradients(loss_fn, test_data); or use attribute, which takes a property."
    )


def check_provider(provider: Any) -> None:
    """Raise an error if `provider` is not a `GroupGradients`; it may be a model, for example."""
    if not isinstance(provider, GroupGradients):
        raise TypeError(f"provider is a {type(provider).__name__}: pass GroupGradients(model, loss_fn, data, groups).")
