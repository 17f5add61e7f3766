"""dattri's attributors, for groups of training points and for properties of the model.

The classes are drop-in subclasses: put ``ggda_`` in front of the import and pass ``groups=``. Scores are then
``(groups, tests)``, with groups instead of dattri's training points. ``attribute(..., property=g)`` explains a property
g of the model instead of test points, with scores ``(groups, properties)``. Without groups, dattri's own code runs.
"""

from __future__ import annotations

try:
    import dattri.algorithm  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"ggda_dattri needs dattri, which could not be imported ({error}): pip install 'ggda-ext[dattri]'"
    ) from error

from ggda_dattri.influence_function import (
    IFAttributorArnoldi,
    IFAttributorCG,
    IFAttributorDataInf,
    IFAttributorEKFAC,
    IFAttributorExplicit,
    IFAttributorLiSSA,
)
from ggda_dattri.tracin import TracInAttributor
from ggda_dattri.trak import TRAKAttributor

__all__ = [
    "IFAttributorLiSSA",
    "IFAttributorExplicit",
    "IFAttributorCG",
    "IFAttributorArnoldi",
    "IFAttributorDataInf",
    "IFAttributorEKFAC",
    "TracInAttributor",
    "TRAKAttributor",
]
