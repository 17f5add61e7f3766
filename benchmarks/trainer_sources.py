"""Which source hurts a fine-tuning? Scores of a Trainer's sources, while training and after, against real retraining.

    python -m benchmarks.trainer_sources run qnli --data-dir FOLDER --out results/sources
    python -m benchmarks.trainer_sources run made --out results/sources
    python -m benchmarks.trainer_sources table --out results/sources --page docs/huggingface.md

`qnli`: a small pre-trained BERT, all but its upper layers frozen, on rows of QNLI from four sources: two clean,
one with flipped labels, one whose sentences are shuffled among its rows. `made`: a tiny BERT from random weights on
eight made sources, trained again without each. Every seed has other rows, another order and another start. What is
done is kept, one file a seed: a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ggda_transformers import GroupTracker, attribute_trainer
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

Rows = list[dict[str, Any]]
Pair = tuple[str, str, int]
METHODS = ("tracker", "tracker, Adam", "tracin", "curvature")
"""Columns of the tables: while training, without and with Adam's division; after it, without and with curvature."""
BROKEN = "flipped"
MARKS = "<!-- trainer_sources: written by `python -m benchmarks.trainer_sources table` -->", "<!-- end -->"


@dataclass(frozen=True)
class Task:
    """Data and training of one kind.

    Attributes:
        name: of the task.
        data: seed → training rows, rows of the property, rows of the test.
        fit: ``(rows, seed, callbacks)`` → a Trainer after training.
        truth: sources to be left out, or None for all.
        every: which steps a tracker scores.
        repeats: trainings for each truth.
    """

    name: str
    data: Callable[[int], tuple[Rows, Rows, Rows]]
    fit: Callable[[Rows, int, list[Any]], Trainer]
    truth: tuple[str, ...] | None
    every: int
    repeats: int


# ---- QNLI

QNLI_SIZES = {"clean a": 320, "clean b": 320, BROKEN: 120, "shuffled": 120}
LONGEST, UPPER_LAYERS, QNLI_EPOCHS = 40, 2, 3


class Given(nn.Module):
    """In the place of a BERT's embeddings and lower layers: gives on what these made of the tokens."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> Tensor:
        """The states `[b, t, h]` as they are."""
        return inputs_embeds


def qnli(folder: Path) -> Task:
    """QNLI rows and the weights of a small BERT, from a folder of data.

    The embeddings and lower layers are frozen, and run once for all trainings of a seed, with dropout off.
    """
    weights = folder / "bert-minilm-l6"
    tokenizer = AutoTokenizer.from_pretrained(weights)

    def bert() -> Any:
        return BertForSequenceClassification.from_pretrained(weights, num_labels=2, dtype=torch.float32)

    def states(pairs: Sequence[Pair], source: str) -> Rows:
        lower, found = bert().bert.eval(), []
        lower.encoder.layer = lower.encoder.layer[:-UPPER_LAYERS]
        with torch.no_grad():
            for low in range(0, len(pairs), 32):
                questions, sentences, labels = zip(*pairs[low : low + 32], strict=True)
                batch = tokenizer(
                    list(questions), list(sentences), truncation=True, max_length=LONGEST, padding=True,
                    return_tensors="pt",
                )  # fmt: skip
                lengths = batch["attention_mask"].sum(1)
                made = lower(**batch).last_hidden_state
                for one, length, label in zip(made, lengths, labels, strict=True):
                    found.append({"inputs_embeds": one[:length].clone(), "labels": label, "source": source})
        return found

    @cache
    def data(seed: int) -> tuple[Rows, Rows, Rows]:
        pairs, rows = _pairs(folder / "qnli.tsv.gz", "train", sum(QNLI_SIZES.values()), seed), []
        for source, count in QNLI_SIZES.items():
            part, pairs = pairs[:count], pairs[count:]
            if source == BROKEN:
                part = [(question, sentence, 1 - label) for question, sentence, label in part]
            if source == "shuffled":
                sentences = random.Random(seed).sample([sentence for _, sentence, _ in part], count)
                part = [(question, other, label) for (question, _, label), other in zip(part, sentences, strict=True)]
            rows += states(part, source)
        held = _pairs(folder / "qnli.tsv.gz", "dev", 600, seed)
        by_label = [[pair for pair in held if pair[2] == label] for label in (0, 1)]
        goal, tests = ([pair for part in by_label for pair in part[cut]] for cut in (slice(24), slice(24, 224)))
        return rows, states(goal, "goal"), states(tests, "tests")

    def fit(rows: Rows, seed: int, callbacks: list[Any]) -> Trainer:
        torch.manual_seed(seed)
        model = bert()
        model.bert.embeddings = Given()
        model.bert.encoder.layer = model.bert.encoder.layer[-UPPER_LAYERS:]
        return _trained(model, rows, _padded, callbacks, seed, 16, num_train_epochs=QNLI_EPOCHS, learning_rate=3e-4)

    return Task("qnli", data, fit, (BROKEN,), every=8, repeats=1)


def _padded(rows: Rows) -> dict[str, Tensor]:
    """States of different lengths as a batch."""
    states = [row["inputs_embeds"] for row in rows]
    mask = pad_sequence([torch.ones(len(one), dtype=torch.long) for one in states], batch_first=True)
    return {"inputs_embeds": pad_sequence(states, batch_first=True), "attention_mask": mask,
            "labels": torch.tensor([row["labels"] for row in rows])}  # fmt: skip


def _pairs(path: Path, split: str, count: int, seed: int) -> list[Pair]:
    """Some rows of a split: question, sentence, label."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    found = [(row[4], row[5], int(row[1])) for row in rows if row[0] == split and row[1] in "01"]
    return random.Random(seed).sample(found, count)


