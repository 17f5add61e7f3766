"""Rows of QNLI from four sources: two clean, one with flipped labels, one whose sentences are shuffled among its rows.

The model is a small pre-trained BERT that reads question and sentence together. Its logits are linear in the means of
their states, in the product of the means and in their difference, because this BERT was pre-trained by comparing means.
Its two upper layers go through a first fine-tuning on other, clean rows of QNLI. Without it, BERT learns too little
from a thousand rows, and wrong labels do not matter. On the four sources only the last layer and a new linear layer are
trained. The layers below are frozen and run once for all trainings of a seed. Only short rows are used. All this saves
time.

Head, layers and the first fine-tuning were chosen by the accuracy of trainings on clean rows only, on seed 99. The
linear layer is new, and rate and sizes were set, after a partial look at seeds 0, 1, 2 and 11. With the linear layer of
the first fine-tuning, the training started where the gradient of the property is almost only noise, and the tracker
named the shuffled source twice. Seeds 21 to 25 had 96 rows for the property and a tracker on every 6th step, which
named the flipped source on four of five seeds; after that, 240 rows and every 3rd step were chosen. On seeds 41 to 45
the tracker scored only the batches of every 3rd step and named the flipped source on four of five seeds; after a look
at seed 41 and at `made`, all batches are scored. Nothing was chosen on seeds 61 to 65.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, BertModel, Trainer

from benchmarks.trainer_sources.task import BROKEN, Rows, Task, trained

Pair = tuple[str, str, int]
SIZES = {"clean a": 250, "clean b": 250, "flipped": 250, "shuffled": 250}
PROPERTY = 240  # rows of the dev set for the property; the other rows are tests
EPOCHS, BATCH_SIZE, RATE = 2, 16, 5e-4
BEFORE: dict[str, Any] = {"rows": 2400, "layers": 2, "epochs": 1, "batch size": 32, "rate": 5e-4}
"""Settings of the first fine-tuning."""
LONGEST = 150  # most characters of question and sentence together, about 35 tokens


class UpperLayers(nn.Module):
    """The upper layers of a BERT, which take the states of the lower layers, and a linear layer that compares question
    and sentence."""

    def __init__(self, layers: nn.ModuleList, width: int) -> None:
        super().__init__()
        self.layers, self.compare = layers, nn.Linear(4 * width, 2)

    def forward(self, states: Tensor, question: Tensor, sentence: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return loss and logits, as a Trainer needs them; `question` and `sentence` are 1 at their tokens `[b, t]`."""
        seen = (question + sentence)[:, None, None, :].bool()
        for layer in self.layers:
            states = layer(states, seen)
            states = states[0] if isinstance(states, tuple) else states
        logits = self.compared(states, question, sentence)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def compared(self, states: Tensor, question: Tensor, sentence: Tensor) -> Tensor:
        """Return logits `[b, 2]` from the states of the last layer."""
        u, v = ((states * part[..., None]).sum(1) / part.sum(1, keepdim=True) for part in (question, sentence))
        return self.compare(torch.cat([u, v, u * v, (u - v).abs()], 1))


def qnli(folder: Path) -> Task:
    """Return the task, with rows of QNLI and the weights of a small BERT from a data folder."""
    weights = folder / "bert-minilm-l6"
    train, dev = (short_pairs(folder / "qnli.tsv.gz", split) for split in ("train", "dev"))
    first, others = train[: BEFORE["rows"]], train[BEFORE["rows"] :]

    @cache
    def before() -> tuple[Any, Rows]:
        bert = tuned(weights, first)
        return bert, states(weights, bert, 1)(dev, "dev")

    def fit(rows: Rows, seed: int, callbacks: list[Any]) -> Trainer:
        torch.manual_seed(seed)
        bert, _ = before()
        model = UpperLayers(deepcopy(bert.encoder.layer[-1:]), bert.config.hidden_size)
        return trained(model, rows, padded, callbacks, seed, BATCH_SIZE, num_train_epochs=EPOCHS, learning_rate=RATE)

    @cache
    def data(seed: int) -> tuple[Rows, Rows, Rows]:
        bert, held = before()
        pairs, rows, read = random.Random(seed).sample(others, sum(SIZES.values())), [], states(weights, bert, 1)
        for source, count in SIZES.items():
            part, pairs = pairs[:count], pairs[count:]
            rows += read(spoiled(part, source, seed), source)
        held = random.Random(seed).sample(held, len(held))
        return rows, held[:PROPERTY], held[PROPERTY:]

    return Task("qnli", data, fit, BROKEN, ("tracker", "curvature"), every=3, repeats=1)


