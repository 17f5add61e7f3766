"""Captum's influence classes for groups of training points and for properties of a model.

Put `ggda_` in front of the import: ``from ggda_captum import TracInCP``. The classes have Captum's arguments and
methods. Pass ``groups=`` to the constructor to get scores of groups, and ``property=`` to `influence` to explain a
property.
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
