"""The paper's six tasks. Each is a data set with the model, training and attribution settings of its appendix."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.data import DataSet, bert
from benchmarks.model_files import ModelFiles
from benchmarks.sizes import Scale
from ggda_ext.storage.folder import digest
from ggda_ext.training import Recipe, Trained, initial_model, train_many, train_one
from ggda_ext.training.many_models import layout_of
from ggda_ext.training.recipe import checked_subset

LOSS = nn.CrossEntropyLoss()
CHECKPOINTS = 5
SMALLEST_BATCH = 16
SMALL_BERT_RATE = 1e-4  # the paper's rate is for BERT-base; a BERT of six layers of width 384 hardly learns with it
ENSEMBLE_SEED = 1000


@dataclass(frozen=True)
class Lissa:
    """Settings of LiSSA: damping, number of runs that are averaged, steps, and the number that divides the Hessian."""

    damping: float = 0.001
    repeats: int = 20
    depth: int = 200
    scale: float = 50.0


@dataclass(frozen=True)
class Paper:
    """A row of the paper's hyperparameter table.

    Attributes:
        data: the data set.
        title: the model's name.
        recipe: how it is trained.
        train: the paper's number of training points.
        projection_dim: dimension of random projections (Fisher, TRAK).
    """

    data: str
    title: str
    recipe: Recipe
    train: int
    projection_dim: int


PAPER: dict[str, Paper] = {
    "heloc-lr": Paper("heloc", "LR", Recipe(200, 0.1, 128), 7_896, 16),
    "heloc-ann-s": Paper("heloc", "ANN-S", Recipe(300, 1e-3, 128, 4e-4), 7_896, 16),
    "heloc-ann-m": Paper("heloc", "ANN-M", Recipe(400, 5e-4, 128, 4e-4), 7_896, 16),
    "mnist-ann-l": Paper("mnist", "ANN-L", Recipe(50, 1e-3, 512), 60_000, 32),
    "cifar10-resnet18": Paper("cifar10", "ResNet-18", Recipe(50, 1e-2, 512), 50_000, 64),
    "qnli-bert": Paper("qnli", "BERT", Recipe(3, 2e-5, 512, schedule="linear"), 50_000, 32),
}
TASKS = tuple(PAPER)


@dataclass(frozen=True)
class Ensemble:
    """Models trained on random subsets of the data, for TRAK.

    Attributes:
        models: the models, in eval mode.
        subsets: training indices of every model.
    """

    models: tuple[nn.Module, ...]
    subsets: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Task:
    """A data set, a model and how to train it.

    Attributes:
        name: one of `TASKS`.
        title: the model's name for tables; it tells if the weights are a stand-in.
        data: the data set.
        make_model: builds a model; its random weights come from torch's global random state.
        recipe: how the model is trained.
        projection_dim: dimension of random projections (Fisher, TRAK).
        lissa: settings of LiSSA.
        weights: where the pre-trained weights came from; empty for models trained from scratch.
        stand_in: whether the data or the pre-trained weights are made up.
    """

    name: str
    title: str
    data: DataSet
    make_model: Callable[[], nn.Module]
    recipe: Recipe
    projection_dim: int
    lissa: Lissa = field(default_factory=Lissa)
    weights: str = ""
    stand_in: bool = False

    @property
    def checkpoint_epochs(self) -> tuple[int, ...]:
        """Epochs after which checkpoints are kept for TracIn. They are evenly spread and include the last epoch."""
        epochs = self.recipe.epochs
        return tuple(sorted({math.ceil(epochs * (i + 1) / CHECKPOINTS) for i in range(CHECKPOINTS)}))

    def trained(self, seed: int, labels: Tensor | None = None, folder: Path | None = None) -> Trained:
        """Return the model trained on all points, with its checkpoints.

        Args:
            seed: for initial weights and batch order.
            labels: labels to train with instead of the data's, `[n]`.
            folder: where trained models are kept; the cache if left out. A model found there is not trained again.
        """
        x, y = self._training_data(labels)
        model = initial_model(self.make_model, seed).to(x.device)
        key = self._key(model, seed, y, None, self.checkpoint_epochs)

        def train() -> Trained:
            return train_one(model, LOSS, (x, y), self.recipe, seed=seed, checkpoint_epochs=self.checkpoint_epochs)

        return ModelFiles(folder).trained_once(key, lambda: model, train)

    def ensemble(
        self,
        count: int = 10,
        fraction: float = 0.5,
        seed: int = 0,
        labels: Tensor | None = None,
        folder: Path | None = None,
    ) -> Ensemble:
        """Return models trained on random subsets of the data, as TRAK needs them.

        Args:
            count: number of models.
            fraction: share of the training points that each model sees.
            seed: for the subsets, initial weights and batch orders.
            labels, folder: as in `trained`.
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction={fraction}: pass a share above 0 and up to 1.")
        x, y = self._training_data(labels)
        draw = np.random.default_rng(seed)
        size = max(1, round(fraction * len(x)))
        subsets = [torch.from_numpy(np.sort(draw.choice(len(x), size, replace=False))) for _ in range(count)]
        seeds = [ENSEMBLE_SEED * (seed + 1) + j for j in range(count)]
        found = [initial_model(self.make_model, seed).to(x.device) for seed in seeds]
        files = ModelFiles(folder)
        keys = [self._key(found[j], seeds[j], y, subsets[j]) for j in range(count)]
        missing = []
        for j, key in enumerate(keys):
            if (content := files.load(key)) is None:
                missing.append(j)
            else:
                found[j].load_state_dict(content["state"])
        together = len(missing) if layout_of(self.make_model, LOSS, (x, y)) is not None else 1
        for start in range(0, len(missing), max(1, together)):
            some = missing[start : start + together]
            made = train_many(
                self.make_model, LOSS, (x, y), self.recipe,
                seeds=[seeds[j] for j in some], subsets=[subsets[j] for j in some],
            )  # fmt: skip
            for place, j in enumerate(some):
                files.save(keys[j], Trained(made.model(place)))
                found[j].load_state_dict(made.model(place).state_dict())
        for model in found:
            model.eval()
        return Ensemble(tuple(found), tuple(subsets))

    def _training_data(self, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        x, y = self.data.train
        if labels is None:
            return x, y
        if labels.shape != y.shape:
            raise ValueError(f"labels has shape {list(labels.shape)}: pass one per training point, {list(y.shape)}.")
        return x, labels.to(y)

    def _key(
        self, model: nn.Module, seed: int, y: Tensor, subset: Tensor | None, checkpoint_epochs: Sequence[int] = ()
    ) -> str:
        """Return a short text that identifies a trained model by its data, initial weights, recipe and seed."""
        settings = np.frombuffer(f"{self.recipe} {seed} {tuple(checkpoint_epochs)}".encode(), np.uint8)
        arrays = [value.detach().cpu().numpy() for value in model.state_dict().values()]
        points = checked_subset(subset, len(y)).numpy()
        made_of = np.frombuffer(self._inputs_digest.encode(), np.uint8)
        return f"{self.name}-{digest(settings, made_of, y.cpu().numpy(), points, *arrays)}"

    @cached_property
    def _inputs_digest(self) -> str:
        return digest(self.data.train[0].cpu().numpy())


def task(name: str, dataset: DataSet, scale: Scale, *, folder: Path | str | None = None) -> Task:
    """Return one of the paper's tasks on a data set.

    Args:
        name: one of `TASKS`.
        dataset: the data, already reduced to the scale.
        scale: gives the epochs, the width of the ResNet, and LiSSA's depth and repeats. If there are fewer training
            points than in the paper, the batch is smaller too, so an epoch keeps about the same number of steps.
        folder: data folder, for BERT's pre-trained weights.
    """
    if name not in PAPER:
        raise ValueError(f"name={name!r} is no task; choose from {', '.join(TASKS)}.")
    paper = PAPER[name]
    if not dataset.name.startswith(paper.data):
        raise ValueError(f"task {name!r} needs the data set {paper.data!r}, not {dataset.name!r}.")
    share = len(dataset.train[0]) / paper.train
    batch = min(paper.recipe.batch_size, max(SMALLEST_BATCH, _power_of_two(paper.recipe.batch_size * share)))
    recipe = replace(paper.recipe, epochs=scale.epochs[name], batch_size=batch)
    methods = scale.experiments[name].methods
    title, weights, stand_in = paper.title, "", dataset.stand_in
    make_model: Callable[[], nn.Module]
    if name == "qnli-bert":
        source = bert(folder)
        weights, stand_in = source.source, stand_in or source.stand_in
        title = "BERT (random weights, stand-in)" if source.stand_in else title
        make_model, width = _bert(source.path, dataset.classes)
        if width < 768:
            recipe = replace(recipe, learning_rate=SMALL_BERT_RATE)
    elif name == "cifar10-resnet18":
        make_model = partial(models.resnet18, scale.resnet_width, dataset.classes)
    else:
        make_model = SMALL_MODELS[name]
    return Task(
        name, title, dataset, make_model, recipe, paper.projection_dim,
        Lissa(repeats=methods.lissa_repeats, depth=methods.lissa_depth), weights, stand_in,
    )  # fmt: skip


SMALL_MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "heloc-lr": models.logistic_regression,
    "heloc-ann-s": models.ann_s,
    "heloc-ann-m": models.ann_m,
    "mnist-ann-l": models.ann_l,
}


def _bert(path: Path | None, classes: int) -> tuple[Callable[[], nn.Module], int]:
    """Return a function that builds BERTs, and their width. Weights are read once; each model has a new random head."""
    if path is None:
        return partial(models.random_bert, classes), 64
    first = models.pretrained_bert(path, classes)
    config: Any = first.bert.config

    def make_model() -> nn.Module:
        model = copy.deepcopy(first)
        head: Any = model.bert.classifier
        nn.init.normal_(head.weight, std=config.initializer_range)
        nn.init.zeros_(head.bias)
        return model

    return make_model, config.hidden_size


def _power_of_two(value: float) -> int:
    """Return the smallest power of two that is at least `value`."""
    return 2 ** math.ceil(math.log2(max(value, 1)))
