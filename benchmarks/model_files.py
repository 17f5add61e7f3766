"""Trained models on disk. Each has a key that says what it was made from, so a model is trained only once."""

from __future__ import annotations

import hashlib
import io
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.data import cache
from ggda_ext.checkpoints import state_on_cpu
from ggda_ext.storage.files import DamagedFile, read_plain, replaced
from ggda_ext.training import Trained

_CHECKSUM = 32
_logger = logging.getLogger(__name__)


class ModelFiles:
    """A folder of trained models.

    Args:
        folder: where the models are; `models` in the cache if left out.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache.root() / "models"

    def save(self, key: str, trained: Trained) -> None:
        """Write a model with its checkpoints, completely or not at all."""
        buffer = io.BytesIO()
        content = {"state": state_on_cpu(trained.model), "checkpoints": trained.checkpoints, "rates": trained.rates}
        torch.save(content, buffer)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replaced(self._path(key)) as file:
                file.write(hashlib.sha256(buffer.getbuffer()).digest())
                file.write(buffer.getbuffer())
        except OSError as error:
            raise OSError(
                error.errno,
                f"the trained model cannot be written to {self.folder}: {error.strerror}. Free space there, or set "
                f"{cache.CACHE_VARIABLE} to another folder, and run again",
            ) from error

    def load(self, key: str) -> dict[str, Any] | None:
        """Return the state, the checkpoints and the rates of a model; None if its file is missing or damaged."""
        content = self._read(key)
        if content is None:
            return None
        found: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return found

    def trained_once(self, key: str, make_model: Callable[[], nn.Module], train: Callable[[], Trained]) -> Trained:
        """Return the model with this key, loaded into a model of `make_model`. If there is none, train and save it."""
        found = self.load(key)
        if found is None:
            made = train()
            self.save(key, made)
            return made
        model = make_model()
        model.load_state_dict(found["state"])
        return Trained(model.eval(), tuple(found["checkpoints"]), tuple(found["rates"]))

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.pt"

    def _read(self, key: str) -> bytes | None:
        try:
            whole = read_plain(self._path(key), sys.maxsize)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except DamagedFile as error:
            _logger.warning("%s The model is trained again.", error)
            return None
        checksum, content = whole[:_CHECKSUM], whole[_CHECKSUM:]
        if hashlib.sha256(content).digest() == checksum:
            return content
        _logger.warning("%s is damaged; the model is trained again.", self._path(key))
        return None
