"""What must hold before a number can be trusted: a deterministic loss, and finite gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ggda_ext.groups import Groups


def check_deterministic_modules(model: nn.Module) -> None:
    """Refuse a model with active dropout or batch statistics, naming the module and the fix."""
    for name, module in model.named_modules():
        mixes = isinstance(module, _BatchNorm)
        random = isinstance(module, _DropoutNd) and module.p > 0
        if module.training and (mixes or random):
            what = "mixes the examples of a batch" if mixes else "is random"
            raise ValueError(
                f"the model is in train mode, where {type(module).__name__} {name!r} {what}, so the gradient of "
                "a group has no fixed value: call model.eval() first."
            )


def check_same_losses(losses: Tensor, again: Tensor, data_name: str) -> None:
    """Refuse a loss that gave two answers for the same examples."""
    if not torch.allclose(losses, again, rtol=1e-4, equal_nan=True):
        raise ValueError(
            f"the loss of the same examples came out as {losses.tolist()}, then as {again.tolist()}: switch off "
            f"what is random in the model (functional dropout?), the loss, or {data_name} (augmentation?)."
        )


def check_finite_scores(scores: Tensor, groups: Groups) -> None:
    """Refuse scores `[m, k]` that are not finite, naming the groups."""
    if not bool(torch.isfinite(scores.sum())):
        _refuse(~torch.isfinite(scores).all(0), groups, "scores")


def check_finite_rows(rows: Tensor, ids: Tensor, groups: Groups) -> None:
    """Refuse gradient rows `[b, p]` of the groups `ids` that are not finite, naming the groups."""
    if not bool(torch.isfinite(rows.sum())):
        bad = torch.zeros(len(groups), dtype=torch.bool, device=rows.device)
        bad[ids.to(rows.device)] = ~torch.isfinite(rows).all(1)
        _refuse(bad, groups, "gradients")


def _refuse(bad: Tensor, groups: Groups, what: str) -> None:
    ids = bad.nonzero().flatten().tolist()
    if ids:
        raise NonFinite(ids, groups, what)


class NonFinite(ValueError):
    """Some groups have gradients or scores that are not finite.

    Args:
        ids: their group ids.
        groups: all groups.
        what: ``"gradients"`` or ``"scores"``.
    """

    def __init__(self, ids: list[int], groups: Groups, what: str) -> None:
        self.ids, self.what = ids, what
        first = ids[0]
        super().__init__(
            f"{len(ids)} of {len(groups)} groups have non-finite {what}, first group {groups.name(first)!r} (training "
            f"points {groups[first][:5].tolist()}{', …' if groups.sizes[first] > 5 else ''}): look for NaN or infinite "
            "inputs there, or a loss that overflows in this dtype."
        )