# ---- made rows

MADE_SIZES = {
    "clean a": 60, "clean b": 60, "clean c": 60, "small": 20, "a third flipped": 60, BROKEN: 40, "shuffled": 40,
    "other question": 40,
}  # fmt: skip


def made() -> Task:
    """Rows whose label is whether the first token is a high one; in four sources not always."""

    def source_of(n: int, source: str, draw: torch.Generator) -> Rows:
        tokens = torch.randint(4, 40, (n, 6), generator=draw)
        labels = (tokens[:, 1 if source == "other question" else 0] >= 22).long()
        if source == BROKEN:
            labels = 1 - labels
        if source == "shuffled":
            labels = labels[torch.randperm(n, generator=draw)]
        if source == "a third flipped":
            labels[::3] = 1 - labels[::3]
        pairs = zip(tokens.tolist(), labels.tolist(), strict=True)
        return [{"input_ids": ids, "labels": label, "source": source} for ids, label in pairs]

    def data(seed: int) -> tuple[Rows, Rows, Rows]:
        draw = torch.Generator().manual_seed(1000 + seed)
        rows = [row for source, count in MADE_SIZES.items() for row in source_of(count, source, draw)]
        return rows, source_of(64, "goal", draw), source_of(400, "tests", draw)

    def fit(rows: Rows, seed: int, callbacks: list[Any]) -> Trainer:
        torch.manual_seed(seed)
        config: Any = BertConfig
        chosen = config(
            vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=8, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        model = BertForSequenceClassification(chosen)
        return _trained(model, rows, default_data_collator, callbacks, seed, 20, num_train_epochs=4, learning_rate=5e-3)

    return Task("made", data, fit, None, every=2, repeats=3)


def _trained(
    model: Any, rows: Rows, collator: Any, callbacks: list[Any], seed: int, batch_size: int, **settings: Any
) -> Trainer:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=batch_size, seed=seed, logging_steps=10, save_strategy="no",
            report_to=[], use_cpu=True, disable_tqdm=True, warmup_steps=10, log_level="error", **settings,
        )  # fmt: skip
        trainer = Trainer(model, arguments, data_collator=collator, train_dataset=rows, callbacks=callbacks)
        trainer.train()
    return trainer


