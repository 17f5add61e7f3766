"""`Attribution`: names stand by their own numbers, one sign everywhere, and it is still the tensor that it was."""

from __future__ import annotations

import copy
import datetime
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from cases import descend
from torch import Tensor, nn

from ggda_ext import Attribution, Groups, MethodFacts, WhatIf, attribute, properties
from ggda_ext.counterfactual.leave_group_out import LeaveGroupOut, leave_group_out
from ggda_ext.results.sentences import answers
from ggda_ext.training import Recipe

LOSS = nn.CrossEntropyLoss()
CLINICS = np.array(["west", "north", "east", "south", "harbour", "airport", "centre"])


def patients(n: int = 210, seed: int = 0) -> pd.DataFrame:
    """A table whose clinics are in no order; the labels of one of them are wrong."""
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(random.normal(size=(n, 3)), columns=["a", "b", "c"])
    frame["clinic"] = random.permutation(np.resize(CLINICS, n))
    frame["year"] = 2020 + random.integers(0, 2, n)
    frame["y"] = (frame["a"] + 0.3 * random.normal(size=n) > 0).astype(int)
    wrong = frame["clinic"] == "harbour"
    frame.loc[wrong, "y"] = 1 - frame.loc[wrong, "y"]
    return frame


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def tensors(frame: pd.DataFrame) -> tuple[Tensor, Tensor]:
    x = torch.tensor(frame[["a", "b", "c"]].to_numpy(), dtype=torch.float32)
    return x, torch.tensor(frame["y"].to_numpy())


def small(**changes: Any) -> Attribution:
    given: dict[str, Any] = {
        "scores": torch.tensor([[0.5, -2.0, 0.0, 1.0], [-1.0, 3.0, 0.25, 0.0]]),
        "groups": Groups(["web", "books", "forum", "news", "web"]),
        "properties": ["loss", "accuracy"],
        "higher_is_better": [False, True],
    }
    return Attribution(**given | changes)


# ---- names


def test_every_name_has_the_score_of_its_own_members() -> None:
    frame, model = patients(), network()
    x, y = tensors(frame)
    goal = properties.mean_loss((x[:50], y[:50]), LOSS)
    result = attribute(model, LOSS, (x, y), frame["clinic"], goal, method="tracin")
    in_order_of_appearance = frame["clinic"].unique()
    assert list(result.names) != list(in_order_of_appearance)  # the trap: zipped with these, names are wrong
    parameters = list(model.parameters())
    slope = torch.autograd.grad(goal(model), parameters)
    for name in in_order_of_appearance:
        members = np.flatnonzero(frame["clinic"] == name)
        own = torch.autograd.grad(nn.CrossEntropyLoss(reduction="sum")(model(x[members]), y[members]), parameters)
        expected = sum(float((a * b).sum()) for a, b in zip(slope, own, strict=True))
        assert float(result[name]) == pytest.approx(expected, rel=1e-4)
        assert result.groups.members(name).tolist() == members.tolist()
        assert result.sizes[result.names.index(name)] == len(members)
    table = result.to_frame().set_index("group")
    assert {name: table.loc[name, "score"] for name in CLINICS} == {name: float(result[name]) for name in CLINICS}


def test_the_clinic_with_wrong_labels_is_found_in_a_few_lines() -> None:
    train, test = patients(seed=0), patients(seed=1)
    test = test[test["clinic"] != "harbour"]
    model, features = network(), ["a", "b", "c"]
    descend(model, LOSS, tensors(train), 60, 0.05)
    goal = properties.mean_loss((test[features], test["y"]), LOSS)
    result = attribute(model, LOSS, (train[features], train["y"]), "clinic", goal, frame=train)
    assert result.harmful().names[0] == "harbour"
    assert str(result.harmful()).splitlines()[3].split()[0] == "harbour"


@pytest.mark.parametrize("name", ["web", "books", "forum", "news"])
def test_selections_keep_what_belongs_to_a_group(name: str) -> None:
    members = torch.arange(10.0).reshape(2, 5)
    result = small(
        low=torch.full((2, 4), -9.0) + torch.arange(4), high=torch.full((2, 4), 9.0) + torch.arange(4),
        warnings={"forum": ["small"]}, member_scores=members,
    )  # fmt: skip
    at = result.names.index(name)
    for part in (result[name], result.ranked(), result.top(4, by="accuracy"), result[[name]]):
        here = part.names.index(name)
        assert torch.equal(part.scores[:, here], result.scores[:, at])
        assert part.low is not None
        assert torch.equal(part.low[:, here], result.low[:, at])
        assert part.groups.members(name).tolist() == result.groups.members(name).tolist()
        assert part.warnings.get(name) == result.warnings.get(name)
        assert part.member_scores is not None
        assert torch.equal(part.member_scores, members)


