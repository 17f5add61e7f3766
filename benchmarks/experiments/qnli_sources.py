"""QNLI from sixteen sources, on the last layer of a small BERT. This fine-tuning can be repeated hundreds of times.

The model, its first fine-tuning on other rows, and the choice of short rows come from
`benchmarks.trainer_sources.qnli`. The layers below the last one are frozen and run once. Ten sources are clean, three
have flipped labels, and three have sentences that are shuffled among the rows of the source.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import BertModel

from benchmarks import data
from benchmarks.data.errors import DataError
from benchmarks.data.sources import obtain
from benchmarks.model_files import ModelFiles
from benchmarks.names import QNLI_SOURCES
from benchmarks.sizes import Scale
from benchmarks.tasks import Task
from benchmarks.trainer_sources.qnli import (
    BATCH_SIZE,
    BEFORE,
    LONGEST,
    RATE,
    Pair,
    UpperLayers,
    padded,
    spoiled,
    states,
    tuned,
)
from ggda_ext.storage.folder import digest
from ggda_ext.training import Recipe, Trained

CLEAN, FLIPPED, SHUFFLED = 10, 3, 3
"""Number of sources of each kind, in this order."""
SHORT = 125
"""Most characters of question and sentence of a row together; the first fine-tuning uses longer rows as well."""


class OnStates(UpperLayers):
    """The last layer of BERT, applied to packed states `[b, t, width + 2]`.

    They hold the states of the layer below and two columns that mark the tokens of question and sentence. Attention is
    not fused and its mask is added, so that outputs can be differentiated along directions of the parameters.
    """

    def forward(self, packed: Tensor) -> Tensor:  # type: ignore[override]
        """Return logits `[b, 2]`."""
        if self.training:  # cut off the padding that all rows of the batch share
            packed = packed[:, : int(packed[..., -2:].sum(2).count_nonzero(1).max())]
        inside, question, sentence = packed[..., :-2], packed[..., -2], packed[..., -1]
        away = (1 - question - sentence)[:, None, None, :] * torch.finfo(packed.dtype).min
        for layer in self.layers:
            inside = layer(inside, away)
            inside = inside[0] if isinstance(inside, tuple) else inside
        return self.compared(inside, question, sentence)


def sources_task(scale: Scale, folder: Path | None, models: Path | None = None) -> Task:
    """Return the task. Its training rows are in sources of equal size; its test rows are short rows of the dev set.

    Args:
        scale: number of rows.
        folder: folder with QNLI and the pre-trained BERT.
        models: where the fine-tuned BERT is kept; the cache if left out.

    Raises:
        DataError: no source has the real QNLI or a pre-trained BERT.
    """
    origin, weights = obtain("qnli", folder, allow_stand_in=False), data.bert(folder)
    if weights.path is None:
        raise DataError(f"{QNLI_SOURCES} needs a pre-trained BERT: pass its folder with --data-dir.")
    size = scale.experiments[QNLI_SOURCES]
    train, dev = (_short(origin.content, part) for part in ("train", "test"))
    first, (others, dev) = train[: BEFORE["rows"]], map(_shorter, (train[BEFORE["rows"] :], dev))
    rows = (size.data.train or 0) // (CLEAN + FLIPPED + SHUFFLED)
    bert = _tuned_once(weights.path, first, models)
    read = states(weights.path, bert, 1)
    pairs, sources = _from_sources(others, rows)
    parts = [_packed(read(some, "")) for some in (pairs, dev[: size.data.test])]
    longest = max(x.shape[1] for x, _ in parts)
    parts = [(pad(x, (0, 0, 0, longest - x.shape[1])), y) for x, y in parts]
    last: Any = BertModel.from_pretrained(weights.path, attn_implementation="eager").float()
    last.load_state_dict(bert.state_dict())

    def make_model() -> nn.Module:
        return OnStates(deepcopy(last.encoder.layer[-1:]), bert.config.hidden_size).eval()

    loaded = data.DataSet(
        "qnli", data.TITLES["qnli"], parts[0], parts[1], 2, origin.source, False, origin.checks, sources
    )
    recipe = Recipe(size.epochs or scale.epochs["qnli-bert"], RATE, BATCH_SIZE, schedule="linear")
    return Task(QNLI_SOURCES, "BERT, last layer", loaded, make_model, recipe, 32, weights=weights.source)


def _short(content: Any, part: str) -> list[Pair]:
    """Return the short rows of a part, in a random order."""
    columns = (content[f"{part}_{name}"] for name in ("question", "sentence", "label"))
    found = [(str(q), str(s), int(y)) for q, s, y in zip(*columns, strict=True) if len(q) + len(s) <= LONGEST]
    return random.Random(0).sample(found, len(found))


def _shorter(pairs: Sequence[Pair]) -> list[Pair]:
    return [pair for pair in pairs if len(pair[0]) + len(pair[1]) <= SHORT]


def _tuned_once(weights: Path, pairs: Sequence[Pair], models: Path | None) -> Any:
    """Return BERT after the first fine-tuning, which is done only once."""
    made_of = np.frombuffer(f"{BEFORE} {pairs}".encode(), np.uint8)
    key = f"{QNLI_SOURCES}-{digest(made_of, np.fromfile(weights / 'config.json', np.uint8))}"
    kept = ModelFiles(models).trained_once(
        key, lambda: BertModel.from_pretrained(weights).float(), lambda: Trained(tuned(weights, pairs))
    )
    return kept.model


def _from_sources(pairs: Sequence[Pair], rows: int) -> tuple[list[Pair], np.ndarray]:
    """Split the first pairs into sources of `rows` rows, and return them with the source of each pair."""
    found: list[Pair] = []
    for source in range(CLEAN + FLIPPED + SHUFFLED):
        kind = "clean" if source < CLEAN else "flipped" if source < CLEAN + FLIPPED else "shuffled"
        found += spoiled(pairs[source * rows : (source + 1) * rows], kind, source)
    return found, np.arange(len(found)) // rows


def _packed(rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Return rows as a tensor `[n, t, width + 2]`, and their labels."""
    batch = padded(rows)
    return torch.cat([batch["states"], batch["question"][..., None], batch["sentence"][..., None]], 2), batch["labels"]
