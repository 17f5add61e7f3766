"""Providers of group-summed gradients: what is proven before a pass and watched in it; one file per strategy."""

from ggda_ext.gradients.checks import check_deterministic_modules
from ggda_ext.gradients.cost import STRATEGIES, Plan
from ggda_ext.gradients.provider import Directions, GroupGradients
from ggda_ext.gradients.request import PointGradients

__all__ = ["STRATEGIES", "Directions", "GroupGradients", "Plan", "PointGradients", "check_deterministic_modules"]
