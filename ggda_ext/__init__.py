"""Group data attribution: which parts of the training data made a model what it is.

``__all__`` lists the names in the order in which a new user meets them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ggda_ext import properties
from ggda_ext.attribution import attribute, property_scores
from ggda_ext.gradients import STRATEGIES, GroupGradients, Plan, PointGradients
from ggda_ext.groups import Groups
from ggda_ext.losses import BatchLoss, ExampleLoss
from ggda_ext.properties import property_gradient
from ggda_ext.results import Attribution, MethodFacts

if TYPE_CHECKING:
    from ggda_ext import grouping
    from ggda_ext.counterfactual import WhatIf
    from ggda_ext.estimation import estimate
    from ggda_ext.label_issues import LabelIssues, find_label_issues
    from ggda_ext.storage.gradients import GradientStore

__version__ = "0.2.0"

__all__ = [
    "Groups",
    "attribute",
    "Attribution",
    "MethodFacts",
    "WhatIf",
    "find_label_issues",
    "LabelIssues",
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

_LATER = {
    "WhatIf": "ggda_ext.counterfactual",
    "find_label_issues": "ggda_ext.label_issues",
    "LabelIssues": "ggda_ext.label_issues",
    "GradientStore": "ggda_ext.storage.gradients",
    "estimate": "ggda_ext.estimation",
    **{room: f"ggda_ext.{room}" for room in ("grouping", "counterfactual", "evaluation", "training")},
}
"""Names that are imported only when they are used, with their modules. This keeps ``import ggda_ext`` fast."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LATER[name])
    return module if module.__name__.endswith(f".{name}") else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
