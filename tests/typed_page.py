"""What a user writes, checked with ``mypy --strict`` by `test_types.py`; it is never run.

A line that must be refused ends in ``# type: ignore[…]``, which mypy reports if the line is accepted after all.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from ggda_ext import (
    STRATEGIES,
    Attribution,
    BatchLoss,
    ExampleLoss,
    GradientStore,
    GroupGradients,
    Groups,
    LabelIssues,
    MethodFacts,
    Plan,
    PointGradients,
    WhatIf,
    attribute,
    estimate,
    find_label_issues,
    grouping,
    properties,
    property_gradient,
    property_scores,
)
from ggda_ext.curvature.damping import TrainingSteps
from ggda_ext.evaluation import group_lds, random_subsets, removal_order
from ggda_ext.methods import Influence
from ggda_ext.results.verifying import Verified
from ggda_ext.training import Recipe


class Series:
    """The part of `pandas.Series` and `DataFrame` that counts, with the signature of pandas."""

    @property
    def iloc(self) -> object:
        raise NotImplementedError

    def to_numpy(
        self, dtype: object = None, copy: bool = False, na_value: object = None, **kwargs: object
    ) -> np.ndarray[Any, Any]:
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
    attribute(model, loss, (x, y), column, goal, method="influence", damping=0.1, intervals="both", checkpoints=file)
    attribute(model, loss, (x, y), column, goal, method="ekfac", recipe=Recipe(3, 0.1, 32), intervals=True)
    attribute(model, loss, (x, y), column, goal, method=Influence("hessian", points=2000), intervals="test points")
    attribute(model, loss, (x, y), column, goal, method="fisher", recipe=TrainingSteps([0.1] * 10, "sgd", momentum=0.9))
    provider = GroupGradients(model, loss, x, column, parameters=["0.weight"], strategy="auto")
    return provider.scores(PointGradients(loss, test))


def results(model: nn.Module, x: Tensor, y: Tensor, table: Series, file: Path) -> float:
    loss = nn.CrossEntropyLoss()
    goal = properties.named(lambda model: model(x).sum(), "sum", higher_is_better=True)
    result: Attribution = attribute(
        model, loss, (table, table), ["clinic", "year"], goal, frame=table, parameters=["0"], strategy=STRATEGIES[0],
        batch_size=32, memory_budget=2**20, show_progress=False, save_dir=file, tag="v1",
    )  # fmt: skip
    part: Attribution = result["web"]
    both: Attribution = result["sum", "web"]
    several: Attribution = result[["web", "books"]]
    rows: Tensor = result[0]
    column: Tensor = result[:, 1] + result.scores[:, 1]
    print(part, both, several, rows, column, result.harmful(sure=True).names, result.helpful(by="sum").sizes.sum())
    print(
        result.top(5).effects(), result.ranked().higher_is_better, result.per_member.low, result.of_group(("a", 2020))
    )
    facts: MethodFacts | None = result.method
    print(facts.cost if facts is not None else "", result.warnings, result.notes, result.interval, result.properties)
    again = Attribution.load(result.save(file)).replace(notes=["checked"], method=MethodFacts("mine", "property"))
    print(Attribution.of(result.numpy().T, table, goal, positive="falls", method="trak", test_axis=1), again.to_frame())
    truth: Verified = result.verify(lambda subsets: np.zeros((len(subsets), 2)), top=3, by="sum")
    print(truth, truth.rises - truth.predicted, truth.agrees.all())
    print(result.groups.members("web"), result.groups.names_of(torch.zeros(2, 3)), result.groups.spread(result))
    return float(both)


def other_doors(model: nn.Module, x: Tensor, y: Tensor, labels: Series, file: Path) -> None:
    def each(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0]).square().sum(1)  # type: ignore[no-any-return]

    own: ExampleLoss = BatchLoss(each)
    provider = GroupGradients(model, own, (x, y), labels)
    plan: Plan = provider.plan(1)
    goal = properties.weighted_sum([properties.mean_loss((x, y), None), properties.soft_accuracy((x, y))], [1.0, -1.0])
    print(plan.explain(), estimate(provider, n=10**6), GradientStore(provider, file))
    print(property_gradient(goal, model, dict(model.named_parameters())), property_scores(provider, goal).shape)
    what_if = WhatIf(model, nn.CrossEntropyLoss(), (x, y), labels)
    print(what_if.search(goal, remove=2, holdout=goal).removed, what_if.shapley(goal, kind="banzhaf").attribution())
    what_if.search(goal, drop=2)  # type: ignore[call-arg]
    answer = what_if.leave_group_out(goal).attribution()
    issues: LabelIssues = find_label_issues(model, nn.CrossEntropyLoss(), (x, y), validation=(x, y), groups=labels)
    print(answer.harmful(), issues, grouping.by_column(labels, freq="M").summary(model, own, (x, y), batch_size=8))


def ready_properties(x: Tensor, y: Tensor) -> list[properties.Property]:
    loss, data = nn.CrossEntropyLoss(), (x, y)
    attacks = [properties.fgsm(0.1), properties.pgd(0.1, 0.05, 3)]
    kinds: tuple[type, ...] = (
        properties.PointProperty, properties.MeanProperty, properties.OutputsProperty, properties.LinearProperty,
    )  # fmt: skip
    print(kinds, properties.class_probabilities(x), properties.property_gradient)
    return [
        properties.point_losses(data, loss).mean(),
        properties.margins(data, soft=False),
        properties.correct_logits(data),
        properties.accuracy(data),
        properties.f1(data),
        properties.soft_f1(data, average="binary", positive=1),
        properties.demographic_parity_gap(data, sensitive=y),
        properties.equalized_odds_gap(data, sensitive=["a", "b"], agg="mean"),
        properties.soft_calibration_error(data),
        properties.of_outputs(data, lambda outputs, targets: outputs.sum(), name="sum", higher_is_better=None),
        properties.contrast(data, data, loss),
        properties.stack(*(properties.attacked_loss(data, loss, attack) for attack in attacks)),
    ]


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
    attribute(model, None, x, column, goal, damping="much")  # type: ignore[arg-type]
    attribute(model, None, x, column, goal, method="influense")  # type: ignore[arg-type]
    attribute(model, None, x, column, goal, intervals="some")  # type: ignore[arg-type]
    attribute(model, None, x, column, goal, kind="linear")  # type: ignore[call-arg]
    attribute(model, None, x, column, goal, show_progress="yes")  # type: ignore[arg-type]
    Attribution.of(x, column, positive="up")  # type: ignore[arg-type]
    MethodFacts("mine", "metres")  # type: ignore[arg-type]
    properties.soft_f1((x, x), average="micro")  # type: ignore[arg-type]
