"""How good are scores of groups? Retraining score, pruning, noisy labels, group LDS, leave-group-out correlation.

*Importance* has one meaning everywhere: the predicted rise of the test loss if the group is removed. Helpful groups are
positive and harmful groups negative; `ggda_ext.attribute` scores a test loss in the same way. Functions that need new
models take ``retrain(subsets) -> values [subsets, seeds]``: a `Retrainer`, or a function of your own.
"""

from ggda_ext.evaluation.correlation import (
    Agreement,
    Correlation,
    Rank,
    additive_ceiling,
    agreement,
    group_lds,
    leave_group_out_correlation,
)
from ggda_ext.evaluation.importance import Aggregation, aggregated, removal_order
from ggda_ext.evaluation.noisy_labels import Detection, noisy_label_detection
from ggda_ext.evaluation.removal import RemovalCurve, pruning_score, retraining_score
from ggda_ext.evaluation.retrainer import Retrainer
from ggda_ext.evaluation.subsets import points_of, random_subsets
from ggda_ext.results.verifying import Retrain, standard_error

__all__ = [
    "Retrain",
    "Retrainer",
    "Aggregation",
    "aggregated",
    "removal_order",
    "RemovalCurve",
    "retraining_score",
    "pruning_score",
    "standard_error",
    "Detection",
    "noisy_label_detection",
    "random_subsets",
    "points_of",
    "Rank",
    "Correlation",
    "Agreement",
    "agreement",
    "group_lds",
    "additive_ceiling",
    "leave_group_out_correlation",
]
