"""How far a refit may be trusted: compare the linearised model with the model itself at the parameters of the refit.

A refit promises that the loss of the kept groups falls by some amount. The model's own outputs at θ + V d tell how much
of this fall comes true. Trust-region methods use the same share; it is 1 if outputs are linear in the parameters. A
share far below zero says that the refit goes where the linearisation means nothing, so its levels mean nothing either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ggda_ext.counterfactual.newton import SingularRefit
from ggda_ext.data import to_device
from ggda_ext.evaluation import random_subsets
from ggda_ext.losses import output_of
from ggda_ext.model import called_with

if TYPE_CHECKING:
    from ggda_ext.counterfactual.linearized import LinearizedModel

LEAST = 0.0
"""If no recipe gives the ridge, the ridge is raised until at least this share comes true: the model itself must not
lose where its linearisation promises a gain. Below this share, ranks can be good, but levels were off by factors of up
to 9."""
_HALVES, _POINTS, _FACTOR, _RAISES = 8, 2_000, 2.0, 16


def trusted_ridge(model: LinearizedModel, ridge: float) -> float:
    """Return the ridge, raised until at least the share `LEAST` of the promised fall comes true (see `kept_share`)."""
    for _ in range(_RAISES):
        if not kept_share(model, ridge) < LEAST or ridge == 0:
            break
        ridge *= _FACTOR
    return ridge


@torch.no_grad()
def kept_share(model: LinearizedModel, ridge: float) -> float:
    """Share of the promised fall of the loss that comes true: the median over refits on random halves of the groups.

    NaN for one group, and if no half has any weight; −∞ if a refit has no optimum.
    """
    groups = model.provider.groups
    if len(groups) < 2:
        return float("nan")
    halves = random_subsets(groups, _HALVES, fraction=0.5, seed=model.settings.seed)
    first = np.unique(groups.labels[groups.labels >= 0], return_index=True)[1]
    halves = halves[:, np.argsort(np.argsort(first))]  # so the halves do not depend on the order of the groups
    weights = torch.from_numpy(np.unique(halves, axis=0).astype(float))
    masses = model.refit.masses.cpu()
    weights = weights[weights @ masses[:-1] + masses[-1] > 0]
    if not len(weights):
        return float("nan")
    try:
        answers = model.refit.solve(weights, model.penalty(ridge))
    except SingularRefit:  # nothing bounds the refit
        return -float("inf")
    stay = torch.ones(len(weights), 1, dtype=torch.float64)
    weights = torch.cat([weights, stay], 1).to(answers)
    shares, pulls = model.refit.weights_of_points(weights), model.refit.pull - model.refit.missing(weights)
    step = -(-len(model.chosen) // _POINTS)
    at = torch.from_numpy(np.argsort(model.chosen)[::step].copy()).to(answers.device)
    loss, before = model.training_loss.take(at), model.outputs[at]
    tangents = model.training.tangents[at]
    found = []
    for d, share, pulled in zip(answers, shares.T, pulls, strict=True):
        weight = share[at].double() * step
        linear = before + (tangents @ d.to(tangents)).view(before.shape)
        pull = float(d @ pulled) - model.settings.decay / 2 * float(d @ d)
        start, promised, real = (
            float(weight @ loss.each(outputs))
            for outputs in (before, linear, moved_outputs(model, at, model.settled + d))
        )
        if start - promised + pull > 0:
            found.append((start - real + pull) / (start - promised + pull))
    return float(np.median(np.nan_to_num(found, nan=-np.inf))) if found else float("nan")


def moved_outputs(model: LinearizedModel, at: Tensor, d: Tensor) -> Tensor:
    """Return the model's own outputs at θ + V d; `at` are places among the training points that the refit looks at."""
    rows = model.directions.rows
    step = (d.to(rows) @ rows)[None]
    moved = {name: value + model.space.part(step, value)[0] for name, value in model.space.parameters.items()}
    points, parts = model.chosen[at.cpu().numpy()], []
    for batch in model.provider.data.batches(np.array_split(points, -(-len(points) // 512))):
        parts.append(called_with(model.space.model, moved, to_device(batch, model.space.device), function=output_of))
    return torch.cat(parts)
