"""Group-summed gradients through TRAK's projectors, in blocks of rows as large as pays.

    φ = Pᵀ Σ_{i∈G} w_i ∇f_i / √d

BasicProjector draws its matrix anew on every call, so its rows are collected first; CudaProjector and
ChunkedCudaProjector have limits of rows, so theirs are split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trak.projectors import BasicProjector, BasicSingleBlockProjector, ChunkedCudaProjector, CudaProjector

from ggda_ext.model import ParameterSpace


class Projection:
    """A TRAK projector for rows of gradients, with TRAK's normalisation.

    Args:
        projector: any projector of TRAK's.
        space: the parameters, in the order of a row.
        scale: what projected rows are divided by, TRAK's √d.
    """

    def __init__(self, projector: Any, space: ParameterSpace, scale: float) -> None:
        self.projector, self.space, self.scale = projector, space, scale

    @property
    def dim(self) -> int:
        """Length of a projected row."""
        return self.projector.proj_dim or self.space.size

    @property
    def collects(self) -> bool:
        """Whether a call has a large price of its own, so that rows are better collected."""
        return isinstance(self.projector, BasicProjector) and self.projector.num_blocks > 1

    @property
    def most_rows(self) -> int | None:
        """The most rows of one call, None for any number."""
        if isinstance(self.projector, ChunkedCudaProjector):
            return self.projector.feat_bs
        if isinstance(self.projector, CudaProjector):
            return max(1, (2**31 - 1) // self.space.size)  # its kernels count entries in 32 bits
        return None

    def __call__(self, rows: Tensor, model_id: int) -> Tensor:
        """Project rows `[b, d]` to `[b, proj_dim]`, in the dtype of the rows."""
        parts = [self._call(part, model_id) for part in rows.split(self.most_rows or max(len(rows), 1))]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(rows.dtype) / self.scale

    def _call(self, rows: Tensor, model_id: int) -> Tensor:
        if not isinstance(self.projector, ChunkedCudaProjector):
            return self.projector.project(rows, model_id=model_id)
        by_parameter = {name: self.space.part(rows, value) for name, value in self.space.parameters.items()}
        return self.projector.project(by_parameter, model_id=model_id)


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