def test_brackets_take_names_of_groups_and_properties_and_refuse_what_is_both() -> None:
    result = small()
    assert float(result["accuracy", "web"]) == float(result["accuracy"]["web"]) == 0.0
    assert result["accuracy"].higher_is_better == (True,)
    assert [float(value) for value in result["web"].scores[:, 0]] == [1.0, 0.0]
    assert result["accuracy", ["web", "books"]].names == ("web", "books")
    assert result["accuracy", ["web", "books"]].properties == ("accuracy",)
    for key in ("acc", "zz", ("acc", "web"), ("zz", "yy")):
        with pytest.raises(KeyError, match=r"there is no group .*\. The properties are '.*', '.*'\."):
            result[key]
    both = small(properties=["web", "accuracy"])
    with pytest.raises(KeyError, match="a group and a property"):
        both["web"]
    assert both.of_group("web").shape == (2, 1)
    assert both.of_property("web").shape == (1, 4)


def test_one_name_and_one_direction_are_those_of_the_only_property() -> None:
    result = Attribution([[1.0, -1.0]], Groups([0, 1]), "loss", False)
    assert (result.properties, result.higher_is_better) == (("loss",), (False,))


def test_numbers_as_names_do_not_change_what_whole_numbers_mean() -> None:
    result = Attribution(torch.tensor([[1.0, 2.0, 3.0]]), Groups([7, 0, 9]))
    assert result[0].tolist() == [1.0, 2.0, 3.0]
    assert result[0, 1] == 2.0
    assert float(result.of_group(7)) == 2.0
    for name in (9, 2**63 + 5):  # the second is no index of a tensor at all
        large = Attribution(torch.tensor([[1.0, 2.0]]), np.array([name, name - 1], np.uint64))
        with pytest.raises(IndexError, match=rf"For the group called {name}: result\.of_group\({name}\)"):
            large[name]
        assert float(large.of_group(name)) == 2.0
    by_tuple = Attribution(torch.tensor([[1.0, 2.0]]), Groups([0, 1], names=[("a", 2020), ("b", 2021)]))
    assert float(by_tuple["b", 2021]) == 2.0


# ---- who helps, who hurts


@pytest.mark.parametrize(("direction", "rise", "fall"), [
    (False, "helps", "hurts"), (True, "hurts", "helps"), (None, "rises", "falls"),
])  # fmt: skip
def test_a_score_and_a_direction_say_who_helps(direction: bool | None, rise: str, fall: str) -> None:
    result = Attribution(torch.tensor([[2.0, -1.0, 0.0, float("nan")]]), Groups(list("abcd")), ["p"], [direction])
    assert result.effects() == (rise, fall, "none", "unknown")
    if direction is not None:
        assert (result.helpful().names, result.harmful().names)[direction] == ("a",)
        assert (result.harmful().names, result.helpful().names)[direction] == ("b",)


def test_an_interval_that_is_not_known_makes_no_group_sure() -> None:
    result = Attribution([[2.0, -1.0]], Groups(["a", "b"]), "loss", False, low=[[np.nan] * 2], high=[[np.nan] * 2])
    assert result.effects() == ("unclear", "unclear")
    assert result.helpful(sure=True).names == result.harmful(sure=True).names == ()


def test_an_interval_that_holds_zero_is_unclear() -> None:
    result = Attribution(
        torch.tensor([[2.0, -1.0]]), Groups(["a", "b"]), ["loss"], [False],
        low=[[1.0, -2.0]], high=[[3.0, 1.0]], interval="95 %, over test points",
    )  # fmt: skip
    assert result.effects() == ("helps", "unclear")
    assert result.harmful().names == ("b",)
    assert len(result.harmful(sure=True).names) == 0
    assert "interval: 95 %, over test points" in str(result)
    assert str(result.harmful(sure=True)).startswith("Attribution of loss (lower is better) to 0 groups")


