"""Where data comes from: a folder, the cache, the public hub, a package registry, a made stand-in, in that order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.data import checksums, folders, stand_ins
from benchmarks.data.contents import Content
from benchmarks.data.errors import DataError


@dataclass(frozen=True)
class Origin:
    """A content, where it came from, whether it is made up, and what was checked."""

    content: Content
    source: str
    stand_in: bool
    checks: tuple[str, ...]


@dataclass(frozen=True)
class BertSource:
    """A small pre-trained BERT.

    Attributes:
        path: folder with config.json, model.safetensors and tokenizer.json; None if none could be had.
        source: where it came from.
        stand_in: there are no pre-trained weights; a model has to begin at random ones.
    """

    path: Path | None
    source: str
    stand_in: bool


def obtain(name: str, folder: Path | str | None, *, allow_stand_in: bool, show_progress: bool) -> Origin:
    """The content of ``"heloc"``, ``"mnist"``, ``"cifar10"`` or ``"qnli"`` from the first source that has it."""
    if (inner := folders.chosen(folder)) and (found := folders.read(name, inner)):
        content, file = found
        try:
            return Origin(content, f"folder ({file})", False, checksums.verify(name, content))
        except DataError as error:
            raise DataError(f"{file} in the data folder {inner}: {error} Replace the file or remove it.") from error
    if not allow_stand_in:
        raise DataError(f"no source has {name}.")
    return Origin(stand_ins.make(name), "stand-in", True, ("made up: no source could be reached",))


def bert(folder: Path | str | None = None, *, show_progress: bool = True) -> BertSource:
    """A small pre-trained BERT with its tokenizer from the first source that has it."""
    if (inner := folders.chosen(folder)) and (path := folders.find_bert(inner)):
        return BertSource(path, f"folder ({path.name})", False)
    return BertSource(None, "stand-in", True)
