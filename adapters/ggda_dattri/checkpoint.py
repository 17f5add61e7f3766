"""One checkpoint of a dattri task, in the form the core needs.

dattri's losses are functions of ``(parameters, data)``. dattri's influence functions call them with a batch of one;
TracIn and TRAK call them with an example without a batch dimension. In dattri the columns of a gradient follow the
order of `layer_name`, in the core the order of the model; if they differ, rows are reordered here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import numpy as np
import torch
from dattri.task import AttributionTask
from torch import Tensor, nn

from ggda_ext.attribution import as_points
from ggda_ext.curvature import GaussNewton, Hessian
from ggda_ext.data import IndexedData
from ggda_ext.drop_in import DropIn
from ggda_ext.gradients import GroupGradients, PointGradients
from ggda_ext.groups import Groups
from ggda_ext.losses import ExampleLoss, FunctionalLoss
from ggda_ext.model import ParameterSpace, inner_name, unwrapped
from ggda_ext.properties import Property, property_gradient
from ggda_ext.sharing import my_share

MEMORY_BUDGET = 64 * 2**20
"""Bytes for the activations of one batch, and for one block of group gradients."""
ROWS_BUDGET = 32 * 2**20
"""Bytes for one block of gradients that is processed at once: test vectors of a solve, or rows to project."""


class TaskLosses:
    """The loss and the target of a task. They are made once, so that findings about them hold for every checkpoint.

    Args:
        task: the task.
        batch_of_one: whether the task's functions expect an example with a batch dimension of one.
    """

    def __init__(self, task: AttributionTask, batch_of_one: bool) -> None:
        self.loss_func, target_func = (
            by_outer_names(function, task.get_model())
            for function in (task.original_loss_func, task.original_target_func)
        )
        self.loss = FunctionalLoss(self.loss_func, batch_of_one=batch_of_one)
        same = task.original_target_func is task.original_loss_func
        self.target = self.loss if same else FunctionalLoss(target_func, batch_of_one=batch_of_one)


class Checkpoint:
    """A task at one of its checkpoints: gradients of groups and of test points, in dattri's layout.

    Args:
        task: the task; checkpoint `index` is loaded into its model.
        index: number of the checkpoint.
        layer_name: names of the parameters that gradients are taken for; None for all that require a gradient.
        losses: loss and target of the task.
        drop_in: the keywords of the group path.
    """

    def __init__(
        self, task: AttributionTask, index: int, layer_name: list[str] | None, losses: TaskLosses, drop_in: DropIn
    ) -> None:
        wrapped = task.get_model()
        self.model = unwrapped(wrapped)
        if layer_name is not None:
            known = dict(self.model.named_parameters())
            layer_name = [inner_name(name, wrapped) for name in layer_name]
            unknown = [name for name in layer_name if name not in known]
            if unknown:
                raise ValueError(f"layer_name has {unknown[0]!r}, which is no parameter of the model: {list(known)}.")
        task._load_checkpoints(index)
        self.task, self.index, self.layer_name = task, index, layer_name
        self.loss_func, self.loss, self.target = losses.loss_func, losses.loss, losses.target
        self._drop_in = drop_in

    def groups(self, data: IndexedData, groups: Groups) -> GroupGradients:
        """Gradients of the training loss, summed by group."""
        return self._provider(self.loss, data, groups)

    def blocks(self, provider: GroupGradients) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a provider's `(ids, rows [b, p])` for this rank's groups, in dattri's layout."""
        for ids, rows in provider.blocks(self.max_rows):
            yield ids, self.to_dattri(rows)

    def weighted_blocks(self, provider: GroupGradients, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Like `blocks`, for weightings of the points `[w, n]` in one pass; weighting j of group i has id w·i + j."""
        count = len(weights)
        for ids, rows in provider.blocks(max(1, self.max_rows // count), weights):
            yield (ids[:, None] * count + torch.arange(count)).flatten(), self.to_dattri(rows.flatten(0, 1))

    def all_blocks(self, provider: GroupGradients) -> Iterator[tuple[Tensor, Tensor]]:
        """Like `blocks`, with all groups on every rank, for work that the ranks do together, block by block."""
        for ids, rows in provider.all_blocks(self.max_rows):
            yield ids, self.to_dattri(rows)

    def by_group(self, provider: GroupGradients, number: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Apply ``number(loss rows, target rows) -> [b]`` to the gradients of all training groups, and return `[k]`."""
        found = torch.empty(len(provider.groups), dtype=self.space.dtype, device=self.space.device)
        for ids, rows, targets in self._paired_blocks(provider):
            found[ids.to(found.device)] = number(rows, targets)
        return found

    def _paired_blocks(self, provider: GroupGradients) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield `(ids, loss rows, target rows)` of all training groups."""
        labels = torch.from_numpy(provider.groups.labels.astype("int64"))
        for ids, rows in self.all_blocks(provider):
            if self.target is self.loss:
                yield ids, rows, rows
                continue
            position = torch.full((len(provider.groups) + 1,), -1)
            position[ids] = torch.arange(len(ids))
            some = Groups(position[labels].numpy(), rest="drop")
            yield ids, rows, self.to_dattri(self._provider(self.target, provider.data, some).rows())

    def points(self, data: IndexedData, count: int | None = None) -> GroupGradients:
        """Gradients of the training loss at single points: the first `count` points, or all."""
        ids = np.arange(data.n or 0)
        first = Groups(np.where(ids < (count or len(ids)), ids, -1), rest="drop")
        return self._points_provider(PointGradients(self.loss, data), first)

    def explained(self, tests: IndexedData | None, property: Property | None) -> Property | PointGradients:
        """The thing to explain: the target at test points, or a property."""
        if property is not None:
            return as_points(property)
        assert tests is not None
        return PointGradients(self.target, tests)

    def test_rows(self, explained: Property | PointGradients, *, shared: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over `(positions, rows [b, p])`, the gradients of test points or of a property, in dattri's layout.

        Args:
            explained: the test points or the property.
            shared: whether each rank gets a share of the rows, or all of them. Every rank computes all rows of a
                property.
        """
        if isinstance(explained, PointGradients):
            provider = self._points_provider(explained)
            return self.blocks(provider) if shared else self.all_blocks(provider)
        rows = self.to_dattri(property_gradient(explained, self.model, self.space.parameters))
        positions = torch.tensor(my_share(len(rows)) if shared else range(len(rows)), dtype=torch.long)
        return ((ids, rows[ids]) for ids in positions.split(self.max_rows) if len(ids))

    def hessian(self, data: IndexedData, gauss_newton: bool = False) -> Hessian:
        """The Hessian of the training loss over all of `data`, or the Gauss–Newton matrix."""
        batch_size = self.groups(data, Groups.singletons(data.n or 1)).plan(1).facts.batch_size
        return (GaussNewton if gauss_newton else Hessian)(
            self.space, lambda model, batch: self.loss_func(dict(model.named_parameters()), batch), data, batch_size
        )

    @property
    def max_rows(self) -> int:
        """Number of gradient rows that fit into `ROWS_BUDGET`."""
        return max(1, ROWS_BUDGET // (self.space.size * self.space.dtype.itemsize))

    def to_dattri(self, rows: Tensor) -> Tensor:
        """Convert rows `[b, p]` from the core's layout to dattri's."""
        return rows if self._order is None else rows[:, self._order]

    def to_core(self, rows: Tensor) -> Tensor:
        """Convert rows `[b, p]` from dattri's layout to the core's."""
        if self._order is None:
            return rows
        result = torch.empty_like(rows)
        result[:, self._order] = rows
        return result

    @cached_property
    def space(self) -> ParameterSpace:
        """The parameters that gradients are taken for, in the core's layout."""
        return ParameterSpace(self.model, self.layer_name)

    @property
    def layer_spans(self) -> list[tuple[int, int]]:
        """The column range `(low, high)` of each module's parameters in the core's layout, where they are adjacent."""
        spans: dict[str, tuple[int, int]] = {}
        for name, (low, high) in zip(self.space.parameters, self.space.spans.values(), strict=True):
            module = name.rpartition(".")[0]
            spans[module] = (spans.get(module, (low, low))[0], high)
        return list(spans.values())

    @cached_property
    def _order(self) -> Tensor | None:
        """For each column of dattri's layout, its column in the core's layout; None if the layouts are the same."""
        names = list(self.space.parameters)
        if self.layer_name is None or self.layer_name == names:
            return None
        spans = dict(zip(names, self.space.spans.values(), strict=True))
        columns = [torch.arange(*spans[name]) for name in dict.fromkeys(self.layer_name)]
        return torch.cat(columns).to(self.space.device)

    def _provider(self, loss: ExampleLoss, data: IndexedData, groups: Groups) -> GroupGradients:
        return self._drop_in.provider(self.model, loss, data, parameters=self.layer_name, groups=groups)

    def _points_provider(self, points: PointGradients, groups: Groups | None = None) -> GroupGradients:
        return points.provider(
            self.model, groups, parameters=self.layer_name, memory_budget=self._drop_in.memory_budget
        )


def by_outer_names(function: Callable[..., Tensor], model: nn.Module) -> Callable[..., Tensor]:
    """Adapt a function of ``(parameters, data)`` for a wrapped model to the parameter names of the model inside."""
    if unwrapped(model) is model:
        return function
    names = {inner_name(name, model): name for name, _ in model.named_parameters()}
    return lambda parameters, data: function({names[name]: value for name, value in parameters.items()}, data)
