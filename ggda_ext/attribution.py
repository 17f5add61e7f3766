"""Group scores of a property by one of several methods, at one set of parameters or over checkpoints.

The score of group G for a property g is

    τ_G = Σ_c w_c ⟨P_c ∇g(θ_c), Σ_{i∈G} ∇ℓ_i(θ_c)⟩

over checkpoints θ_c with weights w_c. The method defines P: see `ggda_ext.methods`. For TracIn, P is the identity, and
the scores are summed over checkpoints (the weights are their learning rates). Methods in the property's unit take the
weighted mean.

`attribute` is the function that users call. For every checkpoint it prepares the property's directions, then makes one
pass over the training data. The scores are returned to the caller, or also written into a folder
(`ggda_ext.storage.scores`, whose `ScoreStore` has the methods of `ScoresInMemory`). Only `keep_scores` chooses between
the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from ggda_ext.checkpoints import Checkpoints, LoadCheckpoint, at_checkpoints, listed_checkpoints, states_of
from ggda_ext.curvature.damping import Training
from ggda_ext.data import DataLike, to_device
from ggda_ext.gradients import Directions, GroupGradients, Plan, PointGradients
from ggda_ext.gradients.proof.findings import Apart
from ggda_ext.groups.partition import GroupsLike
from ggda_ext.methods import METHODS, Method, MethodName, Preconditioned, TracIn
from ggda_ext.methods.cautions import cautions
from ggda_ext.methods.intervals import Intervals, Sources, ends, jackknifed_directions
from ggda_ext.model import ParameterChoice, check_deterministic_modules, only_thread
from ggda_ext.properties import PointProperty, Property, property_gradient
from ggda_ext.properties.classes import data_of
from ggda_ext.results import Attribution
from ggda_ext.results.method import MethodFacts, Setting
from ggda_ext.results.named_scores import names_of, whether_higher_is_better
from ggda_ext.tables import check_columns, group_column
from ggda_ext.words import check_save_dir

if TYPE_CHECKING:
    from ggda_ext.storage.scores import ScoreStore

Weight = float | Tensor


@torch.inference_mode(False)
def attribute(
    model: nn.Module,
    loss_fn: Any,
    data: DataLike,
    groups: GroupsLike | str | None,
    property: Property,
    *,
    method: MethodName | Method = "influence",
    damping: float | None = None,
    recipe: Training | None = None,
    intervals: Intervals = False,
    frame: Any = None,
    models: Sequence[nn.Module] = (),
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
    """Return a score for every group; it is positive if the property is predicted to rise when the group is removed.

    If the property is a loss, groups with a positive score help. The result says which groups help and which hurt. With
    ``"influence"`` and ``"ekfac"`` a score is the predicted rise itself, in the property's unit. With ``"tracin"`` and
    ``"fisher"`` the scores only rank the groups (docs/signs.md lists the signs of all entry points).

    Args:
        model: the trained model; put it in eval mode if it has dropout or BatchNorm.
        loss_fn: the training loss: ``loss_fn(output, target)`` with any reduction, or an `ExampleLoss`; None for a
            model that returns its own loss.
        data: the training set: a DataLoader that does not shuffle, a Dataset, tensors, arrays, pandas frames, or a dict
            of these.
        groups: a `Groups` or anything it accepts; None puts every point in a group of its own. With `frame`, the name
            of a column, or a list of column names: every combination of their values is a group.
        property: what to explain: a callable ``g(model) -> Tensor`` or one of `ggda_ext.properties`.
        method: ``"influence"``, ``"tracin"`` (one pass, ranks only), ``"ekfac"``, ``"fisher"``, or an object from
            `ggda_ext.methods` with its own settings, such as ``Influence(curvature="hessian", points=2000)``.
            ``result.method`` says what was done.
        damping: damping of the curvature; by default it comes from the recipe, or without one from the curvature.
        recipe: how the model was trained, a `ggda_ext.training.Recipe` or `TrainingSteps`; it determines the damping.
        intervals: whether to compute 95 % intervals around the scores: over ``"test points"`` (ten folds of the points
            that the property is measured on), over ``"checkpoints"``, over ``"both"``, or True for all that apply.
            Intervals need no further pass over the training data, but solving with the curvature takes longer.
        frame: a pandas table with one row for every training point; `groups` names its columns.
        models: more models that were trained the same way with other seeds. They are used like checkpoints: in the
            property's unit a score is the mean over all models. This mean predicts other retrained models better than
            one model does.
        checkpoints: one or several state dicts or their paths; the model's current parameters if left out. The model
            gets its own parameters back afterwards.
        weights: one weight per checkpoint; equal weights if left out. Scores in the property's unit are weighted means.
        load_checkpoint: ``load_checkpoint(model, checkpoint)``, for checkpoints that are neither state dicts nor paths.
        save_dir: a folder that keeps finished blocks of scores. If a run was killed, call again: only missing blocks
            are computed, and the result is the same bit for bit. A call with another model, loss, data set, groups or
            settings raises an error; another property may use the same folder. Under torchrun all ranks have to see it.
        tag: with `save_dir`, a name for the version of everything that cannot be checked, such as files that the data
            set reads. Choose another name when they change: a folder with another tag raises an error.
        parameters: the parameters that the gradients are taken for: names of parameters or modules, modules, or
            parameters; by default all that require a gradient.
        strategy: how gradients are summed, ``"auto"`` or one of `STRATEGIES`; all that can be used give the same
            numbers. Methods with a curvature need one that forms gradients: not ``"directional"``, ``"forward"`` or
            ``"ghost"``. ``"ghost"`` is for TracIn and a property of test points.
        batch_size: points per batch; by default the batch size of a DataLoader, else as many points as run fast and fit
            the budget.
        memory_budget: bytes for one batch's activations and for one block of rows.
        show_progress: whether to show a progress bar for passes over the data; by default for passes that take more
            than 5 seconds.

    Returns:
        An `Attribution`: scores `[m, k]`, one row per component of the property, with names, sizes and direction. It
        prints as a ranked table and can be used as a tensor. With `save_dir` the scores are on the CPU; they are a
        memory map if they were found in the folder or are more than one block.
    """
    if frame is not None or isinstance(groups, str):
        groups = group_column(frame, groups)
    provider = GroupGradients(
        model, loss_fn, data, groups, parameters=parameters, strategy=strategy, batch_size=batch_size,
        memory_budget=memory_budget, show_progress=show_progress,
    )  # fmt: skip
    for tested in data_of(property) if provider.data.columns else ():
        check_columns(tested.columns, f"{tested.name} of the property", provider.data.columns)
    solver = _chosen(method, damping=damping, recipe=recipe)
    if models:
        if checkpoints is not None:
            raise ValueError("models and checkpoints are both given: pass one of them.")
        checkpoints = states_of(model, models)
    listed, factors = _weighted(checkpoints, weights, load_checkpoint, mean=solver.unit == "property")
    sources = None if intervals is False else Sources.of(intervals, len(factors))
    asked, m = as_points(property), None
    start, account, each = perf_counter(), Account(), []
    with (
        only_thread(model),
        nullcontext([0]) if listed is None else closing(at_checkpoints(model, listed, load_checkpoint)) as numbers,
        keep_scores(save_dir, tag) as kept,
    ):
        for at in numbers:
            check_deterministic_modules(provider.model)  # before the property's gradient runs the model
            if sources and sources.tests:
                directions, m = jackknifed_directions(property, provider)
            else:
                directions = property_directions(provider, asked)
            each.append(_scores_at(at, solver, provider, directions, property, account, kept))
        apart = [kept.total([(1.0, one)]).clone() for one in each] if sources and sources.checkpoints else []
        scores = kept.total(zip(factors, each, strict=True))
        warned, cautious = cautions(provider, curvature=solver.needs_rows)
    m = len(scores) if m is None else m
    low, high, covers = ends(scores, m, apart, factors, sources) if sources else (None, None, "")
    return Attribution(
        scores[:m], provider.groups, names_of(property, m), whether_higher_is_better(property, m),
        low=low, high=high, interval=covers, warnings=warned,
        notes=[*provider.data.notes, *kept.notes, *account.notes, *cautious],
        method=account.facts(solver, len(factors), perf_counter() - start),
    )  # fmt: skip


def _chosen(method: MethodName | Method, **settings: Any) -> Method:
    """Return the method with this name and these settings, or the method itself if an object is given.

    Args:
        method: the name of a method, or a `Method` that already has its settings.
        **settings: `damping`, `recipe`; a setting that is None keeps the method's default.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if isinstance(method, Method):
        if given:
            name, value = next(iter(given.items()))
            raise ValueError(f"{name}={value!r} is given beside a method with its own settings: pass it there.")
        return method
    kind = METHODS.get(method) if isinstance(method, str) else None
    if kind is None:
        raise ValueError(
            f"method={method!r} is not one of {', '.join(map(repr, METHODS))}; for other settings pass one of "
            "ggda_ext.methods, such as Influence(curvature='hessian')."
        )
    if kind is TracIn and given:
        name, value = next(iter(given.items()))
        raise ValueError(f"{name}={value!r} is given, which method='tracin' does not use: leave it out.")
    return kind(**given)


