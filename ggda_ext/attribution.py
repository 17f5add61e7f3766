"""Group scores of a property, at one set of parameters or summed over checkpoints.

With the curvature left out (TracIn's P = I) the score of group G for a property g is

    τ_G = Σ_c w_c ⟨∇g(θ_c), Σ_{i∈G} ∇ℓ_i(θ_c)⟩

over checkpoints θ_c with weights w_c (TracIn: their learning rates). Adapters put the toolkit's own
curvature between the two gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ggda_ext.checkpoints import Checkpoints, LoadCheckpoint, at_checkpoints, listed_checkpoints
from ggda_ext.data import DataLike
from ggda_ext.gradients import Directions, GroupGradients, PointGradients
from ggda_ext.groups.partition import GroupsLike
from ggda_ext.kept_scores import keep_scores
from ggda_ext.model_lock import only_thread
from ggda_ext.properties import PointProperty, Property, property_gradient


def attribute(
    model: nn.Module,
    loss_fn: Any,
    data: DataLike,
    groups: GroupsLike | None,
    property: Property,
    *,
    checkpoints: Checkpoints | None = None,
    weights: Sequence[float] | None = None,
    load_checkpoint: LoadCheckpoint | None = None,
    save_dir: str | Path | None = None,
    tag: str | None = None,
    **provider_options: Any,
) -> Tensor:
    """Scores of groups: positive where the property is predicted to rise if the group is removed.

    For a loss these are the groups that help. The size of a score is that of a step of gradient descent on the group,
    so it ranks groups and is not the rise itself (docs/signs.md lists all entry points).

    Args:
        model: the trained model, in eval mode if it has dropout or BatchNorm.
        loss_fn: the training loss, ``loss_fn(output, target)`` of any reduction, or an `ExampleLoss`.
        data: the training set.
        groups: a `Groups` or anything it accepts; None for groups of one.
        property: what to explain, a callable ``g(model) -> Tensor`` or one of `ggda_ext.properties`.
        checkpoints: a state dict or its path, or several; the model's current parameters if left out. The model gets
            its own parameters back afterwards.
        weights: one weight per checkpoint; 1 if left out.
        load_checkpoint: ``load_checkpoint(model, checkpoint)``, if a checkpoint is neither.
        save_dir: a folder that keeps finished blocks of scores. Called again after a kill, only missing blocks are
            made, with the same result bit for bit; another model, loss, data set, groups or settings are refused. The
            folder may be asked about other properties, too. Under torchrun all ranks have to see it.
        tag: with `save_dir`, names what cannot be seen from here, such as the version of data that cannot be read;
            another is refused.
        **provider_options: see `GroupGradients`: `parameters`, `strategy`, `batch_size`, `show_progress`, …

    Returns:
        Scores `[m, k]`, one row per component of the property; with `save_dir` a memory map, on the CPU.
    """
    provider = GroupGradients(model, loss_fn, data, groups, **provider_options)
    listed, factors = _weighted(checkpoints, weights)
    with (
        only_thread(model),
        closing(at_checkpoints(model, listed, load_checkpoint)) as numbers,
        keep_scores(save_dir, tag) as kept,
    ):
        return kept.total(
            (factors[at], kept.scores(provider, property_directions(provider, property), at, property))
            for at in numbers
        )


def _weighted(checkpoints: Checkpoints | None, weights: Sequence[float] | None) -> tuple[list[Any] | None, list[float]]:
    """Checkpoints, None for the current parameters, with their weights."""
    if checkpoints is None:
        if weights is not None:
            raise ValueError("weights is given without checkpoints: pass both, or neither.")
        return None, [1.0]
    listed = listed_checkpoints(checkpoints)
    factors = [1.0] * len(listed) if weights is None else [float(weight) for weight in weights]
    if len(factors) != len(listed):
        raise ValueError(f"weights has {len(factors)} entries for {len(listed)} checkpoints.")
    return listed, factors


def property_scores(provider: GroupGradients, property: Property) -> Tensor:
    """Scores `[m, k]` of a property at the current parameters."""
    return provider.scores(property_directions(provider, property))


def property_directions(provider: GroupGradients, property: Property) -> Directions:
    """A property as directions: its gradient `[m, p]`, or the test points themselves for a property of points."""
    if isinstance(property, PointProperty):
        return PointGradients(property.loss, property.data)
    return property_gradient(property, provider.model, provider.space.parameters)
