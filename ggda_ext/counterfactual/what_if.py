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
from ggda_ext.counterfactual.linearized import AT_OPTIMUM, LinearizedModel
from ggda_ext.counterfactual.nearby import copies_nearby
from ggda_ext.counterfactual.property_values import Explained, identity_of, of_outputs_only
from ggda_ext.counterfactual.settings import Settings
from ggda_ext.curvature.damping import Training
from ggda_ext.data import DataLike, IndexedData
from ggda_ext.evaluation import Retrain
from ggda_ext.gradients import GroupGradients
from ggda_ext.groups.partition import Groups, GroupsLike
from ggda_ext.model import only_thread
from ggda_ext.properties import MeanProperty, Property
from ggda_ext.words import whole_bytes, without

if TYPE_CHECKING:
    from ggda_ext.counterfactual.interactions import Interactions
    from ggda_ext.counterfactual.search import Search
    from ggda_ext.counterfactual.semivalues import Semivalues

NOT_CALIBRATED = "Not calibrated: the order of predictions can be trusted before their size; see WhatIf.verify."

NOT_AT_OPTIMUM = (
    "The model is not at the optimum of its training loss: {:.1%} of the loss are left to learn. If it was trained "
    "until it converged, loss_fn, weight_decay or point_weights are not those of its training (a decay of some "
    "parameters only, class weights, reduction='sum'), and predictions are wrong."
)
TO_FIRST_ORDER = (
    "The property is predicted to first order only, because it is not known to be a function of outputs: if it is one, "
    "pass properties.of_outputs."
)