def _weighted(
    checkpoints: Checkpoints | None, weights: Sequence[float] | None, load_checkpoint: Any, *, mean: bool
) -> tuple[list[Any] | None, list[float]]:
    """Return the checkpoints (None for the current parameters) and their weights; weights of a mean add up to 1."""
    if load_checkpoint is not None and (checkpoints is None or not callable(load_checkpoint)):
        what = "without checkpoints" if checkpoints is None else f"as a {type(load_checkpoint).__name__}"
        raise TypeError(
            f"load_checkpoint is given {what}: pass a function load_checkpoint(model, checkpoint) and both."
        )
    if checkpoints is None:
        if weights is not None:
            raise ValueError("weights is given without checkpoints or models: pass both, or neither.")
        return None, [1.0]
    listed = listed_checkpoints(checkpoints)
    factors = [1.0] * len(listed) if weights is None else _checked_weights(weights)
    if len(factors) != len(listed):
        raise ValueError(f"weights has {len(factors)} entries for {len(listed)} checkpoints.")
    if not mean:
        return listed, factors
    if not sum(factors) > 0:
        raise ValueError(f"weights add up to {sum(factors):g}: a mean over checkpoints needs a positive sum.")
    return listed, [factor / sum(factors) for factor in factors]


def _checked_weights(weights: Any) -> list[float]:
    """Return the weights; raise an error if they cannot be iterated over, or if an entry is not a finite number."""
    if not isinstance(weights, Iterable) or isinstance(weights, str):
        raise TypeError(f"weights is a {type(weights).__name__}: pass a list, one number for each checkpoint.")
    found: list[float] = []
    for at, weight in enumerate(weights):
        if weight is None or isinstance(weight, str):
            raise TypeError(f"weights[{at}]={weight!r}: pass a number.")
        found.append(float(weight))
        if not isfinite(found[-1]):
            raise ValueError(f"weights[{at}]={found[-1]}: pass a finite number.")
    return found