READY = {
    "mean_loss": (lambda data: properties.mean_loss(data, LOSS), False),
    "loss": (lambda data: properties.point_losses(data, LOSS), False),
    "mean of loss": (lambda data: properties.point_losses(data, LOSS).mean(), False),
    "attacked_loss": (lambda data: properties.attacked_loss(data, LOSS, properties.fgsm(0.1)), False),
    "margin": (properties.margins, True),
    "correct_logit": (properties.correct_logits, True),
    "accuracy": (properties.accuracy, True),
    "f1": (properties.f1, True),
    "soft_accuracy": (properties.soft_accuracy, True),
    "soft_f1": (properties.soft_f1, True),
    "demographic_parity_gap": (lambda data: properties.demographic_parity_gap(data, np.arange(30) % 2), False),
    "equalized_odds_gap": (lambda data: properties.equalized_odds_gap(data, np.arange(30) % 3), False),
    "soft_calibration_error": (properties.soft_calibration_error, False),
    "contrast": (lambda data: properties.contrast(data, data, LOSS), None),
}


@pytest.mark.parametrize("name", READY)
def test_ready_properties_know_name_and_direction(name: str) -> None:
    make, direction = READY[name]
    goal = make(tensors(patients(30)))
    assert (goal.name, goal.higher_is_better) == (name, direction)
    own = properties.named(goal, "mine", higher_is_better=True)
    assert type(own) is type(goal)
    assert (own.name, own.higher_is_better, goal.name) == ("mine", True, name)


def test_directions_go_through_stacks_and_sums() -> None:
    data = tensors(patients(30))
    loss, accuracy = properties.mean_loss(data, LOSS), properties.soft_accuracy(data)
    own = properties.named(lambda model: model[0].weight.square().sum(), "size", higher_is_better=False)
    goal = properties.stack(accuracy, properties.margins((data[0][:3], data[1][:3])), own, lambda m: m[0].bias.sum())
    result = attribute(network(), LOSS, data, np.arange(30) % 3, goal)
    assert result.properties == ("soft_accuracy", "margin 0", "margin 1", "margin 2", "size", "property")
    assert result.higher_is_better == (True, True, True, True, False, None)
    assert properties.weighted_sum([loss, accuracy], [1, -2]).higher_is_better is False
    assert properties.weighted_sum([loss, accuracy], [1, 1]).higher_is_better is None
    assert properties.weighted_sum([loss, own], [1, 0.1]).higher_is_better is False


def test_names_that_stand_twice_are_told_apart_or_refused() -> None:
    data = tensors(patients(30))
    twice = properties.stack(properties.mean_loss(data, LOSS), properties.mean_loss(data, LOSS))
    assert attribute(network(), LOSS, data, None, twice).properties == ("mean_loss", "mean_loss (2)")
    with pytest.raises(ValueError, match="two properties are called 'loss'"):
        small(properties=["loss", "loss"])
    with pytest.raises(ValueError, match="names holds 'a' twice"):
        Groups([0, 1], names=["a", "a"])


# ---- still a tensor

AS_A_TENSOR = {
    "sum": lambda t: t.sum(), "T": lambda t: t.T, "row": lambda t: t[0], "entry": lambda t: t[0, 1],
    "slice": lambda t: t[:, 1:], "mask": lambda t: t[t > 0], "ids": lambda t: t[:, torch.tensor([2, 0])],
    "list": lambda t: t[:, [0, 1]], "new axis": lambda t: t[None], "plus": lambda t: 1 + t, "minus": lambda t: -t,
    "matmul": lambda t: t @ t.T, "compare": lambda t: t < 0.3, "argsort": lambda t: t.argsort(1),
    "clone": lambda t: t.clone(), "double": lambda t: t.double(), "cat": lambda t: torch.cat([t, t]),
    "stack": lambda t: torch.stack(list(t)), "where": lambda t: torch.where(t > 0, t, 0.0), "abs": torch.abs,
    "topk": lambda t: t.topk(2).values, "softmax": lambda t: torch.softmax(t, 1), "equal": lambda t: t == t,
}  # fmt: skip


@pytest.mark.parametrize("what", AS_A_TENSOR)
def test_what_pytorch_makes_of_it_is_what_it_makes_of_the_tensor(what: str) -> None:
    result = small()
    found, expected = AS_A_TENSOR[what](result), AS_A_TENSOR[what](result.scores.clone())
    assert type(found) is Tensor
    torch.testing.assert_close(found, expected)


