"""What was changed × which store: each refuses what it was not made for, by its name, and stays as it was."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import captum_cases
import dattri_cases
import ggda_trak
import numpy as np
import pytest
import torch
import trak_cases
from store_cases import K, N, Rows, Weighted, changed_points, make_data, make_network, margin, one_point, over
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from ggda_ext import GradientStore, GroupGradients, attribute, properties
from ggda_ext.counterfactual.leave_group_out import leave_group_out
from ggda_ext.curvature.damping import TrainingSteps
from ggda_ext.storage.content import UnknownContent
from ggda_ext.storage.files import read_made_with
from ggda_ext.storage.fingerprint import SampledData
from ggda_ext.storage.folder import StoreMismatch
from ggda_ext.training import Recipe


@dataclass
class Given:
    """Everything a store may depend on."""

    network: Callable[[], nn.Module] = make_network
    loss: Any = field(default_factory=nn.CrossEntropyLoss)
    data: Any = field(default_factory=make_data)
    groups: Any = field(default_factory=lambda: np.arange(N) % K)
    property: Any = field(default_factory=lambda: properties.mean_loss(tuple(part[:9] for part in make_data()), LOSS))
    tests: Any = field(default_factory=lambda: tuple(part[:9] for part in make_data()))


LOSS = nn.CrossEntropyLoss()


def run_attribute(given: Given, folder: Path) -> Any:
    return attribute(
        given.network(), given.loss, given.data, given.groups, given.property, save_dir=folder, method="tracin"
    )


def run_gradients(given: Given, folder: Path) -> Any:
    provider = GroupGradients(given.network(), given.loss, given.data, given.groups)
    return GradientStore(provider, folder).scores(given.property)


def run_retraining(given: Given, folder: Path) -> Any:
    x, y = given.data
    few = slice(0, 60)
    return leave_group_out(
        given.network, given.loss, (x[few], y[few]), np.asarray(given.groups)[few] % 4, given.property,
        Recipe(epochs=1, learning_rate=0.1, batch_size=20), seeds=[0], save_dir=folder,
    )  # fmt: skip


def run_fisher(given: Given, folder: Path) -> Any:
    influence = ggda_trak.FisherInfluence(
        given.network(), given.data, given.loss, given.groups, proj_dim=8, damping=0.5, save_dir=folder
    )
    return influence.influence(given.tests)


STORES = {"attribute": run_attribute, "GradientStore": run_gradients, "leave_group_out": run_retraining,
          "FisherInfluence": run_fisher}  # fmt: skip


def other_values() -> nn.Module:
    network = make_network()
    with torch.no_grad():
        network[2].bias[1] += 1e-4
    return network


def frozen() -> nn.Module:
    network = make_network()
    network[0].requires_grad_(False)
    return network


def scaled(factor: Any) -> Callable[..., Tensor]:
    return lambda output, target: factor * LOSS(output, target)


def executed(name: str, text: str) -> Any:
    """What a piece of code defines, outside of any module."""
    made: dict[str, Any] = {"cross_entropy": functional.cross_entropy}
    exec(text, made)
    return made[name]


def executed_function(factor: float) -> Any:
    return executed("loss", f"def loss(output, target): return {factor} * cross_entropy(output, target)")


def executed_class(factor: float) -> Any:
    text = f"class Loss:\n    def __call__(self, output, target): return {factor} * cross_entropy(output, target)"
    return executed("Loss", text)()


def wrapping(factor: float) -> Any:
    """A function under the name of a library's."""
    loss = executed_function(factor)
    return functools.update_wrapper(loss, functional.cross_entropy)


