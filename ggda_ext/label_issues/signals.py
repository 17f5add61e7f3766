"""Three signals of a wrong label, for every training point i with loss ℓ_i and gradient g_i:

    loss ℓ_i,    self-influence ‖g_i‖²,    influence on clean points 1/m Σ_j cos(g_i, g_j)³

over m clean validation points j. It uses cosines, because otherwise the few points that the model gets wrong outweigh
all others. The cosines are cubed, so that the related points decide and not the mean over all points. A model that has
learned wrong labels by heart gives them a small loss, but their influence on clean points like them is still negative.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.attribution import finite_losses
from ggda_ext.data import DataLike, IndexedData, SomePoints
from ggda_ext.gradients import GroupGradients, PointGradients
from ggda_ext.groups.partition import Groups, GroupsLike
from ggda_ext.label_issues.result import LabelIssues, RankedBy
from ggda_ext.model import ParameterChoice, only_thread
from ggda_ext.tables import check_columns
from ggda_ext.words import without

RankBy = Literal["auto", "loss", "self_influence", "influence", "loss and influence"]


@without(keeping="its signals take a few passes and are not kept; save issues.loss, .self_influence and .influence")
@torch.inference_mode(False)
def find_label_issues(
    model: nn.Module,
    loss_fn: Any,
    data: DataLike,
    *,
    validation: DataLike | None = None,
    groups: GroupsLike | None = None,
    rank_by: RankBy = "auto",
    parameters: ParameterChoice = None,
    strategy: str = "auto",
    batch_size: int | None = None,
    memory_budget: int = 256 * 2**20,
    show_progress: bool | None = None,
) -> LabelIssues:
    """Find training points whose label looks wrong, most suspicious first.

    Points are ranked by the loss. But if clean validation data shows that the model has learned labels by heart (its
    training loss is below the loss of clean points), they are ranked by the mean of the ranks by loss and by influence.
    In tests with a fifth of the labels flipped, nothing was better than the loss for models that had not learned the
    flipped labels; for models that had, loss and influence together were better. Self-influence added nothing
    (docs/label_issues.md). The result says what it is ranked by, and how far the signals agree.

    Args:
        model: the model, trained on `data`, in eval mode if it has dropout or BatchNorm.
        loss_fn: the training loss, ``loss_fn(output, target)`` of any reduction, or an `ExampleLoss`.
        data: the training set, with the labels that the model was trained on.
        validation: some hundred points with right labels that the model was not trained on.
        groups: a `Groups` or anything it accepts, for a table by group.
        rank_by: ``"auto"``, or ``"loss"``, ``"self_influence"``, ``"influence"``, ``"loss and influence"``.
        parameters: names of the parameters or modules that the gradients are taken for; all by default. For a large
            network the last layers are much cheaper, because a gradient per point is needed unless all layers are
            Linear.
        strategy: how gradients are formed: ``"auto"``, or a strategy that can form gradients of single points
            (``"segmented"``, ``"backward"`` or ``"persample"``, see `STRATEGIES`). All give the same numbers.
        batch_size: points per batch; by default as many as fit the budget.
        memory_budget: bytes for a batch's activations, for a block of gradients, and for a block of cosines.
        show_progress: whether to show a progress bar on passes over the data; by default on those over 5 seconds.

    >>> from torch import nn
    >>> x = torch.tensor([[-2.0], [-1.5], [1.5], [2.0]])
    >>> model = nn.Linear(1, 2)
    >>> with torch.no_grad():
    ...     _ = model.weight.copy_(torch.tensor([[-1.0], [1.0]])), model.bias.zero_()
    >>> issues = find_label_issues(model, nn.CrossEntropyLoss(), (x, torch.tensor([0, 1, 1, 1])))
    >>> issues.indices[0].item(), issues.ranked_by
    (1, 'loss')
    """
    if rank_by not in get_args(RankBy):
        raise ValueError(f"rank_by={rank_by!r} is not one of {', '.join(map(repr, get_args(RankBy)))}.")
    if validation is None and "influence" in rank_by.replace("self_influence", ""):
        raise ValueError(f"rank_by={rank_by!r} needs clean points: pass validation=(x, y), points with right labels.")
    options: dict[str, Any] = {
        "parameters": parameters, "strategy": strategy, "batch_size": batch_size, "memory_budget": memory_budget,
        "show_progress": show_progress,
    }  # fmt: skip
    grouped = GroupGradients(model, loss_fn, data, groups, **options)
    with only_thread(model):
        points = grouped.on(grouped.data, Groups.singletons(grouped.groups.n))
        loss, norms = finite_losses(points, batch_size), points.squared_norms()
        influence, clean_loss = None, None
        if validation is not None:
            clean = points.on(IndexedData(validation, "validation"))
            check_columns(clean.data.columns, "validation", points.data.columns)
            influence = _influence(points, clean, norms, points.memory_budget).cpu().numpy()
            clean_loss = float(finite_losses(clean, batch_size).mean())
    ranked_by, why = _choice(rank_by, float(loss.mean()), clean_loss)
    return LabelIssues.ranked(
        loss.cpu().numpy(), norms.cpu().numpy(), influence, ranked_by=ranked_by, why=why,
        groups=None if groups is None else grouped.groups,
    )  # fmt: skip


def _choice(rank_by: RankBy, loss: float, clean_loss: float | None) -> tuple[RankedBy, str]:
    """Return the signals to rank by, and why."""
    if rank_by != "auto":
        return rank_by, "as asked for"
    if clean_loss is None:
        return "loss", "without clean validation data nothing was found to be better"
    found = f"mean training loss {loss:.3g}, of clean points {clean_loss:.3g}"
    if loss >= clean_loss:
        return "loss", f"{found}: labels were not learned by heart, and then nothing was found to be better"
    return "loss and influence", f"{found}: labels were learned by heart, which hides wrong ones from the loss"


def _influence(points: GroupGradients, clean: GroupGradients, norms: Tensor, memory_budget: int) -> Tensor:
    """Mean cubed cosine of every point's gradient with the gradients of the clean points `[n]`.

    The cosine counts as 0 if a gradient is 0.
    """
    n, m = points.groups.n, clean.groups.n
    sizes, clean_sizes = norms.double().sqrt(), clean.squared_norms().double().sqrt()
    total = torch.zeros(n, dtype=torch.float64, device=norms.device)
    step = max(1, memory_budget // (8 * n))
    for low in range(0, m, step):
        at = np.arange(low, min(low + step, m))
        some = PointGradients(points.loss, SomePoints(clean.data, at))
        products = points.scores(some).double()
        lengths = clean_sizes[low : low + step, None] * sizes
        total += torch.where(lengths > 0, products / lengths, 0.0).pow(3).sum(0)
    return total / m
