"""The paper's tasks: its hyperparameters, models that are trained once, ensembles, BERT on plain tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks import models, tasks
from benchmarks.data import BertSource, DataSet
from benchmarks.scales import SCALES
from benchmarks.tasks import LOSS, PAPER, TASKS, Task, task
from ggda_ext.training import initial_model, train_one

SMOKE = SCALES["smoke"]


def dataset(name: str, n: int = 48) -> DataSet:
    generator = torch.Generator().manual_seed(0)

    def part(count: int) -> tuple[Tensor, Tensor]:
        y = torch.arange(count) % 2
        if name == "qnli":
            tokens = torch.randint(1000, 30_000, (count, 3, 8), generator=generator)
            tokens[:, 1], tokens[:, 2] = torch.arange(8) < 6, torch.arange(8) > 3
            return tokens, y
        shape = {"mnist": (784,), "cifar10": (3, 32, 32)}.get(name, (23,))
        return torch.randn(count, *shape, generator=generator), y

    classes = 10 if name in ("mnist", "cifar10") else 2
    return DataSet(name, name.upper(), part(n), part(12), classes, "made by the test", False, ())


def small(name: str, n: int = 48) -> Task:
    return task(name, dataset(PAPER[name].data, n), SMOKE)


@pytest.fixture(autouse=True)
def no_pretrained_bert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "bert", lambda folder=None: BertSource(None, "stand-in", True))


def test_hyperparameters_are_the_paper_s_table() -> None:
    expected = {
        "heloc-lr": (200, 0.1, 128, 0, "onecycle", 16),
        "heloc-ann-s": (300, 0.001, 128, 4e-4, "onecycle", 16),
        "heloc-ann-m": (400, 5e-4, 128, 4e-4, "onecycle", 16),
        "mnist-ann-l": (50, 0.001, 512, 0, "onecycle", 32),
        "cifar10-resnet18": (50, 0.01, 512, 0, "onecycle", 64),
        "qnli-bert": (3, 2e-5, 512, 0, "linear", 32),
    }
    for name, (epochs, rate, batch, decay, schedule, dim) in expected.items():
        recipe = PAPER[name].recipe
        assert (recipe.epochs, recipe.learning_rate, recipe.batch_size) == (epochs, rate, batch)
        assert (recipe.weight_decay, recipe.schedule, PAPER[name].projection_dim) == (decay, schedule, dim)
        assert SCALES["paper"].epochs[name] == epochs
    assert tuple(expected) == TASKS
    full = task("heloc-ann-s", dataset("heloc", 7_896), SCALES["paper"])
    assert full.recipe == PAPER["heloc-ann-s"].recipe
    assert (full.lissa.damping, full.lissa.repeats, full.lissa.depth, full.lissa.scale) == (0.001, 20, 200, 50)


def test_batches_shrink_with_the_data_and_epochs_keep_their_steps() -> None:
    steps = {n: task("heloc-lr", dataset("heloc", n), SMOKE).recipe for n in (7_896, 3_948, 1_000, 48)}
    assert [steps[n].batch_size for n in steps] == [128, 64, 32, 16]
    assert steps[3_948].steps_per_epoch(3_948) == steps[7_896].steps_per_epoch(7_896) == 62


@pytest.mark.parametrize("name", TASKS)
def test_every_task_trains_once_and_is_found_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = small(name)
    made = first.trained(0, folder=tmp_path)
    monkeypatch.setattr(tasks, "train_one", None)  # a second training would fail
    found = small(name).trained(0, folder=tmp_path)
    outputs = found.model(first.data.test[0])
    assert outputs.shape == (12, first.data.classes)
    assert torch.equal(outputs, made.model(first.data.test[0]))
    assert found.rates == made.rates
    assert len(found.checkpoints) == len(first.checkpoint_epochs) == len(made.rates)
    for key, value in found.model.state_dict().items():
        assert torch.equal(found.checkpoints[-1][key], value)
    assert not found.model.training
    assert first.stand_in == (name == "qnli-bert")
    assert ("stand-in" in first.title) == (name == "qnli-bert")


def test_other_labels_seeds_and_recipes_are_other_models(tmp_path: Path) -> None:
    given = small("heloc-ann-s")
    y = given.data.train[1]
    made = [
        given.trained(0, folder=tmp_path),
        given.trained(1, folder=tmp_path),
        given.trained(0, labels=1 - y, folder=tmp_path),
        replace(given, recipe=replace(given.recipe, weight_decay=0.1)).trained(0, folder=tmp_path),
    ]
    assert len(list(tmp_path.iterdir())) == 4
    outputs = [found.model(given.data.test[0]) for found in made]
    assert all(not torch.equal(outputs[0], other) for other in outputs[1:])
    alone = train_one(
        initial_model(given.make_model, 0), LOSS, (given.data.train[0], 1 - y), given.recipe, seed=0
    ).model
    assert torch.equal(alone(given.data.test[0]), outputs[2])
    with pytest.raises(ValueError, match="labels has shape"):
        given.trained(0, labels=y[1:], folder=tmp_path)


def test_a_damaged_file_is_trained_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = small("heloc-lr")
    made = given.trained(0, folder=tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for broken in (whole[:100], whole[:-1] + b"?", b""):
        file.write_bytes(broken)
        again = given.trained(0, folder=tmp_path)
        assert torch.equal(again.model.state_dict()["0.weight"], made.model.state_dict()["0.weight"])
        assert file.read_bytes()[-1:] == whole[-1:]
    assert [record.message.endswith("is damaged; the model is trained again.") for record in caplog.records] == [
        True
    ] * 3


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"trained model cannot be written to .*file: .* set GGDA_CACHE_DIR"):
        small("heloc-lr").trained(0, folder=tmp_path / "file")


@pytest.mark.parametrize("name", ["heloc-ann-s", "cifar10-resnet18"])
def test_an_ensemble_is_models_on_random_halves(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = small(name, 32)
    ensemble = given.ensemble(3, 0.5, seed=2, folder=tmp_path)
    assert [len(np.unique(subset)) for subset in ensemble.subsets] == [16, 16, 16]
    assert not torch.equal(ensemble.subsets[0], ensemble.subsets[1])
    alone = train_one(
        initial_model(given.make_model, 3001), LOSS, given.data.train, given.recipe, seed=3001,
        subset=ensemble.subsets[1],
    ).model  # fmt: skip
    x = given.data.test[0]
    torch.testing.assert_close(ensemble.models[1](x), alone(x), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(tasks, "train_many", None)
    again = given.ensemble(3, 0.5, seed=2, folder=tmp_path)
    assert all(torch.equal(a(x), b(x)) for a, b in zip(again.models, ensemble.models, strict=True))
    with pytest.raises(ValueError, match="fraction=0"):
        given.ensemble(fraction=0)


def test_batch_norm_learns_its_statistics(tmp_path: Path) -> None:
    found = small("cifar10-resnet18", 32).trained(0, folder=tmp_path).model
    norms = [module for module in found.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(norm.running_mean is not None and bool((norm.running_mean != 0).any()) for norm in norms)


def test_text_classifier_is_bert_with_a_mask() -> None:
    torch.manual_seed(0)
    model = models.random_bert().eval()
    tokens, y = dataset("qnli").train
    ids, mask, types = tokens.unbind(1)
    bert: Any = model.bert
    expected = bert(input_ids=ids, attention_mask=mask, token_type_ids=types).logits
    torch.testing.assert_close(model(tokens), expected)
    other = tokens.clone()
    other[:, 0, 6:] = 5  # behind the mask
    torch.testing.assert_close(model(other), expected)

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return LOSS(functional_call(model, parameters, (x[None],)), y[None])

    rows = vmap(grad(loss), (None, 0, 0))(dict(model.named_parameters()), tokens[:3], y[:3])
    model.zero_grad()
    LOSS(model(tokens[2:3]), y[2:3]).backward()
    torch.testing.assert_close(rows["bert.classifier.weight"][2], bert.classifier.weight.grad, rtol=1e-4, atol=1e-6)


def test_pretrained_bert_gets_a_new_head_for_every_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    stored: Any = models.random_bert().bert
    stored.bert.save_pretrained(tmp_path)
    monkeypatch.setattr(tasks, "bert", lambda folder=None: BertSource(tmp_path, "made by the test", False))
    given = small("qnli-bert")
    assert (given.title, given.weights, given.stand_in) == ("BERT", "made by the test", False)
    assert given.recipe.learning_rate == 1e-4  # narrower than BERT-base
    one, again, other = (initial_model(given.make_model, seed).state_dict() for seed in (0, 0, 1))
    changed = {name for name in one if not torch.equal(one[name], other[name])}
    assert changed == {"bert.classifier.weight"}
    assert all(torch.equal(one[name], again[name]) for name in one)
    name = "embeddings.word_embeddings.weight"
    assert torch.equal(one[f"bert.bert.{name}"], stored.bert.state_dict()[name])


def test_bad_names() -> None:
    with pytest.raises(ValueError, match="choose from heloc-lr"):
        task("heloc", dataset("heloc"), SMOKE)
    with pytest.raises(ValueError, match="needs the data set 'mnist', not 'heloc'"):
        task("mnist-ann-l", dataset("heloc"), SMOKE)
    assert task("heloc-lr", dataset("heloc-clean"), SMOKE).data.name == "heloc-clean"
