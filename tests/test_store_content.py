"""What a hash of a value sees: every part that its numbers depend on, and nothing that calls leave behind."""

from __future__ import annotations

import collections
import ctypes
import datetime
import decimal
import enum
import functools
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from store_cases import Rows, Weighted, changed_points, make_data, make_network, margin, over
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ggda_ext.storage.content import Content, UnknownContent
from ggda_ext.storage.fingerprint import SampledData, of_structure, of_value

Change = Callable[[float], Any]


def using(held: Any) -> Callable[[], Any]:
    return lambda: held


def factory(value: float) -> Any:
    return collections.defaultdict(lambda: value)


def member(value: float) -> Any:
    return enum.Enum("Mode", {"A": value}).A  # type: ignore[attr-defined]


class PrivateSlot:
    __slots__ = ("__value",)

    def __init__(self, value: float) -> None:
        self.__value = value


class OwnArray(np.ndarray):
    """An array with an attribute."""


class OwnTensor(Tensor):
    """A tensor with an attribute."""


class OwnNumber(float):
    """A number with an attribute."""


def with_scale(value: float, held: Any) -> Any:
    held.scale = value
    return held


def of_its_class(value: float) -> Any:
    return type("Kind", (type,), {"factor": value})("Held", (), {})()


def taken_by_text(value: float) -> Any:
    made: dict[str, Any] = {"factor": value, "unused": object()}
    exec("def loss(): return globals()['factor']", made)
    return made["loss"]


def evaluated(value: float) -> Any:
    made: dict[str, Any] = {"factor": value, "unused": object()}
    exec("def loss(): return eval('2 * factor')", made)
    return made["loss"]


def of_its_own_module(value: float) -> Any:
    made: dict[str, Any] = {"factor": value, "__name__": "here"}
    exec("import sys\ndef loss(): return sys.modules[__name__].factor", made)
    return made["loss"]


def taken_from(module: ModuleType) -> Any:
    return lambda: getattr(module, "factor")  # noqa: B009  # on purpose by its text


class OwnDate(datetime.date):
    """A date with room for attributes."""


class OwnDecimal(decimal.Decimal):
    """A decimal number with a slot."""

    __slots__ = ("unit",)


class OwnError(Exception):
    """An error of the user's own."""


def with_dates(value: float) -> Any:
    return pd.DataFrame({"at": pd.to_datetime(["2020", f"202{value:.0f}"]).tz_localize("Europe/Berlin")})


CHANGED: dict[str, Change] = {
    "the factory of a dict": factory,
    "the value of a member": member,
    "a private slot": PrivateSlot,
    "an attribute of an array": lambda value: with_scale(value, np.ones(2).view(OwnArray)),
    "an attribute of a tensor": lambda value: with_scale(value, torch.ones(2).as_subclass(OwnTensor)),
    "an attribute of a number": lambda value: with_scale(value, OwnNumber(1.0)),
    "an attribute of the class of a class": of_its_class,
    "a global that is named by a text": taken_by_text,
    "a global in a text that is evaluated": evaluated,
    "a global of the module that is looked up": of_its_own_module,
    "a module that is captured": lambda value: taken_from(module_named("held", factor=value)),
    "a module that an object holds": lambda value: using({"settings": module_named("held", factor=value)}),
    "a sparse tensor": lambda value: torch.eye(2).mul(value).to_sparse(),
    "a sparse tensor by rows": lambda value: torch.eye(2).mul(value).to_sparse_csr(),
    "names of fields": lambda value: np.zeros(2, [(f"x{value}", "f4"), ("y", "f4")]),
    "a pattern": lambda value: re.compile(str(value)),
    "Python's random numbers": lambda value: random.Random(int(value)),
    "NumPy's random numbers": lambda value: np.random.default_rng(int(value)),
    "NumPy's older random numbers": lambda value: np.random.RandomState(int(value)),
    "a date of the user's class": lambda value: OwnDate(2000 + int(value), 1, 1),
    "an attribute of such a date": lambda value: with_scale(value, OwnDate(2000, 1, 1)),
    "a decimal number of the user's class": OwnDecimal,
    "a number of C": ctypes.c_double,
    "an error": OwnError,
    "a point in time": lambda value: pd.Timestamp(f"200{value:.0f}", tz="Europe/Berlin"),
    "a time span": pd.Timedelta,
    "a year": lambda value: pd.Period(f"200{value:.0f}", "Y"),
    "no time": lambda value: (value, pd.NaT),
    "dates with a time zone": with_dates,
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_change_is_seen_and_its_absence_too(what: str) -> None:
    first, again, other = (Content().text(using(CHANGED[what](value)), "loss") for value in (1.0, 1.0, 2.0))
    assert first == again != other


def test_a_global_that_is_named_like_an_attribute_does_not_count() -> None:
    """Scripts and notebooks are full of `a`, `loss` and `model`."""
    made: dict[str, Any] = {"factor": 2.0, "a": 0}
    exec("def loss(self, x):\n    self.a = self.a + x\n    return [factor * self.a for _ in x]", made)
    first = Content().text(made["loss"], "loss")
    made["a"] = 1
    assert Content().text(made["loss"], "loss") == first
    made["factor"] = 3.0
    assert Content().text(made["loss"], "loss") != first


def test_functions_known_by_name_alone_are_refused_unless_they_are_of_a_library() -> None:
    assert Content().text(using(np.exp), "loss") != Content().text(using(np.log), "loss")
    with pytest.raises(UnknownContent, match="no function of NumPy's own"):
        Content().text(using(np.frompyfunc(lambda x: x, 1, 1)), "loss")


def test_an_object_of_which_a_part_cannot_be_read_is_refused() -> None:
    held = ctypes.pointer(ctypes.c_int(1))
    with pytest.raises(UnknownContent, match=r"held is a .*c_int, whose content cannot be told"):
        Content().text(using(held), "loss")


@pytest.mark.parametrize("name", ["this", "user_losses"])
def test_a_file_of_the_users_counts_by_its_code_whatever_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`this` is a module of Python's own, which a file beside a script hides."""
    code = f"import {name}; from ggda_ext.storage.content import Content; print(Content().text({name}.loss, 'loss'))"
    found = []
    for factor in (1, 1, 2):
        (tmp_path / f"{name}.py").write_text(f"def loss(): return {factor}")
        path = os.pathsep.join([str(tmp_path), *sys.path])
        environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        found.append(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment))
    assert found[0].stdout == found[1].stdout != found[2].stdout