def test_other_uses_of_a_tensor() -> None:
    result = small()
    plain = result.scores
    assert type(plain) is type(result.tensor) is Tensor
    assert plain.data_ptr() == result.data_ptr()
    torch.testing.assert_close(result, plain)
    torch.testing.assert_close(plain, result)
    assert torch.equal(result, plain)
    assert torch.allclose(result, plain)
    assert (result.shape, result.dtype, len(result), result.dim()) == (plain.shape, plain.dtype, 2, 2)
    np.testing.assert_array_equal(np.asarray(result), plain.numpy())
    np.testing.assert_array_equal(result.numpy(), plain.numpy())
    assert result.tolist() == plain.tolist()
    assert torch.equal(torch.as_tensor(result), plain)
    assert torch.equal(torch.tensor(np.array(result)), plain)
    assert result.to(torch.float64).dtype == torch.float64
    assert [row.tolist() for row in result] == plain.tolist()
    assert 3.0 in result
    assert "web" in result
    assert "wbe" not in result
    assert float(result["loss", "web"]) == 1.0
    assert f"{result['loss', 'web']:.2f}" == "1.00"
    assert f"{result}" == str(result)
    assert isinstance(result, Tensor)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.matmul(result, plain)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(result, plain + 1)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_copies_keep_names(again: Any) -> None:
    result = small(method=MethodFacts("tracin"), warnings={"web": ["large"]})
    found = again(result)
    assert_same(found, result)


def test_a_deep_copy_shares_no_numbers() -> None:
    result = small(low=torch.zeros(2, 4), high=torch.ones(2, 4), member_scores=torch.ones(2, 5))
    found = copy.deepcopy(result)
    for name in ("scores", "low", "high", "member_scores"):
        getattr(found, name).fill_(7)
        assert not (getattr(result, name) == 7).any(), name


def test_torch_load_reads_it_as_safely_as_a_tensor() -> None:
    file = io.BytesIO()
    torch.save({"scores": small()}, file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True)["scores"], small())


def test_a_folder_of_scores_stays_a_memory_map(tmp_path: Path) -> None:
    data = tensors(patients(30))
    goal = properties.mean_loss(data, LOSS)
    found = attribute(network(), LOSS, data, np.arange(30) % 3, goal, save_dir=tmp_path)
    plain = attribute(network(), LOSS, data, np.arange(30) % 3, goal)
    torch.testing.assert_close(found, plain.scores)
    assert found.names == plain.names


# ---- one file


