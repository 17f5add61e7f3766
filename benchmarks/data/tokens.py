"""Turns pairs of question and sentence into tokens int64 [n, 3, L]: input ids, attention mask, token types, padded."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VOCABULARY, FIRST_WORD = 30522, 1000
CLS, SEP = 101, 102


def tokenize(questions: Sequence[str], sentences: Sequence[str], length: int, model: Path | None) -> Tensor:
    """Return tokens [n, 3, length] of the pairs, from the tokenizer in the folder `model`, or hashed words if None."""
    if length < 8:
        raise ValueError(f"text_length={length}: at least 8, or nothing of the sentence is left.")
    if model is None:
        return hashed_words(questions, sentences, length)
    from tokenizers import Tokenizer  # comes with transformers

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.enable_truncation(length, strategy="longest_first")
    tokenizer.enable_padding(length=length)
    encoded = tokenizer.encode_batch(list(zip(questions, sentences, strict=True)))
    rows = np.array([[text.ids, text.attention_mask, text.type_ids] for text in encoded], dtype=np.int64)
    return torch.tensor(rows.reshape(-1, 3, length))


def hashed_words(questions: Sequence[str], sentences: Sequence[str], length: int) -> Tensor:
    """Return tokens without a vocabulary: the id of every word is its hash, in the range of BERT's words."""
    tokens = torch.zeros(len(questions), 3, length, dtype=torch.int64)
    for row, texts in enumerate(zip(questions, sentences, strict=True)):
        first, second = (
            [FIRST_WORD + zlib.crc32(word.encode()) % (VOCABULARY - FIRST_WORD) for word in words(text)]
            for text in texts
        )
        first = [CLS, *first[: length // 2 - 2], SEP]
        second = [*second[: length - len(first) - 1], SEP]
        used = len(first) + len(second)
        tokens[row, 0, :used] = torch.tensor(first + second)
        tokens[row, 1, :used] = 1
        tokens[row, 2, len(first) : used] = 1
    return tokens


def words(text: str) -> list[str]:
    """Return the words and punctuation marks of a text, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())
