"""Influence with the empirical Fisher of projected gradients: `vmap(grad)` point by point, and `FisherInfluence`.

    score[t, i] = φ_tᵀ (F + λ · mean diag(F) · I)⁻¹ φ_i,    φ = Pᵀ∇ℓ / √d,    F = Σ_i φ_i φ_iᵀ

No toolkit offers this method, so the original is written here in a plain way, with torch.func and TRAK's projector.
"""

from __future__ import annotations

from typing import Any

import torch
from ggda_trak import FisherInfluence
from torch import Tensor, nn
from torch.func import grad, vmap

from benchmarks.check.case import Case, Method, Pair, count_parameters
from benchmarks.check.trak import projector

DAMPING = 0.1


def plain(case: Case) -> Tensor:
    """Return scores of single points, computed from one row per point."""
    project, scale = projector(case.part, case.projection_dim), count_parameters(case.part) ** 0.5
    parameters = {name: value.detach() for name, value in case.part.named_parameters()}
    gradients = vmap(grad(case.loss_of_one), in_dims=(None, 0))

    def features(points: Pair) -> Tensor:
        rows = []
        for batch in zip(*(tensor.split(case.size.batch) for tensor in points), strict=True):
            found = gradients(parameters, batch)
            flat = torch.cat([found[name].flatten(1) for name in parameters], 1)
            rows.append(project.project(flat, model_id=0) / scale)
        return torch.cat(rows)

    train, test = features(case.train), features(case.test)
    fisher = train.T @ train
    fisher += DAMPING * fisher.diagonal().mean() * torch.eye(len(fisher))
    if case.one_property:
        test = test.mean(0, keepdim=True)
    return test @ torch.linalg.solve(fisher, train.T)


def grouped(case: Case, **options: Any) -> Tensor:
    """Return scores of groups by `FisherInfluence`."""
    influence = FisherInfluence(
        case.part, case.train, nn.CrossEntropyLoss(), case.groups,
        projector=projector(case.part, case.projection_dim), **options,
    )  # fmt: skip
    return influence.influence(property=case.mean_loss) if case.one_property else influence.influence(case.test)


METHODS = (
    Method(
        "core", "FisherInfluence", plain, lambda case: grouped(case, fisher="exact", damping=DAMPING),
        lambda case: f"original: vmap(grad) in {case.batches}; {case.scope} projected to {case.projection_dim}, "
        f"exact Fisher, damping {DAMPING}",
        grouped,
        row_per_point=True,
    ),
)  # fmt: skip
