"""The strategies, one file for each; all give the same numbers. `BY_NAME` lists them in the order that users see."""

from ggda_ext.gradients.plan import Strategy
from ggda_ext.gradients.strategies import backward, directional, forward, ghost, persample, segmented

BY_NAME: dict[str, Strategy] = {
    module.STRATEGY.name: module.STRATEGY for module in (directional, forward, ghost, segmented, backward, persample)
}
