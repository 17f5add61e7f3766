"""The attribution methods of the paper. Each gives *importance*: the predicted rise of the mean test loss if the group
is removed. A method whose score is the predicted fall gives it with the other sign.

Seconds are CPU seconds in four parts. *grouping* is the time of the grouping. *gradients* is the time for the training
points; it includes inner products if the strategy never forms gradients. *curvature* is the time of the Hessian or
Fisher. *scoring* is the time for the test points and everything else.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import captum.influence
import numpy as np
import torch
from ggda_trak import FisherInfluence, TRAKer
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks.check.captum import sample_wise, tracin_cp
from benchmarks.check.measure import quiet
from benchmarks.check.trak import projector
from benchmarks.experiments.refits import warm_started, what_if
from benchmarks.experiments.subject import CG_STEPS, Subject, Timed, timed
from benchmarks.names import (
    CG,
    EKFAC,
    FISHER,
    FULL_FISHER,
    INFLUENCE,
    LISSA,
    PER_POINT,
    RATES,
    TRACIN,
    TRAK,
    WARM_START,
    WHAT_IF,
)
from benchmarks.tasks import LOSS
from ggda_ext import Groups, attribute, property_gradient
from ggda_ext.checkpoints import load_state
from ggda_ext.curvature.fisher import EmpiricalFisher, FisherKind
from ggda_ext.evaluation import points_of
from ggda_ext.methods import MethodName
from ggda_ext.model import left_as_it_was

SAMPLED = 8_192  # groups of one are timed on all points up to this many
_BATCH = 64  # number of points whose gradients are held at once


@dataclass(frozen=True)
class Attribution:
    """Importance of groups `[k]`, with its cost.

    Attributes:
        importance: predicted rise of the mean test loss if the group is removed.
        seconds: CPU seconds by part.
        settings: how it was computed, in words.
    """

    importance: np.ndarray
    seconds: dict[str, float]
    settings: str

    @classmethod
    def of(
        cls, rises: Tensor, settings: str, gradients: float, curvature: float = 0.0, scoring: float = 0.0
    ) -> Attribution:
        """Return the attribution with these predicted rises of the loss and CPU seconds."""
        parts = {"gradients": gradients, "curvature": curvature, "scoring": scoring}
        return cls(rises.detach().double().cpu().numpy().reshape(-1), parts, settings)


def attributed(method: str, subject: Subject, groups: Groups) -> Attribution:
    """Return the importance of every group by one method.

    Groups of one are timed with vectorised per-sample gradients. With more than `SAMPLED` points, only the first points
    are timed and the time is scaled up. The scores then come from the strategies for groups, which give the same
    numbers.
    """
    attribute_groups, n = _METHODS[method], groups.n
    per_sample = groups.are_singletons and method != PER_POINT
    if not per_sample or n <= SAMPLED:
        return attribute_groups(subject, groups, per_sample)
    found = attribute_groups(subject, groups, False)  # before the sample, which reuses the solution
    sample = attribute_groups(subject.first(SAMPLED), Groups.singletons(SAMPLED), True)
    return replace(
        found,
        seconds=found.seconds | {"gradients": sample.seconds["gradients"] * n / SAMPLED},
        settings=f"{sample.settings}; timed on {SAMPLED:,} of {n:,} points",
    )


def tracin(subject: Subject, groups: Groups, per_sample: bool) -> Attribution:
    """TracIn at the final checkpoint: ⟨∇g, Σ ∇ℓ⟩. Per sample, Captum computes it if it can be vectorised, else vmap."""
    if per_sample and sample_wise(subject.model):
        found = timed(captum_scores, subject, vectorised=True)
        return Attribution.of(found.value, "Captum's TracInCP, sample-wise gradients", found.seconds)
    provider = subject.gradients(groups, per_sample)
    found = timed(provider.scores, subject.direction.value)
    used = provider.plan(1).strategy
    return Attribution.of(found.value, f"strategy {used}", found.seconds, scoring=subject.direction.seconds)


def tracin_with_rates(subject: Subject, groups: Groups, per_sample: bool) -> Attribution:
    """TracIn over several checkpoints, weighted by their learning rates."""
    trained, total = subject.trained, torch.zeros(len(groups))
    gradients = scoring = 0.0
    with left_as_it_was(trained.model):
        for state, rate in zip(trained.checkpoints, trained.rates, strict=True):
            load_state(trained.model, state)
            provider = subject.gradients(groups, per_sample)
            direction = timed(property_gradient, subject.property, trained.model, provider.space.parameters)
            found = timed(provider.scores, direction.value)
            total += rate * found.value[0].cpu()
            gradients, scoring = gradients + found.seconds, scoring + direction.seconds
    return Attribution.of(total, f"{len(trained.checkpoints)} checkpoints", gradients, scoring=scoring)


def fisher(subject: Subject, groups: Groups, per_sample: bool) -> Attribution:
    """Influence with the empirical Fisher of projected gradients: exact for single points, the paper's for groups."""
    kind: FisherKind = "exact" if groups.are_singletons else "paper"
    dim = subject.task.projection_dim
    influence = FisherInfluence(
        subject.model, subject.train, LOSS, groups, proj_dim=dim, fisher=kind,
        strategy="persample" if per_sample else "auto",
    )  # fmt: skip
    first = timed(influence.influence, property=subject.property)
    again = timed(influence.influence, property=subject.property)  # this call reuses the rows of the training points
    rows = torch.randn(len(groups), min(dim, influence.provider.p))
    curvature = timed(_solve, rows).seconds
    settings = f"{kind} Fisher, {rows.shape[1]} dimensions, λ {influence.chosen_damping[0]:.2g}"
    gradients = max(first.seconds - again.seconds - curvature, 0.0)
    return Attribution.of(first.value, settings, gradients, curvature, again.seconds)


