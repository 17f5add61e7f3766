"""Base class of all grouped attributors: keywords, checks, and whether dattri or the core runs (`ggda_ext.drop_in`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from ggda_dattri.checkpoint import MEMORY_BUDGET, Checkpoint, TaskLosses
from ggda_ext.data import IndexedData
from ggda_ext.drop_in import DropIn, FullSignature
from ggda_ext.groups import Groups, GroupsLike
from ggda_ext.properties import Property
from ggda_ext.words import refuse_words

WORDS = {
    "parameters": "pass layer_name=, the names of the parameters that count",
    "batch_size": "group passes choose theirs by memory_budget",
}
"""Arguments of `ggda_ext.attribute` that have another name in dattri, or are not needed."""


class Grouped(FullSignature):
    """A mixin that stands before a dattri attributor and adds `groups` and the keywords of the group path to it.

    It also decides whether dattri's own code or the core runs.

    Args:
        *args: dattri's own arguments.
        groups: a partition of the training points. With None, dattri's own code runs.
        strategy: the core's gradient strategy.
        save_dir: a folder that keeps finished results, see `ggda_ext.attribute`. After a kill, the same calls compute
            only what is missing. Scores are then memory maps on the CPU, and the core computes groups of one, too.
        tag: with `save_dir`, a name for the version of the data and of anything else that cannot be checked. A folder
            with another tag raises an error.
        memory_budget: bytes for the activations of one batch and for one block of rows, in group passes.
        show_progress: whether to show progress bars in group passes and solves; by default if they take over 5 seconds.
        **kwargs: dattri's own arguments.
    """

    task: Any
    layer_name: Any
    device: Any
    batch_of_one: bool
    """Whether this attributor calls its losses with examples that have a batch dimension of one."""

    def __init__(
        self,
        *args: Any,
        groups: GroupsLike | None = None,
        strategy: str = "auto",
        save_dir: str | Path | None = None,
        tag: str | None = None,
        memory_budget: int = MEMORY_BUDGET,
        show_progress: bool | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_words(kwargs, WORDS, super().__init__, type(self).__name__)
        super().__init__(*args, **kwargs)
        self._drop_in = DropIn(
            groups, strategy=strategy, save_dir=save_dir, tag=tag, memory_budget=memory_budget,
            show_progress=show_progress,
        )  # fmt: skip
        if isinstance(self.layer_name, str):
            self.layer_name = [self.layer_name]

    @property
    def groups(self) -> Groups | None:
        """The groups, or None if there are none."""
        return self._drop_in.groups

    @property
    def _is_dattri(self) -> bool:
        """Whether dattri's own code runs: without groups, or for groups of one if no group setting was chosen."""
        return self._drop_in.by_toolkit

    def _train_data(self, loader: DataLoader, name: str = "train_dataloader") -> tuple[IndexedData, Groups]:
        """The points of a loader, and their groups."""
        data = IndexedData(loader, name)
        if data.n is None:
            raise TypeError(f"{name} is a stream without a length: pass a DataLoader over a map-style data set.")
        return data, self._drop_in.groups_of(data.n)

    def _in_group_order(self, loader: DataLoader | None, run: Callable[[], Tensor]) -> Tensor:
        """Run dattri's code. With groups of one, put its rows, one per training point, in the order of the groups."""
        if self.groups is None:
            return run()
        if loader is not None:
            self._train_data(loader)  # raises an error for a wrong loader before the work starts
        return self._drop_in.in_group_order(run().detach(), 0)

    @cached_property
    def _losses(self) -> TaskLosses:
        return TaskLosses(self.task, self.batch_of_one)

    def _checkpoint(self, index: int) -> Checkpoint:
        return Checkpoint(self.task, index, self.layer_name, self._losses, self._drop_in)

    @property
    def _checkpoints(self) -> range:
        return range(len(self.task.get_checkpoints()))


def check_one_of(test_dataloader: DataLoader | None, property: Property | None) -> None:
    """Raise an error unless exactly one of test points and property is given, and the property is callable."""
    if test_dataloader is None and property is None:
        raise ValueError("attribute got neither test_dataloader nor property: pass one of them.")
    if test_dataloader is not None and property is not None:
        raise ValueError("attribute got both test_dataloader and property: pass one of them.")
    if property is not None and not callable(property):
        raise TypeError(f"property is a {type(property).__name__}: pass a callable g(model) -> Tensor.")
