"""Group data attribution: which parts of the training data made a model what it is.

Names in the order a newcomer meets them.
"""

from ggda_ext import grouping, properties
from ggda_ext.attribution import attribute, property_scores
from ggda_ext.counterfactual import WhatIf
from ggda_ext.estimation import estimate
from ggda_ext.gradients import STRATEGIES, GroupGradients, Plan, PointGradients
from ggda_ext.groups.partition import Groups
from ggda_ext.losses import BatchLoss, ExampleLoss
from ggda_ext.properties import property_gradient
from ggda_ext.stored_gradients import GradientStore

__version__ = "0.1.0"

__all__ = [
    "Groups",
    "attribute",
    "WhatIf",
    "properties",
    "grouping",
    "GroupGradients",
    "PointGradients",
    "GradientStore",
    "Plan",
    "estimate",
    "STRATEGIES",
    "BatchLoss",
    "ExampleLoss",
    "property_gradient",
    "property_scores",
]
