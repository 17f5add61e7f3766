"""Inputs people have: tables, float64 arrays, lists of dicts, loaders of small batches, models with their own loss."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ggda_ext import GroupGradients, Groups, PointGradients, WhatIf, attribute, properties
from ggda_ext.grouping import GradKMeansGroups

LOSS, N, FEATURES = nn.CrossEntropyLoss(), 40, ["a", "b", "c"]


def table(seed: int = 0, n: int = N) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(random.normal(size=(n, 3)), columns=FEATURES, index=pd.Index(random.permutation(n) + 500))
    frame["y"], frame["clinic"] = random.integers(0, 2, n), random.permutation(np.resize(["x", "y", "z"], n))
    frame["year"] = 2020 + random.integers(0, 2, n)
    return frame


def tensors(frame: pd.DataFrame) -> tuple[Tensor, Tensor]:
    return torch.tensor(frame[FEATURES].to_numpy()).float(), torch.tensor(frame["y"].to_numpy())


def network(width: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 2))


def truth(frame: pd.DataFrame, labels: Any) -> Tensor:
    """Scores from plain tensors and a plain list of labels."""
    data = tensors(frame)
    return attribute(network(), LOSS, data, list(labels), properties.mean_loss(data, LOSS)).scores


# ---- tables


def test_a_table_is_data_and_its_columns_are_groups() -> None:
    frame = table()
    data = frame[FEATURES], frame["y"]
    goal = properties.mean_loss(data, LOSS)
    found = attribute(network(), LOSS, data, "clinic", goal, frame=frame)
    torch.testing.assert_close(found, truth(frame, frame["clinic"]))
    assert found.names == ("x", "y", "z")
    both = attribute(network(), LOSS, data, ["clinic", "year"], goal, frame=frame)
    pairs = frame.groupby(["clinic", "year"]).size()
    assert both.names == tuple(pairs.index)
    assert both.sizes.tolist() == pairs.tolist()
    whole = frame.groupby("clinic").groups["y"]
    assert float(both["y", 2020]) + float(both["y", 2021]) == pytest.approx(float(found["y"]), rel=1e-4)
    assert len(whole) == found.sizes[1]


def test_a_level_of_the_index_names_groups_as_a_column_does() -> None:
    frame = table()
    levels = frame.set_index(["clinic", "year"])
    data = levels[FEATURES], levels["y"]
    goal = properties.mean_loss(tensors(frame), LOSS)
    found = attribute(network(), LOSS, data, "clinic", goal, frame=levels)
    torch.testing.assert_close(found, truth(frame, frame["clinic"]))
    assert attribute(network(), LOSS, data, ["year", "clinic"], goal, frame=levels).names[0] == (2020, "x")


def test_types_of_pandas_own_and_of_several_kinds_are_numbers() -> None:
    frame = table()
    own = frame[FEATURES].assign(c=frame["c"] > 0), frame["y"].astype("Int64")
    plain = torch.tensor(own[0].to_numpy().astype(np.float32)), torch.tensor(frame["y"].to_numpy())
    expected = attribute(network(), LOSS, plain, frame["clinic"].tolist(), properties.mean_loss(plain, LOSS))
    found = attribute(network(), LOSS, own, frame["clinic"], properties.mean_loss(own, LOSS))
    torch.testing.assert_close(found.scores, expected.scores)
    sparse = own[0].assign(a=own[0]["a"].astype(pd.SparseDtype(float))), own[1]
    again = attribute(network(), LOSS, sparse, frame["clinic"], properties.mean_loss(own, LOSS))
    torch.testing.assert_close(again.scores, expected.scores)
    asked = plain[0].clone().requires_grad_(), plain[1]  # of inputs that were looked at before
    kept = attribute(network(), LOSS, asked, frame["clinic"].tolist(), properties.mean_loss(asked, LOSS))
    torch.testing.assert_close(kept.scores, expected.scores)
    assert not kept.scores.requires_grad


@pytest.mark.parametrize("what", ["groups", "target", "frame"])
def test_shuffled_columns_are_put_back_into_the_order_of_their_table(what: str) -> None:
    frame = table()
    mixed = frame.sample(frac=1, random_state=1)
    assert list(mixed.index) != list(frame.index)
    goal = properties.mean_loss(tensors(frame), LOSS)
    data = frame[FEATURES], mixed["y"] if what == "target" else frame["y"]
    given: dict[str, Any] = {"groups": mixed["clinic"] if what == "groups" else frame["clinic"]}
    if what == "frame":
        given = {"groups": "clinic", "frame": mixed}
    found = attribute(network(), LOSS, data, property=goal, **given)
    torch.testing.assert_close(found, truth(frame, frame["clinic"]))


def test_columns_that_cannot_be_matched_are_refused() -> None:
    frame = table()
    data = frame[FEATURES], frame["y"]
    goal = properties.mean_loss(data, LOSS)
    for other in (frame["clinic"].reset_index(drop=True), frame["clinic"].iloc[:-1]):
        with pytest.raises(ValueError, match="groups has another index than the training data"):
            attribute(network(), LOSS, data, other, goal)
    doubled = frame["clinic"].set_axis([*frame.index[:-1], frame.index[0]])
    with pytest.raises(ValueError, match="another index"):
        attribute(network(), LOSS, data, doubled, goal)
    with pytest.raises(ValueError, match=r"part 1 of the training data has another index"):
        attribute(network(), LOSS, (frame[FEATURES], frame["y"].reset_index(drop=True)), frame["clinic"], goal)


def test_tensors_have_no_index_so_columns_count_by_position() -> None:
    frame = table()
    data = tensors(frame)
    found = attribute(network(), LOSS, data, frame["clinic"], properties.mean_loss(data, LOSS))
    torch.testing.assert_close(found, truth(frame, frame["clinic"]))


# ---- float64 of NumPy and pandas


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["numpy", "pandas", "dict"])
def test_float64_arrays_come_in_the_dtype_of_the_model(kind: str, dtype: torch.dtype) -> None:
    frame = table()
    x, y = frame[FEATURES].to_numpy(), frame["y"].to_numpy()
    data: Any = {"numpy": (x, y), "pandas": (frame[FEATURES], frame["y"]), "dict": {"input": x, "y": y}}[kind]
    model = network().to(dtype)
    plain = torch.tensor(x, dtype=dtype), torch.tensor(y)
    expected = attribute(model, LOSS, plain, frame["clinic"].tolist(), properties.mean_loss(plain, LOSS))
    found = attribute(model, LOSS, data, frame["clinic"].tolist(), properties.mean_loss(data, LOSS))
    torch.testing.assert_close(found.scores, expected.scores)
    said = "were given to the model as float32" in str(found)
    assert said == (dtype == torch.float32)


@pytest.mark.parametrize("other", ["int64", "bool", "int8", "float64", "Float64", "boolean"])
def test_a_table_of_several_kinds_of_numbers_comes_in_the_dtype_of_the_model(other: str) -> None:
    frame = table()[FEATURES].astype("float32")
    frame[FEATURES[0]] = (frame[FEATURES[0]] > 0).astype(other)
    y, groups = table()["y"], table()["clinic"]
    plain = torch.tensor(frame.astype("float32").to_numpy()), torch.tensor(y.to_numpy())
    expected, found = (
        attribute(network(), LOSS, data, groups.tolist(), properties.mean_loss(data, LOSS), method="tracin")
        for data in (plain, (frame, y))
    )
    torch.testing.assert_close(found.scores, expected.scores)


def test_arrays_that_may_not_be_written_to_are_taken_in_silence() -> None:
    x, y = table()[FEATURES].to_numpy().copy(), table()["y"].to_numpy().copy()
    for array in (x, y):
        array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attribute(network(), LOSS, (x, y), np.arange(N) % 3, properties.mean_loss((x, y), LOSS), method="tracin")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arrays_of_any_strides_and_byte_order_are_their_numbers(dtype: str) -> None:
    x, y = table()[FEATURES].to_numpy().astype(dtype), table()["y"].to_numpy()
    packed = np.zeros(x.shape, [("flag", "i1"), ("value", dtype)])
    packed["value"] = x
    score = partial(attribute, network(), LOSS, groups=np.arange(N) % 3, method="tracin")
    expected = score(data=(x, y), property=properties.mean_loss((x, y), LOSS)).scores
    for same in (x[::-1].copy()[::-1], x.astype(x.dtype.newbyteorder(">")), packed["value"], np.ma.masked_array(x)):
        other = same, y.astype(">i8")
        torch.testing.assert_close(score(data=other, property=properties.mean_loss(other, LOSS)).scores, expected)


def test_float64_arrays_go_through_every_door() -> None:
    frame = table()
    x, y = frame[FEATURES].to_numpy(), frame["y"].to_numpy()
    points = PointGradients(LOSS, (x, y))
    provider = GroupGradients(network(), LOSS, (x, y), frame["clinic"].tolist())
    assert provider.scores(points).shape == (N, 3)
    rise = WhatIf(network(), LOSS, (x, y), frame["clinic"].tolist(), weight_decay=0.1).leave_group_out(
        properties.mean_loss((x, y), LOSS)
    )
    assert rise.attribution().names == ("x", "y", "z")
    assert GradKMeansGroups(network(), LOSS, group_size=10, random_state=0).fit_groups((x, y)).n == N


# ---- examples as dicts


def test_a_list_of_dicts_with_a_collate_function() -> None:
    frame = table()
    x, y = tensors(frame)
    examples = [{"features": a.tolist(), "label": int(b)} for a, b in zip(x, y, strict=True)]

    def collate(some: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        return torch.tensor([one["features"] for one in some]), torch.tensor([one["label"] for one in some])

    loader = DataLoader(examples, batch_size=8, collate_fn=collate)  # type: ignore[arg-type]
    found = attribute(network(), LOSS, loader, frame["clinic"].tolist(), properties.mean_loss(loader, LOSS))
    torch.testing.assert_close(found.scores, truth(frame, frame["clinic"]))
    by_default = DataLoader([{"input": a, "label": b} for a, b in zip(x, y, strict=True)], batch_size=8)  # type: ignore[arg-type]
    found = attribute(network(), LOSS, by_default, frame["clinic"].tolist(), properties.mean_loss(by_default, LOSS))
    torch.testing.assert_close(found.scores, truth(frame, frame["clinic"]))


# ---- the batch size of a loader


class Counting(nn.Module):
    """Remembers the largest batch it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.largest = network(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.largest = max(self.largest, len(x))
        return self.inner(x)


@pytest.mark.parametrize("kind", ["mean", "points", "outputs"])
@pytest.mark.parametrize("strategy", ["auto", "segmented", "backward"])
def test_no_batch_is_larger_than_those_of_the_loader(kind: str, strategy: str) -> None:
    frame = table()
    loader = DataLoader(TensorDataset(*tensors(frame)), batch_size=4)
    goal = {
        "mean": properties.mean_loss(loader, LOSS), "points": properties.point_losses(loader, LOSS),
        "outputs": properties.soft_f1(loader),
    }[kind]  # fmt: skip
    model = Counting()
    attribute(model, LOSS, loader, frame["clinic"].tolist(), goal, strategy=strategy, method="tracin")
    assert model.largest <= 4
    attribute(model, LOSS, loader, frame["clinic"].tolist(), goal, strategy=strategy, batch_size=20, method="tracin")
    assert 4 < model.largest <= 20
    plain = Counting()
    attribute(
        plain,
        LOSS,
        tensors(frame),
        frame["clinic"].tolist(),
        properties.mean_loss(tensors(frame), LOSS),
        method="tracin",
    )
    assert plain.largest > 4


def test_the_batch_size_of_a_property_goes_before_its_loader() -> None:
    frame, model = table(), Counting()
    loader = DataLoader(TensorDataset(*tensors(frame)), batch_size=4)
    properties.mean_loss(loader, LOSS, batch_size=10)(model)
    assert model.largest == 10


# ---- a model with its own loss


class Own(nn.Module):
    """A model that is given inputs and labels and returns its own loss, in one of the usual forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inner, self.form = network(), form

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        outputs = self.inner(x)
        loss = None if labels is None else LOSS(outputs, labels)
        if self.form == "number":
            return loss
        return {"loss": loss, "logits": outputs} if self.form == "dict" else Answer(loss, outputs)


class Answer:
    def __init__(self, loss: Tensor | None, logits: Tensor) -> None:
        self.loss, self.logits = loss, logits


@pytest.mark.parametrize("form", ["number", "dict", "object"])
@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_without_a_loss_function_the_model_gives_the_loss(form: str, kind: str) -> None:
    frame = table(n=12)
    x, y = tensors(frame)
    data: Any = (x, y) if kind == "tuple" else {"x": x, "labels": y}
    model = Own(form)
    found = attribute(model, None, data, frame["clinic"].tolist(), properties.mean_loss(data, None), method="tracin")
    plain = attribute(
        model.inner, LOSS, (x, y), frame["clinic"].tolist(), properties.mean_loss((x, y), LOSS), method="tracin"
    )
    torch.testing.assert_close(found.scores, plain.scores)


@pytest.mark.parametrize("kind", ["tuple", "tensor"])
def test_outputs_are_never_taken_for_a_loss(kind: str) -> None:
    x, y = tensors(table(n=12))
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))  # [b] outputs could pass for losses
    for data in ((x, y), x):
        with pytest.raises(TypeError, match="loss_fn is None, which stands for the loss that the model itself returns"):
            attribute(model, None, data, None, lambda model: model(x).sum())
    with pytest.raises(TypeError, match="loss_fn is None"):
        GradKMeansGroups(model, None, group_size=4).fit_groups((x, y))
    with pytest.raises(TypeError, match="loss_fn is None"):
        Groups.singletons(12).summary(model, None, (x, y))


# ---- progress


@pytest.mark.parametrize(("show", "patience", "expected"), [
    (None, 0.0, True), (None, 60.0, False), (True, 60.0, True), (False, 0.0, False),
])  # fmt: skip
def test_progress_appears_when_a_pass_takes_long(
    show: bool | None, patience: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ggda_ext.sharing.PATIENCE", patience)
    data, errors = tensors(table()), io.StringIO()
    with redirect_stderr(errors):
        attribute(network(), LOSS, data, None, properties.mean_loss(data, LOSS), show_progress=show, method="tracin")
    assert ("point" in errors.getvalue()) == expected
