"""TRAK's projectors under TRAK's names, and two faster projectors of another kind (see `ggda_trak.projection`)."""

from trak.projectors import (
    AbstractProjector,
    BasicProjector,
    BasicSingleBlockProjector,
    ChunkedCudaProjector,
    CudaProjector,
    NoOpProjector,
    ProjectionType,
)

from ggda_trak.projection.factored import FactoredProjector
from ggda_trak.projection.sketch import SketchProjector

__all__ = [
    "ProjectionType",
    "AbstractProjector",
    "NoOpProjector",
    "BasicSingleBlockProjector",
    "BasicProjector",
    "CudaProjector",
    "ChunkedCudaProjector",
    "SketchProjector",
    "FactoredProjector",
]
