"""Group gradients that are kept in a folder, projected or whole. They answer new questions without the training data.

    τ_G(g) = ⟨∇g, Σ_{i∈G} ∇ℓ_i⟩ ≈ ⟨S∇g, S Σ_{i∈G} ∇ℓ_i⟩

S is a CountSketch to `projection_dim` numbers. The projected scores are right on average, with a standard deviation of
at most √(2 / projection_dim) · |∇g| |Σ∇ℓ_i|. Without a projection the scores are exact, and a group takes p numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ggda_ext.attribution import property_directions
from ggda_ext.gradients import Directions, GroupGradients, Plan, PointGradients
from ggda_ext.gradients.provider import check_provider
from ggda_ext.gradients.sketch import count_sketch, draw_sketch
from ggda_ext.model import product
from ggda_ext.properties import Property
from ggda_ext.sharing import alone, once, together
from ggda_ext.storage import fingerprint
from ggda_ext.storage.files import DamagedFile
from ggda_ext.storage.folder import Store, StoreMismatch, digest, read_array
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
from ggda_ext.words import check_counts, check_save_dir, check_whole, without


class GradientStore:
    """The gradients of all groups at the model's current parameters, in a folder.

    Making the store takes one pass over the training data. A pass that was stopped continues where it stopped. Opening
    the store again takes no pass.

    Args:
        provider: model, loss, data and groups.
        save_dir: the folder, for this model only: each checkpoint needs a folder of its own.
        projection_dim: how many numbers are kept per group; None keeps the gradients themselves, p numbers per group.
        seed: the seed of the projection.
        tag: a name for anything that the fingerprint cannot see, such as the version of the data. A folder that was
            made with another tag is refused.

    >>> import tempfile
    >>> from torch import nn
    >>> from ggda_ext import properties
    >>> x, y, loss = torch.randn(60, 4), torch.randint(0, 3, (60,)), nn.CrossEntropyLoss()
    >>> provider = GroupGradients(nn.Linear(4, 3), loss, (x, y), torch.arange(60) // 6)
    >>> gradients = GradientStore(provider, tempfile.mkdtemp())
    >>> gradients.scores(properties.mean_loss((x[:5], y[:5]), loss)).shape  # and so on, for other properties
    torch.Size([1, 10])
    """

    @without(
        **dict.fromkeys(
            ("parameters", "strategy", "batch_size", "memory_budget", "show_progress"),
            "it stores the gradients of a provider; pass it to GroupGradients",
        )
    )
    def __init__(
        self,
        provider: GroupGradients,
        save_dir: str | Path,
        projection_dim: int | None = None,
        *,
        seed: int = 0,
        tag: str | None = None,
    ) -> None:
        check_provider(provider)
        check_save_dir(save_dir, tag)
        check_counts(projection_dim=projection_dim)
        check_whole(seed=seed)
        self.provider, self.folder = provider, Path(save_dir).absolute()
        self.projection_dim = None if projection_dim is None or projection_dim >= provider.p else int(projection_dim)
        if self.projection_dim is not None:
            drawn = draw_sketch(provider.p, self.projection_dim, torch.Generator().manual_seed(int(seed)))
            self._places, self._signs = (values.to(provider.space.device) for values in drawn)
        self._parameters = fingerprint.of_parameters(provider.model)
        self._made_with = {
            "projection_dim": self.projection_dim,
            "seed": None if self.projection_dim is None else int(seed),
        }
        self._tag = tag
        with opened(self.folder, lambda: self._fingerprint) as store:
            while True:
                try:
                    self._finish(store, provider.plan(None))
                    return
                except ValueError as error:
                    go_on_without(provider, error)

    def _finish(self, store: Store | None, plan: Plan) -> None:
        """Make the missing gradients by the plan's strategy; the store has one part per strategy."""
        provider = self.provider
        points = points_per_block(provider, plan.facts.batch_size)
        row = self.dim * provider.score_dtype.itemsize
        self._ranges = group_ranges(provider.groups, points, max(1, provider.memory_budget // row))
        self._part = plan.strategy
        with together():
            part = None if store is None else store.part(self._part, {"blocks": digest(np.array(self._ranges))})
        self._told = once(lambda: "" if part is None else part.made_with)
        title = f"{plan.strategy} group gradients"
        finish(part, self._jobs(plan.strategy), provider.score_dtype, title, provider.show_progress)

    @property
    def dim(self) -> int:
        """How many numbers are kept per group."""
        return self.projection_dim or self.provider.p

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the kept gradients as pairs `(group ids [b], rows [b, dim])`; the rows are memory maps.

        Raises:
            StoreMismatch: the folder was deleted, or it now holds something else.
        """
        for j, (low, high) in enumerate(self._ranges):
            try:
                rows = read_array(self.folder, _name(j), self._part, self._told)
            except (DamagedFile, FileNotFoundError) as error:
                raise StoreMismatch(
                    f"save_dir={str(self.folder)!r} no longer holds the gradients of this store: make it again."
                ) from error
            yield torch.arange(low, high), torch.from_numpy(rows)

    def scores(self, asked: Property | Directions) -> Tensor:
        """Scores of a property, of directions `[m, p]` or of test points, without a pass over the training data.

        Args:
            asked: a callable ``g(model) -> Tensor``, a tensor `[m, p]`, or `PointGradients`.

        Returns:
            Scores `[m, k]` on the CPU: in memory if they fit the provider's memory budget, else a memory map.
        """
        if fingerprint.of_parameters(self.provider.model) != self._parameters:
            raise ValueError(
                "the model's parameters are not those of the stored gradients: load them again, or make a store for "
                "these parameters in another folder."
            )
        with alone():
            rows = self._projected_tests(asked).cpu()
        m, k = len(rows), len(self.provider.groups)
        if m * k * rows.element_size() <= self.provider.memory_budget:
            scores = rows.new_empty(m, k)
            self._write_scores(rows, scores)
            return scores
        return self._mapped_scores(rows)

    def _mapped_scores(self, rows: Tensor) -> Tensor:
        k, name = len(self.provider.groups), f"scores-{self._part}-{digest(rows.numpy())}"
        step = max(1, self.provider.memory_budget // (k * rows.element_size()))

        def parts() -> Iterator[np.ndarray]:
            for some in rows.split(step):
                scores = some.new_empty(len(some), k)
                self._write_scores(some, scores)
                yield scores.numpy()

        with opened(self.folder, lambda: self._fingerprint) as store, together():
            if store is not None and name not in store:
                store.save_parts(name, (len(rows), k), rows.numpy().dtype, parts())
        return torch.from_numpy(read_array(self.folder, name))

    def _write_scores(self, rows: Tensor, scores: Tensor) -> None:
        for ids, block in self.blocks():
            scores[:, ids] = product(rows, block.to(rows.dtype).T)

    def _projected_tests(self, asked: Property | Directions) -> Tensor:
        """The directions of the question `[m, dim]`, projected like the stored gradients."""
        directions = asked if isinstance(asked, Tensor | PointGradients) else property_directions(self.provider, asked)
        if isinstance(directions, Tensor):
            if directions.dim() != 2 or directions.shape[1] != self.provider.p:
                raise ValueError(f"directions has shape {list(directions.shape)}: pass [m, {self.provider.p}].")
            return self._project(directions.detach().to(self.provider.space.device))
        rows = self._empty(directions.n)
        for ids, block in self.provider.tests(directions).blocks():
            rows[ids.to(rows.device)] = self._project(block)
        return rows

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, self.dim, dtype=self.provider.score_dtype, device=self.provider.space.device)

    def _project(self, rows: Tensor) -> Tensor:
        rows = rows.to(self.provider.score_dtype)
        if self.projection_dim is None:
            return rows
        return count_sketch(rows, self._places, self._signs, self.projection_dim)

    def _jobs(self, strategy: str) -> list[Job]:
        def rows(of: Range) -> Tensor:
            found = self._empty(of[1] - of[0])
            with whole_groups(self.provider, of):
                for ids, block in part_of(self.provider, of, strategy).blocks():
                    found[ids.to(found.device)] = self._project(block)
            return found

        return [
            Job(
                _name(j),
                (of[1] - of[0], self.dim),
                points_in(self.provider.groups, of),
                lambda of=of: rows(of),  # type: ignore[misc]
            )
            for j, of in enumerate(self._ranges)
        ]

    @cached_property
    def _fingerprint(self) -> dict[str, object]:
        """Everything that the gradients depend on, as it was when they were made or found."""
        made_of = fingerprint.of_training(self.provider, self._tag) | fingerprint.of_checkpoint(self.provider)
        return made_of | self._made_with


def _name(block: int) -> str:
    return f"gradients-{block:04d}"
