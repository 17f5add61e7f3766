"""Leave-group-out: how a property of the model changes when the model is trained again without a group.

The score of group G_j is ``E_s g(θ_s(D ∖ G_j)) − E_s g(θ_s(D))`` over training seeds s, the negative of the paper's
τ_j: how much the property *rises* if the group is removed, as everywhere in this package. It takes k + 1 trainings per
seed. It is both the ground truth for faster methods and an attribution method of its own. The property needs no
gradient, so it may be the accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.groups.partition import Groups, GroupsLike
from ggda_ext.losses import example_losses
from ggda_ext.properties import Property
from ggda_ext.properties.property import check_property
from ggda_ext.results import Attribution, MethodFacts
from ggda_ext.sharing import once, world_size
from ggda_ext.storage import fingerprint
from ggda_ext.storage.folder import digest
from ggda_ext.storage.jobs import Job, finish, opened
from ggda_ext.training import Recipe, TrainedModels, initial_model, train_many
from ggda_ext.training.batch_order import by_falling_steps
from ggda_ext.training.loop import LossFn, MakeModel
from ggda_ext.training.many_models import layout_of, models_at_once
from ggda_ext.training.recipe import check_seeds, checked_data
from ggda_ext.words import check_counts, check_save_dir, without

Pair = tuple[Tensor, Tensor]
PARTS, SMALLEST_STACK = 8, 32


@dataclass(frozen=True)
class LeaveGroupOut:
    """How much a property rises when a group is removed. Prints as a ranked table.

    ``m`` is left out of the shapes if the property is one number.

    Attributes:
        per_seed: the rise for every seed `[seeds, m, k]`, between two models of the same seed.
        full: the property of the models trained on all points `[seeds, m]`.
        group_ids: the groups that were left out `[k]`.
        groups: the groups that `group_ids` refers to.
        measured: the property.
        made_by: the method, in a few words.
        retrained: True if models were trained without each group, False if their values were predicted.
        note: a warning about predicted values.
    """

    per_seed: Tensor
    full: Tensor
    group_ids: np.ndarray
    groups: Groups | None = None
    measured: Any = None
    made_by: str = "leave group out"
    retrained: bool = True
    note: str = ""

    def __repr__(self) -> str:
        return repr(self.attribution()) if self.groups is not None else f"LeaveGroupOut(scores {self.scores})"

    @property
    def scores(self) -> Tensor:
        """Mean rise over seeds `[m, k]`: positive for groups that lower the property. For a loss, such groups help."""
        return self.per_seed.mean(0)

    @property
    def stderr(self) -> Tensor:
        """Standard error of the scores `[m, k]`; NaN for one seed."""
        return self.per_seed.std(0) / len(self.per_seed) ** 0.5

    @property
    def interval(self) -> tuple[Tensor, Tensor]:
        """Lower and upper end of the 95 % confidence interval of the scores, each `[m, k]`; NaN for one seed."""
        return self.confidence_interval(0.95)

    def confidence_interval(self, confidence: float) -> tuple[Tensor, Tensor]:
        """Lower and upper end of Student's interval of the scores, each `[m, k]`; NaN for one seed."""
        if not 0 < confidence < 1:
            raise ValueError(f"confidence={confidence}: pass a share between 0 and 1, e.g. 0.95.")
        from scipy.special import stdtrit  # quantiles of Student's t, without the seconds that scipy.stats takes

        width = float(stdtrit(max(len(self.per_seed) - 1, 1), (1 + confidence) / 2)) * self.stderr
        return self.scores - width, self.scores + width

    def attribution(
        self,
        groups: GroupsLike | None = None,
        property: Any = None,
        higher_is_better: bool | Sequence[bool | None] | None = None,
    ) -> Attribution:
        """Return the scores as an `Attribution`, with their 95 % interval over seeds if there are several.

        Args:
            groups: by default the groups of this result.
            property: the property that was measured, or its name; by default the property that was passed.
            higher_is_better: whether more of the property is better; by default what the property says.
        """
        known = self.groups if groups is None else Groups.of(groups)
        if known is None:
            raise ValueError("this result does not know its groups: pass groups.")
        scores, seeds = torch.atleast_2d(self.scores), len(self.per_seed)
        asked = self.measured if property is None else property
        if asked is not None and not callable(asked) and not isinstance(asked, str | list):
            asked, higher_is_better = "mean_loss", False if higher_is_better is None else higher_is_better
        of = "seed" if self.retrained else "model"
        notes = [self.note] if self.note else []
        details: dict[str, Any] = {}
        if seeds > 1:
            low, high = (torch.atleast_2d(end) for end in self.interval)
            details = {
                "low": low,
                "high": high,
                "interval": f"95 %, over {seeds} {of}s{' of training' * self.retrained}",
            }
        else:
            notes.append(f"One {of}: nothing is known about the noise of training.")
        facts = MethodFacts(self.made_by, "property", {f"{of}s": seeds}, measured=self.retrained)
        chosen = known.some(self.group_ids.tolist())
        return Attribution.of(
            scores, chosen, asked, higher_is_better, method=facts, test_axis=0, notes=notes, **details
        )


