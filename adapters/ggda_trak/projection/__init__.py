"""Gradients of groups through any of TRAK's projectors: φ = Pᵀ Σ_{i∈G} w_i ∇f_i / √d.

The one place that knows how projectors want their rows: FactoredProjector takes none, it looks at the layers;
BasicProjector draws its matrix anew on every call, so the matrix is kept if it fits the budget, else rows are better
collected (`Projection.collects`); CudaProjector and ChunkedCudaProjector have limits of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from trak.projectors import BasicProjector, BasicSingleBlockProjector, ChunkedCudaProjector, CudaProjector

from ggda_ext import GroupGradients
from ggda_ext.gradients.plan import CACHED_BLOCK_BYTES
from ggda_ext.model import ParameterSpace
from ggda_trak.projection.factored import FactoredProjector

KEPT_BYTES = 128 * 2**20
"""The largest matrix that is kept."""
BLOCK_ROWS, BLOCK_BYTES = 512, 24 * 2**20
"""To project at once: every batch has a price of its own, and larger blocks are given fresh memory each."""


class Projection:
    """A TRAK projector for the gradients of groups, with TRAK's normalisation.

    Args:
        projector: any projector of TRAK's, or of `ggda_trak.projectors`.
        space: the parameters, in the order of a row.
        scale: what projected rows are divided by, TRAK's √d.
        memory_budget: bytes for a matrix that is kept, at most `KEPT_BYTES`.
    """

    def __init__(self, projector: Any, space: ParameterSpace, scale: float, memory_budget: int = KEPT_BYTES) -> None:
        self.projector, self.space, self.scale = projector, space, scale
        row = space.size * space.dtype.itemsize
        basic = isinstance(projector, BasicProjector) and projector.num_blocks > 1
        fits = basic and row * projector.proj_dim <= min(memory_budget, KEPT_BYTES)
        self._kept = KeptMatrix(projector) if fits else None
        self.collects = basic and not fits
        """Whether a call has a large price of its own, so that rows are better collected."""
        fast = max(CACHED_BLOCK_BYTES // row, min(BLOCK_ROWS, BLOCK_BYTES // row), 1)
        fast = max(fast, self.dim)  # fewer would read the matrix more often than the rows
        self._rows_at_once = None if self.collects or self.most_rows else fast

    @property
    def dim(self) -> int:
        """Length of a projected row."""
        return self.projector.proj_dim or self.space.size

    @property
    def most_rows(self) -> int | None:
        """The most rows of one call, None for any number."""
        if isinstance(self.projector, ChunkedCudaProjector):
            return self.projector.feat_bs
        if isinstance(self.projector, CudaProjector):
            return max(1, (2**31 - 1) // self.space.size)  # its kernels count entries in 32 bits
        return None

    def blocks(
        self, gradients: GroupGradients, model_id: int, weights: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Projected gradients of groups, as `(group ids [b], rows [b, dim])`; a group may come in parts, to add up.

        Args:
            gradients: knows model, outputs f, data and groups; under several ranks, of this rank's groups.
            model_id: chooses the matrix.
            weights: weightings of the points `[w, n]`: rows are then `[b, w, dim]`, all from one pass.
        """
        projector = self.projector
        if isinstance(projector, FactoredProjector) and projector.captures(gradients):
            for ids, rows in projector.blocks(gradients, model_id, weights):
                yield ids, rows / self.scale
            return
        yield from gradients.blocks(self._rows_at_once, weights, lambda rows: self(rows, model_id))

    def __call__(self, rows: Tensor, model_id: int) -> Tensor:
        """Project rows `[…, d]` to `[…, dim]`, in the dtype of the rows."""
        flat = rows.flatten(0, -2)
        parts = [self._projected(part, model_id) for part in flat.split(self.most_rows or max(len(flat), 1))]
        projected = torch.cat(parts) if len(parts) > 1 else parts[0]
        return (projected.to(rows.dtype) / self.scale).unflatten(0, rows.shape[:-1])

    def _projected(self, rows: Tensor, model_id: int) -> Tensor:
        if self._kept is not None:
            rows = rows.to(self.projector.dtype)
            return torch.cat([rows @ block for block in self._kept.blocks(model_id)], 1)[:, : self.dim]
        if isinstance(self.projector, ChunkedCudaProjector):
            by_parameter = {name: self.space.part(rows, value) for name, value in self.space.parameters.items()}
            return self.projector.project(by_parameter, model_id=model_id)
        return self.projector.project(rows, model_id=model_id)

    def lent(self) -> AbstractContextManager[None]:
        """Inside, TRAK's own code finds the matrix drawn, if that is kept: the same numbers in less time."""
        return nullcontext() if self._kept is None else self._kept.lent()


