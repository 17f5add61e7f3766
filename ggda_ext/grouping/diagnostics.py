"""Diagnostics to check before trusting a grouping: sizes, spread, agreement of signs, alignment of gradients.

With g_i the gradient of point i and s_i = ⟨∇g, g_i⟩ its score for a property g, for every group G

    same sign = share of members with sign(s_i) = sign(Σ s_i),    alignment = ‖Σ g_i‖² / Σ‖g_i‖²

Alignment is about 1 for unrelated gradients and the group's size for equal gradients; it shows how good a batched
Fisher will be. Both are exact. Signs take one training pass. Alignment takes two to three if all layers are Linear;
else it needs the gradient of every point, a block at a time. Only single numbers per point are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.attribution import property_directions
from ggda_ext.data import IndexedData
from ggda_ext.gradients import GroupGradients
from ggda_ext.grouping.kmeans import means
from ggda_ext.grouping.whitening import check_features
from ggda_ext.groups.partition import Groups
from ggda_ext.methods.cautions import LARGE, WHOLE_CLASS, class_share, labels_of
from ggda_ext.properties import Property
from ggda_ext.results.table import aligned_lines, shown

_CLASS = "nearly a whole class"
_SHOWN = 8


@dataclass(frozen=True, eq=False)
class Summary:
    """Diagnostics of a grouping. Prints as a short table. Values that were not asked for are None.

    Attributes:
        groups: the groups.
        spread: mean squared distance of the members to their mean, in the given features `[k]`.
        total_spread: the spread of all grouped points as one group.
        scores: score of every group for the property `[k]`.
        same_sign: share of members whose own score has the sign of the group's score `[k]`.
        alignment: ‖Σ grad‖² / Σ‖grad‖², between 0 and the group's size `[k]`; 1 if all gradients of a group are zero.
        curvature: ‖Σ grad‖² / size divided by Σ‖grad‖² over all points `[k]`. At least this share of the empirical
            Fisher's trace is lost with the group. It is high for groups that the model learns much from.
        class_share: share of a class that the group holds, for the class with the largest share `[k]`.
    """

    groups: Groups
    spread: np.ndarray | None = None
    total_spread: float | None = None
    scores: np.ndarray | None = None
    same_sign: np.ndarray | None = None
    alignment: np.ndarray | None = None
    curvature: np.ndarray | None = None
    class_share: np.ndarray | None = None

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """Name → array `[k]` for every column that is not None, e.g. for ``pandas.DataFrame(summary.columns)``."""
        found = {"group": np.array([self.groups.name(j) for j in range(len(self.groups))], dtype=object)}
        found["size"] = self.groups.sizes
        for name in ("spread", "scores", "same_sign", "alignment", "curvature", "class_share"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        return found

    @property
    def untrustworthy(self) -> dict[str, np.ndarray]:
        """Reason → ids of the groups for which first-order estimates are known to fail for that reason."""
        found = {f"more than {LARGE:.0%} of all points": self.groups.sizes > LARGE * self.groups.n}
        if self.class_share is not None:
            found[_CLASS] = self.class_share >= WHOLE_CLASS
        if self.curvature is not None:
            found[f"so coherent that more than {LARGE:.0%} of the curvature is theirs"] = self.curvature > LARGE
        return {reason: np.flatnonzero(which) for reason, which in found.items() if which.any()}

    def __str__(self) -> str:
        return "\n".join([*self._overview(), *self._table(), *self._warnings()])

    __repr__ = __str__

    def _overview(self) -> list[str]:
        sizes, n = self.groups.sizes, self.groups.n
        inside = int(sizes.sum())
        low, median, high = int(sizes.min()), float(np.median(sizes)), int(sizes.max())
        lines = [
            f"{len(sizes):,} groups of {inside:,} points: sizes {low:,} … {high:,}, median {median:g}, "
            f"mean {sizes.mean():.1f}; the largest holds {high / n:.1%}"
        ]
        if inside < n:
            lines.append(f"{n - inside:,} points are in no group")
        if self.spread is not None and self.total_spread is not None:
            within = float(self.spread @ sizes) / inside
            share = within / self.total_spread if self.total_spread > 0 else 0.0
            lines.append(f"spread within groups: {share:.1%} of that of all points")
        if self.same_sign is not None:
            members = float(self.same_sign @ sizes) / inside
            lines.append(
                f"members with the sign of their group: {members:.1%}; lowest group {self.same_sign.min():.1%}"
            )
        if self.alignment is not None:
            lines.append(f"alignment of gradients: median {np.median(self.alignment):.3g} (1: unrelated; size: equal)")
        return lines

    def _table(self) -> list[str]:
        by_score = self.scores is not None
        weight = np.abs(self.scores) if self.scores is not None else self.groups.sizes
        first = np.argsort(-weight, kind="stable")[:_SHOWN]
        columns = self.columns
        rows = [["score" if name == "scores" else name.replace("_", " ") for name in columns]]
        rows += [
            [f"{v[j]:.3g}" if v.dtype.kind == "f" else shown(v[j]) for v in columns.values()] for j in first.tolist()
        ]
        rest = len(self.groups) - len(first)
        order = "by absolute score" if by_score else "by size"
        return ["", *aligned_lines(rows), *([f"… and {rest:,} more, {order}"] if rest else [])]

    def _warnings(self) -> list[str]:
        if not self.untrustworthy:
            return []
        worse = " (without a whole class, not even ranks)" if _CLASS in self.untrustworthy else ""
        lines = ["", f"Warning: first-order estimates are known to fail; ranks hold, magnitudes are too small{worse}:"]
        for reason, ids in self.untrustworthy.items():
            names = ", ".join(shown(self.groups.name(int(j))) for j in ids[:_SHOWN])
            names += ", …" if len(ids) > _SHOWN else ""
            what = f"group {names} is" if len(ids) == 1 else f"{len(ids)} groups, {names}, are each"
            lines.append(f"  {what} {_fitting(reason, len(ids))}")
        return lines


def summarize(
    groups: Groups,
    model: nn.Module | None = None,
    loss_fn: Any = None,
    data: Any = None,
    *,
    property: Property | None = None,
    features: Any = None,
    targets: Any = None,
    options: Mapping[str, Any] | None = None,
) -> Summary:
    """Compute all diagnostics that the arguments allow; see `Groups.summary`. `options` are for `GroupGradients`."""
    options = options or {}
    if model is not None and data is None:
        raise ValueError("model is given without data: pass model, loss_fn and data.")
    if model is None and data is not None and not hasattr(features, "whitened_features"):
        raise ValueError("data is given without a model: pass model, loss_fn and data.")
    if model is None and (property is not None or options):
        what = "property" if property is not None else next(iter(options))
        raise ValueError(f"{what}= is given without a model: pass model, loss_fn and data as well.")
    found: dict[str, Any] = {}
    if features is not None:
        found |= _spread(groups, features, data)
    if model is not None:
        provider = GroupGradients(model, loss_fn, data, groups, **options)
        points = provider.on(provider.data, Groups.singletons(groups.n))
        if property is not None:
            found |= _signs(groups, points, property)
        found |= _alignment(groups, provider, points)
        targets = _targets(provider.data) if targets is None else targets
    if targets is not None:
        found["class_share"] = class_share(groups, targets)
    return Summary(groups, **found)


def _spread(groups: Groups, features: Any, data: Any) -> dict[str, Any]:
    if hasattr(features, "whitened_features"):
        if data is None:
            raise ValueError("features is a builder: pass the data it was fitted to as data=.")
        features = features.whitened_features(data)
    rows = features.detach().cpu().numpy() if isinstance(features, Tensor) else np.asarray(features)
    rows = check_features(rows.reshape(len(rows), -1) if rows.ndim else rows)
    if len(rows) != groups.n:
        raise ValueError(f"features has {len(rows)} rows for {groups.n} training points: pass one row per point.")
    labels, rows = groups.labels[groups.labels >= 0], rows[groups.labels >= 0].astype(np.float64)
    centres, sizes = means(rows, labels, len(groups))
    squares = np.square(rows - centres[labels]).sum(1)
    total = np.square(rows - rows.mean(0)).sum(1).mean()
    return {"spread": np.bincount(labels, squares) / sizes, "total_spread": float(total)}


def _signs(groups: Groups, points: GroupGradients, property: Property) -> dict[str, Any]:
    directions = property_directions(points, property)
    m = len(directions) if isinstance(directions, Tensor) else directions.n
    if m != 1:
        raise ValueError(f"property has {m} components: pass one with a single number, such as their mean.")
    each = points.scores(directions)[0]
    scores = groups.sum(each)
    inside = torch.from_numpy(groups.order.astype(np.int64)).to(each.device)
    signs = scores.sign().repeat_interleave(torch.tensor(groups.sizes, device=each.device))
    agrees = torch.zeros(groups.n, dtype=torch.float64, device=each.device)
    agrees[inside] = (each[inside].sign() == signs).double()
    return {"scores": scores.cpu().numpy(), "same_sign": groups.sum(agrees).cpu().numpy() / groups.sizes}


def _alignment(groups: Groups, provider: GroupGradients, points: GroupGradients) -> dict[str, Any]:
    each = points.squared_norms().double()
    together, apart = provider.squared_norms().double().cpu().numpy(), groups.sum(each).cpu().numpy()
    ratio = np.divide(together, apart, out=np.ones_like(apart), where=apart > 0)
    total = float(each.sum())
    curvature = together / groups.sizes / total if total > 0 else np.zeros_like(together)
    return {"alignment": ratio, "curvature": curvature}


def _targets(data: IndexedData) -> Tensor | None:
    """Return the class labels in the data; None unless its targets are whole numbers, one per point."""
    found = []
    for _, batch in data.sequential(1024):
        labels = labels_of(batch)
        if labels is None:
            return None
        found.append(labels)
    return torch.cat(found)


def _fitting(reason: str, count: int) -> str:
    return reason.replace("theirs", "its own") if count == 1 else reason
