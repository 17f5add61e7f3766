"""Rows of QNLI from four sources: two clean, one with flipped labels, one whose sentences are shuffled among its rows.

The model is a small BERT that was pre-trained to tell whether sentences are alike. It reads question and sentence each
by itself, as it learned to; the logits are linear in the cosine of the means of their states, and begin with what that
pre-training suggests: alike is entailment. Only the last layer of the BERT and the linear layer are trained; embeddings
and lower layers are frozen, and run once for all trainings of a seed, with dropout off. Only short rows are taken. All
this is for the sake of time. Sizes, learning rate and epochs were chosen on seed 99.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, BertModel, Trainer

from benchmarks.trainer_sources.task import BROKEN, Rows, Task, trained

Pair = tuple[str, str, int]
SIZES = {"clean a": 200, "clean b": 200, "flipped": 200, "shuffled": 200}
PROPERTY, TESTS = 64, 600
UPPER_LAYERS, EPOCHS, BATCH_SIZE, RATE = 1, 2, 16, 5e-4
COSINE = 20.0  # its unit, so that the linear layer learns as fast as the rest
START = 10.0, 0.55
"""Logits at the start: half of ±10 (cosine − 0.55), about the mean cosine of a pair."""
LONGEST_QUESTION, LONGEST_SENTENCE = 70, 120  # in letters


class Comparison(nn.Module):
    """The upper layers of a BERT on the states of its lower ones, and what compares question and sentence."""

    def __init__(self, weights: Path) -> None:
        super().__init__()
        bert: Any = BertModel.from_pretrained(weights, dtype=torch.float32)
        self.layers = bert.encoder.layer[-UPPER_LAYERS:]
        self.compare = nn.Linear(1, 2)
        with torch.no_grad():
            slope = START[0] / 2 / COSINE * torch.tensor([1.0, -1.0])
            self.compare.weight.copy_(slope[:, None])
            self.compare.bias.copy_(-slope * COSINE * START[1])

    def read(self, states: Tensor, mask: Tensor) -> Tensor:
        """Texts as vectors `[b, h]` of length 1."""
        seen = mask[:, None, None, :].bool()
        for layer in self.layers:
            states = layer(states, seen)
            states = states[0] if isinstance(states, tuple) else states
        return nn.functional.normalize((states * mask[..., None]).sum(1), dim=1)

    def forward(
        self, question: Tensor, question_mask: Tensor, sentence: Tensor, sentence_mask: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Loss and logits, as a Trainer wants them."""
        u, v = self.read(question, question_mask), self.read(sentence, sentence_mask)
        logits = self.compare(COSINE * (u * v).sum(1, keepdim=True))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def qnli(folder: Path) -> Task:
    """QNLI rows and the weights of a small BERT, from a folder of data."""
    weights = folder / "bert-minilm-l6"

    def fit(rows: Rows, seed: int, callbacks: list[Any]) -> Trainer:
        torch.manual_seed(seed)
        return trained(
            Comparison(weights), rows, padded, callbacks, seed, BATCH_SIZE, num_train_epochs=EPOCHS, learning_rate=RATE
        )

    @cache
    def data(seed: int) -> tuple[Rows, Rows, Rows]:
        pairs, rows, read = pairs_of(folder / "qnli.tsv.gz", "train", sum(SIZES.values()), seed), [], states(weights)
        for source, count in SIZES.items():
            part, pairs = pairs[:count], pairs[count:]
            if source == "flipped":
                part = [(question, sentence, 1 - label) for question, sentence, label in part]
            if source == "shuffled":
                sentences = random.Random(seed).sample([sentence for _, sentence, _ in part], count)
                part = [(question, other, label) for (question, _, label), other in zip(part, sentences, strict=True)]
            rows += read(part, source)
        held = pairs_of(folder / "qnli.tsv.gz", "dev", PROPERTY + TESTS, seed)
        return rows, read(held[:PROPERTY], "goal"), read(held[PROPERTY:], "tests")

    return Task("qnli", data, fit, BROKEN, every=8, repeats=1)


def states(weights: Path) -> Any:
    """What the frozen layers make of pairs."""
    tokenizer: Any = AutoTokenizer.from_pretrained(weights)
    lower: Any = BertModel.from_pretrained(weights, dtype=torch.float32).eval()
    lower.encoder.layer = lower.encoder.layer[:-UPPER_LAYERS]

    @torch.no_grad()
    def of_texts(texts: Sequence[str]) -> list[Tensor]:
        found = []
        for low in range(0, len(texts), 32):
            batch = tokenizer(list(texts[low : low + 32]), padding=True, return_tensors="pt")
            lengths = batch["attention_mask"].sum(1)
            made = lower(**batch).last_hidden_state
            found += [one[:length].clone() for one, length in zip(made, lengths, strict=True)]
        return found

    def of_pairs(pairs: Sequence[Pair], source: str) -> Rows:
        questions, sentences, labels = zip(*pairs, strict=True)
        parts = zip(of_texts(questions), of_texts(sentences), labels, strict=True)
        return [{"question": one, "sentence": two, "labels": label, "source": source} for one, two, label in parts]

    return of_pairs


def padded(rows: Rows) -> dict[str, Tensor]:
    """States of different lengths as a batch."""
    batch = {"labels": torch.tensor([row["labels"] for row in rows])}
    for name in ("question", "sentence"):
        parts = [row[name] for row in rows]
        batch[name] = pad_sequence(parts, batch_first=True)
        batch[f"{name}_mask"] = pad_sequence([torch.ones(len(one)) for one in parts], batch_first=True)
    return batch


def pairs_of(path: Path, split: str, count: int, seed: int) -> list[Pair]:
    """Some short rows of a split: question, sentence, label."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    found = [
        (row[4], row[5], int(row[1]))
        for row in rows
        if row[0] == split and row[1] in "01" and len(row[4]) <= LONGEST_QUESTION and len(row[5]) <= LONGEST_SENTENCE
    ]
    return random.Random(seed).sample(found, count)
