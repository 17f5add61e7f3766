"""Gradients of groups through any of TRAK's projectors: φ = Pᵀ Σ_{i∈G} w_i ∇f_i / √d.

Only this module knows how each projector needs its rows. FactoredProjector needs no rows, because it observes the
layers. BasicProjector draws its matrix anew on every call, so the matrix is kept if it fits the budget; otherwise it is
better to collect rows (`Projection.collects`). CudaProjector and ChunkedCudaProjector limit the rows of a call.
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
"""Bytes of the largest matrix that is kept, once, or twice if gradients of single points are projected."""
BLOCK_ROWS, BLOCK_BYTES = 512, 24 * 2**20
"""Rows to project at once: every batch has a fixed cost, and each block above this size is allocated anew."""


class Projection:
    """A TRAK projector for the gradients of groups, with TRAK's normalisation.

    Args:
        projector: any projector of TRAK or of `ggda_trak.projectors`.
        space: the parameters, in the order of a row's columns.
        scale: the number that projected rows are divided by, TRAK's √d.
        memory_budget: bytes for a matrix that is kept; not more than `KEPT_BYTES` are used.
    """

    def __init__(self, projector: Any, space: ParameterSpace, scale: float, memory_budget: int = KEPT_BYTES) -> None:
        self.projector, self.space, self.scale = projector, space, scale
        row = space.size * space.dtype.itemsize
        basic = isinstance(projector, BasicProjector) and projector.num_blocks > 1
        fits = basic and row * projector.proj_dim <= min(memory_budget, KEPT_BYTES)
        self._kept = KeptMatrix(projector) if fits else None
        self.collects = basic and not fits
        """Whether each projector call has a large fixed cost, so that it is better to collect rows."""
        fast = max(CACHED_BLOCK_BYTES // row, min(BLOCK_ROWS, BLOCK_BYTES // row), 1)
        fast = max(fast, self.dim)  # with fewer rows, most reads would be of the matrix
        self._rows_at_once = None if self.collects or self.most_rows else fast

    @property
    def dim(self) -> int:
        """Length of a projected row."""
        return self.projector.proj_dim or self.space.size

    @property
    def most_rows(self) -> int | None:
        """The largest number of rows in one call; None if there is no limit."""
        if isinstance(self.projector, ChunkedCudaProjector):
            return self.projector.feat_bs
        if isinstance(self.projector, CudaProjector):
            return max(1, (2**31 - 1) // self.space.size)  # its kernels count entries in 32 bits
        return None

    def blocks(
        self, gradients: GroupGradients, model_id: int, weights: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield projected gradients of groups as `(group ids [b], rows [b, dim])`; add up rows with the same group id.

        Args:
            gradients: the provider, which knows model, outputs f, data and groups. With several ranks, the rows belong
                to this rank's groups.
            model_id: selects the projection matrix.
            weights: weightings of the points `[w, n]`. Rows are then `[b, w, dim]`, all from one pass.
        """
        projector = self.projector
        if isinstance(projector, FactoredProjector) and projector.captures(gradients):
            for ids, rows in projector.blocks(gradients, model_id, weights):
                yield ids, rows / self.scale
            return
        matrix = self._matrix(model_id) if weights is None else None
        if matrix is None:
            yield from gradients.blocks(self._rows_at_once, weights, lambda rows: self(rows, model_id))
            return
        for ids, rows in gradients.blocks(self._rows_at_once, through=matrix):
            yield ids, rows / self.scale

    def _matrix(self, model_id: int) -> Tensor | None:
        """The matrix `[p, dim]` of a projector that has one in memory; None for the other projectors."""
        projector = self.projector
        if self._kept is not None:
            return self._kept.whole(model_id)[:, : self.dim]
        if self.collects or type(projector) not in (BasicProjector, BasicSingleBlockProjector):
            return None
        projector.project(torch.zeros(1, self.space.size, device=self.space.device), model_id)  # draws it if necessary
        return projector.proj_matrix

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
        """Let TRAK's own code use the kept matrix inside this context: the same numbers in less time."""
        return nullcontext() if self._kept is None else self._kept.lent()


class KeptMatrix:
    """The matrix of a BasicProjector with several blocks, kept for one checkpoint. The projector draws it once.

    Args:
        projector: the projector.
    """

    def __init__(self, projector: BasicProjector) -> None:
        self.projector = projector
        self._model_id: int | None = None
        self._blocks: dict[int, Tensor] = {}
        self._whole: Tensor | None = None

    def whole(self, model_id: int) -> Tensor:
        """Return the whole matrix `[d, ≥ proj_dim]`; it is kept beside its blocks, because copying them takes long."""
        if self._whole is None or model_id != self._model_id:
            self._whole = torch.cat([*self.blocks(model_id)], 1)
        return self._whole

    def blocks(self, model_id: int) -> Iterator[Tensor]:
        """Yield the whole matrix in blocks of columns `[d, block size]`; the last block may have surplus columns."""
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
        """Inside this context, the projector uses the kept blocks and draws only blocks that were not drawn before."""
        projector = self.projector
        draw = projector.generate_sketch_matrix

        def drawn(state: Tensor) -> None:
            if projector.model_id != self._model_id:
                self._model_id, self._blocks, self._whole = projector.model_id, {}, None
            block = next(i for i, known in enumerate(projector.generator_states) if known is state)
            if block not in self._blocks:
                draw(state)
                self._blocks[block] = projector.proj_matrix
                projector.proj_matrix_available = False  # so that the next block gets its own memory
            projector.proj_matrix = self._blocks[block]

        projector.generate_sketch_matrix = drawn
        try:
            yield
        finally:
            del projector.generate_sketch_matrix
            projector.proj_matrix_available = False  # so that later draws do not overwrite a kept block


def release(projector: Any) -> None:
    """Free a projector's memory; this may be called repeatedly. The projector draws its matrix again at its next use.

    TRAK's own two CPU projectors fail if they are freed twice, or if they are freed and then used with the same model
    id as before.
    """
    if isinstance(projector, BasicProjector | BasicSingleBlockProjector):
        if projector.proj_matrix_available:
            projector.free_memory()
        projector.proj_matrix = torch.empty(0)  # because TRAK deletes it once more
        projector.model_id = None
    else:
        projector.free_memory()


def check_dimension(projector: Any, size: int) -> None:
    """Raise an error if a projector was made for gradients of another length."""
    chunks = getattr(projector, "params_per_chunk", None)
    made_for = int(sum(chunks)) if chunks is not None else int(getattr(projector, "grad_dim", 0) or 0)
    if made_for and made_for != size:
        raise ValueError(
            f"projector is a {type(projector).__name__} for gradients of length {made_for}, but {size} parameters "
            f"count here: make it with grad_dim={size}."
        )


def describe(projector: Any) -> dict[str, Any]:
    """Settings that distinguish a projector from others, to check them when a store is opened again."""
    chunks = getattr(projector, "projector_per_chunk", None)
    if chunks is not None:
        return {"projector": type(projector).__name__, "chunks": [describe(chunk) for chunk in chunks]}
    values = {name: getattr(projector, name, None) for name in ("proj_dim", "grad_dim", "seed", "proj_type")}
    return {"projector": type(projector).__name__} | {
        name: str(getattr(value, "value", value)) for name, value in values.items()
    }
