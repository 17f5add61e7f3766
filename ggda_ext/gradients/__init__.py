"""Providers of group-summed gradients, the checks before and during a pass, and one file per strategy."""

from ggda_ext.gradients.plan import Plan
from ggda_ext.gradients.points import Directions, PointGradients
from ggda_ext.gradients.provider import GroupGradients
from ggda_ext.gradients.strategies import BY_NAME
from ggda_ext.model import check_deterministic_modules

STRATEGIES = tuple(BY_NAME)
"""Names of the strategies; all give the same numbers."""

__all__ = ["STRATEGIES", "Directions", "GroupGradients", "Plan", "PointGradients", "check_deterministic_modules"]
