"""Captum's influence classes for groups of training points and for properties of a model.

Put `ggda_` in front of the import: ``from ggda_captum import TracInCP``. Same arguments, same methods; pass
``groups=`` to the constructor, and ``property=`` to `influence`, to get scores of groups and properties.
"""

try:
    from captum.influence import DataInfluence, SimilarityInfluence, TracInCPBase
except ImportError as error:
    raise ImportError("ggda_captum needs Captum: pip install 'ggda-ext[captum]'") from error

from ggda_captum.influence_function import ArnoldiInfluenceFunction, NaiveInfluenceFunction
from ggda_captum.nearest_neighbors import ExactNearestNeighbors
from ggda_captum.tracincp import TracInCP
from ggda_captum.tracincp_fast_rand_proj import TracInCPFast, TracInCPFastRandProj

__all__ = [
    "TracInCP",
    "TracInCPFast",
    "TracInCPFastRandProj",
    "NaiveInfluenceFunction",
    "ArnoldiInfluenceFunction",
    "SimilarityInfluence",
    "DataInfluence",
    "TracInCPBase",
    "ExactNearestNeighbors",
]
