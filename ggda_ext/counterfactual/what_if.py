"""What would the model be without these groups? Answers without training it again.

>>> import torch
>>> from torch import nn
>>> from ggda_ext import properties
>>> from ggda_ext.counterfactual import WhatIf
>>> x, y = torch.randn(300, 4), torch.arange(300) % 3
>>> model, loss = nn.Linear(4, 3), nn.CrossEntropyLoss()
>>> what_if = WhatIf(model, loss, (x, y), ["web", "books", "forum"] * 100, weight_decay=0.01)
>>> answer = what_if.without(["web", "forum"])
>>> answer.value(properties.mean_loss((x, y), loss)).shape
torch.Size([])
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.checkpoints import Checkpoints
from ggda_ext.counterfactual.answer import Counterfactual
from ggda_ext.counterfactual.calibration import Calibration, Verification, chosen_subsets, verified
from ggda_ext.counterfactual.checks import (
    Names,
    check_count,
    checked_kept,
    checked_models,
    checked_point_weights,
    ids_of,
    weights_by_name,
)
from ggda_ext.counterfactual.directions import Kind
from ggda_ext.counterfactual.leave_group_out import LeaveGroupOut
from ggda_ext.counterfactual.linearized import LinearizedModel
from ggda_ext.counterfactual.nearby import copies_nearby
from ggda_ext.counterfactual.property_values import Explained, identity_of
from ggda_ext.counterfactual.settings import Settings
from ggda_ext.curvature.damping import Training
from ggda_ext.data import DataLike, IndexedData
from ggda_ext.evaluation import Retrain
from ggda_ext.gradients import GroupGradients
from ggda_ext.groups.partition import GroupsLike
from ggda_ext.model import only_thread
from ggda_ext.properties import MeanProperty, Property
from ggda_ext.words import without

if TYPE_CHECKING:
    from ggda_ext.counterfactual.interactions import Interactions
    from ggda_ext.counterfactual.search import Search
    from ggda_ext.counterfactual.semivalues import Semivalues

NOT_CALIBRATED = "Not calibrated: the order of predictions can be trusted before their size; see WhatIf.verify."


class WhatIf:
    """A trained model's answers to *what if some groups had not been in the training set, or had weighed less?*

    The outputs are linearised along a few parameter directions, and the training problem of what is kept is solved
    there; see `ggda_ext.counterfactual.refit`. Setting up takes about one pass over the training data for every
    direction, or a few passes for every output where points use each parameter often (text, images); a question then
    takes milliseconds.

    Args:
        model: the model trained on all the data, in eval mode if it has dropout or BatchNorm.
        loss_fn: the training loss, ``loss_fn(output, target)``, convex in the output.
        data: the training set.
        groups: a `Groups` or anything it accepts. Points in no group always stay.
        weight_decay: the L2 penalty of the training, λ in λ/2 ‖θ‖²; or pass its `recipe`.
        recipe: how the model was trained, a `ggda_ext.training.Recipe` or `TrainingSteps`: for its weight decay and for
            the ridge of a training that stopped before its optimum. For one that has converged pass `weight_decay`.
        start: the model before that training, e.g. the pre-trained one; of a model trained from scratch any fresh one,
            ``make_model()``. Refits then begin at its outputs, so that what only the groups left out have taught is
            not learned, also where it was learned so well that its gradients are nearly zero.
        settle: whether changes are those of the model once the noise of its last steps is taken out; with a recipe. For
            checkpoints and models whose last learning rates were still high, not for a training that stopped early.
        nearby: copies of every model, changed at random and settled, that are refitted beside it; with a recipe. Values
            are averaged over them, which takes their time but no training; see `counterfactual.nearby`.
        models: more models trained the same way with other seeds; values are averaged over all of them.
        checkpoints: state dicts or their paths, from along the training; values are averaged over them, and the
            present parameters count only if they are among them. With a start outputs are linearised there, and
            changes are those of the model as it is: best one from early in the training, or one each of several
            trainings with other seeds.
        directions: ``"all"`` parameters, the leading ``"eigen"`` vectors of the Gauss-Newton matrix, what the
            ``"groups"`` teach, ``"both"``; ``"auto"`` takes all parameters if there are at most `rank` of them, else
            both.
        rank: half of it eigenvectors (all of it for ``"eigen"``), and at most as many directions of the groups.
        ridge: keeps refits near the model, where the linearisation holds. By default what the recipe's number of steps
            amounts to, for Adam in its own metric; without a recipe a tenth of the curvature at which eigenvectors are
            cut off, raised where the model itself does not follow (`counterfactual.trust`); next to nothing for models
            that are linear in their parameters. `verify` may choose another.
        point_weights: of every training point in the training loss `[n]`; 1 if left out.
        parameters: names of parameters or modules that may move; all that require a gradient if left out.
        most_points: training points a refit looks at; more are drawn from evenly. The groups' gradients are those of
            all points, which takes one more pass; pass n for refits of all of them.
        batch_size: points per pass; by default those of a DataLoader, else as many as fit the budget.
        memory_budget: bytes for features, for solving and for finding directions; features that need more go to a
            file, and of a large model fewer eigenvectors are taken.
        folder: for such files; a temporary folder if left out.
        seed: of sketches and draws.
        show_progress: whether to show progress bars while it is set up; by default on passes over 5 seconds.
    """

    @without(
        strategy="outputs are pushed along directions, and there is one way to do it; leave it out",
        keeping="a set-up takes some passes and is not kept; save its answers, or keep the object",
    )
    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any,
        data: DataLike,
        groups: GroupsLike,
        *,
        weight_decay: float | None = None,
        recipe: Training | None = None,
        start: nn.Module | None = None,
        settle: bool = False,
        nearby: int = 0,
        models: Sequence[nn.Module] = (),
        checkpoints: Checkpoints | None = None,
        directions: Kind = "auto",
        rank: int = 200,
        ridge: float | None = None,
        point_weights: Any = None,
        parameters: Any = None,
        most_points: int = 20_000,
        batch_size: int | None = None,
        memory_budget: int = 2**30,
        folder: str | Path | None = None,
        seed: int = 0,
        show_progress: bool | None = None,
    ) -> None:
        settings = Settings(
            directions, rank, ridge, recipe, start, settle, nearby, weight_decay, most_points, memory_budget, folder,
            seed,
        )  # fmt: skip
        if batch_size is not None:
            check_count("batch_size", batch_size)
        inside = IndexedData(data, "the training data")
        if inside.n is None:
            raise TypeError("the training data is a stream without a length: pass a map-style data set to what-if.")
        weights = checked_point_weights(point_weights, inside.n)

        def linearized(one: nn.Module, parameters: Any, settings: Settings) -> LinearizedModel:
            explained = model if start is not None and checkpoints is not None else None
            with only_thread(one):
                provider = GroupGradients(
                    one, loss_fn, inside, groups, parameters=parameters, batch_size=batch_size or inside.batch_size,
                    memory_budget=memory_budget, show_progress=show_progress,
                )  # fmt: skip
                return LinearizedModel(provider, settings, weights, explained)

        first = [linearized(one, parameters, settings) for one in checked_models(model, models, checkpoints)]
        self.groups = first[0].provider.groups
        for j, other in enumerate(first[1:]):
            same, own = first[0].output_shape, other.output_shape
            if own != same:
                raise ValueError(f"models[{j}] gives outputs {own} for a point, the model {same}: pass models alike.")
        self.models = [Explained(one) for one in first]
        if not first[0].is_linear:  # refits of a linear model are exact
            copies = copies_nearby([one.provider for one in first], nearby, seed)
            for of, (one, names) in zip(cycle(self.models), copies, strict=False):
                of.models.append(linearized(one, names, replace(settings, settle=True)))
        counted = first[0].point_weights.cpu().numpy()
        masses = np.bincount(self.groups.labels + 1, counted, len(self.groups) + 1)
        self._mass_of_others, self._mass_of_group = float(masses[0]), masses[1:]
        self.calibrations: dict[Any, tuple[Property, Calibration]] = {}

    def __repr__(self) -> str:
        return f"WhatIf({len(self.groups)} groups, {self.groups.n} points, {len(self.models)} models)"

    @property
    def names(self) -> list[Hashable]:
        """Names of the groups, or their ids."""
        return list(self.groups.all_names)

    def explain(self) -> str:
        """What was chosen for every model, why, and what was calibrated."""
        lines = [f"model {j}: {one.models[0].explain()}" for j, one in enumerate(self.models)]
        if copies := len(self.models[0].models) - 1:
            lines.append(f"and {copies} copies nearby of each, settled; values are averaged")
        if not self.calibrations:
            lines.append(NOT_CALIBRATED)
        return "\n".join(lines + [found.explain() for _, found in self.calibrations.values()])

    def without(self, names: Names) -> Counterfactual:
        """The model without one group or several, by name (or id, if they have no names)."""
        weights = np.ones(len(self.groups))
        weights[self.ids(names)] = 0
        return self._answer(weights)

    def only(self, names: Names) -> Counterfactual:
        """The model trained on these groups only."""
        weights = np.zeros(len(self.groups))
        weights[self.ids(names)] = 1
        return self._answer(weights)

    def with_weights(self, weights: Mapping[Hashable, float]) -> Counterfactual:
        """With other weights of some groups: 0 leaves a group out, 2 counts each of its points twice; others have 1."""
        return self._answer(weights_by_name(weights, self.names))

    def _answer(self, weights: np.ndarray) -> Counterfactual:
        return Counterfactual(self, self.checked_weights(weights[None])[0])

    def subsets(self, kept: Any, property: Property) -> Tensor:
        """Values `[s]` or `[s, m]` of a property for many choices of groups at once.

        Args:
            kept: which groups every counterfactual model sees `[s, k]`, as booleans, or weights; of a pandas table the
                columns are found by name.
            property: what is asked.
        """
        weights = self.checked_weights(kept)
        return self.calibrated(property, weights, self.values(property, weights).mean(0))

    def leave_group_out(self, property: Property) -> LeaveGroupOut:
        """How much a property rises without each group in turn; a "seed" of the result is a model explained here."""
        k = len(self.groups)
        if k == 1:
            raise ValueError("there is one group: nothing is left without it.")
        weights = self.checked_weights(1 - np.eye(k))
        full = self.values(property, self.checked_weights(np.ones((1, k))))[:, 0]
        rises = self.values(property, weights) - full[:, None]
        found = self.calibration_of(property)
        if found is not None:
            rises = found.rise(rises, self.removed(weights))
        per_model = rises.transpose(1, -1) if rises.dim() > 2 else rises
        return LeaveGroupOut(
            per_model, full, np.arange(k), self.groups, property, "refit of the linearised model", False,
            self.note(property),
        )  # fmt: skip

    def interactions(self, property: Property, names: Names | None = None) -> Interactions:
        """Pairs of groups whose effects do not add up; see `Interactions`."""
        from ggda_ext.counterfactual.interactions import found_interactions

        return found_interactions(self, property, None if names is None else self.ids(names))

    def search(
        self,
        property: Property,
        *,
        remove: int | None = None,
        budget: int | None = None,
        goal: Literal["min", "max"] | None = None,
        holdout: Property | None = None,
        exchanges: int = 3,
    ) -> Search:
        """Which groups to leave out, so that a property becomes as good as possible.

        Args:
            property: one number.
            remove: how many groups to leave out.
            budget: or at most how many training points; the search then stops when nothing that fits improves it.
            goal: ``"min"`` or ``"max"``; by default what is better for the property.
            holdout: the property of points that the search does not see, to judge the choice by.
            exchanges: rounds in which one removed group may be exchanged for a kept one.
        """
        from ggda_ext.counterfactual.search import found_search

        return found_search(self, property, remove, budget, goal, holdout, exchanges)

    def shapley(
        self,
        property: Property,
        *,
        samples: int = 64,
        kind: Literal["shapley", "banzhaf"] = "shapley",
        atoms: int | None = None,
        seed: int = 0,
    ) -> Semivalues:
        """Shapley or Banzhaf values of the groups from many refits.

        Args:
            property: a property of outputs, one number.
            samples: for Shapley, random orders in which groups arrive; for Banzhaf, random halves: k + 1 refits each.
            kind: ``"shapley"`` or ``"banzhaf"``.
            atoms: cut groups into pieces of about that many points, so that splitting a group gains nothing.
            seed: of the orders.
        """
        from ggda_ext.counterfactual.semivalues import found_semivalues

        return found_semivalues(self, property, samples, kind, atoms, seed)

    def verify(
        self, retrain: Retrain, property: Property, subsets: Any = 8, *, fraction: float = 0.5, seed: int = 0
    ) -> Verification:
        """Compare predictions with a few real retrainings, and calibrate later ones; see `Verification`.

        Args:
            retrain: training indices to keep, one array per subset → values of the property `[subsets, seeds]`; a
                `ggda_ext.evaluation.Retrainer`, or your own.
            property: the property that `retrain` measures, one number.
            subsets: which groups to keep `[s, k]`, or how many to choose: see `to_retrain`.
            fraction: of the groups that a random choice keeps: about what you are going to ask for.
            seed: of the choice.
        """
        return verified(self, retrain, property, subsets, fraction, seed)

    def to_retrain(
        self, property: Property, count: int = 8, *, fraction: float = 0.5, among: Any = None, seed: int = 0
    ) -> np.ndarray:
        """Subsets worth a retraining, for `verify`: which groups to keep `[count, k]`, their predictions spread evenly.

        Args:
            property: one number.
            count: how many; fewer if there are no more.
            fraction: of the groups that a subset keeps.
            among: subsets to choose from `[s, k]`, instead of random ones.
            seed: of the draw.
        """
        return chosen_subsets(self, property, count, fraction, seed, among)

    def values(self, property: Property, weights: Tensor, factor: float = 1.0) -> Tensor:
        """Values `[models, s]` or `[models, s, m]` of a property for weights of groups `[s, k]`, not calibrated; those
        of a model and its copies nearby are one.

        Args:
            property: what is asked.
            weights: of the groups.
            factor: of the ridges.
        """
        return torch.stack([one.values(property, one.solve(weights, factor)) for one in self.models])

    @property
    def linearized(self) -> list[LinearizedModel]:
        """All models with their copies."""
        return [model for one in self.models for model in one.models]

    def calibrated(self, property: Property, weights: Tensor, values: Tensor) -> Tensor:
        """Values with what `verify` found out about their level and slope; as they are without it."""
        found = self.calibration_of(property)
        if found is None:
            return values
        base = self.value_of_all(property)
        return base + found.rise(values - base, self.removed(weights))

    def value_of_all(self, property: Property) -> Tensor:
        """A property with nothing left out, a scalar or `[m]`: the mean over models."""
        return self.values(property, torch.ones(1, len(self.groups), dtype=torch.float64)).mean(0)[0]

    @staticmethod
    def identity(property: Property) -> Any:
        """What two properties share that measure the same: a mean loss made twice of the same data and loss is one."""
        if not isinstance(property, MeanProperty) or property.loss.anchors is None:
            return id(property)
        return (MeanProperty, identity_of(property.data), *map(id, property.loss.anchors))

    def calibration_of(self, property: Property) -> Calibration | None:
        """What `verify` found for this property."""
        found = self.calibrations.get(self.identity(property))
        return None if found is None else found[1]

    def note(self, property: Property) -> str:
        """What to know about predicted levels of this property; empty where they were calibrated or are exact."""
        exact, found = all(model.is_linear for model in self.linearized), list[str]()
        if not exact and self.calibration_of(property) is None:
            found.append(NOT_CALIBRATED)
        if (looked_at := len(self.linearized[0].chosen)) < self.groups.n:
            found.append(
                f"Refits look at {looked_at:,} of {self.groups.n:,} training points; see most_points of WhatIf."
            )
        return " ".join(found)

    def removed(self, weights: Tensor) -> Tensor:
        """Share of the training points that is left out `[s]`; points that count more than once leave nothing out."""
        sizes = torch.from_numpy(self.groups.sizes.astype(float))
        return (1 - weights.cpu().double()).clamp_min(0) @ sizes / self.groups.n

    def ids(self, names: Names) -> list[int]:
        """Ids of groups given by name."""
        return ids_of(names, self.names)

    def checked_weights(self, weights: Any) -> Tensor:
        """Weights of groups `[s, k]`, refused where nothing is left."""
        return checked_kept(weights, self.groups, self._mass_of_group, self._mass_of_others)
