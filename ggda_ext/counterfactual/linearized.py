"""One trained model, linearised along a few directions: refits for any weights of the groups, and their outputs.

For a large training set, a refit looks at a part of the points. They are drawn evenly from every group and weighted
back: the refit fits a few hundred numbers, and some ten thousand points are plenty for that. The groups' gradients at
the start of the refit are those of all points; they cost one more pass.

While learning rates are high, a training with batches is off its optimum by luck. This is so mostly along directions of
high curvature, in which it arrived long ago: at another step, the outputs of another class might have been higher. The
predicted loss without some groups depends on this luck as much as on the groups. So a linearised model may first
*settle*: it moves to where all points together put it, with a ridge that leaves unchanged what the training has not
reached. It is refitted from there.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.counterfactual.directions import Kind, find_directions, pulled_back, slopes
from ggda_ext.counterfactual.features import (
    Features,
    Linearizer,
    are_rows_less_work,
    at_least_single,
    check_finite,
    check_forward_mode,
    is_linear,
)
from ggda_ext.counterfactual.known_losses import convex_loss
from ggda_ext.counterfactual.newton import Penalty
from ggda_ext.counterfactual.refit import Refit
from ggda_ext.counterfactual.settings import Settings
from ggda_ext.counterfactual.trust import kept_share, trusted_ridge
from ggda_ext.curvature.damping import ADAM as STATED_ADAM
from ggda_ext.curvature.damping import of_recipe
from ggda_ext.data import IndexedData, to_device
from ggda_ext.gradients import GroupGradients
from ggda_ext.gradients.proof.findings import Apart
from ggda_ext.groups.partition import Groups
from ggda_ext.losses import ignored_targets, model_output, output_of
from ggda_ext.model import check_deterministic_modules, only_thread
from ggda_ext.properties import Property, property_gradient
from ggda_ext.sharing import checksum, in_shares

RIDGE = 0.1
"""The ridge without a recipe, in units of the curvature at which eigenvectors are cut off."""
ADAM = 1.0
"""The ridge for a training by Adam that ended before its optimum, in units of √v_j / Σ η_t (`curvature.damping`).
Chosen on HELOC with 2,000 points and MNIST with 4,000, one grouping each, then halved on three groupings of HELOC with
ANN-S. A quadratic loss would have 1."""
FROM_START = 0.1
"""The ridge of a refit from the start, in units of the ridge that follows from the recipe. Chosen on MNIST with 4,000
points, two groupings, so that changes have about the right size; ranks were as good with 0.03 to 1."""
AT_OPTIMUM = 1e-3
"""Share of the training loss that a model may still have to learn, for its refits to be called exact."""
SETTLED = 10.0
"""The ridge with which a model settles, in units of its own ridge; for Adam this is the damping of influence functions.
With 1, settling would continue a training that stopped early. Chosen on HELOC with ANN-S and on MNIST with 4,000
points, one grouping each."""
MOST_PARAMETERS = 1_000
"""Up to how many parameters ``directions="auto"`` takes all parameters of a linear model. With 1,000, a refit takes
seconds on one core."""
_RELATIVE_RIDGE = 2e-5  # the ridge if no eigenvectors are cut off, in units of the largest curvature
_BOUNDING = {torch.float64: 1e-10, torch.float32: 1e-6}
"""The ridge of an exact refit without weight decay, in units of the curvature of each parameter, so that units of
features do not matter; it only bounds what the data leaves unbounded (separable classes)."""
_DETERMINED = 1e-4
"""What this ridge shrinks to, in double precision, along directions that the points determine badly, but do determine,
such as those of the bias and of a feature far from zero (a year)."""
_NOT_LEARNED = 1e-6
"""The same if training has not reached the optimum, in units of the largest curvature. Also the share of the loss that
may be left to learn along what this ridge holds, beyond which training has not reached the optimum."""
_MATRICES = 4  # matrices [p, p] that a refit along all p parameters holds: the directions, curvature and its factors


class LinearizedModel:
    """Refits of one model.

    Args:
        provider: the model, its loss, the training data, the groups and the parameters that the gradients are taken
            for.
        settings: directions, ridge and limits.
        point_weights: weight of every training point in the loss `[n]`.
        explained: the model whose outputs are changed, if it is not the model that is linearised.

    Attributes:
        is_linear: whether outputs are linear in the parameters.
        exact: whether refits are trainings to the optimum: outputs are linear, and the directions span all parameters.
        left_to_learn: by which share of its training loss such a model would improve on the way to its own optimum.
    """

    def __init__(
        self, provider: GroupGradients, settings: Settings, point_weights: Tensor, explained: nn.Module | None = None
    ) -> None:
        self.provider, self.space, self.settings = provider, provider.space, settings
        self._explained = explained
        self._live = [provider.model, *([] if explained is None else [explained])]
        for model in self._live:
            check_deterministic_modules(model)
        self._states = [_state_of(model) for model in self._live]
        facts = provider.plan(None).facts
        self._batch_size = batch_size = facts.batch_size
        outputs, targets = self._outputs_of(provider.model, provider.data)
        self.output_shape = list(outputs.shape[1:])
        ignored = ignored_targets(getattr(provider.loss, "loss_fn", None), targets)
        self.point_weights = point_weights.to(outputs.device)
        if ignored is not None:
            self.point_weights = self.point_weights.masked_fill(ignored, 0)  # the mean loss leaves these points out
        if targets is not None:
            targets = _filled(targets, self.point_weights > 0)
        loss = self._loss = convex_loss(provider.loss, outputs, targets)
        losses = loss.each(outputs)
        check_finite(torch.where(self.point_weights > 0, losses, 0.0), "losses", provider.data.name)
        self.is_linear = is_linear(self.space, provider.data, batch_size)
        self.directions = find_directions(
            self._kind(outputs), settings.rank, provider, loss, outputs, self.point_weights / self.point_weights.sum(),
            settings.seed,
        )  # fmt: skip
        self._linearizer = Linearizer(
            self.space,
            self.directions.rows,
            batch_size,
            settings.memory_budget,
            None if settings.folder is None else Path(settings.folder),
            provider.show_progress,
            are_rows_less_work(facts, outputs[0].numel(), len(self.directions.rows)),
        )
        if not self._linearizer.by_rows:
            check_forward_mode(self._linearizer, provider.data)
        self.chosen, self._chosen_weights = _evenly_drawn(
            provider.groups, self.point_weights, settings.most_points, settings.seed
        )
        looked_at = _Chosen(provider.data, self.chosen)
        self.training = self._linearizer.features(looked_at)
        at = torch.from_numpy(self.chosen).to(outputs.device)
        self.training_loss = loss.take(at)
        self.exact = self.is_linear and len(self.directions.rows) == self.space.size
        self.settled = self.directions.rows.new_zeros(len(self.directions.rows), dtype=torch.float64)
        self.zero: Tensor | None = None
        self._start: Tensor | None = None
        if self.exact and explained is not None:  # a linear model has the same features at all parameters
            outputs, _ = self._outputs_of(explained, provider.data)
            self.training = replace(self.training, outputs=outputs[at])
        elif settings.start is not None and not self.exact:
            start = copy.deepcopy(settings.start).to(self.space.device).eval()
            self.zero = self._zero_from(start)
            self._start, _ = self._outputs_of(start, looked_at)
        self._all_outputs = outputs
        self.refit = self._refit(provider.groups)
        self.metric = torch.eye(self.refit.r, dtype=torch.float64, device=self.space.device)
        self.ridge, self._ridge_from = self._default_ridge() if settings.ridge is None else (settings.ridge, "given")
        self.left_to_learn = self._left_to_learn(self.ridge * self.metric) if self.exact else 0.0
        if settings.settle and not self.exact and self.ridge:
            here = Penalty(SETTLED * self.ridge * self.metric, settings.decay, self._zero_from(provider.model))
            self.settled = self.refit.settle(here)

    def _kind(self, outputs: Tensor) -> Kind:
        """The directions asked for; ``"all"`` if a linear model leaves the choice open and is small enough for it."""
        points, p = min(len(outputs), self.settings.most_points), self.space.size
        room = 8 * max(points * outputs[0].numel(), _MATRICES * p) * p
        small = p <= MOST_PARAMETERS and room <= self.settings.memory_budget
        return "all" if self.settings.directions == "auto" and self.is_linear and small else self.settings.directions

    def check_unchanged(self) -> None:
        """Raise an error if a model is no longer what it was at the set-up: an answer would mix the two."""
        for model, (mode, values) in zip(self._live, self._states, strict=True):
            now, others = _state_of(model)
            if others != values:
                raise ValueError(
                    "the model has other parameters or buffers than when WhatIf was set up (was it trained on?), and "
                    "answers would mix both: make a new WhatIf, or pass it a copy.deepcopy of the model."
                )
            if now != mode:
                raise ValueError(
                    "modules of the model were switched between train and eval mode since WhatIf was set up, and "
                    "answers may mix both: switch the model back, or make a new WhatIf."
                )

    def _refit(self, groups: Groups) -> Refit:
        """Return the small problem (see `Refit`) for groups of the training points."""
        labels = groups.labels_of(self.chosen)
        order = _group_after_group(labels, len(groups))
        starts = np.searchsorted(np.sort(labels[labels >= 0]), np.arange(len(groups) + 1))
        n = len(order)
        parts = [self.training_loss.columns(self.outputs.reshape(n, -1).double()), self._chosen_weights]
        loss, tangents = self.training_loss, self.training_loss.columns(self.training.tangents)
        if self.exact and 8 * tangents.numel() <= self.settings.memory_budget:
            tangents = tangents.double()  # parameters of features of different sizes need it, and no ridge helps
        if not np.array_equal(order, np.arange(n)):  # pieces of groups; the groups themselves are in order already
            at = torch.from_numpy(order).to(tangents.device)
            parts, loss, tangents = [part[at] for part in parts], loss.take(at), tangents[at]
        budget = self.settings.memory_budget // 2
        problem = Refit(parts[0], tangents, loss, starts, parts[1], budget, self._missing(groups))
        if problem.dtype != self.training.tangents.dtype:
            problem.tolerance = 1e-12  # more is lost in the rounding of outputs
        if self.exact:
            problem.excess = problem.pull - self.settings.decay * self._zero_from(self._live[-1])
        if self.exact and not self.settings.decay:
            problem.radius = self.training_loss.radius
        return problem

    def _missing(self, groups: Groups) -> Tensor | None:
        """Gradients of all points of every group minus those of the points looked at `[k + 1, r]`.

        The last row is for points in no group. None if the refit looks at all points, or if it begins at the outputs
        of the start, far from its answers.
        """
        if len(self.chosen) == groups.n or self._start is not None:
            return None
        self.check_unchanged()
        over = self.point_weights.double()
        over = over.index_add(0, torch.from_numpy(self.chosen).to(over.device), -self._chosen_weights.double())
        labels, k = groups.labels_of(np.arange(groups.n)), len(groups)
        filled, at = np.unique(np.where(labels < 0, k, labels), return_inverse=True)
        rows = slopes(self._loss, self._all_outputs) * over[:, None]
        found = self.directions.rows.new_zeros(k + 1, len(self.directions.rows), dtype=torch.float64)
        found[filled] = pulled_back(self.provider, rows, Groups(at)).scores(self.directions.rows).T.double()
        return found

    def solve(self, weights: Tensor, factor: float = 1.0) -> Tensor:
        """Return coefficients d `[s, r]` for weights of groups `[s, k]`; ranks share the work.

        `factor` multiplies the ridge.
        """
        penalty = self.penalty(factor * self.ridge)
        return in_shares(len(weights), lambda some: self.refit.solve(weights[some], penalty), "subsets")

    @property
    def outputs(self) -> Tensor:
        """Outputs, where a refit starts, of the training points it looks at: of the start, or of the settled model."""
        return self.training.moved(self.settled) if self._start is None else self._start

    def penalty(self, ridge: float | None = None) -> Penalty:
        """Return the weight decay and the ridge in the directions, and the place that they pull to."""
        size = self.ridge if ridge is None else ridge
        return Penalty(size * self.metric, self.settings.decay, self.zero)

    def _zero_from(self, model: nn.Module) -> Tensor:
        """Coefficients `[r]` of the directions at which parameters are zero, if d = 0 is at the model's parameters."""
        rows, found = self.directions.rows, dict(model.named_parameters())
        for name, value in self.space.parameters.items():
            if name not in found or found[name].shape != value.shape:
                raise ValueError(f"start has no parameter {name} of shape {list(value.shape)}: pass a model alike.")
        values = [found[name].detach().to(rows) for name in self.space.parameters]
        return -(rows.double() @ self.space.flatten(values, rows.new_zeros(self.space.size)).double())

    @torch.inference_mode(False)
    def regrouped(self, groups: Groups) -> Refit:
        """Return the small problem for other groups of the same points, with the same features."""
        return self._refit(groups)

    @torch.inference_mode(False)
    def features(self, data: IndexedData) -> Features:
        """Return the outputs and tangents of any data."""
        self.check_unchanged()
        data.check_repeats()
        with only_thread(self.provider.model):
            data.suit(self.provider.model)
            found = self._linearizer.features(data)
        return found if self._explained is None else replace(found, outputs=self._outputs_of(self._explained, data)[0])

    @torch.no_grad()
    def _outputs_of(self, model: nn.Module, data: IndexedData) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of a model for all points of `data`, and the targets of the points if they have any."""
        outputs, targets, apart = [], [], Apart(model, output_of, data.name, what="value")
        with only_thread(model):
            for _, batch in data.sequential(self._batch_size):
                batch = to_device(batch, self.space.device)
                output, target = model_output(model, batch)
                apart.check(batch, output)
                outputs.append(output)
                targets.append(target)
        joined = at_least_single(torch.cat(outputs))
        check_finite(joined, "outputs", data.name)
        return joined, None if targets[0] is None else torch.cat([target for target in targets if target is not None])

    @torch.inference_mode(False)
    def linearised(self, property: Property) -> tuple[Tensor, Tensor]:
        """Return values `[m]` of a property at the model's parameters, and its slopes `[m, r]` along the directions."""
        model = self.provider.model
        own = model if self._explained is None else self._explained
        with only_thread(own), torch.no_grad():
            value = torch.as_tensor(property(own)).detach().double().reshape(-1)
        with only_thread(model):
            gradient = property_gradient(property, model, self.space.parameters)
        return value, (gradient @ self.directions.rows.T).double()

    def _default_ridge(self) -> tuple[float, str]:
        """Return the ridge and where it comes from; set the metric in which the ridge is measured."""
        if self.exact and self.settings.decay:
            return 0.0, "none is needed with a weight decay"
        if self.settings.recipe is not None and not self.exact:
            source, own = of_recipe(
                self.provider, self.provider.data, self.provider.groups.n, self.settings.recipe
            )  # fmt: skip
            own = (own - self.settings.decay).clamp_min(0) * (1.0 if self._start is None else FROM_START)
            if own.dim() == 0:
                return float(own), source
            rows = self.directions.rows.double()
            metric = (rows * own.to(rows)) @ rows.T / (STATED_ADAM / ADAM)
            size = float(metric.diagonal().mean())
            if size > 0:
                self.metric = metric / size
                return size, source
        if self.directions.cut > 0:
            return self._trusted(RIDGE * self.directions.cut, "the smallest curvature among the eigenvectors")
        total = self.refit._curvature.double().sum(0) / self.refit.masses.sum()
        if self.exact:
            return self._bounding(total)
        largest = float(torch.linalg.eigvalsh(total)[-1])
        return self._trusted(_RELATIVE_RIDGE * largest, "the largest curvature")

    @property
    def at_optimum(self) -> bool:
        """Whether refits are exact, and the model is where a refit to all points would put it."""
        return self.exact and self.left_to_learn <= AT_OPTIMUM

    def _left_to_learn(self, ridge: Tensor) -> float:
        """By which share of the training loss an exact refit to all points would improve the model."""
        weights = self._chosen_weights.double()
        loss = float(weights @ self.training_loss.each(self.outputs) / weights.sum())
        left = self.refit.left_to_learn(ridge + self.settings.decay * torch.eye(self.refit.r).to(ridge))
        return left / max(abs(loss), torch.finfo(torch.float64).tiny)

    def _bounding(self, curvature: Tensor) -> tuple[float, str]:
        """Return the ridge of an exact refit without weight decay, and where it comes from; set its metric.

        What training has not learned, along parameters that change the outputs of few points, no other training of its
        kind learns either. Then the ridge holds these parameters, which otherwise would go far without these points.
        """
        own = curvature.diagonal().clamp_min(1e-12 * float(curvature.diagonal().max()))
        metric = _bounded(curvature, own, self.refit.dtype) / own.mean()
        size = _BOUNDING[self.refit.dtype] * float(own.mean())
        held = _NOT_LEARNED * float(torch.linalg.eigvalsh(curvature)[-1])
        left = [self._left_to_learn(ridge) for ridge in (size * metric, held * self.metric)]
        if left[0] - left[1] > _NOT_LEARNED:
            return held, "the largest curvature, because training has not reached the optimum"
        self.metric = metric
        return size, "the curvature of each parameter"

    def _trusted(self, ridge: float, source: str) -> tuple[float, str]:
        """Return the ridge, raised until the model itself follows (see `trusted_ridge`), and where it comes from."""
        raised = trusted_ridge(self, ridge)
        return raised, source if raised == ridge else f"{source}, raised until the model itself follows"

    def explain(self) -> str:
        """Describe in words what was chosen, and why."""
        points = len(self.chosen)
        of = "all" if points == self.provider.groups.n else f"{points:,} of {self.provider.groups.n:,}"
        kind = "linear in its parameters: refits are exact" if self.exact else "linearised around its parameters"
        if self.exact and not self.at_optimum:
            left = f"{self.left_to_learn:.1%} of its loss are left to learn"
            kind = f"linear in its parameters, but not at its optimum: {left}"
        if self.exact and points < self.provider.groups.n:
            kind += " for these points"
        if self.exact and self.refit.dtype != torch.float64:
            kind += ", but for rounding: memory_budget is too small for double precision"
        if self.is_linear and not self.exact:
            kind = (
                f"linear, but refits along a part of its {self.space.size:,} parameters (see directions) are not exact"
            )
        told = (
            f"{self.directions.why}; {of} training points; the model is {kind}; weight decay "
            f"{self.settings.decay:.3g}, ridge {self.ridge:.3g} (from: {self._ridge_from})"
        )
        if self._start is not None:
            at = "" if self._explained is None else "; features of a checkpoint"
            return f"{told}, towards where the training started{at}"
        if self.exact or len(self.provider.groups) < 2:
            return told
        if bool(self.settled.any()):
            change = (self.outputs - self.training.outputs).double().square().mean().sqrt()
            told += f"; settled, by which its outputs change by {float(change):.2g}"
        self.check_unchanged()
        share = kept_share(self, self.ridge)
        return f"{told}; without half of the groups {share:.0%} of the predicted fall of the kept loss come true"


