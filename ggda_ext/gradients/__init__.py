"""Providers of group-summed gradients: one file per strategy, one that plans, one that is called."""

from ggda_ext.gradients.checks import check_deterministic_modules
from ggda_ext.gradients.job import PointGradients
from ggda_ext.gradients.plan import STRATEGIES, Plan
from ggda_ext.gradients.provider import Directions, GroupGradients

__all__ = ["STRATEGIES", "Directions", "GroupGradients", "Plan", "PointGradients", "check_deterministic_modules"]
