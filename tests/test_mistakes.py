"""Mistakes that everybody makes once: each is refused with words that say what was passed and what to pass instead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ggda_ext import Attribution, Groups, MethodFacts, WhatIf, attribute, find_label_issues, properties
from ggda_ext.counterfactual.leave_group_out import leave_group_out
from ggda_ext.curvature.damping import TrainingSteps
from ggda_ext.evaluation import Retrainer
from ggda_ext.training import Recipe, initial_model, train_one

N, CLASSES = 120, 3
X, Y = torch.randn(N, 4, generator=torch.Generator().manual_seed(0)), torch.arange(N) % CLASSES
MODEL, LOSS = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, CLASSES)), nn.CrossEntropyLoss()
FEATURES = ["age", "dose", "weight", "height"]
TABLE = pd.DataFrame(X.numpy().astype(float), columns=FEATURES).assign(
    y=Y.numpy(), clinic=np.resize(["west", "north", "east"], N), year=2020 + np.arange(N) % 2
)
EXAMPLES = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
RESULT = Attribution(torch.tensor([[1.0, -1.0, 2.0]]), Groups(TABLE["clinic"]), ["mean_loss"], [False])


def ask(**changes: Any) -> Attribution:
    """A call of `attribute` without mistakes, but for `changes`."""
    right = {
        "model": MODEL, "loss_fn": LOSS, "data": (X, Y), "groups": TABLE["clinic"].to_numpy(),
        "property": properties.mean_loss((X, Y), LOSS),
    }  # fmt: skip
    return attribute(**right | changes)


RECIPE = Recipe(1, 0.1, 32)


def leave(**changes: Any) -> Any:
    """A call of `leave_group_out` without mistakes, but for `changes`."""
    return leave_group_out(
        **{"make_model": lambda: copy.deepcopy(MODEL), "loss_fn": LOSS, "data": (X, Y), "groups": TABLE["clinic"],
           "property": (X, Y), "recipe": RECIPE} | changes
    )  # fmt: skip


def first_weight(model: nn.Module) -> torch.Tensor:
    return next(model.parameters()).sum()


class Listed(Dataset[Any]):
    """Examples as lists of numbers, which a DataLoader does not make one tensor of."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[list[float], int]:
        return X[index].tolist(), int(Y[index])


def of_table(columns: list[str]) -> Any:
    return properties.mean_loss((TABLE[columns], TABLE["y"]), LOSS)


def elsewhere(index_from: int) -> pd.Series:
    return TABLE["clinic"].set_axis(pd.RangeIndex(index_from, index_from + N))


