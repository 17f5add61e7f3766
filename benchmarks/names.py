"""What methods, groupings and baselines are called, in the rows of results as in tables and figures."""

from __future__ import annotations

TRACIN, FISHER, LISSA, TRAK = PAPER_METHODS = ("TracIn", "Inf. (Fisher)", "Inf. (LiSSA)", "TRAK")
CG, RATES, PER_POINT = "Inf. (CG)", "TracIn (learning rates)", "Per-point, directional"
LEAVE_GROUP_OUT = "Leave-group-out"
WHAT_IF, WARM_START = "What-if", "Warm start"
KEPT_POINTS, CLASS_BALANCE = TRIVIAL = ("Kept points", "Class balance")
NO_REMOVAL, RANDOM_REMOVAL = BASELINES = ("No removal", "Random removal")

SINGLE_POINTS = "none"
RANDOM, K_MEANS, REPR_K_MEANS, GRAD_K_MEANS = GROUPINGS = ("Random", "K-Means", "Repr-K-Means", "Grad-K-Means")