class Scripted(nn.Module):
    """A loss whose setting is an attribute of a scripted module."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.tensor = factor, torch.tensor(factor)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.factor * self.tensor * functional.cross_entropy(output, target)


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "loss: another one": ({}, {"loss": nn.MultiMarginLoss()}, "loss"),
    "loss: label smoothing": ({}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "loss"),
    "loss: a captured number": ({"loss": scaled(1.0)}, {"loss": scaled(1.01)}, "loss"),
    "loss: a captured tensor": ({"loss": scaled(torch.tensor(1.0))}, {"loss": scaled(torch.tensor(2.0))}, "loss"),
    "loss: a partial": (
        {"loss": functools.partial(functional.cross_entropy, label_smoothing=0.1)},
        {"loss": functools.partial(functional.cross_entropy, label_smoothing=0.2)},
        "loss",
    ),
    "loss: a buffer": ({"loss": Weighted()}, {"loss": Weighted(2.0)}, "loss"),
    "loss: a setting": ({"loss": Weighted()}, {"loss": Weighted(1.0, 2.0)}, "loss"),
    "loss: executed text": ({"loss": executed_function(1.0)}, {"loss": executed_function(1.5)}, "loss"),
    "loss: a class of executed text": ({"loss": executed_class(1.0)}, {"loss": executed_class(1.5)}, "loss"),
    "loss: a library's name": ({"loss": wrapping(1.0)}, {"loss": wrapping(1.5)}, "loss"),
    "loss: a scripted module": (
        {"loss": torch.jit.script(Scripted(1.0))},
        {"loss": torch.jit.script(Scripted(1.0001))},
        "loss",
    ),
    "model: an activation": ({}, {"network": functools.partial(make_network, nn.Tanh)}, "model"),
    "model: a value": ({}, {"network": other_values}, "values of the parameters"),
    "model: what is trained": ({}, {"network": frozen}, "parameters"),
    "groups": ({}, {"groups": np.arange(N) % K // 2}, "groups"),
    "data: 968 of 1,000 points": ({}, {"data": changed_points()}, "data"),
    "data: one number": ({}, {"data": one_point()}, "data"),
}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("what", CHANGES)
def test_what_was_changed_is_refused_by_name_and_the_store_stays(what: str, store: str, tmp_path: Path) -> None:
    before, after, named = CHANGES[what]
    given = replace(Given(), **before)
    STORES[store](given, tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(StoreMismatch, match=f"was made with {named} = "):
        STORES[store](replace(given, **after), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    STORES[store](given, tmp_path)


def of_test_points(shift: float) -> Any:
    x, y = make_data()
    return x[:9] + shift, y[:9]


class Probe:
    """A property with a setting, as an object and by its method."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, network: nn.Module) -> Tensor:
        return margin(self.at, network)

    def measure(self, network: nn.Module) -> Tensor:
        return margin(self.at, network)


PROPERTIES: dict[str, tuple[Any, Any]] = {
    "test points": (of_test_points(0), of_test_points(1e-2)),
    "loss of a mean": (
        properties.mean_loss(of_test_points(0), LOSS),
        properties.mean_loss(of_test_points(0), nn.CrossEntropyLoss(label_smoothing=0.1)),
    ),
    "points of a mean": (
        properties.mean_loss(of_test_points(0), LOSS), properties.mean_loss(of_test_points(0.1), LOSS)
    ),
    "lambda over a number": (over(0), over(1)),
    "lambda over a tensor": (over(torch.tensor(0)), over(torch.tensor(1))),
    "lambda over a module": (over(0, make_network(nn.Tanh)), over(0, other_values())),
    "partial": (functools.partial(margin, 0), functools.partial(margin, 1)),
    "object": (Probe(0), Probe(1)),
    "bound method": (Probe(0).measure, Probe(1).measure),
}  # fmt: skip


@pytest.mark.parametrize("kind", PROPERTIES)
def test_leave_group_out_refuses_another_property(kind: str, tmp_path: Path) -> None:
    first, second = PROPERTIES[kind]
    found = run_retraining(replace(Given(), property=first), tmp_path)
    with pytest.raises(StoreMismatch, match="was made with property = "):
        run_retraining(replace(Given(), property=second), tmp_path)
    assert torch.equal(run_retraining(replace(Given(), property=first), tmp_path).per_seed, found.per_seed)


@pytest.mark.parametrize("kind", [kind for kind in PROPERTIES if kind != "test points"])
def test_another_property_is_another_question_to_attribute(kind: str, tmp_path: Path) -> None:
    for goal in PROPERTIES[kind]:
        given = replace(Given(), property=goal)
        plain = attribute(given.network(), given.loss, given.data, given.groups, goal, method="tracin")
        torch.testing.assert_close(run_attribute(given, tmp_path), plain)


def collate(rows: list[Any]) -> Any:
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