def counted() -> Callable[[nn.Module], Tensor]:
    calls = 0

    def property(network: nn.Module) -> Tensor:
        nonlocal calls
        calls += 1
        return margin(0, network)

    return property


class Counting:
    """A property that counts its calls, and moves its weight as losses do."""

    def __init__(self, weight: float) -> None:
        self.weight, self.calls = torch.tensor(weight), 0

    def __call__(self, network: nn.Module) -> Tensor:
        self.calls += 1
        self.weight = self.weight.to("cpu")
        return self.weight * margin(0, network)


@pytest.mark.parametrize("make", [counted, lambda: Counting(1.0)])
def test_the_number_of_calls_is_not_what_a_property_is_made_of(make: Callable[[], Any]) -> None:
    goal = make()
    before = of_value(goal, "property", None)
    goal(make_network())
    assert of_value(goal, "property", None) == before


def test_an_attribute_that_calls_assign_to_is_still_a_setting() -> None:
    assert of_value(Counting(1.0), "property", None) != of_value(Counting(2.0), "property", None)


def test_a_captured_data_set_counts_by_its_points() -> None:
    def over_data(data: tuple[Tensor, Tensor]) -> Callable[[nn.Module], Tensor]:
        held = DataLoader(Rows(data, keep=False), batch_size=100)
        return lambda network: torch.stack([network(x).mean() for x, _ in held]).mean()

    with pytest.warns(SampledData, match="held"):
        found = {of_value(over_data(data), "property", None) for data in (make_data(), make_data(), changed_points())}
    assert len(found) == 2


def test_values_that_are_alike_have_one_hash_and_others_another() -> None:
    def hashed(value: Any) -> str:
        return Content().text(value, "value")

    ring: list[Any] = [1]
    ring.append(ring)
    alike: list[Callable[[], Any]] = [
        lambda: {"b": 1, "a": {2, 3}}, lambda: over(0), lambda: functools.partial(margin, 1), lambda: Weighted(),
        lambda: np.arange(3.0), lambda: np.float32(1), lambda: torch.float32, lambda: Path("a"), lambda: nn.Tanh,
        lambda: torch.Generator().manual_seed(1), lambda: functools.lru_cache(margin), lambda: (1, [2, "x"]),
    ]  # fmt: skip
    found = [hashed(make()) for make in alike]
    assert found == [hashed(make()) for make in alike]
    assert (
        len({*found, hashed(ring), hashed(1), hashed(1.0), hashed(True), hashed("1"), hashed(b"1")}) == len(alike) + 6
    )
    assert hashed({"b": 1, "a": {3, 2}}) == found[0]
    assert hashed({"a": {2, 3}, "b": 1}) != found[0]  # the order of a dict may be that of a property's components