def lissa(subject: Subject, groups: Groups, per_sample: bool) -> Attribution:
    """Influence with one LiSSA solve for all groups."""
    solved, settings = subject.solved
    return _influence(subject, groups, per_sample, solved, str(settings))


def conjugate_gradients(subject: Subject, groups: Groups, per_sample: bool) -> Attribution:
    """Influence with one solve by conjugate gradients for all groups."""
    settings = f"{CG_STEPS} steps on all points, damping {subject.task.lissa.damping:g}"
    return _influence(subject, groups, per_sample, subject.solved_by_gradients, settings)


def _influence(subject: Subject, groups: Groups, per_sample: bool, solved: Timed[Tensor], settings: str) -> Attribution:
    """Return ⟨H⁻¹ ∇g, Σ ∇ℓ⟩, given H⁻¹ ∇g (`solved`)."""
    found = timed(subject.gradients(groups, per_sample).scores, solved.value)
    return Attribution.of(found.value, settings, found.seconds, solved.seconds, subject.direction.seconds)


def trak(subject: Subject, groups: Groups, per_sample: bool) -> Attribution:
    """TRAK over an ensemble; the time to train the ensemble is left out.

    Its score is how much the group raises the mean test loss, so the loss falls by the score without the group.
    """
    states, batch = subject.ensemble, _BATCH if per_sample else 1024
    exact = groups.are_singletons and not per_sample
    with tempfile.TemporaryDirectory() as folder, left_as_it_was(subject.model), quiet():
        traker = TRAKer(
            subject.model, "image_classification", groups.n, save_dir=folder, device="cpu", groups=groups,
            projector=projector(subject.model, subject.task.projection_dim), use_half_precision=False,
            logging_level=100, checkpoints=list(states),
            fisher="exact" if exact else "batched", strategy="segmented" if exact else "auto",
        )  # fmt: skip
        gradients = 0.0
        for number, state in enumerate(states):
            gradients += timed(_featurize, traker, number, state, subject.train, groups.batch_sampler(batch)).seconds
        curvature = timed(traker.finalize_features).seconds
        found = timed(_scored, traker, states, subject)
    settings = f"{len(states)} models on halves of the data, {subject.task.projection_dim} dimensions"
    return Attribution.of(-found.value, settings, gradients, curvature, found.seconds)


def by_attribute(method: MethodName) -> Callable[[Subject, Groups, bool], Attribution]:
    """Return a function that calls `attribute` with a method, which chooses its own solver and damping."""

    def scored(subject: Subject, groups: Groups, per_sample: bool) -> Attribution:
        found = timed(
            attribute, subject.model, LOSS, subject.train, groups, subject.property,
            method=method, recipe=subject.task.recipe, show_progress=False,
        )  # fmt: skip
        return Attribution.of(found.value[0].as_subclass(Tensor), str(found.value.method), found.seconds)

    return scored


def refitted(subject: Subject, groups: Groups, per_sample: bool) -> Attribution:
    """What-if without each group in turn."""
    asked = timed(what_if, [subject], groups)
    found = timed(asked.value.leave_group_out, subject.property)
    return Attribution.of(found.value.scores, asked.value.explain(), asked.seconds, scoring=found.seconds)


def warm_start(subject: Subject, groups: Groups, per_sample: bool) -> Attribution:
    """Train for a few more epochs, on all points and without each group in turn; scores are the rises of the loss."""
    everything = np.ones((1, len(groups)), bool)
    kept = np.concatenate([everything, ~np.eye(len(groups), dtype=bool)])
    found = timed(warm_started, subject, points_of(groups, kept))
    rises = torch.from_numpy(found.value[1:] - found.value[0])
    return Attribution.of(rises, f"{len(groups) + 1} models trained on", found.seconds)


_METHODS: dict[str, Callable[[Subject, Groups, bool], Attribution]] = {
    TRACIN: tracin,
    FISHER: fisher,
    LISSA: lissa,
    TRAK: trak,
    CG: conjugate_gradients,
    RATES: tracin_with_rates,
    PER_POINT: tracin,
    INFLUENCE: by_attribute("influence"),
    EKFAC: by_attribute("ekfac"),
    FULL_FISHER: by_attribute("fisher"),
    WHAT_IF: refitted,
    WARM_START: warm_start,
}
METHODS = tuple(_METHODS)


def captum_scores(subject: Subject, vectorised: bool) -> Tensor:
    """Return scores of every point `[n]` for the mean test loss by Captum's TracInCP, sample-wise or default mode."""
    influence = tracin_cp(captum.influence, subject.model, TensorDataset(*subject.train), _BATCH, vectorised)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input Tensor .* did not already require gradients", UserWarning)
        return influence.influence(subject.test, aggregate=True)[0] / len(subject.test[0])


def _solve(rows: Tensor) -> Tensor:
    damped, _ = EmpiricalFisher(rows.shape[1]).add(rows).damped()
    return torch.linalg.solve(damped, rows.T)


def _featurize(traker: Any, number: int, state: dict[str, Tensor], train: Any, batches: Iterable[list[int]]) -> None:
    traker.load_checkpoint(state, model_id=number)
    for indices in batches:
        at = torch.as_tensor(indices)
        traker.featurize([tensor[at] for tensor in train], inds=np.asarray(indices))


def _scored(traker: Any, states: Iterable[dict[str, Tensor]], subject: Subject) -> Tensor:
    for number, state in enumerate(states):
        traker.start_scoring_checkpoint("test", state, number, num_targets=1)
        traker.score(property=subject.property, num_samples=1)
    return torch.tensor(np.array(traker.finalize_scores("test")))[:, 0]
