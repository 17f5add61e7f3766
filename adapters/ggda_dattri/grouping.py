"""What all grouped attributors share: their keywords, and checks of what the user passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ggda_dattri.checkpoint import Checkpoint
from ggda_ext.data import IndexedData
from ggda_ext.gradients.plan import STRATEGIES
from ggda_ext.groups import Groups, GroupsLike
from ggda_ext.properties import Property


class Grouped:
    """Mixin before a dattri attributor: takes `groups`, `strategy` and `save_dir`, and knows when dattri's code serves.

    Args:
        *args: dattri's own arguments.
        groups: a partition of the training points; None for dattri's own code.
        strategy: the core's gradient strategy.
        save_dir: a folder that keeps what is finished, see `ggda_ext.attribute`: after a kill the same calls go on with
            what is missing, and scores are memory maps on the CPU. Groups of one are computed as groups then.
        tag: with `save_dir`, names what cannot be seen from here, such as the version of the data; another is refused.
        **kwargs: dattri's own arguments.
    """

    task: Any
    layer_name: Any
    device: Any
    batch_of_one: bool
    """Whether this attributor gives its losses an example with a batch dimension."""

    def __init__(
        self,
        *args: Any,
        groups: GroupsLike | None = None,
        strategy: str = "auto",
        save_dir: str | Path | None = None,
        tag: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if strategy not in ("auto", *STRATEGIES):
            raise ValueError(f"strategy={strategy!r} is not one of 'auto', {', '.join(map(repr, STRATEGIES))}.")
        if groups is None and save_dir is not None:
            raise ValueError(f"save_dir={str(save_dir)!r} is given without groups: it keeps scores of groups.")
        self.groups = None if groups is None else Groups.of(groups)
        self.strategy, self.save_dir, self.tag = strategy, save_dir, tag
        if isinstance(self.layer_name, str):
            self.layer_name = [self.layer_name]

    @property
    def _is_dattri(self) -> bool:
        """Whether dattri's own code gives the answer: no groups, or groups of one and no strategy asked for."""
        serves = self.strategy == "auto" and self.save_dir is None
        return self.groups is None or (self.groups.are_singletons and serves)

    def _train_data(self, loader: DataLoader, name: str = "train_dataloader") -> tuple[IndexedData, Groups]:
        """The points of a loader, and the groups they are in."""
        data = IndexedData(loader, name)
        if data.n is None:
            raise TypeError(f"{name} is a stream without a length: pass a DataLoader over a map-style data set.")
        return data, Groups.singletons(data.n) if self.groups is None else Groups.of(self.groups, data.n)

    def _in_group_order(self, loader: DataLoader | None, run: Callable[[], Tensor]) -> Tensor:
        """dattri's rows, one per training point, in the order of groups of one; as they are without groups."""
        if self.groups is None:
            return run()
        if loader is not None:
            self._train_data(loader)  # refuses a loader that does not fit before the work starts
        scores = run().detach()
        return scores[torch.from_numpy(self.groups.order.astype("int64")).to(scores.device)]

    def _checkpoint(self, index: int) -> Checkpoint:
        return Checkpoint(self.task, index, self.layer_name, batch_of_one=self.batch_of_one, strategy=self.strategy)

    @property
    def _checkpoints(self) -> range:
        return range(len(self.task.get_checkpoints()))


def check_one_of(test_dataloader: DataLoader | None, property: Property | None) -> None:
    """Refuse both or neither of test points and property."""
    if test_dataloader is None and property is None:
        raise ValueError("attribute got neither test_dataloader nor property: pass one of them.")
    if test_dataloader is not None and property is not None:
        raise ValueError("attribute got both test_dataloader and property: pass one of them.")
    if property is not None and not callable(property):
        raise TypeError(f"property is a {type(property).__name__}: pass a callable g(model) -> Tensor.")
