"""Hugging Face as a source of the small BERT, through `huggingface_hub`, which comes with `transformers`.

Without a network the library waits for minutes, so this module first checks whether the hub answers at all.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from benchmarks.data import downloads
from benchmarks.data.errors import DataError, NoAnswerError, NoRoomError, UnreachableError
from benchmarks.data.registry import BERT_MEMBERS

HUGGING_FACE = "Hugging Face"
BERT = "sentence-transformers/all-MiniLM-L6-v2"


def address() -> str:
    """Return the address of the hub, or of the mirror that the user has set."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def fetch_bert(into: Path) -> None:
    """Put the files of the small BERT into a folder.

    Raises:
        UnreachableError: the hub cannot be used.
        DataError: the hub answers with something else.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UnreachableError("pip install huggingface_hub to use it")
    downloads.require_answer(address())
    from huggingface_hub import snapshot_download

    try:
        # the model is public; without a token the library does not look for one in a home folder that may not exist
        folder = snapshot_download(BERT, allow_patterns=list(BERT_MEMBERS), endpoint=address(), token=False)
        for file in BERT_MEMBERS:
            shutil.copyfile(Path(folder) / file, into / file)
    except OSError as error:
        kind = NoRoomError if error.errno in downloads.NO_ROOM else NoAnswerError
        raise kind(f"{HUGGING_FACE}: {error}") from error
    except Exception as error:  # the library has its own errors for a missing, renamed or refused model
        raise DataError(f"{HUGGING_FACE}: {type(error).__name__}: {error}") from error