def property_scores(provider: GroupGradients, property: Property) -> Tensor:
    """Return the scores `[m, k]` of a property at the current parameters, without a curvature."""
    return provider.scores(property_directions(provider, property))


def as_points(property: Property) -> Property | PointGradients:
    """Return the test points of a `PointProperty`, which can be scored without forming gradients; else the property."""
    if isinstance(property, PointProperty):
        return PointGradients(property.loss, property.data, property.batch_size)
    return property


def property_directions(provider: GroupGradients, property: Property | PointGradients) -> Any:
    """Return the directions of a property: its gradient `[m, p]`, or the test points of a property of points."""
    asked = property if isinstance(property, PointGradients) else as_points(property)
    if isinstance(asked, PointGradients):
        return asked
    return property_gradient(asked, provider.model, provider.space.parameters)


# scores of one checkpoint, and where they are kept


@dataclass
class Account:
    """Record of what a method did so far, over all blocks of test points and all checkpoints."""

    settings: dict[str, Setting] = field(default_factory=dict)
    passes: float = 0.0
    notes: list[str] = field(default_factory=list)

    def add(self, done: Preconditioned, passes: float) -> None:
        """Add what was done for a block of test points; of numbers the largest is kept, of other settings the first."""
        for name, value in done.settings.items():
            before = self.settings.get(name)
            numbers = isinstance(value, int | float) and isinstance(before, int | float)
            self.settings[name] = max(value, before) if numbers else value if before is None else before  # type: ignore
        self.passes += done.passes + passes
        self.notes += [note for note in done.notes if note not in self.notes]

    def facts(self, method: Method, checkpoints: int, seconds: float) -> MethodFacts:
        """Return the facts about the method that the result shows."""
        several = {"checkpoints": checkpoints} if checkpoints > 1 or not self.settings else {}
        return MethodFacts(method.name, method.unit, self.settings | several, self.passes, seconds)


