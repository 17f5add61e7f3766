"""Scores that are kept in a folder: block by block while they are made, and as one memory map when they are finished.

The folder holds one part per checkpoint and question (a property, or a set of test points), so the same folder can
answer several questions about one model. The training side has to be the same for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ggda_ext.attribution import Weight, sum_scores
from ggda_ext.data import SomePoints
from ggda_ext.gradients import Directions, GroupGradients, Plan, PointGradients
from ggda_ext.methods.method import Method, Preconditioned
from ggda_ext.sharing import once, together
from ggda_ext.storage import fingerprint
from ggda_ext.storage.data_content import is_sampled
from ggda_ext.storage.files import as_text, plain_number
from ggda_ext.storage.folder import Arrays, Store, difference, read_array
from ggda_ext.storage.hashing import joined
from ggda_ext.storage.jobs import (
    Job,
    Range,
    finish,
    go_on_without,
    group_ranges,
    opened,
    part_of,
    points_in,
    points_per_block,
    whole_groups,
)
from ggda_ext.storage.score_blocks import ScoreBlocks, StackedBlocks, block_name

_POINTS_PER_TEST = 20  # least points of a block per test point, because every block repeats the work for test points
_WRITE_BYTES = 64 * 2**20


class ScoreStore:
    """Makes scores in a folder, or finds them there. It is a context manager for one call at a time.

    Args:
        save_dir: the folder.
        tag: a name for anything that the fingerprint cannot see, such as the version of the data. A folder that was
            made with another tag is refused.

    Attributes:
        notes: texts for the results that say which data was not compared.
    """

    def __init__(self, save_dir: str | Path, tag: str | None = None) -> None:
        self.folder, self.tag, self.notes = Path(save_dir), tag, tuple[str, ...]()
        self._opened: AbstractContextManager[Store | None] | None = None
        self._store: Store | None = None

    def __enter__(self) -> ScoreStore:
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self._store.close()

    def scores(
        self,
        provider: GroupGradients,
        directions: Directions,
        checkpoint: int = 0,
        property: Any = None,
        plan: Plan | None = None,
    ) -> Any:
        """Return the blocks of ``provider.scores(directions)`` at the model's current parameters; make missing blocks.

        Args:
            provider: the training side.
            directions: the directions or test points that are scored.
            checkpoint: the number of the checkpoint.
            property: the property that the directions come from, if any; another property is another question.
            plan: ``provider.plan(directions)``, if it is known.
        """
        values = fingerprint.of_checkpoint(provider)
        within = self._checkpoint(provider, checkpoint, values)
        asked = (
            {"asked for": "" if property is None else fingerprint.kind_of(property)}  # the directions say the rest
            | values
            | fingerprint.of_directions(provider, directions, self.tag)
        )
        while True:
            plan = plan or provider.plan(directions)
            try:
                return self._answer(provider, directions, plan, within, asked)
            except ValueError as error:
                go_on_without(provider, error)
                plan = None

    def _answer(
        self, provider: GroupGradients, directions: Directions, plan: Plan, within: str, asked: dict[str, Any]
    ) -> ScoreBlocks:
        """Make or find the scores by one strategy; scores by another strategy belong to another question."""
        tests, groups = _grid(provider, directions, plan)
        asked = asked | {"strategy": plan.strategy, "blocks": joined(tests, groups).hex()[:16]}
        part: Arrays | None = None

        def ask() -> tuple[str, str]:
            nonlocal part
            assert self._store is not None
            name = _question(self._store, within, asked)
            part = self._store.part(name, asked)
            return name, joined(part.made_with).hex()

        question, made_with = once(ask)
        jobs = _jobs(provider, directions, plan, tests, groups)
        made = finish(part, jobs, provider.score_dtype, f"{plan.strategy} group scores", provider.show_progress)
        return ScoreBlocks(self.folder, question, made_with, tests, groups, provider.score_dtype, made)

    def array(
        self, provider: GroupGradients, checkpoint: int, name: str, settings: dict[str, Any], make: Callable[[], Tensor]
    ) -> Tensor:
        """Return an array that depends only on the training side and `settings`; it is made once and then found.

        Args:
            provider: the training side, at the checkpoint's parameters.
            checkpoint: the number of the checkpoint.
            name: the name of the array.
            settings: everything else that the array depends on; other settings than the stored ones raise an error.
            make: the function that makes the array; all ranks call it.
        """
        values = fingerprint.of_checkpoint(provider)
        within = f"{self._checkpoint(provider, checkpoint, values)}-{name}"
        with together():
            part = None if self._store is None else self._store.part(within, settings | values)
        if once(lambda: part is None or name not in part):
            made = make().detach().cpu()
            with together():
                if part is not None:
                    part.save(name, made.numpy())
        return torch.from_numpy(read_array(self.folder, name, within)).to(provider.space.device)

    def solve(self, method: Method, provider: GroupGradients, rows: Tensor, checkpoint: int) -> Preconditioned:
        """Return the result of ``method.precondition(provider, rows)``, from the folder if it was computed before."""
        described = fingerprint.of_value(method, "method", self.tag)
        name = f"solve-{fingerprint.of_state({described: rows})}"
        packed = self.array(
            provider,
            checkpoint,
            name,
            {"method": described},
            lambda: _packed(method.precondition(provider, rows), rows),
        )
        size = rows.numel() * rows.element_size()
        settings, passes, notes = json.loads(packed[size:].cpu().numpy().tobytes())
        return Preconditioned(packed[:size].view(rows.dtype).view(rows.shape), settings, passes, tuple(notes))

    def _checkpoint(self, provider: GroupGradients, number: int, values: dict[str, Any]) -> str:
        """The name of a checkpoint; raise an error if the folder was made with another model, data or settings."""
        if self._opened is None:
            self._opened = opened(self.folder, lambda: fingerprint.of_training(provider, self.tag))
            self._store = store = self._opened.__enter__()
            self.notes = once(lambda: () if store is None or self.tag is not None else _sampled(store))
        name = f"checkpoint-{number:03d}"
        with together():
            if self._store is not None:
                self._store.check(name, values)
        return name

    def stacked(self, parts: Sequence[tuple[Tensor, Any]]) -> Any:
        """Put the scores of several sets of test points in order, from pairs `(positions, scores)`."""
        return StackedBlocks([blocks for _, blocks in sorted(parts, key=lambda part: int(part[0][0]))])

    def total(self, parts: Iterable[tuple[Weight, Any]]) -> Tensor:
        """Weighted sum `[m, k]` of the scores of checkpoints, on the CPU.

        It is a memory map, unless the scores are a single block that was made just now.

        Args:
            parts: pairs of a weight (a number, or one number per group `[k]`) and the result of `scores` or `stacked`.
        """
        listed: list[tuple[Weight, ScoreBlocks | StackedBlocks]] = list(parts)
        weight, first = listed[0]
        as_they_are = len(listed) == 1 and not isinstance(weight, Tensor) and weight == 1.0
        if as_they_are and isinstance(first, ScoreBlocks) and first.is_one_block:
            return first.whole()
        made_of = [
            (fingerprint.sums_of(weight[None]) if isinstance(weight, Tensor) else weight, blocks.made_of)
            for weight, blocks in listed
        ]

        def rows(low: int, high: int) -> Tensor:
            return sum_scores((weight, blocks.rows(low, high)) for weight, blocks in listed)

        return self.write(as_text(made_of), first.m, first.k, first.dtype, rows)

    def write(self, made_of: str, m: int, k: int, dtype: torch.dtype, rows: Callable[[int, int], Tensor]) -> Tensor:
        """Write a matrix `[m, k]`, a few rows ``rows(low, high)`` at a time, and return it as a memory map on the CPU.

        A matrix that was written before with the same `made_of` is only read.
        """
        name = f"scores-{joined(made_of).hex()[:16]}"
        step = max(1, _WRITE_BYTES // (k * dtype.itemsize))

        def parts() -> Iterator[np.ndarray]:
            for low in range(0, m, step):
                yield rows(low, min(low + step, m)).numpy()

        with together():
            if self._store is not None and name not in self._store:
                self._store.save_parts(name, (m, k), torch.empty(0, dtype=dtype).numpy().dtype, parts())
        return torch.from_numpy(read_array(self.folder, name))


def _sampled(store: Store) -> tuple[str, ...]:
    """Notes about a store whose training data cannot be read whole; empty if all of it was read."""
    if is_sampled(store.fingerprint["data"]):
        return (
            "save_dir was compared with some of the training points only, as they cannot be read whole: pass tag=.",
        )
    return ()


def _question(store: Store, within: str, asked: dict[str, Any]) -> str:
    """The name of a question in the store, or a free name if the question was not asked before.

    A name becomes free if all blocks of its question are lost. What is made of blocks therefore depends on
    `ScoreBlocks.made_of`, not on the name alone.
    """
    for name, made_with in store.parts.items():
        if name.startswith(f"{within}-scores-") and difference(made_with, asked) is None:
            return name
    return next(name for number in count() if (name := f"{within}-scores-{number:03d}") not in store.parts)


def _packed(done: Preconditioned, rows: Tensor) -> Tensor:
    """Pack preconditioned directions as bytes, and after them their settings, passes and notes as JSON text."""
    told = json.dumps([dict(done.settings), done.passes, done.notes], default=plain_number)  # in their order
    numbers = done.directions.to(rows).contiguous().view(-1).view(torch.uint8)
    return torch.cat([numbers, torch.frombuffer(bytearray(told.encode()), dtype=torch.uint8).to(numbers.device)])


def _grid(provider: GroupGradients, directions: Directions, plan: Plan) -> tuple[list[Range], list[Range]]:
    """Blocks of test points or components, and blocks of groups; they limit memory and the work lost by a kill."""
    batch_size, itemsize = plan.facts.batch_size, provider.score_dtype.itemsize
    points = points_per_block(provider, batch_size)
    if isinstance(directions, Tensor):
        m = most = len(directions)
    else:
        m = directions.n
        row = batch_size if plan.strategy == "ghost" else provider.p
        most = max(1, provider.memory_budget // (row * itemsize))
        points = max(points, _POINTS_PER_TEST * min(m, most))
    tests = [(low, min(low + most, m)) for low in range(0, m, most)]
    if provider.data.is_stream:
        return tests, [(0, len(provider.groups))]
    return tests, group_ranges(provider.groups, points, max(1, provider.memory_budget // (min(m, most) * itemsize)))


def _jobs(
    provider: GroupGradients, directions: Directions, plan: Plan, tests: list[Range], groups: list[Range]
) -> list[Job]:
    @lru_cache(maxsize=1)
    def asked(at: Range) -> Directions:
        if isinstance(directions, Tensor):
            return directions if at[1] - at[0] == len(directions) else directions[slice(*at)]
        some = PointGradients(directions.loss, SomePoints(directions.data, np.arange(*at)), directions.batch_size)
        return some if plan.strategy == "ghost" else provider.tests(some).rows()

    def scores(at: Range, of: Range) -> Tensor:
        if provider.data.is_stream:
            return provider.scores(asked(at))
        with whole_groups(provider, of):
            return part_of(provider, of, plan.strategy).scores(asked(at))

    return [
        Job(
            block_name(i, j),
            (at[1] - at[0], of[1] - of[0]),
            points_in(provider.groups, of),
            lambda at=at, of=of: scores(at, of),  # type: ignore[misc]
            shared=provider.data.is_stream,
        )
        for i, at in enumerate(tests)
        for j, of in enumerate(groups)
    ]
