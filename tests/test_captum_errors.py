"""Bad input to ggda_captum: errors that name the argument and the fix, and a model left as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ggda_captum
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from ggda_ext import properties
from ggda_ext.model import SavedState
from tests.captum_cases import CLASSES, CURVED, TRACIN, UNEVEN, N, Problem, load, ours, problem, score


class Stream(IterableDataset):
    """Examples without an index."""

    def __iter__(self) -> Any:
        given = problem()
        return iter(zip(*given.train, strict=True))


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _is_unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (range(N + 1), f"labels for {N + 1} points, but the training set has {N}"),
        ([[0, 1], [1, 2]], "more than once"),
        ([[0, 1], [N]], f"outside 0 … {N - 1}"),
        ([[0, 1]], "are in no group"),
    ],
)
def test_groups_that_do_not_fit_are_refused_before_any_work(name: str, groups: Any, words: str) -> None:
    given, loads = problem(), []
    before = _state(given.model)
    with pytest.raises(ValueError, match=words):
        ours(name, given, groups=groups, checkpoints_load_func=lambda model, checkpoint: loads.append(checkpoint))
    assert loads == []
    assert _is_unchanged(given.model, before)


@pytest.mark.parametrize("name", CLASSES)
def test_neither_or_both_of_inputs_and_property(name: str) -> None:
    given = problem()
    for groups in (None, UNEVEN, range(N)):
        influence = ours(name, given, groups=groups)
        with pytest.raises(ValueError, match="one of `inputs` and `property` is required"):
            influence.influence()
        with pytest.raises(ValueError, match="both `inputs` and `property` are given"):
            influence.influence(given.test, property=properties.margins(given.test))


@pytest.mark.parametrize("name", CLASSES)
def test_an_iterable_data_set_has_no_index(name: str) -> None:
    given = problem()
    given.__class__ = type("Streamed", (Problem,), {"train_set": Stream()})
    with pytest.raises(TypeError, match="train_dataset is an IterableDataset"):
        ours(name, given, groups=UNEVEN)


@pytest.mark.parametrize("name", CLASSES)
def test_a_list_of_examples_is_a_data_set(name: str) -> None:
    given = problem()
    expected = score(ours(name, given, groups=UNEVEN), given.test)
    given.__class__ = type("Listed", (Problem,), {"train_set": list(zip(*given.train, strict=True))})
    torch.testing.assert_close(score(ours(name, given, groups=UNEVEN), given.test), expected)


def test_a_loader_that_shuffles_has_no_index() -> None:
    given = problem()
    shuffled = DataLoader(given.train_set, 4, shuffle=True)
    with pytest.raises(ValueError, match="train_dataset is a DataLoader that shuffles"):
        ggda_captum.TracInCP(
            given.model, shuffled, given.checkpoints, loss_fn=nn.MSELoss(reduction="none"), groups=UNEVEN
        )


def test_a_loader_without_batches_of_points() -> None:
    given = problem()
    whole = DataLoader([given.train], batch_size=None)
    with pytest.raises(ValueError, match="train_dataset is a DataLoader with batch_size=None"):
        ggda_captum.TracInCP(given.model, whole, given.checkpoints, loss_fn=nn.NLLLoss(reduction="none"), groups=UNEVEN)


@pytest.mark.parametrize("name", TRACIN)
def test_a_folder_or_list_without_checkpoints(name: str, tmp_path: Path) -> None:
    given = problem()
    for empty in (str(tmp_path), str(tmp_path / "missing"), []):
        given.checkpoints = empty  # type: ignore[assignment]
        with pytest.raises(ValueError, match="holds no checkpoint; pass a folder with files in it"):
            ours(name, given, groups=UNEVEN)


def _half_loaded(model: nn.Module, checkpoint: Any) -> float:
    """Fails at the second checkpoint after it has changed some parameters, as a wrong state dict does."""
    if checkpoint[1] == 0.7:
        model.first.weight.data.zero_()
        model.train()
        raise KeyError("middle.weight")
    return load(model, checkpoint)


@pytest.mark.parametrize("name", CLASSES)
def test_a_checkpoint_that_does_not_load_leaves_the_model_alone(name: str) -> None:
    given = problem()
    before = _state(given.model)
    with pytest.raises(ValueError, match=r"checkpoint of type tuple does not load \(KeyError: 'middle.weight'\)"):
        score(ours(name, given, groups=UNEVEN, checkpoints_load_func=_half_loaded), given.test)
    assert _is_unchanged(given.model, before)
    assert not given.model.training


@pytest.mark.parametrize("name", TRACIN)
def test_after_the_models_own_state_dict_a_failure_still_leaves_the_model_alone(name: str) -> None:
    def loaded(model: nn.Module, checkpoint: dict[str, Tensor]) -> float:
        model.load_state_dict(checkpoint)  # of which the second lacks a layer, after others were loaded
        return 0.1

    given = problem()
    broken = {key: value + 1 for key, value in given.model.state_dict().items() if key != list(_state(given.model))[-1]}
    given.checkpoints = [given.model.state_dict(), broken]  # type: ignore[list-item]
    before = _state(given.model)
    with pytest.raises(ValueError, match=r"checkpoint of type \w*[dD]ict does not load"):
        score(ours(name, given, groups=UNEVEN, checkpoints_load_func=loaded), given.test)
    assert _is_unchanged(given.model, before)


def test_before_a_load_only_what_the_checkpoint_does_not_hold_itself_is_copied() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    own = model.state_dict()
    for checkpoint, copied in (
        (own, []),
        (own | {"1.bias": own["1.bias"].clone()}, ["1.bias"]),
        (own | {"1.weight": own["1.weight"].t().reshape(2, 3)}, ["1.weight"]),
        ("a path", list(own)),
    ):
        saved = SavedState(model, ())
        saved.copy_values(but_for=checkpoint)
        with torch.no_grad():
            for value in model.parameters():
                value.add_(1)
        assert saved.changed() == copied


@pytest.mark.parametrize("name", CLASSES)
def test_a_file_of_another_model_is_named(name: str, tmp_path: Path) -> None:
    given = problem()
    path = tmp_path / "other.pt"
    torch.save(nn.Linear(2, 2).state_dict(), path)
    given.checkpoints = [str(path)]  # type: ignore[list-item]
    default = __import__("captum.influence._utils.common", fromlist=["x"])._load_flexible_state_dict
    before = _state(given.model)
    with pytest.raises(ValueError, match=r"checkpoint '.*other\.pt' does not load"):
        score(ours(name, given, groups=UNEVEN, checkpoints_load_func=default), given.test)
    assert _is_unchanged(given.model, before)


def test_a_load_function_without_a_learning_rate() -> None:
    given = problem()
    influence = ours("TracInCP", given, groups=UNEVEN, checkpoints_load_func=lambda model, checkpoint: None)
    with pytest.raises(TypeError, match="checkpoints_load_func returned None"):
        influence.influence(given.test)


@pytest.mark.parametrize("name", CLASSES)
def test_a_property_that_fails_leaves_the_model_alone(name: str) -> None:
    given = problem()
    influence = ours(name, given, groups=UNEVEN)
    before = _state(given.model)
    with pytest.raises(ValueError, match="property has no gradient"):
        score(influence, property=lambda model: model(given.test[0]).argmax(1).double().mean())
    assert _is_unchanged(given.model, before)
    assert all(parameter.requires_grad for parameter in given.model.parameters())


@pytest.mark.parametrize("name", ["TracInCP", *CURVED])
@pytest.mark.parametrize("layers", [["last", "first", "last"], ["first", "middle"]])
def test_layers_that_hold_a_parameter_twice_are_refused_before_any_work(name: str, layers: list[str]) -> None:
    given, loads = problem(), []
    if layers == ["first", "middle"]:
        given.model.middle.bias = given.model.first.bias
    said = rf"layers hold \d parameters more than once, first '{layers[0]}"
    with pytest.raises(ValueError, match=said):
        ours(name, given, groups=UNEVEN, layers=layers, checkpoints_load_func=lambda *given: loads.append(given))
    assert loads == []
    with pytest.raises(ValueError, match=said):
        score(ours(name, given, layers=layers, reduction="none"), property=properties.margins(given.test))


def test_an_unknown_strategy() -> None:
    with pytest.raises(ValueError, match="strategy='fast' is not one of 'auto', 'directional'"):
        ours("TracInCP", problem(), groups=UNEVEN, strategy="fast")


def test_test_points_that_are_no_tuple() -> None:
    given = problem()
    with pytest.raises(TypeError, match="inputs is a Tensor: pass a tuple"):
        ours("TracInCP", given, groups=UNEVEN).influence(given.test[0])
    with pytest.raises(TypeError, match=r"inputs is a \w+: .*, or, for a property, property="):
        ours("TracInCP", given, groups=UNEVEN).influence(properties.margins(given.test))


def test_missing_captum_names_the_extra() -> None:
    code = "import sys; sys.modules['captum'] = None\nimport ggda_captum"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: ggda_captum needs Captum: pip install 'ggda-ext[captum]'" in run.stderr


def test_self_influence_of_projections_needs_groups() -> None:
    with pytest.raises(NotImplementedError):
        ours("TracInCPFastRandProj", problem()).self_influence()


@pytest.mark.parametrize("name", CURVED)
def test_k_uses_the_test_loss_where_captum_forgets_it(name: str) -> None:
    given = problem()
    influence = ours(name, given, groups=UNEVEN, other_test_loss=True)
    assert torch.equal(
        influence.influence(given.test, k=1).influence_scores[:, 0], score(influence, given.test).amax(1)
    )