def _state_of(model: nn.Module) -> tuple[list[bool], tuple[str, str]]:
    """Which modules of a model are in train mode, and checksums of its parameters and buffers."""
    with only_thread(model):  # another thread may have put other tensors in place of the parameters
        modes = [module.training for module in model.modules()]
        return modes, (checksum(model.parameters()), checksum(model.buffers()))


class _Chosen(IndexedData):
    """Some examples of a data set."""

    def __init__(self, inner: IndexedData, chosen: np.ndarray) -> None:
        self.__dict__.update(inner.__dict__)
        self._inner, self._chosen, self.n = inner, chosen, len(chosen)

    def batches(self, index_batches: Any) -> Any:
        """Return one batch for every sequence of indices; index j is the j-th chosen example."""
        return self._inner.batches(self._chosen[np.asarray(indices)] for indices in index_batches)


def _bounded(curvature: Tensor, own: Tensor, precision: torch.dtype) -> Tensor:
    """Return the metric of an exact refit's ridge `[p, p]`: each parameter's curvature, less where it would matter.

    Args:
        curvature: of all points `[p, p]`.
        own: the curvature of each parameter `[p]`.
        precision: of the features.
    """
    if precision != torch.float64:
        return torch.diag(own)
    root = own.sqrt()
    values, vectors = torch.linalg.eigh(curvature / root[:, None] / root)
    nothing = values <= 100 * torch.finfo(precision).eps * len(values)  # no example tells, but for rounding
    sizes = torch.where(nothing, 1.0, values.clamp(_DETERMINED, 1.0))
    return root[:, None] * ((vectors * sizes) @ vectors.T) * root


