"""Group data attribution: which parts of the training data made a model what it is.

``__all__`` lists the names in the order in which a new user meets them.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch.serialization import add_safe_globals

if TYPE_CHECKING:
    from ggda_ext import grouping, properties
    from ggda_ext.attribution import attribute, property_scores
    from ggda_ext.counterfactual import WhatIf
    from ggda_ext.estimation import estimate
    from ggda_ext.gradients import STRATEGIES, GroupGradients, Plan, PointGradients
    from ggda_ext.groups import Groups
    from ggda_ext.label_issues import LabelIssues, find_label_issues
    from ggda_ext.losses import BatchLoss, ExampleLoss
    from ggda_ext.properties import property_gradient
    from ggda_ext.results import Attribution, MethodFacts
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

_HOMES = {
    "Groups": "groups",
    "attribute": "attribution",
    "Attribution": "results",
    "MethodFacts": "results",
    "WhatIf": "counterfactual",
    "find_label_issues": "label_issues",
    "LabelIssues": "label_issues",
    "GroupGradients": "gradients",
    "PointGradients": "gradients",
    "GradientStore": "storage.gradients",
    "Plan": "gradients",
    "estimate": "estimation",
    "STRATEGIES": "gradients",
    "BatchLoss": "losses",
    "ExampleLoss": "losses",
    "property_gradient": "properties",
    "property_scores": "attribution",
}
"""Names that are used from here, with their modules. All are imported when they are used, and so are the modules:
``import ggda_ext`` takes no time, and who needs only `Groups` waits for nothing else."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"ggda_ext.{_HOMES[name]}"), name)
    elif not name.startswith("_") and find_spec(f"ggda_ext.{name}") is not None:
        value = import_module(f"ggda_ext.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _rebuilt(*parts: Any) -> Any:
    return import_module("ggda_ext.results.saving").rebuilt(*parts)


# safe for torch.load: it reads JSON and tensors only
add_safe_globals([(_rebuilt, "ggda_ext.results.saving.rebuilt")])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
