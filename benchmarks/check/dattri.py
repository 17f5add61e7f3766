"""dattri's LiSSA, TracIn and TRAK, per sample and with groups."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ggda_dattri
import torch
from dattri import algorithm as upstream
from dattri.task import AttributionTask
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.check.case import Case, Method

DAMPING = 0.01


def lissa(case: Case, toolkit: ModuleType, **groups: Any) -> Tensor:
    """LiSSA with all points of the Hessian in every step, so that the result is not random."""
    attributor = toolkit.IFAttributorLiSSA(
        AttributionTask(case.loss, case.part, case.part.state_dict()),
        recursion_depth=case.size.depth, batch_size=len(case.curvature_set), scaling=case.lissa_scaling,
        damping=DAMPING, **groups,
    )  # fmt: skip
    attributor.cache(case.curvature_loader())
    with torch.no_grad():
        return _asked(case, attributor, case.train_loader(), **groups)


def tracin(case: Case, toolkit: ModuleType, **groups: Any) -> Tensor:
    """TracIn at the final checkpoint, without projection."""
    task = AttributionTask(case.loss_of_one, case.part, case.part.state_dict())
    attributor = toolkit.TracInAttributor(task, torch.ones(1), False, {"proj_type": "identity"}, **groups)
    return _asked(case, attributor, case.train_loader(), **groups)


def trak(case: Case, toolkit: ModuleType, **groups: Any) -> Tensor:
    """TRAK with dattri's projection."""
    attributor = toolkit.TRAKAttributor(
        AttributionTask(case.loss_of_one, case.part, case.part.state_dict()),
        lambda parameters, data: torch.exp(-case.loss_of_one(parameters, data)),
        {"proj_dim": case.projection_dim, "proj_type": "normal", "device": "cpu"},
        regularization=case.loss_ridge, **groups,
    )  # fmt: skip
    attributor.cache(case.train_loader())
    return _asked(case, attributor, **groups)


def _asked(case: Case, attributor: Any, *train: DataLoader, **groups: Any) -> Tensor:
    """Return scores for the test points, or for their mean loss: with groups as a property, else as an average."""
    if case.one_property and groups:
        return attributor.attribute(*train, property=case.mean_loss).T
    scores = attributor.attribute(*train, case.test_loader()).T
    return scores.mean(0, keepdim=True) if case.one_property else scores


METHODS = (
    Method(
        "dattri", "IFAttributorLiSSA",
        lambda case: lissa(case, upstream),
        lambda case: lissa(case, ggda_dattri, groups=case.groups, show_progress=False),
        lambda case: f"{case.scope}, depth {case.size.depth}, scaling {case.lissa_scaling:g}, "
        f"Hessian of {len(case.curvature_set)} points, all in every step, {case.batches}",
        solves_each_test=True,
    ),
    Method(
        "dattri", "TracInAttributor",
        lambda case: tracin(case, upstream), lambda case: tracin(case, ggda_dattri, groups=case.groups),
        lambda case: f"{case.scope}, not projected, {case.batches}",
    ),
    Method(
        "dattri", "TRAKAttributor",
        lambda case: trak(case, upstream), lambda case: trak(case, ggda_dattri, groups=case.groups, fisher="exact"),
        lambda case: f"{case.scope} projected to {case.projection_dim}, exact Fisher, "
        f"regularization {case.loss_ridge:g}, {case.batches}",
        lambda case: trak(case, ggda_dattri, groups=case.groups),
        row_per_point=True,
    ),
)  # fmt: skip