def _filled(targets: Tensor, counts: Tensor) -> Tensor:
    """Return targets in which points that do not count have the target of one that does; theirs may be missing."""
    if bool(counts.all()) or not bool(counts.any()):
        return targets
    targets = targets.clone()
    targets[~counts] = targets[counts][0]
    return targets


def _group_after_group(labels: np.ndarray, k: int) -> np.ndarray:
    """Return the order that sorts points with these group ids by group, points in no group last."""
    return np.argsort(np.where(labels < 0, k, labels), kind="stable")


def _evenly_drawn(groups: Groups, weights: Tensor, most: int, seed: int) -> tuple[np.ndarray, Tensor]:
    """Draw about `most` points, the same share of every group and at least one each; return them and their weights.

    If there are no more than `most` points, all are taken.
    """
    n = groups.n
    labels = groups.labels_of(np.arange(n))
    if n <= most:
        order = _group_after_group(labels, len(groups))
        return order, weights[torch.from_numpy(order)]
    draw, counts = np.random.default_rng(seed), weights.cpu().numpy() != 0
    chosen: list[np.ndarray] = []
    for group in range(-1, len(groups)):
        members = np.flatnonzero(labels == group)
        if counts[members].any():
            members = members[counts[members]]
        if len(members):
            count = max(1, round(len(members) * most / n))
            chosen.append(draw.choice(members, min(count, len(members)), replace=False))
    picked = np.sort(np.concatenate(chosen))
    picked = picked[_group_after_group(labels[picked], len(groups))]
    at = torch.from_numpy(picked)
    ids = torch.from_numpy(labels.astype(np.int64)) + 1
    totals = torch.zeros(len(groups) + 1, dtype=torch.float64).index_add_(0, ids, weights.double().cpu())
    drawn = torch.zeros_like(totals).index_add_(0, ids[at], weights.double().cpu()[at])
    factor = torch.where(drawn > 0, totals / drawn.clamp_min(1e-300), 0.0)
    return picked, (weights.double().cpu()[at] * factor[ids[at]]).to(weights)
