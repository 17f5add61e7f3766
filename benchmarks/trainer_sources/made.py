"""Made rows from eight sources. The label says whether the first token is high, but not always in four sources."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, default_data_collator

from benchmarks.trainer_sources.task import SCORES, Rows, Task, trained

SIZES = {
    "clean a": 60, "clean b": 60, "clean c": 60, "small": 20, "a third flipped": 60, "flipped": 40, "shuffled": 40,
    "other question": 40,
}  # fmt: skip


def made() -> Task:
    """Return the task: a tiny BERT, trained from random weights on made rows."""
    return Task("made", data, fit, ("", *SIZES), tuple(SCORES), every=2, repeats=3)


def data(seed: int) -> tuple[Rows, Rows, Rows]:
    """Return training rows, rows for the property, and rows for the test."""
    draw = torch.Generator().manual_seed(1000 + seed)
    rows = [row for source, count in SIZES.items() for row in rows_of(count, source, draw)]
    return rows, rows_of(64, "goal", draw), rows_of(400, "tests", draw)


def rows_of(n: int, source: str, draw: torch.Generator) -> Rows:
    """Return `n` rows of one source."""
    tokens = torch.randint(4, 40, (n, 6), generator=draw)
    labels = (tokens[:, 1 if source == "other question" else 0] >= 22).long()
    if source == "flipped":
        labels = 1 - labels
    if source == "shuffled":
        labels = labels[torch.randperm(n, generator=draw)]
    if source == "a third flipped":
        labels[::3] = 1 - labels[::3]
    pairs = zip(tokens.tolist(), labels.tolist(), strict=True)
    return [{"input_ids": ids, "labels": label, "source": source} for ids, label in pairs]


def fit(rows: Rows, seed: int, callbacks: list[Any]) -> Trainer:
    """Train a model on the rows and return its Trainer."""
    torch.manual_seed(seed)
    config: Any = BertConfig
    chosen = config(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(chosen)
    return trained(model, rows, default_data_collator, callbacks, seed, 20, num_train_epochs=4, learning_rate=5e-3)
