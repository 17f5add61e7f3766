"""Group scores of a property, at one set of parameters or summed over checkpoints.

With the curvature left out (TracIn's P = I) the score of group G for a property g is

    τ_G = Σ_c w_c ⟨∇g(θ_c), Σ_{i∈G} ∇ℓ_i(θ_c)⟩

over checkpoints θ_c with weights w_c (TracIn: their learning rates). Adapters put the toolkit's own
curvature between the two gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from ggda_ext.checkpoints import Checkpoints, LoadCheckpoint, at_checkpoints, listed_checkpoints
from ggda_ext.data import DataLike
from ggda_ext.gradients import Directions, GroupGradients, PointGradients
from ggda_ext.groups.partition import GroupsLike
from ggda_ext.model import ParameterChoice, only_thread
from ggda_ext.properties import PointProperty, Property, property_gradient
from ggda_ext.results import Attribution, MethodFacts
from ggda_ext.tables import group_column

if TYPE_CHECKING:
    from ggda_ext.storage.scores import ScoreStore


def attribute(
    model: nn.Module,
    loss_fn: Any,
    data: DataLike,
    groups: GroupsLike | str | None,
    property: Property,
    *,
    frame: Any = None,
    checkpoints: Checkpoints | None = None,
    weights: Sequence[float] | None = None,
    load_checkpoint: LoadCheckpoint | None = None,
    save_dir: str | Path | None = None,
    tag: str | None = None,
    parameters: ParameterChoice = None,
    strategy: str = "auto",
    batch_size: int | None = None,
    memory_budget: int = 256 * 2**20,
    show_progress: bool | None = None,
) -> Attribution:
    """Scores of groups: positive where the property is predicted to rise if the group is removed.

    For a loss these are the groups that help; the result says who helps and who hurts. The size of a score is that of a
    step of gradient descent on the group, so it ranks groups and is not the rise itself (docs/signs.md lists all entry
    points).

    Args:
        model: the trained model, in eval mode if it has dropout or BatchNorm.
        loss_fn: the training loss, ``loss_fn(output, target)`` of any reduction, or an `ExampleLoss`; None for a model
            that returns its own loss.
        data: the training set: a DataLoader that does not shuffle, a Dataset, tensors, arrays, pandas frames, or a dict
            of these.
        groups: a `Groups` or anything it accepts; None for groups of one; with `frame`, the name of a column, or a
            list of names for the combinations of their values.
        property: what to explain, a callable ``g(model) -> Tensor`` or one of `ggda_ext.properties`.
        frame: the pandas table whose columns `groups` names, with a row for every training point.
        checkpoints: a state dict or its path, or several; the model's current parameters if left out. The model gets
            its own parameters back afterwards.
        weights: one weight per checkpoint; 1 if left out.
        load_checkpoint: ``load_checkpoint(model, checkpoint)``, if a checkpoint is neither.
        save_dir: a folder that keeps finished blocks of scores. Called again after a kill, only missing blocks are
            made, with the same result bit for bit; another model, loss, data set, groups or settings are refused. The
            folder may be asked about other properties, too. Under torchrun all ranks have to see it.
        tag: with `save_dir`, names what cannot be seen from here, such as the version of data that cannot be read;
            another is refused.
        parameters: names of parameters or modules, modules or parameters that count; by default all that require a
            gradient.
        strategy: how gradients are summed, ``"auto"`` or one of `STRATEGIES`; all give the same numbers.
        batch_size: points per batch; by default those of a DataLoader, else as many as fit the budget, at most 1024.
        memory_budget: bytes for one batch's activations and for one block of rows.
        show_progress: whether to show a progress bar on passes over the data; by default on those over 5 seconds.

    Returns:
        An `Attribution`: scores `[m, k]`, one row per component of the property, with names, sizes and direction; it
        prints as a ranked table, and is a tensor. With `save_dir` the scores are a memory map, on the CPU.
    """
    if frame is not None or isinstance(groups, str):
        groups = group_column(frame, groups)
    provider = GroupGradients(
        model, loss_fn, data, groups, parameters=parameters, strategy=strategy, batch_size=batch_size,
        memory_budget=memory_budget, show_progress=show_progress,
    )  # fmt: skip
    listed, factors = _weighted(checkpoints, weights)
    start = perf_counter()
    with (
        only_thread(model),
        closing(at_checkpoints(model, listed, load_checkpoint)) as numbers,
        keep_scores(save_dir, tag) as kept,
    ):
        scores = kept.total(
            (factors[at], kept.scores(provider, property_directions(provider, property), at, property))
            for at in numbers
        )
    method = MethodFacts("tracin", "rank", {"checkpoints": len(factors)}, seconds=perf_counter() - start)
    return Attribution.of(scores, provider.groups, property, method=method, test_axis=0, notes=provider.data.notes)


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


def as_points(property: Property) -> Property | PointGradients:
    """The test points themselves for a property of points, which can be scored without forming gradients."""
    if isinstance(property, PointProperty):
        return PointGradients(property.loss, property.data, property.batch_size)
    return property


def property_directions(provider: GroupGradients, property: Property | PointGradients) -> Any:
    """A property as directions: its gradient `[m, p]`, or the test points themselves for a property of points."""
    asked = property if isinstance(property, PointGradients) else as_points(property)
    if isinstance(asked, PointGradients):
        return asked
    return property_gradient(asked, provider.model, provider.space.parameters)


# where scores go: to the caller, or into a folder (`ggda_ext.storage.scores`) that has the same methods

Weight = float | Tensor


class ScoresInMemory:
    """What `ScoreStore` does, without a folder: nothing is kept."""

    def __enter__(self) -> ScoresInMemory:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def scores(
        self, provider: GroupGradients, directions: Directions, checkpoint: int = 0, property: Any = None
    ) -> Any:
        """``provider.scores(directions)``."""
        return provider.scores(directions)

    def array(
        self, provider: GroupGradients, checkpoint: int, name: str, settings: dict[str, Any], make: Callable[[], Tensor]
    ) -> Tensor:
        """``make()``."""
        return make()

    def stacked(self, parts: Sequence[tuple[Tensor, Any]]) -> Any:
        """Scores of some test points after others, from `(their positions, scores)`."""
        return torch.cat([block for _, block in parts])[torch.cat([ids for ids, _ in parts]).argsort()]

    def total(self, parts: Iterable[tuple[Weight, Any]]) -> Tensor:
        """Weighted sum of scores `[m, k]`."""
        return weighted_sum(parts)

    def write(self, made_of: str, m: int, k: int, dtype: torch.dtype, rows: Callable[[int, int], Tensor]) -> Tensor:
        """``rows(0, m)``."""
        return rows(0, m)


KeptScores: TypeAlias = "ScoreStore | ScoresInMemory"
"""Either of the two; both have the methods of `ScoresInMemory`."""


def keep_scores(save_dir: str | Path | None, tag: str | None = None) -> KeptScores:
    """A store of scores, or one that keeps nothing where `save_dir` is None.

    Args:
        save_dir: the folder.
        tag: names what a fingerprint cannot see, such as the version of the data; another tag is refused.
    """
    if save_dir is not None:
        from ggda_ext.storage.scores import ScoreStore  # only who stores something needs it

        return ScoreStore(save_dir, tag)
    if tag is not None:
        raise ValueError(f"tag={tag!r} is given without save_dir: pass the folder it is for, or leave it out.")
    return ScoresInMemory()


def weighted_sum(parts: Iterable[tuple[Weight, Tensor]]) -> Tensor:
    """Sum of weighted scores, added up as they come."""
    total: Tensor | None = None
    for weight, part in parts:
        weighted = part if isinstance(weight, float) and weight == 1 else weight * part
        total = weighted if total is None else total.add_(weighted)
    assert total is not None
    return total
