"""dattri's public settings: MNIST with logistic regression and with an MLP, single points, LDS of every test point.

As in dattri's own benchmark, there are the first 5,000 training and 500 test points and 50 random halves of the
training points. LDS is computed for the loss of each test point and averaged over test points. Models come from
dattri's training functions (SGD, 20 and 50 epochs). Methods named "dattri" are dattri's original code with its
settings. Halves, seeds and models are made here; dattri's own are on a public hub.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dattri import algorithm as upstream
from dattri.benchmark.datasets import mnist as upstream_mnist
from dattri.task import AttributionTask
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import data
from benchmarks.experiments.subject import Timed, timed
from benchmarks.model_files import ModelFiles
from benchmarks.models import loss_of, loss_of_one
from benchmarks.results import ResultFolder
from benchmarks.sizes import DattriScale, Scale
from benchmarks.tasks import LOSS
from ggda_ext import Groups, WhatIf, attribute, properties
from ggda_ext.curvature.damping import TrainingSteps
from ggda_ext.evaluation import agreement, points_of, random_subsets
from ggda_ext.losses import example_losses
from ggda_ext.storage.folder import digest
from ggda_ext.training import Trained
from ggda_ext.training.recipe import order_generator, shuffled

NAME = "dattri"
MEAN, SPREAD = 0.1307, 0.3081  # mean and standard deviation of MNIST's pixels; dattri scales with them
EXPLAINED, TRUE_SEED, HALF_SEED = 0, 100, 1000  # first seeds of explained models, of the truth, of TRAK's halves
SUBSET_SEED = 300
RATE = 0.01  # learning rate of dattri's training functions
TRACIN, CG, TRAK = "dattri TracIn", "dattri CG", "dattri TRAK"
WHAT_IF, INFLUENCE, MARGINS, OWN_CLASS = "What-if", "Influence", "Influence on margins", "Kept points of its class"
LESS_DAMPED, LESS_DAMPING = f"{MARGINS}, a tenth of the damping", 0.1
"""Chosen on the first 25 halves of the MLP with two models; benchmarks/RESULTS.md uses other halves and models."""
CG_STEPS, CG_DAMPING = 10, 0.1
"""dattri's settings. It tries seven dampings and reports the best by LDS; this damping is from its documentation."""
Predicted = tuple[np.ndarray, str]


@dataclass(frozen=True)
class Setting:
    """A model with dattri's function that trains it by SGD, the momentum, and the batch size of dattri's command."""

    title: str
    make_model: Callable[[], nn.Module]
    train: Callable[..., nn.Module]
    batch_size: int
    momentum: float


SETTINGS = {
    "dattri-mnist-lr": Setting(
        "LR (dattri)", lambda: upstream_mnist.create_lr_model("mnist"), upstream_mnist.train_mnist_lr, 32, 0.0
    ),
    "dattri-mnist-mlp": Setting(
        "MLP (dattri)", lambda: upstream_mnist.create_mlp_model("mnist"), upstream_mnist.train_mnist_mlp, 64, 0.9
    ),
}