def assert_same(found: Attribution, expected: Attribution) -> None:
    assert type(found) is Attribution
    assert torch.equal(found.scores, expected.scores)
    assert found.dtype == expected.dtype
    for name in ("low", "high", "member_scores"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    for name in ("names", "groups", "properties", "higher_is_better", "interval", "warnings", "notes", "method"):
        assert getattr(found, name) == getattr(expected, name), name


NAMES: dict[str, list[Any]] = {
    "texts": ["a", "ü\n<b>", ""],
    "numbers": [3, 1.5, True],
    "tuples": [("a", 2020), ("a", (None, 1)), ()],
    "dates": [datetime.date(2024, 2, 29), datetime.datetime(2024, 1, 1, 12, 30), np.datetime64("2024-03", "M")],
    "lengths of time": [datetime.timedelta(days=3), datetime.timedelta(hours=-1, microseconds=5), datetime.timedelta()],
    "none": [None, "x", 2],
}


@pytest.mark.parametrize("kind", NAMES)
def test_saved_and_loaded_is_the_same(kind: str, tmp_path: Path) -> None:
    groups = Groups([0, 1, 2, 1, -1], names=NAMES[kind], rest="drop")
    result = Attribution(
        torch.randn(2, 3, dtype=torch.float64), groups, ["p", "q"], [True, None], low=torch.zeros(2, 3),
        high=torch.ones(2, 3), interval="90 %", warnings={NAMES[kind][1]: ["large", "coherent"]}, notes=["a note"],
        method=MethodFacts("influence", "property", {"damping": 0.1, "solver": "cg", "steps": 3}, passes=2.5),
        member_scores=torch.randn(2, 5),
    )  # fmt: skip
    path = result.save(tmp_path / "below" / "result.ggda")
    found = Attribution.load(path)
    assert_same(found, result)
    assert [type(name) for name in found.names] == [type(name) for name in result.names]
    assert [file.name for file in path.parent.iterdir()] == ["result.ggda"]


def test_a_selection_and_an_empty_one_can_be_saved(tmp_path: Path) -> None:
    for part in (small().top(2), small(higher_is_better=[True, True]).per_member, small().some([])):
        assert_same(Attribution.load(part.save(tmp_path / "part")), part)


AS_USERS_HAVE_IT: dict[str, dict[str, Any]] = {
    "ends that are whole numbers": {"low": [[0, -3, 0, 1]] * 2, "high": np.ones((2, 4), int)},
    "members that are whole numbers": {"member_scores": np.ones((2, 5), int)},
    "properties by number": {"properties": [0, 1]},
    "directions of NumPy": {"higher_is_better": np.array([False, True])},
    "directions of torch": {"higher_is_better": torch.tensor([False, True])},
    "directions as 0 and 1": {"higher_is_better": [0, 1]},
    "settings of NumPy": {"method": MethodFacts(
        "influence", settings={"damping": np.float32(0.01), "steps": np.int64(3), "at": torch.tensor(2.0), "on": (1,)},
        passes=np.float32(2.0), seconds=np.int64(3),
    )},
    "one note": {"notes": "careful"},
    "one warning": {"warnings": {"web": "large"}},
    "notes that are no texts": {"notes": [3], "warnings": {"web": [ValueError("large")]}, "interval": 0.95},
}  # fmt: skip


@pytest.mark.parametrize("kind", AS_USERS_HAVE_IT)
def test_what_can_be_made_can_be_saved_and_pickled(kind: str, tmp_path: Path) -> None:
    result = small(**AS_USERS_HAVE_IT[kind])
    for found in (Attribution.load(result.save(tmp_path / "result")), pickle.loads(pickle.dumps(result))):
        assert_same(found, result)
        assert str(found) == str(result)


def test_one_text_is_one_note() -> None:
    assert small(notes="careful").notes == ("careful",)


def test_a_number_of_numpy_for_damping_is_a_setting_like_any_other(tmp_path: Path) -> None:
    data = tensors(patients(30))
    goal = properties.mean_loss(data, LOSS)
    result = attribute(
        network(), LOSS, data, np.arange(30) % 3, goal, method="influence", damping=np.float32(0.5),
        save_dir=tmp_path / "scores",
    )  # fmt: skip
    found = Attribution.load(result.save(tmp_path / "result"))
    assert_same(found, result)
    assert "damping 0.5" in str(found)


def test_scores_of_half_precision_become_arrays_and_frames() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        result = small(scores=torch.ones(2, 4, dtype=dtype), member_scores=torch.ones(2, 5, dtype=dtype))
        assert np.asarray(result).tolist() == np.array(result, dtype=float).tolist() == result.tolist()
        assert np.array(result, copy=True).tolist() == result.to_frame()["score"].to_numpy().reshape(2, 4).tolist()


def test_a_damaged_or_foreign_file_is_refused_by_name(tmp_path: Path) -> None:
    path = small().save(tmp_path / "result")
    content = path.read_bytes()
    for at in (25, 45, 60, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ValueError, match=r"result is damaged"):
            Attribution.load(path)
    path.write_bytes(content[:-3])
    with pytest.raises(ValueError, match=r"result is damaged"):
        Attribution.load(path)
    torch.save(torch.zeros(3), path)
    with pytest.raises(ValueError, match="is no saved Attribution"):
        Attribution.load(path)
    with pytest.raises(FileNotFoundError):
        Attribution.load(tmp_path / "none")
    named_by_object = small(groups=Groups([0, 1, 2, 3], names=[object(), 1, 2, 3]))
    with pytest.raises(TypeError, match="cannot be saved"):
        named_by_object.save(path)


# ---- from other results


def test_captum_dattri_and_trak_in_either_shape_have_one_sign() -> None:
    groups, scores = Groups([0, 1, 2, 0]), torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]])
    captum = Attribution.of(scores, groups, "loss", False)
    dattri = Attribution.of(scores.T, groups, "loss", False, positive="rises")
    trak = Attribution.of(-scores.T.numpy(), groups, "loss", False, positive="falls", low=-scores - 1, high=-scores + 1)
    for found in (captum, dattri, trak):
        torch.testing.assert_close(found.scores, scores)
        assert found.properties == ("loss 0", "loss 1")
    assert trak.low is not None
    assert torch.equal(trak.low, scores - 1)
    assert Attribution.of([1.0, 2.0, 3.0], groups).shape == (1, 3)
    square = torch.randn(3, 3)
    assert torch.equal(Attribution.of(square, groups, test_axis=0), square)
    assert torch.equal(Attribution.of(square, groups, test_axis=1, positive="rises"), square.T)