HOLDERS: dict[str, Callable[[tuple[Tensor, Tensor]], Any]] = {
    "TensorDataset": lambda data: TensorDataset(*data),
    "Subset": lambda data: Subset(TensorDataset(*data), list(range(N))[::-1]),
    "DataLoader": lambda data: DataLoader(TensorDataset(*data), batch_size=100),
    "own collate": lambda data: DataLoader(TensorDataset(*data), batch_size=100, collate_fn=collate),
    "NumPy": lambda data: tuple(part.numpy() for part in data),
    "own data set": lambda data: Rows(data, keep=True),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.filterwarnings("ignore::ggda_ext.storage.fingerprint.SampledData")
def test_one_changed_point_is_seen_wherever_data_are_held_in_memory(holder: str, tmp_path: Path) -> None:
    given = replace(Given(), data=HOLDERS[holder](make_data()))
    run_attribute(given, tmp_path)
    with pytest.raises(StoreMismatch, match="was made with data = "):
        run_attribute(replace(given, data=HOLDERS[holder](one_point())), tmp_path)


@pytest.mark.filterwarnings("ignore::ggda_ext.storage.fingerprint.SampledData")
def test_a_result_says_that_its_data_were_sampled(tmp_path: Path) -> None:
    def notes(name: str, data: Any, **options: Any) -> str:
        goal = properties.mean_loss(make_data(), nn.CrossEntropyLoss())
        groups = np.arange(N) % K
        return str(attribute(make_network(), nn.CrossEntropyLoss(), data, groups, goal, save_dir=tmp_path / name,
                             method="tracin", **options).notes)  # fmt: skip

    lazy, stream = Rows(make_data(), keep=False), DataLoader(Stream(make_data()), batch_size=50)
    for _ in range(2):  # made, then found
        assert "some of the training points only" in notes("lazy", lazy)
        assert "some of the training points only" in notes("stream", stream)
        assert "some of the training points" not in notes("tagged", lazy, tag="data of May")
        assert "some of the training points" not in notes("whole", make_data())


def test_a_lazy_data_set_is_sampled_which_is_said_and_a_tag_is_asked_for(tmp_path: Path) -> None:
    given = replace(Given(), data=Rows(make_data(), keep=False))
    with pytest.warns(SampledData, match="pass tag="):
        run_attribute(given, tmp_path / "a")
    told = read_made_with(next((tmp_path / "a").glob("*.npy")))
    assert "256 of them looked at" in told["fingerprint"]["data"]
    other = replace(given, data=Rows(changed_points(), keep=False))
    with pytest.warns(SampledData), pytest.raises(StoreMismatch, match="was made with data = "):
        run_attribute(other, tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SampledData)
        everything = (given.network(), given.loss, given.data, given.groups, given.property)
        attribute(*everything, save_dir=tmp_path / "b", tag="v1", method="tracin")
        with pytest.raises(StoreMismatch, match="tag = 'v1', now it is 'v2'"):
            attribute(*everything, save_dir=tmp_path / "b", tag="v2", method="tracin")


class Stream(IterableDataset):
    """Points one after the other."""

    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self.fetch = lambda: zip(*data, strict=True)

    def __iter__(self) -> Iterator[Any]:
        return self.fetch()


@pytest.mark.filterwarnings("ignore::ggda_ext.storage.fingerprint.SampledData")
def test_a_change_among_the_first_points_of_a_stream_is_seen_beyond_its_first_batch(tmp_path: Path) -> None:
    given = replace(Given(), data=DataLoader(Stream(make_data()), batch_size=20))
    run_attribute(given, tmp_path)
    with pytest.raises(StoreMismatch, match="was made with data = "):
        run_attribute(replace(given, data=DataLoader(Stream(one_point()), batch_size=20)), tmp_path)


class Locked:
    """A property whose content cannot be told."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, network: nn.Module) -> Tensor:
        return margin(0, network)


class Named(Locked):
    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version

    def __fingerprint__(self) -> str:
        return f"version {self.version}"


def test_content_that_cannot_be_told_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UnknownContent, match=r"property → lock is a lock.*pass tag=.*__fingerprint__.*leave save_dir"):
        run_retraining(replace(Given(), property=Locked()), tmp_path)
    run_retraining(replace(Given(), property=Named(1)), tmp_path)
    with pytest.raises(StoreMismatch, match="was made with property"):
        run_retraining(replace(Given(), property=Named(2)), tmp_path)


# the toolkits


def captum(given: captum_cases.Problem, folder: Path, **options: Any) -> Any:
    made = captum_cases.ours("TracInCP", given, groups=captum_cases.UNEVEN, save_dir=folder, **options)
    return captum_cases.score(made, given.test)


def dattri(case: dattri_cases.Case, folder: Path) -> Any:
    made = dattri_cases.ours("CG", case.task(), groups=dattri_cases.GROUPS, save_dir=folder)
    made.cache(case.full_loader())
    return made.attribute(case.train_loader(), case.test_loader())


@pytest.mark.parametrize(
    ("run", "make", "change", "named"),
    [
        (captum, captum_cases.problem, lambda given: given.train[0].__setitem__((12, 1), 9.0), "data"),
        (
            captum, captum_cases.problem, lambda given: given.checkpoints[1][0]["last.bias"].add_(1),
            "values of the parameters",
        ),
        (dattri, dattri_cases.make_case, lambda case: case.train.tensors[0].__setitem__((12, 1), 9.0), "data"),
        (
            dattri, dattri_cases.make_case, lambda case: case.checkpoints[0]["2.bias"].add_(1),
            "(loss|values of the parameters)",
        ),
        (dattri, dattri_cases.make_case, lambda case: case.model.__setitem__(1, nn.ReLU()), "(loss|model)"),
    ],
)  # fmt: skip
def test_a_toolkit_refuses(
    run: Callable[..., Any], make: Callable[[], Any], change: Callable[[Any], Any], named: str, tmp_path: Path
) -> None:
    run(make(), tmp_path)
    given = make()
    change(given)
    with pytest.raises(StoreMismatch, match=f"was made with {named} = "):
        run(given, tmp_path)


def test_captum_refuses_another_loss(tmp_path: Path) -> None:
    captum(captum_cases.problem(), tmp_path)
    with pytest.raises(StoreMismatch, match="was made with loss = "):
        captum(captum_cases.problem(), tmp_path, reduction="mean")


@pytest.mark.parametrize(
    ("option", "value", "size"), [("lambda_reg", 0.5, 4), ("damping", 0.2, 4), ("lambda_reg", 0.5, 1)]
)
def test_trak_refuses_features_that_were_finished_with_another_ridge(
    option: str, value: float, size: int, tmp_path: Path
) -> None:
    given = trak_cases.case("image_classification")
    state = given.checkpoints(1)[0]

    def run(folder: Path, *, finish: bool = True, **options: Any) -> np.ndarray:
        options = given.options | {"proj_dim": 16, "groups": np.arange(trak_cases.N) // size} | options
        made = ggda_trak.TRAKer(given.model, given.task, trak_cases.N, save_dir=folder, **options)
        made.load_checkpoint(state, 0)
        for at in trak_cases.batches():
            made.featurize(trak_cases.take(given.train, at), inds=at)
        if finish:
            made.finalize_features()
        return made.saver.current_store["features"].copy()

    found = run(tmp_path / "a")
    with pytest.raises(StoreMismatch, match=f"in the features of model id 0, was made with {option} = "):
        run(tmp_path / "a", **{option: value})
    np.testing.assert_array_equal(run(tmp_path / "a"), found)
    run(tmp_path / "b", finish=False)
    np.testing.assert_allclose(run(tmp_path / "b", **{option: value}), run(tmp_path / "c", **{option: value}))


@pytest.mark.parametrize("method", ["tracin", "influence"])
def test_a_small_component_of_a_property_counts_beside_a_large_one(method: Any, tmp_path: Path) -> None:
    given, (x, y) = Given(), make_data()

    def goal(small: int) -> Callable[[nn.Module], Tensor]:
        return lambda model: torch.stack([1e6 * LOSS(model(x[:9]), y[:9]), 1e-2 * LOSS(model(x[small]), y[small])])

    def run(small: int, **options: Any) -> Tensor:
        return attribute(
            given.network(), given.loss, given.data, given.groups, goal(small), method=method, **options
        ).scores

    run(10, save_dir=tmp_path)
    torch.testing.assert_close(run(11, save_dir=tmp_path)[1], run(11)[1], rtol=1e-3, atol=1e-7)


def test_a_solve_is_found_again_for_the_same_settings_only_however_long_they_are(tmp_path: Path) -> None:
    given, rates = Given(), np.full(2_000, 1e-2)
    other = rates.copy()
    other[1_000] = 50.0  # NumPy prints neither

    def run(rates: np.ndarray, **options: Any) -> Tensor:
        recipe = TrainingSteps(rates)  # type: ignore[arg-type]
        return attribute(
            given.network(), LOSS, given.data, given.groups, given.property, recipe=recipe, **options
        ).scores

    first = run(rates, save_dir=tmp_path)
    assert torch.equal(run(rates, save_dir=tmp_path), first)
    assert len(list(tmp_path.glob("*solve-*"))) == 1
    torch.testing.assert_close(run(other, save_dir=tmp_path), run(other))
    assert not torch.allclose(run(other), first)
