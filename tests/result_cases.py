"""Results to draw and to write about: few groups and many, one property and several, with and without intervals."""

from __future__ import annotations

import numpy as np
import torch

from ggda_ext import Groups
from ggda_ext.results import Attribution, MethodFacts


def result(
    k=3, m=1, *, each=6, names=None, directions=None, interval=True, members=True, unit="property", scores=None,
    warnings=None, seed=0,
):  # fmt: skip
    """Random scores of k groups for m properties, summed from those of the members."""
    draw = np.random.default_rng(seed)
    labels = np.repeat(np.arange(k), each)
    groups = Groups(labels, names=names)
    own = torch.from_numpy(draw.normal(size=(m, k * each)))
    if scores is not None:
        own = torch.tensor(scores, dtype=torch.float64).reshape(m, k)[:, labels] / each
    summed = groups.sum(own)
    width = 0.1 * summed.abs()
    return Attribution(
        summed,
        groups,
        [f"property {j}" for j in range(m)] if m > 1 else ["test loss"],
        [False] * m if directions is None else directions,
        low=summed - width if interval else None,
        high=summed + width if interval else None,
        interval="95 %, over test points" if interval else "",
        method=MethodFacts("influence", unit, {"damping": 0.01}, passes=6),
        warnings=warnings,
        member_scores=own if members else None,
    )
