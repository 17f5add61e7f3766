"""Group scores of a property by one of several methods, at one set of parameters or over checkpoints.

The score of group G for a property g is

    τ_G = Σ_c w_c ⟨P_c ∇g(θ_c), Σ_{i∈G} ∇ℓ_i(θ_c)⟩

over checkpoints θ_c with weights w_c. The method is P: see `ggda_ext.methods`. TracIn, whose P is the identity, sums
over checkpoints (its weights are their learning rates); methods in the property's unit take the mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from ggda_ext.checkpoints import Checkpoints, LoadCheckpoint, at_checkpoints, listed_checkpoints, states_of
from ggda_ext.curvature.damping import Training
from ggda_ext.data import DataLike
from ggda_ext.gradients import GroupGradients, PointGradients
from ggda_ext.groups.partition import GroupsLike
from ggda_ext.methods import METHODS, Method, MethodName, TracIn
from ggda_ext.methods.cautions import cautions
from ggda_ext.methods.intervals import Intervals, Sources, ends, jackknifed_directions
from ggda_ext.methods.scoring import Account, keep_scores, scores_by
from ggda_ext.model import ParameterChoice, only_thread
from ggda_ext.properties import PointProperty, Property, property_gradient
from ggda_ext.properties.classes import data_of
from ggda_ext.results import Attribution
from ggda_ext.results.named_scores import names_of, whether_higher_is_better
from ggda_ext.tables import check_columns, group_column


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
    """Scores of groups: positive where the property is predicted to rise if the group is removed.

    For a loss these are the groups that help; the result says who helps and who hurts. With ``"influence"`` and
    ``"ekfac"`` a score is the predicted rise itself, in the property's unit; with ``"tracin"`` and ``"fisher"`` it
    ranks groups (docs/signs.md lists all entry points).

    Args:
        model: the trained model, in eval mode if it has dropout or BatchNorm.
        loss_fn: the training loss, ``loss_fn(output, target)`` of any reduction, or an `ExampleLoss`; None for a model
            that returns its own loss.
        data: the training set: a DataLoader that does not shuffle, a Dataset, tensors, arrays, pandas frames, or a dict
            of these.
        groups: a `Groups` or anything it accepts; None for groups of one; with `frame`, the name of a column, or a
            list of names for the combinations of their values.
        property: what to explain, a callable ``g(model) -> Tensor`` or one of `ggda_ext.properties`.
        method: ``"influence"``, ``"tracin"`` (one pass, ranks only), ``"ekfac"``, ``"fisher"``, or one of
            `ggda_ext.methods` with settings of its own, such as ``Influence(curvature="hessian", points=2000)``.
            ``result.method`` says what was done.
        damping: of the curvature; by default from the recipe, else from the curvature itself.
        recipe: how the model was trained, a `ggda_ext.training.Recipe` or `TrainingSteps`: gives the damping.
        intervals: around the scores, at 95 %: over ``"test points"`` (ten folds of those that the property is measured
            on), over ``"checkpoints"``, ``"both"``, or True for what there is. They share the pass over the training
            data; solving with the curvature takes longer.
        frame: the pandas table whose columns `groups` names, with a row for every training point.
        models: more models trained the same way with other seeds. Scores are those of all of them, as over checkpoints:
            a mean in the property's unit. Their mean predicts other retrained models better than one model does.
        checkpoints: a state dict or its path, or several; the model's current parameters if left out. The model gets
            its own parameters back afterwards.
        weights: one weight per checkpoint, equal ones if left out. Scores in the property's unit are weighted means.
        load_checkpoint: ``load_checkpoint(model, checkpoint)``, if a checkpoint is neither.
        save_dir: a folder that keeps finished blocks of scores. Called again after a kill, only missing blocks are
            made, with the same result bit for bit; another model, loss, data set, groups or settings are refused. The
            folder may be asked about other properties, too. Under torchrun all ranks have to see it.
        tag: with `save_dir`, a name for the version of what cannot be checked, such as files that the data set reads.
            Choose another name when they change: a folder with another tag is refused.
        parameters: names of parameters or modules, modules or parameters that count; by default all that require a
            gradient.
        strategy: how gradients are summed, ``"auto"`` or one of `STRATEGIES`; all give the same numbers.
        batch_size: points per batch; by default those of a DataLoader, else as many as run fast and fit the budget.
        memory_budget: bytes for one batch's activations and for one block of rows.
        show_progress: whether to show a progress bar on passes over the data; by default on those over 5 seconds.

    Returns:
        An `Attribution`: scores `[m, k]`, one row per component of the property, with names, sizes and direction; it
        prints as a ranked table, and is a tensor. With `save_dir` the scores are on the CPU, a memory map if
        they were found there or are more than one block.
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
            if sources and sources.tests:
                directions, m = jackknifed_directions(property, provider)
            else:
                directions = property_directions(provider, asked)
            each.append(scores_by(solver, provider, directions, account, kept, at, property))
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
    """A method by name with settings, of which those that are None are left to it; or one that has its settings.

    Args:
        method: its name, or the method itself.
        **settings: `damping`, `recipe`.
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
    """Checkpoints, None for the current parameters, with their weights; those of a mean add up to 1."""
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
    factors = [1.0] * len(listed) if weights is None else [float(weight) for weight in _checked_weights(weights)]
    if len(factors) != len(listed):
        raise ValueError(f"weights has {len(factors)} entries for {len(listed)} checkpoints.")
    if not mean:
        return listed, factors
    if not sum(factors) > 0:
        raise ValueError(f"weights add up to {sum(factors):g}: a mean over checkpoints needs a positive sum.")
    return listed, [factor / sum(factors) for factor in factors]


def _checked_weights(weights: Any) -> Any:
    """Weights that are numbers."""
    if not isinstance(weights, Iterable) or isinstance(weights, str):
        raise TypeError(f"weights is a {type(weights).__name__}: pass a list, one number for each checkpoint.")
    for at, weight in enumerate(weights):
        if weight is None or isinstance(weight, str):
            raise TypeError(f"weights[{at}]={weight!r}: pass a number.")
    return weights


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