# ---- prediction and truth


def measured(trainer: Trainer, rows: Rows) -> tuple[float, float]:
    """Mean loss and accuracy on rows."""
    model: Any = trainer.model
    model.eval()
    loss, right = 0.0, 0
    with torch.no_grad():
        for low in range(0, len(rows), 50):
            kept = [{key: value for key, value in row.items() if key != "source"} for row in rows[low : low + 50]]
            batch = trainer.data_collator(kept)
            output = model(**batch)
            loss += float(output.loss) * len(kept)
            right += int((output.logits.argmax(1) == batch["labels"]).sum())
    return loss / len(rows), right / len(rows)


def scored(task: Task, seed: int) -> dict[str, Any]:
    """Scores of every source by every method, and what the model reaches with all sources."""
    rows, goal, tests = task.data(seed)
    tracker = GroupTracker(rows, "source", eval_dataset=goal, every=task.every, show=False)
    begin = time.process_time()
    trainer = task.fit(rows, seed, [tracker])
    seconds, found = time.process_time() - begin, {"tracker": tracker.result}
    if task.name == "made":  # two trackers are two trainings
        adam = GroupTracker(rows, "source", eval_dataset=goal, every=task.every, preconditioner="adam", show=False)
        task.fit(rows, seed, [adam])
        found["tracker, Adam"] = adam.result
    begin = time.process_time()
    found["curvature"] = attribute_trainer(trainer, rows, "source", eval_dataset=goal)
    after = time.process_time() - begin
    found["tracin"] = attribute_trainer(trainer, rows, "source", eval_dataset=goal, method="tracin")
    return {
        "scores": {
            name: dict(zip(map(str, one.names), one.scores[0].tolist(), strict=True)) for name, one in found.items()
        },
        "curvature": str(found["curvature"].method), "overhead": tracker.overhead,
        "CPU s": {"training with tracker": seconds, "curvature": after},
        "with all": {"goal": measured(trainer, goal), "tests": measured(trainer, tests)},
    }  # fmt: skip


def trained_without(task: Task, seed: int, source: str | None) -> list[dict[str, Any]]:
    """Loss and accuracy of models trained without a source, or with all."""
    rows, goal, tests = task.data(seed)
    kept, found = [row for row in rows if row["source"] != source], []
    for repeat in range(task.repeats):
        trainer = task.fit(kept, seed + 100 * repeat, [])
        found.append({"goal": measured(trainer, goal), "tests": measured(trainer, tests)})
    return found


def run(task: Task, seed: int, path: Path) -> dict[str, Any]:
    """One seed, from where the file stands."""
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"seed": seed}

    def keep() -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(known, indent=1), encoding="utf-8")
        part.replace(path)

    if "scores" not in known:
        known |= scored(task, seed)
        keep()
    left_out: dict[str, Any] = known.setdefault("without", {})
    sources = task.truth or ("", *known["scores"]["tracker"])  # "": nothing is left out, with the seeds of the others
    for source in sources:
        if source not in left_out:
            left_out[source] = trained_without(task, seed, source or None)
            keep()
    return known


# ---- tables


def tables(folder: Path) -> str:
    """What the files of a folder show, as Markdown."""
    kept = {name: [json.loads(p.read_text("utf-8")) for p in sorted(folder.glob(f"{name}-*.json"))] for name in TASKS}
    parts = [_qnli_table(kept["qnli"]), _made_table(kept["made"])]
    return "\n\n".join(part for part in parts if part)


def _last(scores: dict[str, float]) -> str:
    return min(scores, key=scores.__getitem__)