class KeptMatrix:
    """The matrix of a BasicProjector of several blocks, for one checkpoint at a time, drawn once as it draws it.

    Args:
        projector: the projector.
    """

    def __init__(self, projector: BasicProjector) -> None:
        self.projector = projector
        self._model_id: int | None = None
        self._blocks: dict[int, Tensor] = {}

    def blocks(self, model_id: int) -> Iterator[Tensor]:
        """All of it, in blocks of columns `[d, block size]`; the last may have more than are left."""
        projector = self.projector
        if projector.model_id != model_id:
            projector.model_id = model_id
            projector.get_generator_states()
        with self.lent():
            for state in projector.generator_states:
                projector.generate_sketch_matrix(state)
                yield projector.proj_matrix

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, the projector takes the blocks from here and draws only those it has not drawn before."""
        projector = self.projector
        draw = projector.generate_sketch_matrix

        def drawn(state: Tensor) -> None:
            if projector.model_id != self._model_id:
                self._model_id, self._blocks = projector.model_id, {}
            block = next(i for i, known in enumerate(projector.generator_states) if known is state)
            if block not in self._blocks:
                draw(state)
                self._blocks[block] = projector.proj_matrix
                projector.proj_matrix_available = False  # that memory is taken: it draws the next into its own
            projector.proj_matrix = self._blocks[block]

        projector.generate_sketch_matrix = drawn
        try:
            yield
        finally:
            del projector.generate_sketch_matrix
            projector.proj_matrix_available = False  # what it draws from here on is not drawn over a block


def release(projector: Any) -> None:
    """Free a projector's memory, as often as wanted; it draws its matrix again when it is next used.

    TRAK's own two CPU projectors fail when freed twice, or used after it with the model id they were last used with.
    """
    if isinstance(projector, BasicProjector | BasicSingleBlockProjector):
        if projector.proj_matrix_available:
            projector.free_memory()
        projector.proj_matrix = torch.empty(0)  # TRAK deletes it once more
        projector.model_id = None
    else:
        projector.free_memory()


def check_dimension(projector: Any, size: int) -> None:
    """Refuse a projector made for gradients of another length."""
    chunks = getattr(projector, "params_per_chunk", None)
    made_for = int(sum(chunks)) if chunks is not None else int(getattr(projector, "grad_dim", 0) or 0)
    if made_for and made_for != size:
        raise ValueError(
            f"projector is a {type(projector).__name__} for gradients of length {made_for}, but {size} parameters "
            f"count here: make it with grad_dim={size}."
        )


def describe(projector: Any) -> dict[str, Any]:
    """What tells a projector from another one, for a store that is opened again."""
    chunks = getattr(projector, "projector_per_chunk", None)
    if chunks is not None:
        return {"projector": type(projector).__name__, "chunks": [describe(chunk) for chunk in chunks]}
    values = {name: getattr(projector, name, None) for name in ("proj_dim", "grad_dim", "seed", "proj_type")}
    return {"projector": type(projector).__name__} | {
        name: str(getattr(value, "value", value)) for name, value in values.items()
    }