def spoiled(pairs: Sequence[Pair], source: str, seed: int) -> list[Pair]:
    """Return the rows of a source: with flipped labels if it is "flipped", with shuffled sentences if it is "shuffled",
    else unchanged."""
    if source == "flipped":
        return [(question, sentence, 1 - label) for question, sentence, label in pairs]
    if source == "shuffled":
        others = random.Random(seed).sample([sentence for _, sentence, _ in pairs], len(pairs))
        return [(question, other, label) for (question, _, label), other in zip(pairs, others, strict=True)]
    return list(pairs)


def tuned(weights: Path, pairs: Sequence[Pair]) -> Any:
    """Return the pre-trained BERT after the first fine-tuning."""
    torch.manual_seed(0)
    bert: Any = BertModel.from_pretrained(weights).float()
    model = UpperLayers(bert.encoder.layer[-BEFORE["layers"] :], bert.config.hidden_size)
    rows = states(weights, bert, BEFORE["layers"])(pairs, "before")
    trained(
        model, rows, padded, [], 0, BEFORE["batch size"], num_train_epochs=BEFORE["epochs"],
        learning_rate=BEFORE["rate"],
    )  # fmt: skip
    return bert


def states(weights: Path, bert: Any, upper: int) -> Callable[[Sequence[Pair], str], Rows]:
    """Return a function that runs all but the last `upper` layers on pairs and returns states as rows of a source."""
    tokenizer: Any = AutoTokenizer.from_pretrained(weights)
    lower = deepcopy(bert).eval()
    lower.encoder.layer = lower.encoder.layer[:-upper]

    @torch.no_grad()
    def of_pairs(pairs: Sequence[Pair], source: str) -> Rows:
        found: dict[int, dict[str, Any]] = {}
        order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0] + pairs[i][1]))
        for low in range(0, len(pairs), 32):
            some = order[low : low + 32]
            texts = [[pairs[i][part] for i in some] for part in (0, 1)]
            batch = tokenizer(*texts, padding="longest", return_tensors="pt")
            made, mask, second = lower(**batch).last_hidden_state, batch["attention_mask"], batch["token_type_ids"]
            for at, i in enumerate(some):
                kept = slice(int(mask[at].sum()))
                found[i] = {
                    "states": made[at, kept].clone(), "question": 1.0 - second[at, kept],
                    "sentence": second[at, kept].float(), "labels": pairs[i][2], "source": source,
                }  # fmt: skip
        return [found[i] for i in range(len(pairs))]

    return of_pairs


def padded(rows: Rows) -> dict[str, Tensor]:
    """Return rows with states of different lengths as one padded batch."""
    parts = {name: [row[name] for row in rows] for name in ("states", "question", "sentence")}
    batch = {name: pad_sequence(values, batch_first=True) for name, values in parts.items()}
    return batch | {"labels": torch.tensor([row["labels"] for row in rows])}


def short_pairs(path: Path, split: str) -> list[Pair]:
    """Return the short rows of a split in a random order: question, sentence, label."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    found = [
        (row[4], row[5], int(row[1]))
        for row in rows
        if row[0] == split and row[1] in "01" and len(row[4]) + len(row[5]) <= LONGEST
    ]
    return random.Random(0).sample(found, len(found))