def _qnli_table(found: list[dict[str, Any]]) -> str:
    """For each seed which source comes last, and the test accuracy with all sources and without the broken one."""
    done = [one for one in found if BROKEN in one.get("without", {})]
    if not done:
        return ""
    lines = [
        "| seed | last by the tracker | last after training (EK-FAC) | test accuracy with all | without the flipped |",
        "|---|---|---|---|---|",
    ]
    for one in done:
        before, after = one["with all"]["tests"][1], one["without"][BROKEN][0]["tests"][1]
        last = [_last(one["scores"][name]) for name in ("tracker", "curvature")]
        lines.append(f"| {one['seed']} | {last[0]} | {last[1]} | {before:.1%} | {after:.1%} |")
    return "\n".join(lines)


def _made_table(found: list[dict[str, Any]]) -> str:
    """How well each method ranks the sources of `made` as leaving each out does."""
    done = [one for one in found if set(one.get("without", {})) >= {"", *MADE_SIZES}]
    if not done:
        return ""
    agreement: dict[str, list[float]] = {name: [] for name in (*METHODS, "other seeds")}
    last = dict.fromkeys(agreement, 0)
    for one in done:
        truth = {source: _effects(one, source) for source in MADE_SIZES}
        mean = {source: float(np.mean(values)) for source, values in truth.items()}
        cases = dict(one["scores"]) | {"other seeds": {source: values[0] for source, values in truth.items()}}
        for name, scores in cases.items():
            against = mean if name != "other seeds" else {s: float(np.mean(v[1:])) for s, v in truth.items()}
            order = list(MADE_SIZES)
            agreement[name].append(float(spearmanr([scores[s] for s in order], [against[s] for s in order])[0]))
            last[name] += _last(scores) == _last(against)
    words = {
        "tracker": "`GroupTracker`", "tracker, Adam": "`GroupTracker(preconditioner=\"adam\")`",
        "tracin": "`attribute_trainer(method=\"tracin\")`", "curvature": "`attribute_trainer`, by default influence",
        "other seeds": "one retraining against two others",
    }  # fmt: skip
    lines = ["| | rank agreement with retraining, mean (least) | names the worst source |", "|---|---|---|"]
    for name, values in agreement.items():
        least = f"{np.mean(values):.2f} ({min(values):.2f})"
        lines.append(f"| {words[name]} | {least} | {last[name]} of {len(values)} |")
    return "\n".join(lines)


def _effects(one: dict[str, Any], source: str) -> list[float]:
    """By how much the property rose without a source, for each training seed."""
    pairs = zip(one["without"][source], one["without"][""], strict=True)
    return [without["goal"][0] - everything["goal"][0] for without, everything in pairs]


def write_into(page: Path, text: str) -> None:
    """Put the tables between the page's marks."""
    head, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, tail = rest.partition(MARKS[1])
    if not end:
        raise ValueError(f"{page} has no place for the tables: it needs the lines {MARKS[0]!r} and {MARKS[1]!r}.")
    page.write_text(f"{head}{MARKS[0]}\n\n{text}\n\n{end}{tail}", encoding="utf-8")


TASKS = ("qnli", "made")


def main() -> None:
    """Run seeds, or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("task", nargs="?", choices=TASKS)
    parser.add_argument("--data-dir", type=Path, help="holds qnli.tsv.gz and bert-minilm-l6")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--out", type=Path, required=True, help="folder, one file for each seed")
    parser.add_argument("--page", type=Path, help="page to write the tables into")
    given = parser.parse_args()
    if given.command == "table":
        text = tables(given.out)
        print(text)
        if given.page is not None:
            write_into(given.page, text)
        return
    if given.task is None or (given.task == "qnli" and given.data_dir is None):
        parser.error("run needs a task, qnli or made; qnli needs --data-dir")
    task = made() if given.task == "made" else qnli(given.data_dir)
    given.out.mkdir(parents=True, exist_ok=True)
    for seed in given.seeds:
        found = run(task, seed, given.out / f"{task.name}-{seed}.json")
        print(seed, {name: _last(scores) for name, scores in found["scores"].items()}, flush=True)


if __name__ == "__main__":
    main()