@without(
    parameters="all that require a gradient are trained; freeze others in make_model, by requires_grad_(False)",
    strategy="it trains models; there are no gradients of groups to sum",
    batch_size="it is part of the training; set it in the recipe",
    memory_budget="pass at_once=, how many models are trained at once",
)
def leave_group_out(
    make_model: MakeModel,
    loss_fn: LossFn,
    data: Pair,
    groups: GroupsLike,
    property: Property | Pair,
    recipe: Recipe,
    *,
    seeds: Sequence[int] = range(5),
    group_ids: Sequence[Hashable] | Hashable | None = None,
    at_once: int | None = None,
    save_dir: str | Path | None = None,
    tag: str | None = None,
    show_progress: bool | None = None,
) -> LeaveGroupOut:
    """Train models without each group in turn, and compare them with models trained on all points.

    Under ``torchrun`` the ranks share the trainings, and every rank gets the whole result.

    Args:
        make_model: builds a model; its initial weights come from torch's global random state.
        loss_fn: the training loss, ``loss_fn(model(x), y)``, a mean over the batch.
        data: the training set ``(x, y)``.
        groups: a `Groups` or anything it accepts.
        property: test data ``(x, y)`` for the mean test loss, or a callable ``g(model)`` that returns one number or a
            vector `[m]`.
        recipe: how the models are trained.
        seeds: seeds of the initial weights and batch orders; every group is left out once for each seed.
        group_ids: names of the groups to leave out, or their ids if no name is a number; by default all groups.
        at_once: number of models trained at once, and saved at once; chosen by size if left out.
        save_dir: folder for finished trainings. If a run was stopped, call it again with the same arguments to go on
            from there. A call with another model, loss, property, data set, recipe or other groups raises an error.
        tag: with `save_dir`, a version name for everything that cannot be checked, such as a file that the property
            reads.
        show_progress: whether to show a progress bar; by default once it takes over 5 seconds.
    """
    if tag is not None and save_dir is None:
        raise ValueError(f"tag={tag!r} is given without save_dir: pass the folder it is for, or leave it out.")
    if save_dir is not None:
        check_save_dir(save_dir, tag)
    x, y = checked_data(data)
    groups = Groups.of(groups, len(x))
    ids = np.arange(len(groups)) if group_ids is None else _checked_ids(group_ids, groups)
    check_seeds(seeds)
    check_counts(at_once=at_once)
    if loss_fn is None:
        raise TypeError("loss_fn is None: pass the training loss, e.g. nn.CrossEntropyLoss().")
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is a {type(recipe).__name__}: pass a ggda_ext.training.Recipe.")
    if int(groups.sizes.max()) == len(x):
        raise ValueError("groups has one group with all points: nothing is left to train on without it.")
    measure = Measure(property, loss_fn)
    everything = np.arange(len(x))
    kept = [everything, *(np.delete(everything, groups[int(j)]) for j in ids)]
    trainings = [(points, seed) for seed in seeds for points in kept]
    layout = layout_of(make_model, loss_fn, (x, y))
    # Enough parts for a few ranks, and to lose little if the run stops; a smaller stack is hardly faster than a loop
    share = max(SMALLEST_STACK, -(-len(trainings) // PARTS))
    together = at_once or (1 if layout is None else min(models_at_once(layout, recipe), share))
    order = by_falling_steps([torch.from_numpy(points) for points, _ in trainings], recipe)
    chunks = np.array_split(order, max(-(-len(order) // together), min(len(order), world_size())))
    first = initial_model(make_model, int(seeds[0])).to(x.device).eval()
    m = measure.components(TrainedModels(make_model, [first.state_dict()]))

    def job(number: int, chunk: np.ndarray) -> Job:
        def make() -> Tensor:
            subsets, chosen = zip(*(trainings[j] for j in chunk), strict=True)
            models = train_many(
                make_model, loss_fn, (x, y), recipe, subsets=subsets, seeds=chosen, at_once=at_once
            )  # fmt: skip
            return measure(models)

        return Job(f"values-{number}", (len(chunk), m), sum(len(trainings[j][0]) for j in chunk), make)

    def made_with() -> dict[str, Any]:
        return {
            "tag": tag,
            "data": fingerprint.of_state({"x": x, "y": y}),
            "groups": digest(groups.labels.astype(np.int64), ids),
            "property": fingerprint.of_value(measure.property, "property", tag),
            "loss": fingerprint.of_value(loss_fn, "loss_fn", tag),
            "recipe": asdict(recipe),
            "seeds": [int(seed) for seed in seeds],
            "model": fingerprint.of_structure(first, tag),
            "parameters": [name for name, value in first.named_parameters() if value.requires_grad],  # that are trained
            "values of the parameters": fingerprint.of_parameters(first),
            "models at once": [len(chunk) for chunk in chunks],
        } | fingerprint.of_surroundings(x.device)

    jobs = [job(*numbered) for numbered in enumerate(chunks)]
    values = _finished(save_dir, made_with, jobs, show_progress)[torch.from_numpy(np.argsort(order))]
    values = values.view(len(seeds), len(ids) + 1, m).transpose(1, 2)
    full, rises = values[:, :, 0], values[:, :, 1:] - values[:, :, :1]
    found = (rises, full) if measure.is_vector else (rises[:, 0], full[:, 0])
    return LeaveGroupOut(*found, ids, groups, measure.property)


def _finished(
    save_dir: str | Path | None, made_with: Callable[[], dict[str, Any]], jobs: list[Job], show_progress: bool | None
) -> Tensor:
    """Run all jobs and return their joined values. They are stored in `save_dir`, or in a temporary folder."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()) if save_dir is None else save_dir)
        store = stack.enter_context(opened(folder, dict if save_dir is None else made_with))
        finish(store, jobs, torch.float64, "leave group out", show_progress)

        def saved() -> Tensor:
            assert store is not None
            return torch.cat([torch.from_numpy(np.array(store.load(job.name))) for job in jobs])

        return once(saved)


class Measure:
    """Computes a property of many models; the mean loss of test data uses the outputs of all models together."""

    def __init__(self, property: Property | Pair, loss_fn: LossFn) -> None:
        self.property, self.loss_fn = property, loss_fn
        self.is_vector = False
        if not callable(property) and not isinstance(property, tuple | list):
            raise TypeError(f"property is a {type(property).__name__}: pass test data (x, y), or a callable g(model).")
        if callable(property):
            check_property(property)
        else:
            self.property = checked_data(property)

    def __call__(self, models: TrainedModels) -> Tensor:
        """Return the values `[models, m]` of the property."""
        if callable(self.property):
            return torch.stack([self._values(self.property, model) for model in models])
        x, y = self.property
        losses = [example_losses(self.loss_fn, outputs, y).mean() for outputs in models.outputs(x)]
        return torch.stack(losses)[:, None]

    def components(self, models: TrainedModels) -> int:
        """Return m, the number of values that the property gives for a model; raise an error if one is not finite."""
        values = self(models)[0]
        if not bool(values.isfinite().all()):
            raise ValueError(
                f"the property is {values.tolist()} before any training: look for NaN or infinite numbers in its data."
            )
        return len(values)

    @torch.no_grad()
    def _values(self, property: Property, model: nn.Module) -> Tensor:
        value = torch.as_tensor(property(model)).detach().cpu().double()
        if value.dim() > 1 or value.numel() == 0:
            raise ValueError(f"property returned shape {list(value.shape)}: return one number or a vector [m], m ≥ 1.")
        self.is_vector = value.dim() == 1
        return value.reshape(-1)


def _checked_ids(group_ids: Any, groups: Groups) -> np.ndarray:
    """Return ids of groups given by name, or by id; a number is a name if any name of the groups is a number."""
    names, k = groups.names or (), len(groups)
    given: Any = np.atleast_1d(group_ids) if isinstance(group_ids, Tensor | np.ndarray) else group_ids
    alone = not isinstance(given, Iterable) or isinstance(given, str) or (isinstance(given, tuple) and given in names)
    listed: list[Any] = [one.item() if isinstance(one, Tensor) else one for one in ([given] if alone else given)]
    by_name = any(isinstance(name, Real | np.bool_) for name in names)
    found = []
    for one in listed:
        if by_name or not isinstance(one, Real | np.bool_):
            found.append(groups.id_of(one))
        elif isinstance(one, Integral) and not isinstance(one, bool):
            found.append(int(one))
        else:
            raise TypeError(f"group_ids holds {one!r}: pass names of groups, or whole numbers from 0 to {k - 1}.")
    ids = np.array(found, np.int64)
    if len(np.unique(ids)) < len(ids):
        raise ValueError(f"group_ids holds a group twice, {listed!r}: pass every group once.")
    outside = ids[(ids < 0) | (ids >= k)]
    if len(ids) == 0 or len(outside):
        raise ValueError(
            "group_ids is empty: pass at least one, or leave it out."
            if len(ids) == 0
            else f"group_ids holds {outside[0]}: pass ids from 0 to {k - 1}."
        )
    return ids