Mistake = tuple[Callable[[], Any], type[Exception], str]
MISTAKES: dict[str, Mistake] = {
    # groups
    "the name of a column alone": (lambda: ask(groups="clinic"), ValueError, r"one value, .* frame=df"),
    "one number for all points": (lambda: ask(groups=3), ValueError, "not 3, which is one value: pass one label per"),
    "names of columns without their table": (lambda: ask(groups=["clinic", "year"]), ValueError, "frame=df"),
    "a column that does not exist": (
        lambda: ask(groups="clinik", frame=TABLE), ValueError, "'clinik', which is no column of frame: it has 'age'"
    ),
    "a column of fractions beside another": (
        lambda: ask(groups=["age", "rate"], frame=TABLE.assign(rate=np.linspace(0, 1, len(TABLE)))), TypeError,
        "fractional numbers: bin them first",
    ),
    "a path for a table": (lambda: ask(groups="clinic", frame="t.csv"), TypeError, "frame is a str: pass the pandas"),
    "labels together with a table": (lambda: ask(frame=TABLE), TypeError, "leave out frame, or pass names"),
    "a whole table for labels": (lambda: ask(groups=TABLE[["clinic"]]), ValueError, r"\(120, 1\).*df\['clinic'\]"),
    "too few labels": (lambda: ask(groups=np.zeros(50, int)), ValueError, "labels for 50 points, but .* has 120"),
    "a missing label": (lambda: ask(groups=[None] + ["a"] * (N - 1)), ValueError, r"Groups\(labels, rest='drop'\)"),
    "measurements for labels": (lambda: ask(groups=X[:, 0].numpy()), TypeError, "fractional numbers: bin them"),
    "a column of another table": (
        lambda: ask(data=(TABLE[FEATURES], TABLE["y"]), groups=elsewhere(1000)), ValueError, "groups has another index"
    ),
    # data
    "a path for data": (lambda: ask(data="train.csv"), TypeError, "the text 'train.csv': read the file first"),
    "targets of another length": (lambda: ask(data=(X, Y[:50])), ValueError, r"different lengths: \[120, 50\]"),
    "targets left out": (lambda: ask(data=X), ValueError, r"no targets, .* pass \(x, y\)"),
    "targets before inputs": (lambda: ask(data=(Y, X)), TypeError, "pass inputs first, then the target"),
    "a text among the features": (
        lambda: ask(data=(TABLE[[*FEATURES, "clinic"]], TABLE["y"])), TypeError, "column 'clinic' .* encode it"
    ),
    "missing values": (
        lambda: ask(data=(TABLE[FEATURES].where(X.numpy() > -1), TABLE["y"])), ValueError, "column .age. .* missing"
    ),
    "missing values of pandas' own in one of two columns": (
        lambda: ask(data=(TABLE[FEATURES], TABLE["y"]), groups=["clinic", "year"], frame=TABLE.convert_dtypes().assign(
            clinic=TABLE["clinic"].astype("string").where(TABLE.index > 0))),
        ValueError, "1 of 120 points are in no group, first 0"
    ),
    "two columns of one name": (
        lambda: ask(groups="a", frame=pd.DataFrame(np.zeros((N, 2)), columns=["a", "a"])), ValueError,
        "frame has 2 columns of that name"
    ),
    "a column of more rows than the data": (
        lambda: ask(data=(TABLE[FEATURES][:100], TABLE["y"][:100]), groups=TABLE["clinic"]), ValueError,
        r"groups has 120 rows, .* has 100: .* df.loc\[x.index, 'clinic'\]"
    ),
    "numbers of classes of a categorical": (
        lambda: ask(data=(TABLE[FEATURES], TABLE["y"].astype("category").cat.codes)), TypeError,
        r"int8 numbers of classes: .* y.astype\('int64'\)"
    ),
    "texts for inputs": (lambda: ask(data=(["a", "b"] * (N // 2), Y)), TypeError, "holds texts, 'a' …: encode them"),
    "lists for inputs": (lambda: ask(data=(X.tolist(), Y.tolist())), TypeError, r"a list: .* torch.tensor\(numbers\)"),
    "texts from a loader": (
        lambda: ask(data=DataLoader([("a", 0)] * N, batch_size=8)), TypeError, "gives a tuple where the model needs"
    ),
    "a picture of nothing": (lambda: ask().some([]).plot.bars(), ValueError, "no group to show"),
    "a page about nothing": (lambda: ask().some([]).to_html("never.html"), ValueError, "no group to show"),
    "a heat map of nothing": (lambda: ask().some([]).plot.heatmap(), ValueError, "no group to show"),
    "a list of dicts": (lambda: ask(data=EXAMPLES), TypeError, "list of dicts: pass DataLoader.*collate_fn="),
    "a list of pairs": (lambda: ask(data=list(zip(X, Y, strict=True))), TypeError, "list of examples: pass DataLoader"),
    "a loader that shuffles": (
        lambda: ask(data=DataLoader(TensorDataset(X, Y), shuffle=True)), ValueError, "shuffle=False"
    ),
    "tensors of float64": (lambda: ask(data=(X.double(), Y)), TypeError, r"float64.* pass x.float\(\)"),
    "a model of float64": (
        lambda: ask(model=copy.deepcopy(MODEL).double()), TypeError, r"x.double\(\) for x, or model.float\(\)"
    ),
    "masked numbers": (
        lambda: ask(data=(np.ma.masked_less(X.numpy(), -2), Y)), ValueError, r"missing values?: .*\.filled\(np.nan\)"
    ),
    "fields for numbers": (lambda: ask(data=(X.numpy().view("f4,f4"), Y)), TypeError, "not made of numbers: it holds"),
    # model and loss
    "a path for a model": (lambda: ask(model="net.pt"), TypeError, "model is a str: pass the trained torch.nn.Module"),
    "a model in train mode": (
        lambda: ask(model=nn.Sequential(MODEL, nn.Dropout()).train()), ValueError, r"call model.eval\(\) first"
    ),
    "a frozen model": (
        lambda: ask(model=nn.Linear(4, 3).requires_grad_(False)), ValueError, "none of which requires a gradient"
    ),
    "a layer that does not exist": (lambda: ask(parameters=["head"]), ValueError, "'head', which is no parameter or"),
    "no loss": (lambda: ask(loss_fn=None), TypeError, "loss_fn is None, .* pass the training loss, e.g. nn.Cross"),
    "a loss class": (lambda: ask(loss_fn=nn.CrossEntropyLoss), TypeError, r"pass an instance, CrossEntropyLoss\(\)"),
    "the value of a loss": (lambda: ask(loss_fn=LOSS(MODEL(X), Y)), TypeError, "loss_fn is a Tensor: pass a callable"),
    "a loss for numbers with classes": (
        lambda: ask(loss_fn=nn.MSELoss()), ValueError, r"for classes use nn.CrossEntropyLoss\(\)"
    ),
    "a loss with class weights": (
        lambda: ask(loss_fn=nn.CrossEntropyLoss(weight=torch.ones(3))), ValueError, "pass reduction='sum'"
    ),
    # property
    "test data for a property": (lambda: ask(property=(X, Y)), TypeError, r"e.g. properties.mean_loss\(test_data"),
    "the name of a metric": (lambda: ask(property="accuracy"), TypeError, "property is a str: pass what is to be"),
    "a property that was not made": (
        lambda: ask(property=properties.mean_loss), TypeError, "the function mean_loss itself: call it with its data"
    ),
    "a property that gives a float": (
        lambda: ask(property=lambda model: model(X).sum().item()), TypeError, r"without .item\(\)"
    ),
    "accuracy by argmax": (
        lambda: ask(property=lambda model: (model(X).argmax(1) == Y).float().mean()), ValueError, "probabilities"
    ),
    "all outputs for a property": (
        lambda: ask(property=lambda model: model(X)), ValueError, r"shape \[120, 3\]: return one number or a vector"
    ),
    "labels from 1": (
        lambda: ask(property=properties.soft_accuracy((X, Y + 1))), ValueError, "no class of the model, first 3"
    ),
    # settings
    "a strategy that does not exist": (lambda: ask(strategy="fast"), ValueError, "'fast' is not one of 'auto'"),
    "an empty batch": (lambda: ask(batch_size=0), ValueError, "batch_size=0: pass a positive number"),
    "weights without checkpoints": (lambda: ask(weights=[1.0]), ValueError, "without checkpoints or models: pass both"),
    "models of another kind": (lambda: ask(models=[nn.Linear(2, 3)]), ValueError, r"models\[0\] differs from"),
    "states for models": (lambda: ask(models=[{}]), TypeError, r"models\[0\] is a dict"),
    "models and checkpoints": (lambda: ask(models=[MODEL], checkpoints=[{}]), ValueError, "both given"),
    # the result
    "a misspelt group": (lambda: RESULT["nort"], KeyError, "there is no group 'nort'; did you mean 'north'"),
    "a misspelt property": (lambda: RESULT["mean_los"], KeyError, "did you mean 'mean_loss'"),
    "who hurts, of an unknown direction": (
        lambda: ask(property=lambda model: model(X).sum()).harmful(), ValueError, "properties.named.*higher_is_better="
    ),
    "scores that may lie on either side": (
        lambda: Attribution.of(torch.eye(3), TABLE["clinic"]), ValueError, "test_axis=0 for .* test_axis=1 for"
    ),
    "scores of dattri or TRAK": (
        lambda: Attribution.of(torch.ones(3, 2), TABLE["clinic"]), ValueError, "positive='falls' for TRAKer"
    ),
    "scores of points for groups": (
        lambda: Attribution.of(torch.ones(2, N), TABLE["clinic"]), ValueError, r"pass \[m, 3\] or \[3, m\] for 3 groups"
    ),
    "scores of groups turned": (
        lambda: Groups(TABLE["clinic"]).spread(torch.ones(3, 2)), ValueError, "Pass its transpose"
    ),
    "a file of something else": (lambda: Attribution.load(Path(__file__)), ValueError, "is no saved Attribution"),
    # data, once more
    "targets that are text": (lambda: ask(data=(X, TABLE["clinic"].to_numpy())), TypeError, "not made of numbers"),
    "class numbers as floats": (lambda: ask(data=(X, Y.float())), TypeError, "float32 numbers of classes: pass y.long"),
    "class numbers in a column": (lambda: ask(data=(X, Y[:, None])), ValueError, r"shape \[.*, 1\].*: pass y\[:, 0\]"),
    "a class too many": (lambda: ask(data=(X, Y + 5)), ValueError, "class 7, and the model has outputs for 3, 0 … 2"),
    "inputs of another width": (lambda: ask(data=(X[:, :3], Y)), ValueError, r"cannot run on inputs of shape \[.*3\]"),
    "lists for tensors": (lambda: ask(data=Listed()), TypeError, "the data gives a list .* torch.tensor"),
    "names the model does not know": (
        lambda: ask(data={"age": X, "y": Y}), TypeError, "given as keywords, age=.* dict whose keys are arguments"
    ),
    "two inputs for one": (lambda: ask(data=(X, X, Y)), TypeError, "2 inputs, .* and a target"),
    "missing values in a tensor": (
        lambda: ask(data=(X.where(X < 1, torch.nan), Y)), ValueError, "the loss of point .* of the training data is nan"
    ),
    "a grouped table": (lambda: ask(groups=TABLE.groupby("clinic")), TypeError, "DataFrameGroupBy.*one label per"),
    # model and loss, once more
    "one output for classes": (
        lambda: ask(model=nn.Linear(4, 1), data=(X, 0 * Y)), ValueError, "one output.* use nn.BCEWithLogitsLoss"
    ),
    "probabilities from no sigmoid": (
        lambda: ask(model=nn.Linear(4, 1), loss_fn=nn.BCELoss(), data=(X, Y // 2), property=first_weight), ValueError,
        r"BCELoss takes probabilities.* pass nn.BCEWithLogitsLoss\(\), and the model without a sigmoid",
    ),
    "a loss of three arguments": (
        lambda: ask(loss_fn=lambda output, target, weight: output.sum()), TypeError, r"loss_fn\(output, target\)"
    ),
    "a model for checkpoints": (lambda: ask(checkpoints=MODEL), TypeError, "checkpoints is a Sequential: .* models="),
    "models for checkpoints": (lambda: ask(checkpoints=[MODEL]), TypeError, r"checkpoints\[0\] is a Sequential: "),
    "a checkpoint that is not there": (
        lambda: ask(checkpoints=["nowhere.pt"]), FileNotFoundError, r"checkpoints\[0\] is 'nowhere.pt', which is no"
    ),
    "a checkpoint of another model": (
        lambda: ask(checkpoints=[nn.Linear(2, 2).state_dict()]), ValueError, r"checkpoints\[0\] does not fit the model"
    ),
    "one model for several": (lambda: ask(models=MODEL), TypeError, r"models is a Sequential: pass a list, \[model\]"),
    # property, once more
    "a list of properties": (
        lambda: ask(property=[properties.mean_loss((X, Y), LOSS)] * 2), TypeError, "for several, properties.stack"
    ),
    "a property of nothing": (lambda: ask(property=lambda: 1), TypeError, r"called as property\(model\)"),
    "a property of more than the model": (
        lambda: ask(property=lambda model, x: model(x)), TypeError, r"called as property\(model\)"
    ),
    "accuracy without targets": (
        lambda: ask(property=properties.soft_accuracy(X)), ValueError, r"gives no targets: pass \(x, y\)"
    ),
    "test data after the loss": (
        lambda: properties.mean_loss(LOSS, (X, Y)), TypeError, r"loss_fn is a tuple: pass a callable loss_fn"
    ),
    # settings, once more
    "a method that does not exist": (lambda: ask(method="shapley"), ValueError, "'shapley' is not one of 'tracin'"),
    "damping in words": (lambda: ask(damping="small"), TypeError, "damping='small': pass a number from 0 on"),
    "half a batch": (lambda: ask(batch_size=2.5), TypeError, "batch_size=2.5: pass a whole number"),
    "a batch in words": (lambda: ask(batch_size="32"), TypeError, "batch_size='32': pass a whole number"),
    "memory in words": (lambda: ask(memory_budget="1 GB"), TypeError, "memory_budget='1 GB': pass a whole number"),
    "a folder by number": (lambda: ask(save_dir=3), TypeError, "save_dir is a int: pass the path of a folder"),
    "a tag by number": (lambda: ask(save_dir="x", tag=3), TypeError, "tag is a int: pass text"),
    "a parameter by number": (lambda: ask(parameters=3), TypeError, "parameters holds a int: pass names"),
    "one weight for all": (
        lambda: ask(checkpoints=[MODEL.state_dict()], weights=1.0), TypeError, "weights is a float: pass a list"
    ),
    "weights in words": (
        lambda: ask(checkpoints=[MODEL.state_dict()], weights=["all"]), TypeError, r"weights\[0\]='all': pass a number"
    ),
    "epochs in words": (lambda: Recipe("3", 0.1, 4), TypeError, "epochs='3': pass a whole number"),
    "confidence for intervals": (lambda: ask(intervals=0.95), ValueError, "intervals=0.95 is not one of True, False"),
    "a bootstrap of one function": (
        lambda: ask(property=lambda model: model(X).sum(), intervals=True), TypeError, "whose test points cannot be"
    ),
    # the result, once more
    "a count in words": (lambda: RESULT.top("3"), TypeError, "count='3': pass a whole number"),
    "a group by a wrong id": (lambda: RESULT.some([7]), IndexError, "ids holds 7: there are 3 groups, 0 … 2"),
    "a group by a number it has not": (lambda: RESULT.of_group(3), KeyError, "no group 3; the first ones are 'east', "),
    "text for scores": (lambda: Attribution.of("abc", TABLE["clinic"]), TypeError, "scores is a str: pass a tensor"),
    "a k= result for scores": (
        lambda: Attribution.of((torch.ones(2, 3), torch.ones(2, 3)), TABLE["clinic"]), TypeError,
        "scores is a tuple: .* groups.names_of",
    ),
    "a direction in words": (
        lambda: Attribution.of(torch.ones(1, 3), TABLE["clinic"], "loss", "lower"), TypeError,
        "higher_is_better='lower': pass True, False or None",
    ),
    "a name for the facts of a method": (
        lambda: RESULT.replace(method="tracin"), TypeError, r"method is a str: pass MethodFacts\(name, unit\)"
    ),
    "a unit of one's own": (
        lambda: RESULT.replace(method=MethodFacts("mine", "metres")), ValueError, "unit='metres' of the method is not"  # type: ignore[arg-type]
    ),
    "a folder to save to": (lambda: RESULT.save("."), IsADirectoryError, "is a folder: pass the path of a file"),
    "below a file": (lambda: RESULT.save(f"{__file__}/result.ggda"), NotADirectoryError, "lies below a file"),
    "further below a file": (lambda: RESULT.save(f"{__file__}/a/result.ggda"), NotADirectoryError, "lies below a file"),
    "a page below a file": (lambda: RESULT.to_html(f"{__file__}/page.html"), NotADirectoryError, "lies below a file"),
    "a folder for the page": (lambda: RESULT.to_html("."), IsADirectoryError, "is a folder: pass the path of a file"),
    "losses of examples for retraining": (
        lambda: leave(make_model=lambda: copy.deepcopy(MODEL), loss_fn=nn.CrossEntropyLoss(reduction="none")),
        ValueError, r"loss_fn returned shape \[\d+\] for a batch.*let it return their mean",
    ),
    "a number for retraining": (lambda: RESULT.verify(3), TypeError, "retrain is a int: pass a function"),
    "a column name for issues": (
        lambda: find_label_issues(MODEL, LOSS, (X, Y), groups="clinic"), ValueError, "one value: pass one label"
    ),
    # tables and types
    "columns of the test table in another order": (
        lambda: ask(data=(TABLE[FEATURES], TABLE["y"]), property=of_table(FEATURES[::-1])), ValueError,
        r"of the property has its columns in another order than .*\[\['age', 'dose', 'weight', 'height'\]\]",
    ),
    "another column in the test table": (
        lambda: ask(data=(TABLE[FEATURES], TABLE["y"]), property=properties.stack(of_table([*FEATURES[:3], "year"]))),
        ValueError, "has a column 'year', and the training data has 'height' there: pass the same columns",
    ),
    "columns of the clean table in another order": (
        lambda: find_label_issues(
            MODEL, LOSS, (TABLE[FEATURES], TABLE["y"]), validation=(TABLE[FEATURES[::-1]], TABLE["y"])
        ), ValueError, "validation has its columns in another order than the training data",
    ),
    "classes as True and False": (
        lambda: ask(data=(TABLE[FEATURES], TABLE["y"] > 0)), TypeError, r"targets are bool.*: pass y.long\(\)"
    ),
    "classes as short numbers": (lambda: ask(data=(X, Y.int())), TypeError, r"targets are int32.*: pass y.long\(\)"),
    "classes one-hot, as whole numbers": (
        lambda: ask(data=(X, nn.functional.one_hot(Y))), TypeError, r"one-hot.*: pass y.argmax\(1\)"
    ),
    "a class below 0": (lambda: ask(data=(X, Y - 1)), ValueError, "the targets hold class -1, and the model has"),
    "inputs as whole numbers": (lambda: ask(data=((9 * X).long(), Y)), TypeError, r"int64.*x.float\(\)"),
    "images as bytes": (lambda: ask(data=((9 * X).byte(), Y)), TypeError, r"uint8.*x.float\(\)"),
    "inputs of half precision": (lambda: ask(data=(X.half(), Y)), TypeError, r"float16.*x.float\(\)"),
    "masks for groups": (
        lambda: ask(groups={"a": Y == 0, "b": Y != 0}), TypeError, r"not bool: .* np.flatnonzero\(mask\)"
    ),
    "labels that can be read once": (
        lambda: ask(groups=iter(TABLE["clinic"])), TypeError, r"pass list\(groups\)"
    ),
    "a rule for groups": (lambda: ask(groups=lambda i: i % 3), TypeError, r"or Groups.by_rule\(n, k, rule\)"),
    "a list to be stacked": (
        lambda: properties.stack([properties.mean_loss((X, Y), LOSS)]), TypeError, r"a list: .* stack\(a, b\)"
    ),
    "a frame of scores": (
        lambda: Attribution.of(pd.DataFrame([[1.0, 2.0, 3.0]]), TABLE["clinic"]), TypeError, r"pass scores.to_numpy\(\)"
    ),
    "scores that are text": (lambda: Attribution([["a", "b", "c"]], RESULT.groups), TypeError, "scores is a list: "),
    "complex scores": (lambda: Attribution(torch.ones(1, 3) * 1j, RESULT.groups), TypeError, "pass real numbers"),
    "an interval upside down": (
        lambda: RESULT.replace(low=RESULT.scores + 1, high=RESULT.scores), ValueError, "low is above high"
    ),
    "a year that is no row": (
        lambda: Attribution([[1.0, 2.0]], Groups([2023, 2024]))[2023], IndexError, r"result.of_group\(2023\)"
    ),
    "text for how many to draw": (lambda: RESULT.plot.bars(most="3"), TypeError, "most='3': pass a whole number"),
    "examples for images": (
        lambda: RESULT.to_html("page.html", images=TensorDataset(torch.ones(N, 8, 8), Y)), TypeError,
        "images holds a tuple: pass the images alone",
    ),
    "a loader for images": (
        lambda: RESULT.to_html("page.html", images=DataLoader(torch.ones(N, 8, 8))), TypeError, "images is a DataLoader"
    ),
    "two groups of one name": (lambda: Groups([0, 1], names=["a", "a"]), ValueError, "names holds 'a' twice"),
    "columns of another order for what-if": (
        lambda: WhatIf(MODEL, LOSS, (TABLE[FEATURES], TABLE["y"]), TABLE["clinic"])
        .without("north").change(of_table(FEATURES[::-1])), ValueError, "its columns in another order",
    ),
    # training again
    "tables to train on": (
        lambda: train_one(MODEL, LOSS, (TABLE[FEATURES], TABLE["y"]), RECIPE, seed=0), TypeError,
        r"data holds a DataFrame: pass tensors, e.g. torch.tensor\(df.to_numpy\(\)",
    ),
    "a model where a new one is made": (lambda: initial_model(MODEL, 0), TypeError, "make_model is a Sequential: "),
    "a function that makes no model": (lambda: initial_model(dict, 0), TypeError, "make_model returned a dict"),
    "a measure that does not exist": (
        lambda: Retrainer(lambda: MODEL, LOSS, (X, Y), (X, Y), RECIPE, measure="f1"), ValueError,
        "measure='f1' is not one of 'accuracy', 'loss'",
    ),
    "a group to leave out by a misspelt name": (
        lambda: leave(group_ids=["nort"]), KeyError, "there is no group 'nort'; did you mean 'north'"
    ),
    "how many seeds": (lambda: leave(seeds=3), TypeError, r"seeds=3: pass the seeds themselves, e.g. range\(3\)"),
    "settings for a recipe": (lambda: leave(recipe={"epochs": 1}), TypeError, "recipe is a dict: pass a .*Recipe"),
    "retraining that gives text": (lambda: RESULT.verify(lambda subsets: ["good"] * 4), TypeError, "retrain returned"),
    "a strategy that forms no gradients, with a curvature": (
        lambda: ask(strategy="ghost"), ValueError, r"used here.*Use 'auto', 'segmented', 'backward', 'persample'\.$"
    ),
    "data of another dtype than a model in bfloat16": (
        lambda: ask(model=copy.deepcopy(MODEL).bfloat16()), TypeError, r"bfloat16: pass x\.to\(torch\.bfloat16\)"
    ),
    "a penalty in the loss": (
        lambda: ask(loss_fn=lambda out, y: LOSS(out, y) + MODEL[0].weight.square().sum()),
        ValueError, "Leave the penalty out of the loss, and pass its strength as damping= of attribute",
    ),
    "a recipe of no epoch": (lambda: Recipe(0, 0.1, 32), ValueError, r"epochs=0: pass a positive number\.$"),
    "batches of no point": (lambda: Recipe(1, 0.1, 0), ValueError, r"batch_size=0: pass a positive number\.$"),
    "a folder for a file of scores": (lambda: Attribution.load("tests"), ValueError, "tests is a folder: pass a file"),
    "learning rates that are not finite": (
        lambda: TrainingSteps([0.1, float("nan")]), ValueError, "learning_rates holds nan: pass finite numbers"
    ),
    "negative learning rates": (lambda: TrainingSteps(-0.1), ValueError, r"learning_rates holds -0\.1: pass finite"),
    "a batch size as text": (lambda: Groups([0, 1]).batch_sampler("3"), TypeError, "batch_size='3': pass a whole"),
}  # fmt: skip


@pytest.mark.parametrize("method", ["influence", "tracin"])
def test_a_refused_call_leaves_batch_statistics_as_they_were(method: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)).train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"the model is in train mode.*call model\.eval\(\) first"):
        ask(model=model, property=lambda model: model(X).square().mean(), method=method)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake: str) -> None:
    call, kind, words = MISTAKES[mistake]
    with pytest.raises(kind, match=words):
        call()


def test_the_call_itself_is_right() -> None:
    assert ask().names == ("east", "north", "west")
    assert len(MISTAKES) >= 30