def test_what_is_said_about_leave_group_out_stays_with_it() -> None:
    groups = Groups(["a", "b"])
    measured = LeaveGroupOut(torch.tensor([[1.0, -1.0]]), torch.zeros(1), np.arange(2), groups)
    alone = Attribution.of(measured, groups)
    found = Attribution.of(
        measured, groups, "loss", np.False_, positive="rises", test_axis=0, notes="careful", warnings={"a": "small"},
        method="mine", member_scores=[[1.0, -1.0]],
    )  # fmt: skip
    assert torch.equal(found.scores, alone.scores)
    assert found.notes == (*alone.notes, "careful")
    assert (found.warnings, found.higher_is_better) == ({"a": ("small",)}, (False,))
    assert found.method == MethodFacts("mine")
    assert found.member_scores is not None
    for wrong in ({"positive": "falls"}, {"test_axis": 1}):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"{name}={value!r}: .* leave {name} out"):
            Attribution.of(measured, groups, **wrong)


def test_leave_group_out_and_what_if_become_one(tmp_path) -> None:
    frame = patients(60)
    data, recipe = tensors(frame), Recipe(epochs=1, learning_rate=0.1, batch_size=20)
    goal = properties.soft_accuracy(data)
    measured = leave_group_out(network, LOSS, data, frame["clinic"], goal, recipe, seeds=range(2), group_ids=[4, 1])
    result = measured.attribution()
    assert result.names == tuple(np.unique(CLINICS)[[4, 1]])
    torch.testing.assert_close(result.scores[0], measured.scores)
    assert (result.higher_is_better, result.properties) == ((True,), ("soft_accuracy",))
    assert result.low is not None
    assert "over 2" in result.interval
    assert result.method is not None
    assert result.method.unit == "property"
    assert "measured changes" in str(result)
    assert "predicted" not in f"{result} {answers(result, 0)} {Attribution.load(result.save(tmp_path / 'result'))}"
    of_loss = leave_group_out(network, LOSS, data, frame["clinic"], data, recipe, seeds=[0])
    assert Attribution.of(of_loss, frame["clinic"]).properties == ("mean_loss",)
    asked = WhatIf(network(), LOSS, data, frame["clinic"], weight_decay=0.01).leave_group_out(goal)
    torch.testing.assert_close(asked.attribution().scores[0], asked.scores)
    assert asked.attribution().names == tuple(np.unique(CLINICS))
    assert "predicted changes" in str(asked.attribution())


# ---- groups back to names and points


def test_ids_of_any_shape_become_names() -> None:
    groups = Groups(["b", "a", "b"])
    assert groups.names_of(torch.tensor([[[1], [0]]])).tolist() == [[["b"], ["a"]]]
    assert groups.names_of(1).item() == "b"
    assert Groups([0, 1]).names_of([1, 0]).tolist() == [1, 0]
    with pytest.raises(IndexError, match="ids holds 2"):
        groups.names_of([2])


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    result = Attribution(torch.ones(1, 2), [[0], [1]])
    with pytest.raises(IsADirectoryError):
        result.save(tmp_path / ".")
    assert not list(tmp_path.parent.glob(f"{tmp_path.name}.part"))


def test_spread_over_points_keeps_sums_and_order() -> None:
    assert Groups(["a", "b", "a"]).spread([2.0, 3.0]).tolist() == [1.0, 3.0, 1.0]
    groups = Groups([0, 1, 1, -1, 0, 0], rest="drop")
    scores = torch.tensor([[3.0, 8.0], [-1.0, 0.5]])
    shares = groups.spread(scores, left_out=0.0)
    torch.testing.assert_close(groups.sum(shares), scores)
    assert groups.spread(scores)[:, 3].isnan().all()
    copies = groups.spread(scores, how="copy", left_out=0.0)
    assert copies.tolist()[0] == [3.0, 8.0, 8.0, 0.0, 3.0, 3.0]
    assert type(groups.spread(Attribution(scores, groups))) is Tensor


