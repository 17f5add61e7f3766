"""What a user writes, checked with ``mypy --strict`` by `test_types.py`; it is never run.

A line that must be refused ends in ``# type: ignore[…]``, which mypy reports if the line is accepted after all.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from ggda_ext import GroupGradients, Groups, PointGradients, attribute, properties
from ggda_ext.evaluation import group_lds, random_subsets, removal_order


class Series:
    """The part of `pandas.Series` that counts, with the signature of pandas."""

    def to_numpy(
        self, dtype: object = None, copy: bool = False, na_value: object = None, **kwargs: object
    ) -> np.ndarray:
        raise NotImplementedError


class Pairs(Dataset[tuple[Tensor, int]]):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise NotImplementedError


class HuggingFace:
    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, key: int | str) -> dict[str, Tensor]:
        raise NotImplementedError

    def __getitems__(self, keys: list[int]) -> list[dict[str, Tensor]]:
        raise NotImplementedError


def groups_from_what_users_have(column: Series, text: list[str], lists: list[list[int]]) -> list[Groups]:
    return [
        Groups(column),
        Groups(text),
        Groups([0, 1, 1]),
        Groups(("a", None, 3)),
        Groups(np.zeros(3)),
        Groups(torch.zeros(3)),
        Groups(range(3)),
        Groups(lists),
        Groups([np.arange(2), np.arange(2, 4)]),
        Groups((torch.arange(2), [2, 3])),
        Groups({"web": [0, 1], "books": np.array([2])}),
        Groups({1: column, 2: column}),
        Groups(Groups([0, 1])),
        Groups.of(column, 3),
    ]


def scores_of_what_users_have(model: nn.Module, x: Tensor, y: Tensor, column: Series, file: Path) -> Tensor:
    loss, test = nn.CrossEntropyLoss(), (x, y)
    goal = properties.mean_loss(test, loss)
    arrays = (np.zeros((3, 2)), np.zeros(3))
    attribute(model, loss, (x, y), column, goal)
    attribute(model, loss, [x, y], column, goal, checkpoints=file)
    attribute(model, loss, arrays, [[0, 1], [2]], goal, checkpoints=[file, str(file)], weights=[1.0, 0.5])
    attribute(model, loss, {"input_ids": x, "labels": y}, ["a", "b"], goal, checkpoints=model.state_dict())
    attribute(model, loss, {"input_ids": arrays[0]}, {"a": [0]}, goal)
    attribute(model, loss, TensorDataset(x, y), None, goal)
    attribute(model, loss, Subset(Pairs(), [0, 1]), None, goal)
    attribute(model, loss, DataLoader(Pairs(), batch_size=2), column, goal)
    attribute(model, loss, HuggingFace(), column, goal)
    provider = GroupGradients(model, loss, x, column, parameters=["0.weight"], strategy="auto")
    return provider.scores(PointGradients(loss, test))


def evaluations(scores: Tensor, column: Series) -> None:
    kept = random_subsets(column, 10)
    print(group_lds(scores, kept, np.zeros(10)).value, removal_order(scores[0], column))


def mistakes(model: nn.Module, x: Tensor, column: Series) -> None:
    goal = properties.mean_loss(x, None)
    Groups(3)  # type: ignore[arg-type]
    Groups(None)  # type: ignore[arg-type]
    Groups({"web": 3})  # type: ignore[dict-item]
    attribute(model, None, 3, column, goal)  # type: ignore[arg-type]
    attribute(model, None, "train.csv", column, goal)  # type: ignore[arg-type]
    attribute(model, None, [1.0, 2.0], column, goal)  # type: ignore[list-item]
    attribute(model, None, x, column, goal, checkpoints=3)  # type: ignore[arg-type]
    PointGradients(nn.CrossEntropyLoss(), None)  # type: ignore[arg-type]
