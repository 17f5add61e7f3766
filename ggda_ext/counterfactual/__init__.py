"""Counterfactual models: predict a model without some groups by refitting instead of training again.

Scores of groups add up, but the effects of several coherent groups do not; see `WhatIf`.
"""

from ggda_ext.counterfactual.answer import Counterfactual
from ggda_ext.counterfactual.calibration import Calibration, Verification
from ggda_ext.counterfactual.interactions import Interactions
from ggda_ext.counterfactual.search import Search
from ggda_ext.counterfactual.semivalues import Semivalues
from ggda_ext.counterfactual.what_if import WhatIf

__all__ = ["WhatIf", "Counterfactual", "Verification", "Calibration", "Interactions", "Search", "Semivalues"]
