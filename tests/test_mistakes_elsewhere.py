"""Mistakes beside `attribute`: groups, what-if, training again, results (see test_mistakes.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.cluster import KMeans
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ggda_ext import (
    Attribution,
    GradientStore,
    GroupGradients,
    Groups,
    WhatIf,
    estimate,
    evaluation,
    grouping,
    properties,
)
from ggda_ext.evaluation import Retrainer
from ggda_ext.training import Recipe, initial_model, train_many, train_one
from tests.test_mistakes import LOSS, MODEL, RECIPE, RESULT, TABLE, Mistake, N, X, Y, ask, leave

GROUPS = Groups(TABLE["clinic"])
STATE = MODEL.state_dict()


@cache
def what_if() -> WhatIf:
    return WhatIf(nn.Linear(4, 3), LOSS, (X, Y), GROUPS)


def retrainer(measure: Any = "loss") -> Retrainer:
    return Retrainer(lambda: nn.Linear(4, 3), LOSS, (X, Y), (X, Y), RECIPE, measure=measure)


def stored(**options: Any) -> GradientStore:
    return GradientStore(GroupGradients(MODEL, LOSS, (X, Y), GROUPS), **{"save_dir": "folder", **options})


def shift(model: nn.Module) -> torch.Tensor:
    return model(X).sum()


MEAN_LOSS = properties.mean_loss((X, Y), LOSS)
MISTAKES: dict[str, Mistake] = {
    # attribute
    "a loss in the place of the model": (
        lambda: ask(model=LOSS, loss_fn=MODEL), ValueError, "CrossEntropyLoss, has no parameters: pass the trained"
    ),
    "a property in the place of groups": (
        lambda: ask(groups=MEAN_LOSS, property=TABLE["clinic"]), TypeError, "groups is a MeanProperty: pass one label"
    ),
    "a loss for a property": (lambda: ask(property=LOSS), TypeError, "CrossEntropyLoss, not a function of the model"),
    "a model for a property": (lambda: ask(property=MODEL), TypeError, "property is a Sequential, not a function"),
    "a loss that is cut off": (
        lambda: ask(loss_fn=lambda output, target: LOSS(output, target).detach()), ValueError, "without detach"
    ),
    "images where rows were learned": (lambda: ask(data=(X[:, None], Y)), ValueError, r"outputs \[.*1, 3\].* shape"),
    "damping for each property": (lambda: ask(damping=torch.ones(2)), TypeError, "damping=tensor.*: pass a number"),
    "a loader that is being read": (
        lambda: ask(data=iter(DataLoader(TensorDataset(X, Y)))), TypeError, "read only once: pass a DataLoader"
    ),
    "one target for all": (lambda: ask(data=(X, torch.tensor(1))), ValueError, "part 1 of .* is a single number"),
    "a checkpoint with more in it": (
        lambda: ask(checkpoints=[{"net": STATE, "epoch": 3}]), ValueError, r"under 'net': pass that, checkpoint\["
    ),
    "epochs for checkpoints": (lambda: ask(checkpoints=[10, 20]), TypeError, r"checkpoints\[0\] is 10: pass a state"),
    "how many checkpoints": (lambda: ask(checkpoints=3), TypeError, "checkpoints=3: pass state dicts"),
    "a weight left out": (
        lambda: ask(checkpoints=[STATE] * 2, weights=[1.0, None]), TypeError, r"weights\[1\]=None: pass a number"
    ),
    "a weight that is no number": (
        lambda: ask(checkpoints=[STATE] * 2, weights=iter([1.0, float("nan")]), method="tracin"), ValueError,
        r"weights\[1\]=nan: pass a finite number"
    ),
    "a loader of no checkpoints": (
        lambda: ask(load_checkpoint=lambda model, checkpoint: None), TypeError, "load_checkpoint is given without"
    ),
    "the name of a loader": (
        lambda: ask(checkpoints=[STATE], load_checkpoint="load"), TypeError, r"a str: pass a function load_checkpoint\("
    ),
    "something else for a checkpoint": (lambda: ask(checkpoints=[__file__]), ValueError, "holds no state dict alone"),
    "a name beside a checkpoint": (
        lambda: ask(checkpoints=[("epoch 1", STATE)]), TypeError, r"checkpoints\[0\] is a tuple: pass a state dict"
    ),
    "checkpoints in a list of lists": (lambda: ask(checkpoints=[STATE, [STATE]]), TypeError, r"\[1\] is a list: pass"),
    "a tensor for a checkpoint": (lambda: ask(checkpoints=[X]), TypeError, r"checkpoints\[0\] is a Tensor: pass a"),
    "parameters by number": (lambda: ask(checkpoints=[{0: X}]), ValueError, r"\[0\] has a key 0, .* pass a state dict"),
    "a folder for a checkpoint": (lambda: ask(checkpoints=["."]), FileNotFoundError, "'.', which is no file"),
    "a list of targets": (lambda: ask(data=(X, Y.tolist())), TypeError, r"holds a list: .* torch.tensor\(numbers\)"),
    "a table of counts": (
        lambda: ask(data=(TABLE[["year"] * 4], TABLE["y"])), TypeError, r"int64.* df.astype\('float32'\)"
    ),
    "several strategies": (lambda: ask(strategy=["ghost"]), ValueError, r"strategy=\['ghost'\] is not one of"),
    "damping switched on": (lambda: ask(damping=True), TypeError, "damping=True: pass a number"),
    "a function of outputs alone": (
        lambda: properties.of_outputs((X, Y), lambda outputs: outputs.sum()), TypeError, r"function fn\(outputs"
    ),
    "a direction that is text": (
        lambda: properties.named(shift, "sum", higher_is_better="yes"), TypeError, "higher_is_better='yes': pass True"
    ),
    "a number for a name": (lambda: properties.named(shift, 3), TypeError, "name=3: pass text"),
    # groups and grouping
    "a set of labels": (lambda: ask(groups=set(TABLE["clinic"])), TypeError, "a set, which has no order"),
    "a group by its name": (lambda: GROUPS["west"], TypeError, r"groups.members\('west'\)"),
    "one text for names": (lambda: Groups([0, 1], names="ab"), TypeError, "names is a str: pass a list"),
    "names of groups as a dict": (lambda: Groups([0, 1], names={0: "a", 1: "b"}), TypeError, "names is a dict: pass a"),
    "rows of a table by their index": (
        lambda: Groups(TABLE[::-1].groupby("clinic").groups), TypeError, r"pandas Index, .* df.groupby\(.*\).indices"
    ),
    "pairs as labels": (
        lambda: Groups([("west", 1), ("east", 2)]), TypeError, r"whole numbers, not object: pass pandas.Series\(pairs\)"
    ),
    "data for groups": (lambda: Groups((X.numpy()[None], Y)), TypeError, r"not an array of shape \[1, 120, 4\]"),
    "a fraction for the number of points": (lambda: Groups([[0, 1]], n=2.0), TypeError, "n=2.0: pass a whole number"),
    "names for ids": (lambda: GROUPS.some(["west"]), TypeError, r"ids=\['west'\]: pass a list of group ids, 0 … 2"),
    "digits for ids": (lambda: Groups(["1", "2"]).some(["1"]), TypeError, r"groups.id_of\(name\) gives an id"),
    "one id alone": (lambda: GROUPS.some(1), TypeError, "ids=1: pass a list"),
    "several groups at once": (lambda: GROUPS[0:2], TypeError, r"group id slice\(0, 2, None\) is no whole number"),
    "text to be spread": (lambda: GROUPS.spread("abc"), TypeError, r"scores='abc': pass numbers, scores \[m, 3\]"),
    "a rule before the numbers": (
        lambda: Groups.by_rule(lambda i: i % 3, N, 3), TypeError, r"and a function: by_rule\(n, k, rule\)"
    ),
    "data for their number": (
        lambda: grouping.random_groups(X, 4), TypeError, r"n is a Tensor: pass a whole number, len\(data\)"
    ),
    "the name of a column to bin": (
        lambda: grouping.by_column("date", freq="M"), TypeError, r"pass the column itself, df\['date'\]"
    ),
    "dates as text": (
        lambda: grouping.by_column(pd.Series(["2024-01-31"]), freq="M"), TypeError, r"Pass pandas.to_datetime\(column\)"
    ),
    "a data set for its labels": (
        lambda: grouping.by_label(TensorDataset(X, Y)), TypeError, "labels is a TensorDataset without .targets: pass"
    ),
    "measurements for groups": (lambda: grouping.by_column(X[:, 0]), TypeError, r"by_column\(values, bins=4\)"),
    "the class of a clusterer": (lambda: grouping.from_clusters(KMeans, X), TypeError, r"an instance, KMeans\(…\)"),
    # what if
    "indices for names": (
        lambda: what_if().without(np.array([0, 1])), ValueError, "no group 0; the first ones are 'east', 'north'"
    ),
    "a search that does not know what is better": (
        lambda: what_if().search(shift, remove=1), ValueError, "pass goal='min' or 'max', or properties.named"
    ),
    "too few groups to verify with": (
        lambda: what_if().verify(retrainer(), MEAN_LOSS), ValueError, "subsets of 3 groups to retrain, and verify needs"
    ),
    "no retraining at all": (lambda: what_if().to_retrain(MEAN_LOSS, 0), ValueError, "count=0: pass a whole number"),
    # training again
    "text for a property": (lambda: leave(property="loss"), TypeError, r"property is a str: pass test data \(x, y\)"),
    "a loss for the property": (lambda: leave(property=LOSS), TypeError, "not a function of the model"),
    "no loss to train with": (lambda: leave(loss_fn=None), TypeError, "loss_fn is None: pass the training loss"),
    "a class that needs arguments": (lambda: leave(make_model=nn.Linear), TypeError, "a function without arguments"),
    "seeds in words": (lambda: leave(seeds="abc"), TypeError, "seeds holds 'a': pass whole numbers"),
    "a seed twice": (lambda: leave(seeds=[0, 0]), ValueError, r"seeds=\[0, 0\] holds a seed twice"),
    "a group twice": (lambda: leave(group_ids=["east", "east"]), ValueError, "group_ids holds a group twice"),
    "learning rates of the steps": (lambda: Recipe(1, [0.1, 0.2], 8), TypeError, r"learning_rate=\[0.1, 0.2\]: pass"),
    "no seed": (
        lambda: train_one(initial_model(lambda: nn.Linear(4, 3), 0), LOSS, (X, Y), RECIPE, seed=None), TypeError,
        "seed=None: pass a whole number",
    ),
    "how many models": (
        lambda: train_many(lambda: nn.Linear(4, 3), LOSS, (X, Y), RECIPE, seeds=3), TypeError, r"e.g. range\(3\)"
    ),
    # results
    "accuracy beside a loss": (
        lambda: RESULT.verify(retrainer("accuracy")), ValueError, "lower is better: pass a Retrainer .* measure='loss'"
    ),
    "how many to verify, in words": (lambda: RESULT.verify(retrainer(), top="all"), TypeError, "top='all': pass a"),
    "one row for all": (lambda: RESULT.to_html("page.html", rows=5), TypeError, "rows is a int: pass one entry"),
    "scores to draw members of": (lambda: RESULT.plot.members(torch.ones(2)), TypeError, "pass its name or number"),
    "a direction of one's own": (
        lambda: RESULT.replace(higher_is_better=["lower"]), TypeError, "higher_is_better='lower': pass True, False or"
    ),
    "no scores": (lambda: Attribution.of(None, GROUPS), TypeError, "scores is a NoneType: pass a tensor"),
    "scores that are complex": (
        lambda: Attribution.of(torch.ones(1, 3) * 1j, GROUPS), TypeError, "complex64: pass real numbers"
    ),
    # further doors
    "an attack that was not made": (
        lambda: properties.attacked_loss((X, Y), LOSS, properties.fgsm), TypeError, r"fgsm itself: .* fgsm\(eps\)"
    ),
    "no model at once": (
        lambda: train_many(lambda: nn.Linear(4, 3), LOSS, (X, Y), RECIPE, seeds=[0], at_once=0), ValueError, "at_once=0"
    ),
    "no training at once": (lambda: leave(at_once=0), ValueError, "at_once=0: pass a positive number"),
    "no subsets": (lambda: evaluation.random_subsets(GROUPS, 0), ValueError, "count=0: pass a positive number"),
    "choices of other groups": (
        lambda: evaluation.points_of(GROUPS, np.ones((2, 9), bool)), ValueError, r"kept has shape \[2, 9\]: .*, 3\]"
    ),
    "one fraction": (
        lambda: evaluation.pruning_score(np.ones(3), GROUPS, retrainer(), 0.5), TypeError, r"fractions=0.5: .* \[0.1"
    ),
    "how many subsets": (lambda: retrainer()(5), TypeError, "subsets=5: pass a list of arrays of training indices"),
    "a group beyond the last": (lambda: GROUPS.some([0, 9]), IndexError, "group id 9 is out of range: there are 3"),
    "a group twice, by id": (lambda: GROUPS.some([1, 1]), ValueError, "ids holds 1 more than once: pass each group"),
    "the name of a group beyond the last": (lambda: GROUPS.name(9), IndexError, "group id 9 is out of range: there"),
    "a model to estimate": (lambda: estimate(MODEL), TypeError, r"provider is a Sequential: pass GroupGradients\("),
    "a model to store": (lambda: GradientStore(MODEL, "folder"), TypeError, "provider is a Sequential: pass GroupGrad"),
    "a folder of gradients by number": (lambda: stored(save_dir=3), TypeError, "save_dir is a int: pass the path of a"),
    "gradients in no folder": (lambda: stored(save_dir=None), TypeError, "save_dir is a NoneType: pass the path of a"),
    "a tag of gradients by number": (lambda: stored(tag=3), TypeError, "tag is a int: pass text"),
    "a projection in words": (lambda: stored(projection_dim="4"), TypeError, "projection_dim='4': pass a whole number"),
    "a projection to a fraction": (lambda: stored(projection_dim=4.0), TypeError, "projection_dim=4.0: pass a whole"),
    "a projection to nothing": (lambda: stored(projection_dim=0), ValueError, "projection_dim=0: pass a positive num"),
    "a seed of gradients in words": (lambda: stored(seed="4"), TypeError, "seed='4': pass a whole number"),
    "a folder of trainings by number": (lambda: leave(save_dir=3), TypeError, "save_dir is a int: pass the path of a"),
    "a tag of trainings by number": (lambda: leave(save_dir="x", tag=3), TypeError, "tag is a int: pass text"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, kind, words = MISTAKES[mistake]
    with pytest.raises(kind, match=words):
        call()
    assert not list(tmp_path.iterdir()), "a mistake leaves nothing behind"


@pytest.mark.parametrize(("made", "best"), [(properties.mean_loss, min), (properties.soft_accuracy, max)])
def test_a_search_looks_for_what_is_better(made: Callable[..., Any], best: Callable[..., float]) -> None:
    goal = made((X, Y), LOSS) if made is properties.mean_loss else made((X, Y))
    asked = what_if()
    found = asked.search(goal, remove=1)
    values = {name: float(asked.without(name).value(goal)) for name in GROUPS.names}
    assert values[found.removed[0]] == pytest.approx(best(values.values()))