def module_named(name: str, **held: Any) -> ModuleType:
    """A module of the user's own."""
    made = ModuleType(name)
    vars(made).update(held)
    return made


settings = module_named("settings", inner=module_named("settings.inner", factor=1.0))


def of_a_module_below() -> float:
    return settings.inner.factor


def of_an_imported_module() -> float:
    import user_settings

    return user_settings.factor


@pytest.mark.parametrize("function", [of_a_module_below, of_an_imported_module])
def test_a_function_counts_with_what_it_takes_from_modules_of_the_user(
    function: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = module_named("user_settings", factor=1.0)
    monkeypatch.setitem(sys.modules, "user_settings", imported)
    found = [Content().text(function, "function") for _ in range(2)]
    monkeypatch.setattr(settings.inner, "factor", 2.0)
    monkeypatch.setattr(imported, "factor", 2.0)
    assert found[0] == found[1] != Content().text(function, "function")


def test_tables_and_masked_arrays_count_by_all_that_they_hold() -> None:
    def table() -> pd.DataFrame:
        kinds = pd.Categorical(["u", "v"])
        return pd.DataFrame({"a": [1.0, 2.0], "b": ["x", None], "c": pd.array([1, None], "Int64"), "d": kinds})

    changed = [
        table(), table().assign(a=[1.0, 3.0]), table().rename(columns={"a": "z"}), table().set_index("a"),
        table().astype({"a": "float32"}), table().iloc[::-1],
        table().assign(d=pd.Categorical(["u", "v"], categories=["v", "u"])), table()["a"], table()["a"].rename("z"),
        np.ma.array([1.0, 2.0], mask=[False, False]), np.ma.array([1.0, 2.0], mask=[False, True]),
    ]  # fmt: skip
    assert len({Content().text(over(0, value), "property") for value in changed}) == len(changed)
    assert Content().text(table(), "table") == Content().text(table(), "table")


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(2, 2), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def tied(*, shared: bool) -> nn.Module:
    pair = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if shared:
        pair[1].weight = pair[0].weight
    return pair


def hooked() -> nn.Module:
    network = Scaled(1.0)
    network.register_forward_hook(lambda module, args, output: output + 1)
    return network


def on_parameters(value: float) -> nn.Module:
    network = nn.Linear(2, 2)
    network.weight.register_hook(lambda gradient: gradient * value)
    return network


def normalised(*, training: bool) -> nn.Module:
    return nn.InstanceNorm1d(2, track_running_stats=True).train(training)


def test_the_structure_of_a_model_is_more_than_its_parameters() -> None:
    made: list[nn.Module] = [
        on_parameters(1.0), on_parameters(2.0), normalised(training=True), normalised(training=False),
        Scaled(1.0), Scaled(2.0), hooked(), tied(shared=False), tied(shared=True), nn.Sequential(nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.GELU()), nn.Sequential(nn.Linear(2, 2), nn.GELU(approximate="tanh")),
    ]  # fmt: skip
    assert len({of_structure(one, None) for one in made}) == len(made)
    assert of_structure(Scaled(1.0), None) == of_structure(Scaled(1.0), None)


def test_a_hook_of_all_modules_and_a_replaced_forward_are_part_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.Softplus()
    found = {of_structure(network, None)}
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: output + 1)
    found.add(of_structure(network, None))
    handle.remove()
    for factor in (1, 2):
        monkeypatch.setattr(nn.Softplus, "forward", lambda self, x, factor=factor: x * factor)
        found.add(of_structure(network, None))
    assert len(found) == 4


def test_a_script_has_one_hash_in_every_process() -> None:
    code = (
        "import torch; from torch import nn; from ggda_ext.storage.content import Content; torch.manual_seed(0);"
        "print(Content().text(torch.jit.script(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))), 'x'))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True, env=os.environ | {"PYTHONHASHSEED": seed}
        ).stdout
        for seed in "014"
    }
    assert len(found) == 1


def test_a_configuration_for_generating_text_has_one_hash_in_every_process() -> None:
    code = (
        "from transformers import GPT2Config, GPT2LMHeadModel; from ggda_ext.storage.fingerprint import of_structure;"
        "print(of_structure(GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1)), None))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True, env=os.environ | {"PYTHONHASHSEED": seed}
        ).stdout
        for seed in "01"
    }
    assert len(found) == 1
