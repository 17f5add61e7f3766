"""Names of commands, methods, groupings, protocols and baselines, used on the command line, in rows and in tables."""

from __future__ import annotations

EXPERIMENTS = ("lds", "noisy", "pruning", "retraining")
METHODS = (
    "TracInCP", "TracInCPFast", "ArnoldiInfluenceFunction", "NaiveInfluenceFunction",
    "IFAttributorLiSSA", "TracInAttributor", "TRAKAttributor", "TRAKer", "FisherInfluence",
)  # fmt: skip
"""Methods of all toolkits in the order of the tables, listed here so that the toolkits need not be imported."""
SPEED_PARTS = ("core", "captum", "dattri", "trak", "grouping", "training", "scaling", "transformers")
FETCHABLE = ("heloc", "heloc-clean", "mnist", "cifar10", "qnli", "bert", "all")

TRACIN, FISHER, LISSA, TRAK = PAPER_METHODS = ("TracIn", "Inf. (Fisher)", "Inf. (LiSSA)", "TRAK")
CG, RATES, PER_POINT = "Inf. (CG)", "TracIn (learning rates)", "Per-point, directional"
INFLUENCE, EKFAC, FULL_FISHER = OURS = ("Influence", "EK-FAC", "Fisher")
"""`attribute(method=…)` with its own choice of solver and damping. Fisher uses full gradients, not projected ones."""
LEAVE_GROUP_OUT = "Leave-group-out"
WHAT_IF, WARM_START = REFITS = ("What-if", "Warm start")
"""Methods that predict each choice of groups separately, so their predictions are not additive."""
FROM_START = "What-if from the start"
"""What-if that refits the whole training from the untrained model, with features of the first checkpoint."""
WITH_COPIES = "What-if, copies"
"""What-if that also explains copies of the model, changed at random and settled."""
INFLUENCE_3, WHAT_IF_3, FROM_START_3 = "Influence, 3 models", "What-if, 3 models", "What-if from the start, 3 models"
WITH_COPIES_3 = "What-if, 3 models, copies"
AVERAGED = {INFLUENCE_3: INFLUENCE, WHAT_IF_3: WHAT_IF, WITH_COPIES_3: WITH_COPIES, FROM_START_3: FROM_START}
"""Methods whose predictions are averaged over three models → the same method with one model."""
WHAT_IFS = (WHAT_IF, WHAT_IF_3, WITH_COPIES, WITH_COPIES_3, FROM_START, FROM_START_3)
"""All kinds of what-if, in the order of tables."""
LDS_METHODS = (*PAPER_METHODS, CG, *OURS, RATES, PER_POINT, *AVERAGED, *REFITS, WITH_COPIES, FROM_START)
"""Methods of LDS in the order of tables, without the trivial ones."""
KEPT_POINTS, CLASS_BALANCE = TRIVIAL = ("Kept points", "Class balance")
NO_REMOVAL, RANDOM_REMOVAL = BASELINES = ("No removal", "Random removal")

ONE_PROPERTY, TEST_POINTS = "one property", "test points"
DEFAULT_MODE, EXACT_MODE = "default", "exact"
HALVES, KEEP_80, LEAVE_ONE_OUT = PROTOCOLS = ("halves", "keep 80 %", "leave one out")
"""What models are retrained on: halves of the groups, 80 % of them, or all but one group.

The choices of halves and of 80 % all have about the same number of points.
"""

DATTRI_TASKS = ("dattri-mnist-lr", "dattri-mnist-mlp")
"""Tasks with dattri's public settings; their sizes are in `benchmarks.sizes.DattriScale`."""
QNLI_SOURCES = "qnli-sources"
LDS_TASKS = (*DATTRI_TASKS, QNLI_SOURCES)
"""Tasks that only LDS runs on."""

SINGLE_POINTS, SOURCES = "none", "Sources"
"""Groupings that the data gives: every point is a group, or the sources named in the data are the groups."""
RANDOM, K_MEANS, REPR_K_MEANS, GRAD_K_MEANS = GROUPINGS = ("Random", "K-Means", "Repr-K-Means", "Grad-K-Means")
EQUAL_K_MEANS, EQUAL_GRAD_K_MEANS = EQUAL_GROUPINGS = ("K-Means, equal sizes", "Grad-K-Means, equal sizes")