class WhatIf:
    """A trained model's answers to *what if some groups had not been in the training set, or had weighed less?*

    It linearises the outputs along a few parameter directions, and solves the training problem of the kept groups
    there; see `ggda_ext.counterfactual.refit`. The set-up takes about one pass over the training data for every
    direction. If points use each parameter often (text, images), it takes a few passes for every output instead. A
    question then takes milliseconds.

    Args:
        model: the model trained on all the data, in eval mode if it has dropout or BatchNorm.
        loss_fn: the training loss, ``loss_fn(output, target)``, convex in the output.
        data: the training set.
        groups: a `Groups` or anything it accepts. Points in no group always stay.
        weight_decay: the L2 penalty of the training, λ in λ/2 ‖θ‖²; or pass its `recipe`.
        recipe: how the model was trained, a `ggda_ext.training.Recipe` or `TrainingSteps`. It gives the weight decay,
            and the ridge for a training that stopped before its optimum. If the training has converged, pass
            `weight_decay` instead.
        start: the model before that training, e.g. the pre-trained one; for a model trained from scratch any fresh one,
            ``make_model()``. Refits then begin at its outputs, so they do not learn what only the removed groups have
            taught. This also works if the model learned it so well that the gradients are nearly zero.
        settle: whether the model first settles, which takes out the noise of its last training steps; changes are then
            measured from there. Needs a recipe. Use it for checkpoints and for models whose last learning rates were
            still high, not for a training that stopped early.
        nearby: number of copies of every model. Each copy is changed at random, settled and refitted beside the model,
            and values are averaged over all of them. This takes time for every copy, but no training; see
            `counterfactual.nearby`. Needs a recipe.
        models: more models trained the same way with other seeds; values are averaged over all of them.
        checkpoints: state dicts or their paths, from along the training. Values are averaged over them; the present
            parameters count only if they are among them. With a `start`, outputs are linearised at the checkpoints,
            and the changes are added to the outputs of the present model. Then it is best to pass one checkpoint from
            early in the training, or one from each of several trainings with other seeds.
        directions: ``"all"`` parameters, the leading ``"eigen"`` vectors of the Gauss-Newton matrix, what the
            ``"groups"`` teach, or ``"both"`` of the last two; ``"auto"`` takes all parameters if there are at most
            `rank` of them (1,000 for a model that is linear in its parameters, if `memory_budget` has room for their
            features), else both.
        rank: number of directions: half of it for eigenvectors (all of it for ``"eigen"``), and in addition at most
            `rank` directions of the groups.
        ridge: keeps refits near the model, where the linearisation holds. With a recipe, the default follows from the
            number of training steps (for Adam in its own metric). Without a recipe, it is a tenth of the curvature at
            which eigenvectors are cut off, raised until the model itself follows (`counterfactual.trust`). Models that
            are linear in their parameters get next to no ridge along all parameters, where refits are exact, or a small
            one if training has not reached the optimum. `verify` may choose another.
        point_weights: weight of every training point in the training loss `[n]`, e.g. a column of a table; 1 if left
            out.
        parameters: names of parameters or modules that may move; all that require a gradient if left out.
        most_points: number of training points that a refit looks at. If there are more, this many are drawn, the same
            share of every group. The groups' gradients still are those of all points, which takes one more pass. Pass
            n for refits that look at all points.
        batch_size: points per batch; by default the batch size of the DataLoader, else as many as fit the budget.
        memory_budget: bytes for features, for solving and for finding directions. Features that need more go to a
            file, and a large model gets fewer eigenvectors.
        folder: folder for such files; a temporary folder if left out.
        seed: random seed of sketches and draws.
        show_progress: whether to show progress bars during the set-up; by default on passes over 5 seconds.
    """

    @without(
        strategy="outputs are pushed along directions, and there is one way to do it; leave it out",
        keeping="a set-up takes some passes and is not kept; save its answers, or keep the object",
    )
    @torch.inference_mode(False)
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
            directions, rank, ridge, recipe, start, settle, nearby, weight_decay, most_points,
            whole_bytes(memory_budget), folder, seed,
        )  # fmt: skip
        if batch_size is not None:
            check_count("batch_size", batch_size)
        inside = IndexedData(data, "the training data")
        if inside.n is None:
            raise TypeError("the training data is a stream without a length: pass a map-style data set to what-if.")
        weights = checked_point_weights(point_weights, inside)

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
        if not first[0].exact:
            copies = copies_nearby([one.provider for one in first], nearby, seed)
            for of, (one, names) in zip(cycle(self.models), copies, strict=False):
                of.models.append(linearized(one, names, replace(settings, settle=True)))
        self._point_weights = first[0].point_weights.cpu().numpy()
        self._masses = self._masses_of(self.groups)
        self.calibrations: dict[Any, tuple[Property, Calibration]] = {}

    def __repr__(self) -> str:
        return f"WhatIf({len(self.groups)} groups, {self.groups.n} points, {len(self.models)} models)"

    @property
    def names(self) -> list[Hashable]:
        """Names of the groups, or their ids."""
        return list(self.groups.all_names)

    def explain(self) -> str:
        """Describe in words what was chosen for every model, why, and what was calibrated."""
        lines = [f"model {j}: {one.models[0].explain()}" for j, one in enumerate(self.models)]
        if copies := len(self.models[0].models) - 1:
            lines.append(f"and {copies} copies nearby of each, settled; values are averaged")
        if not self.calibrations:
            lines.append(NOT_CALIBRATED)
        return "\n".join(lines + [found.explain() for _, found in self.calibrations.values()])

    def without(self, names: Names) -> Counterfactual:
        """Return the model without one or several groups, given by name (or by id, if the groups have no names)."""
        weights = np.ones(len(self.groups))
        weights[self.ids(names)] = 0
        return self._answer(weights)

    def only(self, names: Names) -> Counterfactual:
        """Return the model as it would be if it had been trained on these groups only."""
        weights = np.zeros(len(self.groups))
        weights[self.ids(names)] = 1
        return self._answer(weights)

    def with_weights(self, weights: Mapping[Hashable, float]) -> Counterfactual:
        """Return the model with other weights of some groups: 0 removes a group, 2 counts each of its points twice.

        Groups that are not given keep weight 1.
        """
        return self._answer(weights_by_name(weights, self.names))

    def _answer(self, weights: np.ndarray) -> Counterfactual:
        return Counterfactual(self, self.checked_weights(weights[None])[0])

    def subsets(self, kept: Any, property: Property) -> Tensor:
        """Return the values `[s]` or `[s, m]` of a property for many choices of groups at once.

        Args:
            kept: which groups every counterfactual model sees `[s, k]`, as booleans or weights. The columns of a pandas
                table are found by name.
            property: the property to predict.
        """
        weights = self.checked_weights(kept)
        return self.calibrated(property, weights, self.values(property, weights).mean(0))

    def leave_group_out(self, property: Property) -> LeaveGroupOut:
        """Predict how much a property rises without each group in turn.

        The result has one "seed" for every model that is explained here.
        """
        k = len(self.groups)
        self.check_rest([[j] for j in range(k)])
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
        """Find pairs of groups whose effects do not add up; see `Interactions`."""
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
        """Find the groups to remove to make a property as good as possible.

        Args:
            property: the property to improve, one number.
            remove: how many groups to remove.
            budget: instead of `remove`, the largest number of training points to remove. The search stops when no group
                that fits the budget improves the property.
            goal: ``"min"`` or ``"max"``; by default the one that is better for the property.
            holdout: the same property of points that the search does not see, to judge the choice by.
            exchanges: largest number of rounds in which one removed group is exchanged for a kept one.
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
        """Estimate Shapley or Banzhaf values of the groups from many refits.

        Args:
            property: a property of outputs, one number.
            samples: number of random orders in which groups arrive (Shapley), or of random halves (Banzhaf). Each takes
                k + 1 refits.
            kind: ``"shapley"`` or ``"banzhaf"``.
            atoms: cut groups into pieces of about this many points, so that splitting a group gains nothing.
            seed: random seed of the orders or halves.
        """
        from ggda_ext.counterfactual.semivalues import found_semivalues

        return found_semivalues(self, property, samples, kind, atoms, seed)

    def verify(
        self, retrain: Retrain, property: Property, subsets: Any = 8, *, fraction: float = 0.5, seed: int = 0
    ) -> Verification:
        """Compare predictions with a few real retrainings, and calibrate later predictions; see `Verification`.

        Args:
            retrain: a function that takes the training indices to keep, one array per subset, and returns the values of
                the property `[subsets, seeds]`; a `ggda_ext.evaluation.Retrainer`, or your own.
            property: the property that `retrain` measures, one number.
            subsets: which groups to keep `[s, k]`, or how many subsets to choose; see `to_retrain`.
            fraction: share of the groups that a random subset keeps. Pass about the share that you are going to ask
                about.
            seed: random seed of the choice.
        """
        return verified(self, retrain, property, subsets, fraction, seed)

    def to_retrain(
        self, property: Property, count: int = 8, *, fraction: float = 0.5, among: Any = None, seed: int = 0
    ) -> np.ndarray:
        """Choose subsets for `verify` to retrain: which groups to keep `[count, k]`. Their predictions spread evenly.

        Args:
            property: the property to predict, one number.
            count: number of subsets; fewer are returned if there are no more.
            fraction: share of the groups that a subset keeps.
            among: subsets to choose from `[s, k]`, instead of random ones.
            seed: random seed of the draw.
        """
        return chosen_subsets(self, property, count, fraction, seed, among)

    def values(self, property: Property, weights: Tensor, factor: float = 1.0) -> Tensor:
        """Return values `[models, s]` or `[models, s, m]` of a property for weights of groups, without calibration.

        A model and its copies nearby give one value, their mean.

        Args:
            property: the property to predict.
            weights: weights of the groups `[s, k]`.
            factor: multiplies the ridges.
        """
        return torch.stack([one.values(property, one.solve(weights, factor)) for one in self.models])

    @property
    def linearized(self) -> list[LinearizedModel]:
        """All models, each followed by its copies nearby."""
        return [model for one in self.models for model in one.models]

    def calibrated(self, property: Property, weights: Tensor, values: Tensor) -> Tensor:
        """Correct values by the level and slope that `verify` found; return them unchanged if it found none."""
        found = self.calibration_of(property)
        if found is None:
            return values
        base = self.value_of_all(property)
        return base + found.rise(values - base, self.removed(weights))

    def value_of_all(self, property: Property) -> Tensor:
        """Predicted value of a property with nothing left out, a scalar or `[m]`: the mean over models."""
        return self.values(property, torch.ones(1, len(self.groups), dtype=torch.float64)).mean(0)[0]

    @staticmethod
    def identity(property: Property) -> Any:
        """A key that is equal for properties that measure the same.

        Two mean losses made from the same data and the same loss have the same key.
        """
        if not isinstance(property, MeanProperty) or property.loss.anchors is None:
            return id(property)
        return (MeanProperty, identity_of(property.data), *map(id, property.loss.anchors))

    def calibration_of(self, property: Property) -> Calibration | None:
        """The calibration that `verify` found for this property, or None."""
        found = self.calibrations.get(self.identity(property))
        return None if found is None else found[1]

    def note(self, property: Property) -> str:
        """A warning about the predicted values of this property; empty if nothing limits them.

        It says that they are not calibrated, unless they are exact, that a linear model is not at the optimum of what
        it is said to be trained on, that refits look at a part of the points, and that the property is predicted to
        first order.
        """
        found = list[str]()
        if not of_outputs_only(property):
            found.append(TO_FIRST_ORDER)
        left = max(model.left_to_learn for model in self.linearized)
        if left > AT_OPTIMUM:
            found.append(NOT_AT_OPTIMUM.format(left))
        if not all(model.at_optimum for model in self.linearized) and self.calibration_of(property) is None:
            found.append(NOT_CALIBRATED)
        if (looked_at := len(self.linearized[0].chosen)) < self.groups.n:
            found.append(
                f"Refits look at {looked_at:,} of {self.groups.n:,} training points; see most_points of WhatIf."
            )
        return " ".join(found)

    def removed(self, weights: Tensor) -> Tensor:
        """Share of the training points that is left out `[s]`; weights above 1 count as 1."""
        sizes = torch.from_numpy(self.groups.sizes.astype(float))
        return (1 - weights.cpu().double()).clamp_min(0) @ sizes / self.groups.n

    def ids(self, names: Names) -> list[int]:
        """Return the ids of groups given by name."""
        return ids_of(names, self.names)

    def checked_weights(self, weights: Any, argument: str = "kept") -> Tensor:
        """Return weights of groups `[s, k]` as a tensor; raise an error if a row leaves nothing to train on."""
        return checked_kept(weights, self.groups, self.masses, argument)

    def masses(self, weights: np.ndarray, groups: Groups | None = None) -> np.ndarray:
        """Total weight of the training points that weights of groups `[s, k]` leave, with the points in no group `[s]`.

        Args:
            weights: weights of the groups.
            groups: other groups of the same points, e.g. pieces of them.
        """
        found = self._masses if groups is None else self._masses_of(groups)
        return weights @ found[1:] + found[0]

    def _masses_of(self, groups: Groups) -> np.ndarray:
        """Total weight of the points in no group, and of each group `[1 + k]`."""
        return np.bincount(groups.labels + 1, self._point_weights, len(groups) + 1)

    def check_rest(self, choices: Sequence[list[int]]) -> None:
        """Raise an error that names the groups if one of some choices of groups to remove leaves nothing."""
        kept = np.ones((len(choices), len(self.groups)))
        for row, gone in zip(kept, choices, strict=True):
            row[gone] = 0
        for at in np.flatnonzero(self.masses(kept) <= 0)[:1]:
            named = " and ".join(repr(self.names[j]) for j in choices[at])
            raise ValueError(f"without {named} nothing is left to train on: there are no other points of any weight.")