class ScoresInMemory:
    """Has the methods of `ScoreStore` but no folder: it computes everything and stores nothing."""

    notes: tuple[str, ...] = ()

    def __enter__(self) -> ScoresInMemory:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def scores(
        self,
        provider: GroupGradients,
        directions: Directions,
        checkpoint: int = 0,
        property: Any = None,
        plan: Plan | None = None,
    ) -> Any:
        """Return ``provider.scores(directions)``."""
        return provider.scores(directions)

    def array(
        self, provider: GroupGradients, checkpoint: int, name: str, settings: dict[str, Any], make: Callable[[], Tensor]
    ) -> Tensor:
        """Return ``make()``."""
        return make()

    def solve(self, method: Method, provider: GroupGradients, rows: Tensor, checkpoint: int) -> Preconditioned:
        """Return ``method.precondition(provider, rows)``."""
        return method.precondition(provider, rows)

    def stacked(self, parts: Sequence[tuple[Tensor, Any]]) -> Any:
        """Join the scores of blocks of test points, given as `(positions, scores)`, in the order of the positions."""
        return torch.cat([block for _, block in parts])[torch.cat([ids for ids, _ in parts]).argsort()]

    def total(self, parts: Iterable[tuple[Weight, Any]]) -> Tensor:
        """Return the weighted sum of scores `[m, k]`."""
        return sum_scores(parts)

    def write(self, made_of: str, m: int, k: int, dtype: torch.dtype, rows: Callable[[int, int], Tensor]) -> Tensor:
        """Return ``rows(0, m)``."""
        return rows(0, m)


KeptScores: TypeAlias = "ScoreStore | ScoresInMemory"
"""A store of scores; both classes have the methods of `ScoresInMemory`."""


def _scores_at(
    checkpoint: int,
    method: Method,
    provider: GroupGradients,
    directions: Directions,
    property: Property,
    account: Account,
    kept: KeptScores,
) -> Any:
    """Return the scores `[m, k]` of a method at the model's current parameters, in the form that `kept.scores` returns.

    Args:
        checkpoint: the number of the checkpoint that is loaded.
        method: one of `ggda_ext.methods`.
        provider: the provider of the training gradients.
        directions: gradients of the property `[m, p]`, or the test points themselves.
        property: the property that the directions come from.
        account: records what was done.
        kept: keeps scores and solves.
    """

    def scored(done: Preconditioned, along: Directions) -> Any:
        plan = provider.plan(along)
        account.add(done, plan.passes)
        return kept.scores(provider, along, checkpoint, property, plan)

    def of_rows(rows: Tensor) -> Any:
        try:
            done = kept.solve(method, provider, rows, checkpoint) if method.needs_rows else Preconditioned(rows)
        except (ValueError, RuntimeError):
            finite_losses(provider)  # a single point can make the solve fail; this error then names the point
            raise
        return scored(done, done.directions)

    if isinstance(directions, Tensor):
        return of_rows(directions)
    if not method.needs_rows:
        return scored(Preconditioned(torch.empty(0)), directions)
    return kept.stacked([(ids, of_rows(rows)) for ids, rows in provider.tests(directions).all_blocks()])


def finite_losses(points: GroupGradients, batch_size: int | None = None) -> Tensor:
    """Return the loss of every point `[n]`; raise an error for mixed points, or for one whose loss is not finite.

    Args:
        points: the model, its loss, and the data.
        batch_size: points per batch; by default the batch size of a DataLoader, else 256.
    """
    batch_size = batch_size or points.data.batch_size or 256
    found, apart = [], Apart(points.model, points.loss.each, points.data.name)
    with torch.no_grad():
        for _, indexed in points.data.sequential(batch_size):
            batch = to_device(indexed, points.space.device)
            found.append(points.loss.each(points.model, batch).detach())
            apart.check(batch, found[-1])
    losses = torch.cat(found).to(torch.promote_types(found[0].dtype, torch.float32))
    wrong = torch.nonzero(~losses.isfinite())
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(f"the loss of point {at} of {points.data.name} is {float(losses[at])}: look at that point.")
    return losses


def keep_scores(save_dir: str | Path | None, tag: str | None = None) -> KeptScores:
    """Return a store of scores in a folder, or one that stores nothing if `save_dir` is None.

    Args:
        save_dir: the folder.
        tag: a name for everything that a fingerprint cannot see, such as the version of the data; the store raises an
            error if the folder has another tag.
    """
    if save_dir is not None:
        check_save_dir(save_dir, tag)
        from ggda_ext.storage.scores import ScoreStore  # needed only if scores are stored

        return ScoreStore(save_dir, tag)
    if tag is not None:
        raise ValueError(f"tag={tag!r} is given without save_dir: pass the folder it is for, or leave it out.")
    return ScoresInMemory()


def sum_scores(parts: Iterable[tuple[Weight, Tensor]]) -> Tensor:
    """Return the weighted sum of scores; the parts are taken one at a time."""
    total: Tensor | None = None
    for weight, part in parts:
        weighted = part if isinstance(weight, float) and weight == 1 else weight * part
        total = weighted if total is None else total.add_(weighted)
    assert total is not None
    return total
