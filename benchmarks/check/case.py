"""One task for the check: a trained model, as many points as an original toolkit can handle, and uneven groups."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from ggda_trak.task_outputs import margins
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.sizes import CheckScale
from ggda_ext import Groups, properties
from ggda_ext.curvature import Hessian
from ggda_ext.data import IndexedData
from ggda_ext.grouping import GradKMeansGroups
from ggda_ext.model import ParameterSpace

Pair = tuple[Tensor, Tensor]
_POWER_STEPS, _RIDGE_POINTS = 5, 16
_SETTINGS = ("part", "curvature_set", "projection_dim", "lissa_scaling", "loss_ridge", "margin_ridge")


@dataclass(frozen=True)
class Case:
    """A model with training and test points. Every method runs on it, per sample and by group.

    Attributes:
        model: the trained model, in eval mode, from inputs to logits.
        train: inputs and labels of the training points.
        test: inputs and labels of the test points.
        size: batch sizes and depths.
        largest_projection: the task's dimension of random projections.
        one_property: ask for the mean loss of the test points, which is one row of scores, instead of one row for each
            test point.
    """

    model: nn.Module
    train: Pair
    test: Pair
    size: CheckScale
    largest_projection: int
    one_property: bool = False

    @cached_property
    def few(self) -> Case:
        """The same case with only the first training points, as many as dattri gets."""
        count = self.size.dattri_points
        return (
            self if count >= len(self.train[0]) else replace(self, train=(self.train[0][:count], self.train[1][:count]))
        )

    def asking(self, tests: int, one_property: bool) -> Case:
        """Return the case with only the first test points, which asks for each of them or for their mean loss."""
        test = (self.test[0][:tests], self.test[1][:tests])
        return replace(self, test=test, one_property=one_property)._with(self, *_SETTINGS, "groups", "train_set")

    def grouped_by(self, size: int) -> Case:
        """Return the case with groups of another mean size."""
        return replace(self, size=replace(self.size, group_size=size))._with(self, *_SETTINGS, "train_set")

    def first(self, count: int) -> Case:
        """Return the case with the first `count` training points and the settings of all points.

        So the work for each point is the same.
        """
        train = (self.train[0][:count], self.train[1][:count])
        return self if count >= len(self.train[0]) else replace(self, train=train)._with(self, *_SETTINGS)

    def _with(self, other: Case, *names: str) -> Case:
        """Copy some cached attributes of another case, and return this case."""
        for name in names:
            self.__dict__[name] = getattr(other, name)
        return self

    @cached_property
    def groups(self) -> Groups:
        """Uneven groups of the training points: Grad-K-Means clusters, or single points if the group size is one."""
        if self.size.group_size == 1:
            return Groups.singletons(len(self.train[0]))
        builder = GradKMeansGroups(self.model, nn.CrossEntropyLoss(), group_size=self.size.group_size, random_state=0)
        return builder.fit_groups(self.train)

    @cached_property
    def train_set(self) -> TensorDataset:
        return TensorDataset(*self.train)

    @cached_property
    def curvature_set(self) -> TensorDataset:
        """The first training points. Original and group version compute Hessians of the loss on these points."""
        count = self.size.curvature_points
        return TensorDataset(*(tensor[:count] for tensor in self.train))

    def train_loader(self) -> DataLoader:
        return DataLoader(self.train_set, batch_size=self.size.batch)

    def test_loader(self) -> DataLoader:
        return DataLoader(TensorDataset(*self.test), batch_size=len(self.test[0]))

    @cached_property
    def mean_loss(self) -> Any:
        """The mean loss of the test points, as a property of the model."""
        return properties.mean_loss(self.test, nn.CrossEntropyLoss())

    def curvature_loader(self) -> DataLoader:
        """Return `curvature_set` in one batch, because dattri adds up one inverse per batch."""
        return DataLoader(self.curvature_set, batch_size=len(self.curvature_set))

    @cached_property
    def last_layer(self) -> str:
        """Name of the linear layer that gives the logits."""
        return [name for name, module in self.model.named_modules() if isinstance(module, nn.Linear)][-1]

    @cached_property
    def part(self) -> nn.Module:
        """The model with only its last parameters as parameters, as many as the scale allows; the others are buffers.

        It is for toolkits that form a row over all parameters for every point. dattri cuts this row into slices, so its
        time for a point grows with the length of the row times the number of layers.
        """
        limit, kept, total = self.size.last_parameters, set[str](), 0
        for name, parameter in reversed(list(self.model.named_parameters())):
            total += parameter.numel()
            if kept and limit is not None and total > limit:
                break
            kept.add(name)
        part = copy.deepcopy(self.model)
        for name, parameter in list(part.named_parameters()):
            if name not in kept:
                owner, _, last = name.rpartition(".")
                delattr(part.get_submodule(owner), last)
                part.get_submodule(owner).register_buffer(last, parameter.detach())
        return part

    @property
    def scope(self) -> str:
        """Words that say which parameters are in `part`."""
        some, every = (count_parameters(model) for model in (self.part, self.model))
        return f"all {every:,} parameters" if some == every else f"the last {some:,} of {every:,} parameters"

    @property
    def batches(self) -> str:
        """Words that say in which batches the original gets its points."""
        return f"batches of {min(self.size.batch, len(self.train_set)):,}"

    @cached_property
    def projection_dim(self) -> int:
        """The task's dimension of random projections, but at most a quarter of the points, so that Fishers have full
        rank."""
        return min(self.largest_projection, max(2, len(self.train[0]) // 4))

    @cached_property
    def lissa_scaling(self) -> float:
        """A scaling with which LiSSA converges: twice the largest curvature, found by power iteration."""
        space = ParameterSpace(self.part)
        data = IndexedData(self.curvature_set, "curvature_set")
        hessian = Hessian(space, lambda model, batch: self.loss(dict(model.named_parameters()), batch), data)
        vector = torch.randn(1, space.size, generator=torch.Generator().manual_seed(0))
        for _ in range(_POWER_STEPS):
            vector = hessian @ (vector / vector.norm())
        return float(f"{2 * max(float(vector.norm()), 0.5):.2g}")

    @cached_property
    def loss_ridge(self) -> float:
        """A ridge for dattri's TRAK: a hundredth of the mean diagonal of its kernel."""
        return float(f"{self._mean_diagonal(cross_entropy) / self.projection_dim / 100:.2g}")

    @cached_property
    def margin_ridge(self) -> float:
        """A ridge for TRAK itself: a hundredth of the mean diagonal of its kernel."""
        return float(f"{self._mean_diagonal(margins) / 100:.2g}")

    def _mean_diagonal(self, output: Callable[[Tensor, Tensor], Tensor]) -> float:
        """Estimate the mean diagonal of Σ φφᵀ, φ = Pᵀ∇output / √parameters, from a few points.

        A ridge is needed because gradients that all point the same way lead to rounding errors in TRAK, also in the
        original.
        """
        parameters, squares = list(self.part.parameters()), list[float]()
        for x, y in zip(*(tensor[:_RIDGE_POINTS].split(1) for tensor in self.train), strict=True):
            gradient = torch.autograd.grad(output(self.part(x), y).sum(), parameters)
            squares.append(sum(float(part.square().sum()) for part in gradient))
        return len(self.train[0]) * sum(squares) / len(squares) / count_parameters(self.part)

    def loss(self, parameters: dict[str, Tensor], data: tuple[Tensor, ...]) -> Tensor:
        """Return the mean loss of a batch as a function of parameters. dattri may turn tokens and labels to floats."""
        inputs, labels = data
        outputs = torch.func.functional_call(self.part, parameters, (inputs.to(self.train[0].dtype),))
        return cross_entropy(outputs, labels.long())

    def loss_of_one(self, parameters: dict[str, Tensor], data: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of one example without a batch dimension, as a function of parameters."""
        return self.loss(parameters, tuple(value.unsqueeze(0) for value in data))


def count_parameters(model: nn.Module) -> int:
    """Number of scalars in a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


Score = Callable[[Case], Tensor]


@dataclass(frozen=True)
class Method:
    """An attribution method of a toolkit, in the original and with groups.

    Attributes:
        toolkit: ``"Captum"``, ``"dattri"``, ``"TRAK"`` or ``"core"``.
        name: as the toolkit calls it.
        original: scores of single training points `[tests, points]`, by the toolkit alone.
        grouped: scores of groups `[tests, groups]`.
        settings: how both are run, in words.
        default: scores of groups in the drop-in's default mode if it is an approximation (a Fisher of group sums);
            `grouped` is then the exact mode. None if the default is exact.
        row_per_point: for groups of one, both the original and the group version form a row for every point, also for a
            property.
        solves_each_test: the original solves a system of equations for every test point, and again for every batch.
    """

    toolkit: str
    name: str
    original: Score
    grouped: Score
    settings: Callable[[Case], str]
    default: Score | None = None
    row_per_point: bool = False
    solves_each_test: bool = False

    @property
    def own_code(self) -> bool:
        """Whether the drop-in runs the toolkit's own code for groups of one and test points."""
        return self.toolkit != "core"
