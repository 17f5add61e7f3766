"""Settings that say how models are linearised."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ggda_ext.counterfactual.checks import check_count, check_folder, check_penalty
from ggda_ext.counterfactual.directions import KINDS, Kind
from ggda_ext.curvature.damping import Training, TrainingSteps


@dataclass(frozen=True)
class Settings:
    """Arguments of `WhatIf`; raises an error if they make no sense."""

    directions: Kind
    rank: int
    ridge: float | None
    recipe: Training | None
    start: nn.Module | None
    settle: bool
    nearby: int
    weight_decay: float | None
    most_points: int
    memory_budget: int
    folder: str | Path | None
    seed: int

    def __post_init__(self) -> None:
        if self.directions not in KINDS:
            raise ValueError(f"directions={self.directions!r} is not one of {', '.join(map(repr, KINDS))}.")
        for name in ("rank", "most_points"):
            check_count(name, getattr(self, name))
        check_count("nearby", self.nearby, 0)
        check_count("seed", self.seed, 0)
        for name in ("weight_decay", "ridge"):
            if getattr(self, name) is not None:
                check_penalty(name, getattr(self, name))
        check_folder(self.folder)
        if self.weight_decay is not None and self.recipe is not None:
            raise ValueError("weight_decay and recipe are both given: pass one of them.")
        if self.start is not None and not isinstance(self.start, nn.Module):
            raise TypeError(f"start is a {type(self.start).__name__}: pass a model, e.g. make_model().")
        if self.start is not None and self.recipe is None:
            raise ValueError("start is given without a recipe, which says how far a training gets: pass both.")
        for name, asked in (("settle", self.settle), ("nearby", self.nearby)):
            if asked and self.recipe is None:
                raise ValueError(f"{name}={asked} needs a recipe, which says how far a training gets: pass both.")
            if asked and self.start is not None:
                raise ValueError(f"{name} and start are both given: pass one of them.")
        _ = self.decay  # raises an error if `recipe` is no recipe

    @property
    def decay(self) -> float:
        """The weight decay λ, given directly or by the recipe."""
        return (self.weight_decay or 0.0) if self.recipe is None else TrainingSteps.of(self.recipe, 1).weight_decay
