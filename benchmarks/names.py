"""What commands, methods, groupings and baselines are called: on the command line, in rows, in tables and figures."""

from __future__ import annotations

EXPERIMENTS = ("lds", "noisy", "pruning", "retraining")
MORE_EXPERIMENTS = ("what-if",)
"""Experiments that run only if they are named."""
METHODS = (
    "TracInCP", "TracInCPFast", "ArnoldiInfluenceFunction", "NaiveInfluenceFunction",
    "IFAttributorLiSSA", "TracInAttributor", "TRAKAttributor", "TRAKer", "FisherInfluence",
)  # fmt: skip
"""Of all toolkits, in the order of the tables; known without importing them."""
SPEED_PARTS = ("core", "captum", "dattri", "trak", "grouping", "training", "scaling")
FETCHABLE = ("heloc", "heloc-clean", "mnist", "cifar10", "qnli", "bert", "all")

TRACIN, FISHER, LISSA, TRAK = PAPER_METHODS = ("TracIn", "Inf. (Fisher)", "Inf. (LiSSA)", "TRAK")
CG, RATES, PER_POINT = "Inf. (CG)", "TracIn (learning rates)", "Per-point, directional"
LEAVE_GROUP_OUT = "Leave-group-out"
WHAT_IF, WARM_START = "What-if", "Warm start"
KEPT_POINTS, CLASS_BALANCE = TRIVIAL = ("Kept points", "Class balance")
NO_REMOVAL, RANDOM_REMOVAL = BASELINES = ("No removal", "Random removal")

ONE_PROPERTY, TEST_POINTS = "one property", "test points"
DEFAULT_MODE, EXACT_MODE = "default", "exact"

SINGLE_POINTS = "none"
RANDOM, K_MEANS, REPR_K_MEANS, GRAD_K_MEANS = GROUPINGS = ("Random", "K-Means", "Repr-K-Means", "Grad-K-Means")