# ---- what it looks like


def test_tables_escape_and_cut_what_comes_from_data() -> None:
    groups = Groups([0, 1], names=["<script>alert(1)</script>", "line\nbreak" + 60 * "x"])
    result = Attribution(torch.tensor([[1.0, 2.0]]), groups, ["<b>"], [False])
    assert "<script>" not in result._repr_html_()
    assert "<b>loss" not in result._repr_html_()
    assert "&lt;script&gt;" in result._repr_html_()
    assert max(map(len, str(result).splitlines())) < 100
    assert "line break" in str(result)
    empty = Attribution(torch.tensor([[1.0, 2.0]]), Groups([0, 1], names=["", " "]), ["loss"], [False])
    assert [line[:3] for line in str(empty).splitlines()[3:5]] == ["' '", "'' "]


def test_columns_stay_below_each_other_in_a_terminal_also_below_wide_letters() -> None:
    result = Attribution([[1.0, 2.0, 3.0]], Groups(["北京", "Sao\u0303", "web"]))
    rows = str(result).splitlines()[3:6]
    assert rows == ["北京      1     +3  rises", "web       1     +2  rises", "Sao\u0303       1     +1  rises"]


def test_days_and_months_are_shown_as_people_write_them() -> None:
    days = pd.Series(pd.to_datetime(["2024-01-31", "2024-02-01", "2024-02-01"]))
    for column in (days, days.to_numpy().astype("datetime64[ns]")):
        said = str(Attribution(torch.ones(1, 2), Groups(column)))
        assert "2024-01-31 " in said
        assert "00:00" not in said
    pairs = [("x", month) for month in days.dt.to_period("M")]
    assert "('x', '2024-01')" in str(Attribution(torch.ones(1, 2), {pair: [at] for at, pair in enumerate(pairs[:2])}))


def test_many_groups_and_many_properties_still_print_on_a_page() -> None:
    many = Attribution(torch.randn(300, 400), Groups.singletons(400), None, [False] * 300)
    assert len(str(many).splitlines()) < 30
    assert many.top(3).names[0] == int(many.scores.mean(0).abs().argmax())
    mixed = Attribution(torch.randn(6, 4), Groups.singletons(4), None, [False, True] * 3)
    assert "2 more properties" in str(mixed)


def test_per_member_divides_by_size() -> None:
    result = small(low=torch.zeros(2, 4), high=torch.ones(2, 4))
    found = result.per_member
    assert found.scores[:, -1].tolist() == [0.5, 0.0]
    assert found.high is not None
    assert found.high[0].tolist() == [1.0, 1.0, 1.0, 0.5]


def test_per_member_is_not_the_change_without_the_group() -> None:
    found = small(method=MethodFacts("influence", "property", {"damping": 0.1})).per_member
    assert "influence with damping 0.1; scores rank groups" in str(found)
    assert "share of one member" in str(found)
    assert "changes in the property" not in str(found)
    verified = found.verify(lambda subsets: [float(len(subset)) for subset in subsets], top=1)
    assert not verified.in_unit
    assert small().per_member.method is None


def test_a_mask_selects_the_groups_where_it_is_true() -> None:
    result = Attribution(torch.tensor([[1.0, -2.0]]), Groups(["a", "b"]))
    for mask in (result.scores[0] < 0, np.array([False, True]), [False, True], (False, True)):
        assert result.some(mask).names == ("b",)
        assert result.groups.some(mask).names == ("b",)
    assert result.some(torch.tensor([1, 0])).names == ("b", "a")
    assert len(result.some(result.scores[0] > 9).names) == 0
    for mask in (result.scores > 0, [True, False, True]):
        for part in (result, result.groups):
            with pytest.raises(ValueError, match=r"ids is a mask of shape \[.*\]: pass one of \[2\]"):
                part.some(mask)


def test_a_new_process_reads_what_torch_saved(tmp_path: Path) -> None:
    torch.save(small(), tmp_path / "scores.pt")
    code = f"import torch, ggda_ext; print(torch.load({str(tmp_path / 'scores.pt')!r}, weights_only=True).names)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(small().names), done.stderr
