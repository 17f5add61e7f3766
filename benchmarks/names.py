"""What commands, methods, groupings, protocols and baselines are called: on the command line, in rows and tables."""

from __future__ import annotations

EXPERIMENTS = ("lds", "noisy", "pruning", "retraining")
METHODS = (
    "TracInCP", "TracInCPFast", "ArnoldiInfluenceFunction", "NaiveInfluenceFunction",
    "IFAttributorLiSSA", "TracInAttributor", "TRAKAttributor", "TRAKer", "FisherInfluence",
)  # fmt: skip
"""Of all toolkits, in the order of the tables; known without importing them."""
SPEED_PARTS = ("core", "captum", "dattri", "trak", "grouping", "training", "scaling", "transformers")
FETCHABLE = ("heloc", "heloc-clean", "mnist", "cifar10", "qnli", "bert", "all")

TRACIN, FISHER, LISSA, TRAK = PAPER_METHODS = ("TracIn", "Inf. (Fisher)", "Inf. (LiSSA)", "TRAK")
CG, RATES, PER_POINT = "Inf. (CG)", "TracIn (learning rates)", "Per-point, directional"
INFLUENCE, EKFAC, FULL_FISHER = OURS = ("Influence", "EK-FAC", "Fisher")
"""`attribute(method=…)` with its own choice of solver and damping; Fisher is that of all gradients, not projected."""
LEAVE_GROUP_OUT = "Leave-group-out"
WHAT_IF, WARM_START = REFITS = ("What-if", "Warm start")
"""Methods that predict each choice of groups by itself: their predictions do not add up."""
FROM_START = "What-if from the start"
"""What-if of the whole training, from the untrained model, with features of the first checkpoint."""
INFLUENCE_3, WHAT_IF_3, FROM_START_3 = "Influence, 3 models", "What-if, 3 models", "What-if from the start, 3 models"
AVERAGED = {INFLUENCE_3: INFLUENCE, WHAT_IF_3: WHAT_IF, FROM_START_3: FROM_START}
"""Methods whose predictions are averaged over three models, and the method of one model."""
WHAT_IFS = (WHAT_IF, WHAT_IF_3, FROM_START, FROM_START_3)
"""All kinds of what-if, in the order of tables."""
LDS_METHODS = (*PAPER_METHODS, CG, *OURS, RATES, PER_POINT, *AVERAGED, *REFITS, FROM_START)
"""Methods of LDS in the order of tables, beside the trivial ones."""
KEPT_POINTS, CLASS_BALANCE = TRIVIAL = ("Kept points", "Class balance")
NO_REMOVAL, RANDOM_REMOVAL = BASELINES = ("No removal", "Random removal")

ONE_PROPERTY, TEST_POINTS = "one property", "test points"
DEFAULT_MODE, EXACT_MODE = "default", "exact"
HALVES, KEEP_80, LEAVE_ONE_OUT = PROTOCOLS = ("halves", "keep 80 %", "leave one out")
"""What models are retrained on: halves or 80 % of the groups with about as many points in each, all but one group."""

DATTRI_TASKS = ("dattri-mnist-lr", "dattri-mnist-mlp")
"""Tasks with dattri's public settings, with sizes of their own."""
QNLI_SOURCES = "qnli-sources"
LDS_TASKS = (*DATTRI_TASKS, QNLI_SOURCES)
"""Tasks for LDS only."""

SINGLE_POINTS, SOURCES = "none", "Sources"
"""Groupings without a choice: every point by itself, and where the data says that it comes from."""
RANDOM, K_MEANS, REPR_K_MEANS, GRAD_K_MEANS = GROUPINGS = ("Random", "K-Means", "Repr-K-Means", "Grad-K-Means")
EQUAL_K_MEANS, EQUAL_GRAD_K_MEANS = EQUAL_GROUPINGS = ("K-Means, equal sizes", "Grad-K-Means, equal sizes")
