"""Intervals around scores: over the test points that the property is measured on, and over checkpoints.

Both kinds are standard errors times the quantile of Student's t. The result also says what an interval does not cover:
another training would end at other parameters, and a first-order estimate has its own error (see `Attribution.verify`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ggda_ext.gradients import GroupGradients
from ggda_ext.properties import Property
from ggda_ext.properties.resampling import FOLDS, jackknifed, spread

Intervals = Literal["test points", "checkpoints", "both"] | bool
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Sources:
    """The sources of chance that intervals cover: test points, checkpoints, or both."""

    tests: bool
    checkpoints: bool

    def __bool__(self) -> bool:
        return self.tests or self.checkpoints

    @classmethod
    def of(cls, intervals: Intervals, checkpoints: int) -> Sources:
        """Return the sources that `intervals` asks for; True is test points, and checkpoints if there are several."""
        if intervals not in (True, False, "test points", "checkpoints", "both"):
            raise ValueError(
                f"intervals={intervals!r} is not one of True, False, 'test points', 'checkpoints', 'both'."
            )
        if intervals in ("checkpoints", "both") and checkpoints < 2:
            raise ValueError(
                f"intervals={intervals!r} with {checkpoints} checkpoint: pass several with checkpoints=, such as those "
                "of several seeds, or intervals='test points'."
            )
        several = intervals in ("checkpoints", "both") or (intervals is True and checkpoints > 1)
        return cls(intervals in (True, "test points", "both"), several)


def jackknifed_directions(property: Property, provider: GroupGradients) -> tuple[Tensor, int]:
    """Return rows, the property's gradient `[m, p]` followed by its changes without each fold of test points, and m."""
    whole, changes = jackknifed(property, provider.model, provider.space.parameters, FOLDS)
    return torch.cat([whole, changes.flatten(0, 1)]), len(whole)


def ends(
    scores: Tensor, m: int, each: Sequence[Tensor], weights: Sequence[float], sources: Sources
) -> tuple[Tensor, Tensor, str]:
    """Return the lower and upper ends of the intervals `[m, k]`, and a text that says what they cover.

    Args:
        scores: scores `[m, k]`; for intervals over test points they are followed by the changes without each fold,
            `[folds · m, k]`.
        m: number of components of the property.
        each: scores of every checkpoint.
        weights: weight of every checkpoint.
        sources: the sources of chance to cover.
    """
    from scipy.special import stdtrit  # quantiles of Student's t; importing scipy.stats would take seconds

    parts: list[tuple[Tensor, int, str]] = []
    if sources.tests:
        changes = scores[m:].unflatten(0, (-1, m))
        parts.append((spread(changes).square(), len(changes) - 1, "test points"))
    if sources.checkpoints:
        count = len(each)
        parts.append((_over_checkpoints([part[:m] for part in each], weights), count - 1, f"{count} checkpoints"))
    variances = torch.stack([variance.double().cpu() for variance, _, _ in parts])
    freedom = torch.tensor([float(number) for _, number, _ in parts], dtype=torch.float64)[:, None, None]
    total = variances.sum(0).clamp_min(1e-300)
    shared = total.square() / (variances.square() / freedom).sum(0).clamp_min(1e-300)  # Welch and Satterthwaite
    quantile = torch.from_numpy(stdtrit(shared.clamp_min(1.0).numpy(), (1 + CONFIDENCE) / 2))
    width = (quantile * total.sqrt()).to(scores)
    over = [words for _, _, words in parts]
    missing = [] if sources.checkpoints else ["another training"]
    text = f"{CONFIDENCE:.0%}".replace("%", " %") + f", over {' and '.join(over)}; it does not cover "
    text += " or ".join([*missing, "the error of a first-order estimate (see .verify)"])
    return scores[:m] - width, scores[:m] + width, text


def _over_checkpoints(each: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the variance `[m, k]` of the weighted sum of scores, from their spread over checkpoints."""
    parts, count = torch.stack(list(each)), len(each)
    shares = torch.tensor(weights, dtype=parts.dtype, device=parts.device)[:, None, None]
    mean = (shares * parts).sum(0) / shares.sum()
    return count / (count - 1) * (shares * (parts - mean)).square().sum(0)