class Batches:
    """Shuffled batches of some points, for dattri's training functions, which expect a DataLoader."""

    def __init__(self, points: Tensor, x: Tensor, y: Tensor, batch_size: int, seed: int) -> None:
        self.points, self.x, self.y, self.batch_size = points, x, y, batch_size
        self._order = order_generator(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for at in shuffled(self.points, self._order).split(self.batch_size):
            yield self.x[at], self.y[at]


class Problem:
    """One of dattri's settings: data, random halves, models, and the losses that are predicted.

    Args:
        name: one of `SETTINGS`.
        size: sizes of the run.
        source: the whole of MNIST.
        folder: where models are kept.
    """

    def __init__(self, name: str, size: DattriScale, source: data.DataSet, folder: Path) -> None:
        self.name, self.setting, self.size, self.source = name, SETTINGS[name], size, source
        self.train, self.test = (
            ((x[:count].reshape(-1, 784) - MEAN) / SPREAD, y[:count])
            for (x, y), count in ((source.train, size.train), (source.test, size.test))
        )
        self.groups = Groups.singletons(len(self.train[0]))
        self.kept = random_subsets(self.groups, size.subsets, seed=SUBSET_SEED)
        self._files = ModelFiles(folder)

    def model(self, seed: int, points: np.ndarray | None = None) -> nn.Module:
        """Return a model trained by dattri's function on some points, all by default. Each is trained only once."""
        chosen = torch.arange(len(self.train[0])) if points is None else torch.from_numpy(points)
        epochs = self.size.epochs[self.name]
        key = f"{self.name}-{epochs}-{seed}-{digest(chosen.numpy(), self.train[0].numpy(), self.train[1].numpy())}"
        made = self._files.trained_once(key, self.setting.make_model, lambda: Trained(self._trained(seed, chosen)))
        return made.model

    def _trained(self, seed: int, points: Tensor) -> nn.Module:
        batches = Batches(points, *self.train, self.setting.batch_size, seed)
        with torch.random.fork_rng():
            return self.setting.train(batches, seed=seed, epoch_num=self.size.epochs[self.name]).eval()

    @cached_property
    def training_seconds(self) -> dict[bool, float]:
        """Whether on a half → CPU seconds of training a model.

        A new model is trained for this and not kept, because the others may be on disk already.
        """
        counts = {False: len(self.train[0]), True: len(self.train[0]) // 2}
        return {half: timed(self._trained, EXPLAINED, torch.arange(n)).seconds for half, n in counts.items()}

    @property
    def recipe(self) -> dict[str, Any]:
        """How dattri trains a model, as fields of a row."""
        epochs, batch_size = self.size.epochs[self.name], self.setting.batch_size
        return {"optimizer": "SGD", "epochs": epochs, "batch_size": batch_size}

    @property
    def steps(self) -> TrainingSteps:
        """How dattri trains a model, in the form that our methods take."""
        epochs, batch_size = self.size.epochs[self.name], self.setting.batch_size
        rates = RATE * epochs * math.ceil(len(self.train[0]) / batch_size)
        return TrainingSteps(rates, momentum=self.setting.momentum, batch_size=batch_size)

    @cached_property
    def losses(self) -> np.ndarray:
        """Losses of the test points by models trained on the halves `[seeds, subsets, tests]`."""
        halves = points_of(self.groups, self.kept)
        return np.stack(
            [[self._losses_of(self.model(TRUE_SEED + s, h)) for h in halves] for s in range(self.size.seeds)]
        )

    @torch.no_grad()
    def _losses_of(self, model: nn.Module) -> np.ndarray:
        outputs = model(self.test[0]).double()  # in single precision, losses of confident points are all 0
        return example_losses(LOSS, outputs, self.test[1]).numpy()

    def halves(self, count: int) -> list[nn.Module]:
        """Return models trained on other random halves, as TRAK needs them."""
        kept = random_subsets(self.groups, count, seed=HALF_SEED)
        return [self.model(HALF_SEED + j, points) for j, points in enumerate(points_of(self.groups, kept))]

    def loader(self, part: tuple[Tensor, Tensor], batch_size: int) -> DataLoader[Any]:
        """Return a part of the data as the DataLoader that dattri takes."""
        return DataLoader(TensorDataset(*part), batch_size=batch_size)


@dataclass(frozen=True)
class Method:
    """A function that predicts the losses `[subsets, tests]`, the number of models it needs, and whether they are
    trained on random halves."""

    predict: Callable[[Problem, list[nn.Module]], Predicted]
    models: int = 1
    of_halves: bool = False


def run(name: str, scale: Scale, folder: ResultFolder, data_dir: Path | None = None) -> None:
    """Compute and write the rows of one setting that the folder does not have yet."""
    source = data.load("mnist", data_dir)
    folder.add_source(source.title, source.source, source.stand_in)
    problem = Problem(name, scale.dattri, source, folder.path / "models")
    for title, method in _methods(scale.dattri).items():
        key = f"{NAME}/{name}/{title}"
        if not folder.done(key):
            count = method.models
            models = problem.halves(count) if method.of_halves else [problem.model(EXPLAINED + j) for j in range(count)]
            found = timed(method.predict, problem, models)
            folder.append({"key": key} | _row(problem, scale, title, method, found))


def _methods(size: DattriScale) -> dict[str, Method]:
    """Return title → method; slow methods come last."""
    less_damped = partial(margin_influence, share=LESS_DAMPING)
    return {
        OWN_CLASS: Method(own_class, 0),
        MARGINS: Method(margin_influence),
        **{f"{MARGINS}, {count} models": Method(margin_influence, count) for count in size.margin_models},
        LESS_DAMPED: Method(less_damped),
        **{f"{LESS_DAMPED}, {count} models": Method(less_damped, count) for count in size.margin_models},
        WHAT_IF: Method(what_if),
        f"{WHAT_IF}, 3 models": Method(what_if, 3),
        f"{TRACIN}, 1 model": Method(tracin),
        TRACIN: Method(tracin, size.tracin_models),
        INFLUENCE: Method(influence),
        **{f"{TRAK}-{count}": Method(trak, count, of_halves=True) for count in size.trak_models},
        f"{INFLUENCE}, 3 models": Method(influence, 3),
        CG: Method(conjugate_gradients),
    }


def _row(problem: Problem, scale: Scale, title: str, method: Method, found: Timed[Predicted]) -> dict[str, Any]:
    predicted, settings = found.value
    losses = problem.losses
    same = agreement(predicted, losses.mean(0))
    ceiling = None
    if len(losses) > 1:
        ceiling = agreement(losses[1:].mean(0), losses[0], resamples=1).spearman.value
    return {
        "experiment": NAME, "data": "MNIST", "model": problem.setting.title, "method": title, "scale": scale.name,
        "source": problem.source.source, "stand_in": problem.source.stand_in, "recipe": problem.recipe,
        "train_points": len(problem.train[0]), "test_points": len(problem.test[0]), "settings": settings,
        "mean": same.spearman.value, "interval": list(same.spearman.interval), "pearson": same.pearson.value,
        "slope": same.slope, "ceiling": ceiling, "subsets": len(predicted), "seeds": len(losses),
        "models": method.models, "cpu_seconds": found.seconds,
        "training_seconds": method.models * problem.training_seconds[method.of_halves],
        "seconds_of_half": problem.training_seconds[True],
    }  # fmt: skip


def own_class(problem: Problem, models: list[nn.Module]) -> Predicted:
    """Trivial prediction: the more points of a test point's class are kept, the lower its loss."""
    counts = np.stack([problem.kept.astype(float) @ (problem.train[1].numpy() == label) for label in range(10)], 1)
    return -counts[:, problem.test[1].numpy()].astype(float), "no model"


def what_if(problem: Problem, models: list[nn.Module]) -> Predicted:
    """Refits of the linearised model, averaged over models."""
    refit = WhatIf(
        models[0], LOSS, problem.train, problem.groups, models=models[1:], directions="eigen", recipe=problem.steps
    )  # fmt: skip
    measure = properties.of_outputs(problem.test, lambda z, y: example_losses(LOSS, z.double(), y))
    return refit.subsets(problem.kept, measure).numpy(), refit.explain()


def influence(problem: Problem, models: list[nn.Module]) -> Predicted:
    """`attribute`, averaged over models."""
    found = attribute(
        models[0], LOSS, problem.train, None, properties.point_losses(problem.test, LOSS), models=models[1:],
        recipe=problem.steps, show_progress=False,
    )  # fmt: skip
    return _additive(problem, found.as_subclass(Tensor).T), str(found.method)


def margin_influence(problem: Problem, models: list[nn.Module], share: float = 1.0) -> Predicted:
    """Influence on margins, averaged over models, with a share of the recipe's damping.

    The predicted losses are those of the mean margins.
    """
    damping = share / problem.steps.distance
    found = [margins_and_scores(model, problem.train, problem.test, damping) for model in models]
    margins, scores = (np.mean([one[part].numpy() for one in found], axis=0) for part in (0, 1))
    left = margins - (~problem.kept).astype(float) @ scores
    return np.logaddexp(0, -left), f"damping {damping:.2g}, {share:g} of that of the learning rates"


def margins_and_scores(
    model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], damping: float
) -> tuple[Tensor, Tensor]:
    """Return margins of test points `[tests]`, and by how much they fall without each training point `[points, tests]`.

    Let p be the probability of the label, m the gradient of its margin and K = m mᵀ. The Gauss–Newton matrix of the
    label against all other labels is 1/n Σ p (1 − p) m mᵀ. There are fewer points than parameters, so the linear system
    is solved in the space of points. Without point i the margin of test point t falls by

        K_t s (s K s + n λ)⁻¹ √((1 − p_i) / p_i),     s = √(p (1 − p))
    """
    n = len(train[0])
    margins = properties.margins((torch.cat([train[0], test[0]]), torch.cat([train[1], test[1]])))
    found = attribute(model, margins.loss, train, None, margins, method="tracin", show_progress=False)
    products, own = found.as_subclass(Tensor).double(), margins(model).detach().double()
    s = (own[:n].sigmoid() * own[:n].neg().sigmoid()).sqrt()
    curved = s[:, None] * products[:n] * s
    curved.diagonal().add_(n * damping)
    solved = torch.cholesky_solve((products[n:] * s).T, torch.linalg.cholesky(curved))
    return own[n:], (own[:n] / -2).exp()[:, None] * solved


def tracin(problem: Problem, models: list[nn.Module]) -> Predicted:
    """dattri's TracIn over models of several seeds with equal weights."""
    task = AttributionTask(loss_of_one(models[0]), models[0], [model.state_dict() for model in models])
    attributor = upstream.tracin.TracInAttributor(
        task, torch.ones(len(models)) * 1e-3, False, {"proj_type": "identity"}
    )  # fmt: skip
    with torch.no_grad():
        scores = attributor.attribute(problem.loader(problem.train, 500), problem.loader(problem.test, 500))
    return _additive(problem, scores), f"{len(models)} models"


def conjugate_gradients(problem: Problem, models: list[nn.Module]) -> Predicted:
    """dattri's influence function by conjugate gradients."""
    (model,) = models
    task = AttributionTask(loss_of(model), model, model.state_dict())
    attributor = upstream.influence_function.IFAttributorCG(task, max_iter=CG_STEPS, regularization=CG_DAMPING)
    attributor.cache(problem.loader(problem.train, len(problem.train[0])))
    with torch.no_grad():
        scores = attributor.attribute(problem.loader(problem.train, 500), problem.loader(problem.test, 500))
    return _additive(problem, scores), f"{CG_STEPS} steps, damping {CG_DAMPING:g}"


def trak(problem: Problem, models: list[nn.Module]) -> Predicted:
    """dattri's TRAK over models trained on halves."""
    loss = loss_of_one(models[0])

    def odds(parameters: dict[str, Tensor], pair: tuple[Tensor, Tensor]) -> Tensor:
        logarithm = -loss(parameters, pair)
        return logarithm - torch.log(1 - torch.exp(logarithm))

    def probability(parameters: dict[str, Tensor], pair: tuple[Tensor, Tensor]) -> Tensor:
        return torch.exp(-loss(parameters, pair))

    task = AttributionTask(odds, models[0], [model.state_dict() for model in models])
    projector = {"proj_dim": problem.size.trak_dimensions, "proj_type": "normal", "device": "cpu"}
    attributor = upstream.trak.TRAKAttributor(task, probability, projector)
    attributor.cache(problem.loader(problem.train, 500))
    with torch.no_grad():
        scores = attributor.attribute(problem.loader(problem.test, 500))
    return _additive(problem, scores), f"{len(models)} models on halves, {problem.size.trak_dimensions} dimensions"


def _additive(problem: Problem, scores: Tensor) -> np.ndarray:
    """Return predicted losses `[subsets, tests]` from scores `[points, tests]`: each kept point lowers the loss by its
    score."""
    return -problem.kept.astype(float) @ scores.double().numpy()
