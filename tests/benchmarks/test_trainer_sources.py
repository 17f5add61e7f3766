"""Sources of a fine-tuning, from rows to tables, with a tiny BERT and made questions in the place of QNLI."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("transformers")

from transformers import BertConfig, BertModel, BertTokenizerFast

from benchmarks import experiments
from benchmarks.data.sources import Origin
from benchmarks.experiments import qnli_sources
from benchmarks.names import QNLI_SOURCES, SOURCES, TRIVIAL
from benchmarks.results import ResultFolder
from benchmarks.scales import SCALES
from benchmarks.trainer_sources import made as made_rows
from benchmarks.trainer_sources import qnli as rows_of_qnli
from benchmarks.trainer_sources import tables
from benchmarks.trainer_sources.task import SCORES, run

WORDS = ["red", "green", "blue", "round", "square", "flat"]


@pytest.fixture
def folder(tmp_path):
    """A folder as the data of QNLI and a small BERT come in."""
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]), encoding="utf-8")
    config = BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=16,
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path / "bert-minilm-l6")
    BertTokenizerFast(str(vocabulary)).save_pretrained(tmp_path / "bert-minilm-l6")
    draw = random.Random(0)
    with gzip.open(tmp_path / "qnli.tsv.gz", "wt", encoding="utf-8") as file:
        for number in range(90):
            question, sentence = (" ".join(draw.choices(WORDS, k=length)) for length in (2, 2 + number % 3))
            split = "train" if number < 60 else "dev"
            file.write(f"{split}\t{number % 2}\t{number}\tmade\t{question}\t{sentence}\n")
    return tmp_path


def test_a_seed_of_qnli_is_scored_trained_again_and_shown(folder, monkeypatch):
    monkeypatch.setattr(rows_of_qnli, "SIZES", dict.fromkeys(rows_of_qnli.SIZES, 8))
    monkeypatch.setattr(rows_of_qnli, "PROPERTY", 6)
    monkeypatch.setitem(rows_of_qnli.BEFORE, "rows", 16)
    task = rows_of_qnli.qnli(folder)
    rows, goal, tests = task.data(3)
    assert [row["source"] for row in rows] == [name for name in rows_of_qnli.SIZES for _ in range(8)]
    assert (len(goal), len(tests)) == (6, 24)
    found = run(task, 3, folder / "qnli-3.json")
    assert set(found["scores"]) == {"tracker", "curvature"}
    assert all(set(scores) == set(rows_of_qnli.SIZES) for scores in found["scores"].values())
    assert set(found["without"]) == {"flipped", "shuffled"}
    assert json.loads((folder / "qnli-3.json").read_text("utf-8"))["seed"] == 3
    page = folder / "page.md"
    kept = [tables.mark("made"), "stays", tables.END]
    page.write_text("\n".join([*kept, tables.mark("qnli"), "goes", tables.END, "after"]), encoding="utf-8")
    tables.write_into(page, tables.tables(folder))
    text = page.read_text("utf-8")
    assert text.startswith("\n".join(kept))
    assert text.endswith("after")
    assert "goes" not in text
    assert "| 3 |" in text
    with pytest.raises(ValueError, match="has no place for the table"):
        tables.write_into(page, {"other": "table"})


def test_flipped_labels_and_shuffled_sentences_are_those_of_the_same_rows(folder, monkeypatch):
    monkeypatch.setattr(rows_of_qnli, "SIZES", dict.fromkeys(rows_of_qnli.SIZES, 8))
    monkeypatch.setitem(rows_of_qnli.BEFORE, "rows", 16)
    given = rows_of_qnli.short_pairs(folder / "qnli.tsv.gz", "train")
    seen = []

    def states(*_):
        return lambda pairs, source: seen.append((source, list(pairs))) or []

    monkeypatch.setattr(rows_of_qnli, "states", states)
    monkeypatch.setattr(rows_of_qnli, "trained", lambda *_, **__: None)
    rows_of_qnli.qnli(folder).data(0)
    parts = dict(seen)
    assert parts["before"] == given[:16]
    others = set(given[16:])
    assert others.issuperset(parts["clean a"] + parts["clean b"])
    assert others.issuperset((question, sentence, 1 - label) for question, sentence, label in parts["flipped"])
    drawn = random.Random(0).sample(given[16:], 32)[24:]
    assert [(q, label) for q, _, label in parts["shuffled"]] == [(q, label) for q, _, label in drawn]
    assert sorted(s for _, s, _ in parts["shuffled"]) == sorted(s for _, s, _ in drawn)


def test_a_seed_of_made_rows_has_every_kind_of_score(tmp_path, monkeypatch):
    monkeypatch.setattr(made_rows, "SIZES", dict.fromkeys(made_rows.SIZES, 4))
    task = replace(made_rows.made(), left_out=("",), repeats=1)
    found = run(task, 0, tmp_path / "made-0.json")
    assert tuple(found["scores"]) == tuple(SCORES)
    assert len(found["without"][""]) == 1


def test_sources_are_a_task_of_lds(folder, monkeypatch):
    """Rows of sources of each kind, models on all but the frozen layers, and a row for every method."""
    pairs = rows_of_qnli.short_pairs(folder / "qnli.tsv.gz", "train")
    parts = {"train": pairs, "test": rows_of_qnli.short_pairs(folder / "qnli.tsv.gz", "dev")}
    names = ("question", "sentence", "label")
    content = {
        f"{part}_{name}": np.array([row[at] for row in rows], dtype=object)
        for part, rows in parts.items()
        for at, name in enumerate(names)
    }
    monkeypatch.setattr(qnli_sources, "obtain", lambda *_, **__: Origin(content, "made", False, ()))
    monkeypatch.setattr(qnli_sources.data, "bert", lambda _: SimpleNamespace(path=folder / "bert-minilm-l6", source=""))
    monkeypatch.setitem(rows_of_qnli.BEFORE, "rows", 16)
    scale = SCALES["smoke"]
    task = qnli_sources.sources_task(scale, folder, folder / "models")
    assert task.data.sources.tolist() == [j // 2 for j in range(32)]
    clean = np.array([label for _, _, label in qnli_sources._short(content, "train")[16:48]])
    flipped = np.isin(task.data.sources, range(10, 13))
    assert (task.data.train[1].numpy() == np.where(flipped, 1 - clean, clean)).all()
    size = scale.experiments[QNLI_SOURCES]
    few = replace(
        size, lds=replace(size.lds, cells=replace(size.lds.cells, groups={SOURCES: (2,)}), subsets=4, seeds=1)
    )
    results = ResultFolder.open("run", {"command": "run", "scale": "smoke"}, base=folder)
    experiments.run(["lds"], [QNLI_SOURCES], replace(scale, experiments={QNLI_SOURCES: few}), results)
    assert {row["method"] for row in results.rows} == {*size.lds.cells.methods, *TRIVIAL}
    assert {(row["groups"], row["grouping"]) for row in results.rows} == {(16, SOURCES)}
