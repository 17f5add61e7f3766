"""Saving and loading of an `Attribution` as one file without pickle: a line of JSON, then the tensors.

    magic | checksum of the rest (16 bytes) | length of the JSON (8 bytes) | JSON | tensors, one after the other

The JSON holds dtype and shape of every tensor, so nothing in the file is executed, and every size is checked. The file
may come from a stranger, who can compute a valid checksum for any content. So `_check` also checks the type of entries.
"""

from __future__ import annotations

import datetime
import json
import math
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from ggda_ext.groups.partition import Groups
from ggda_ext.results.method import MethodFacts

if TYPE_CHECKING:
    from ggda_ext.results.attribution import Attribution
    from ggda_ext.results.named_scores import NamedScores

MAGIC = b"ggda-ext attribution\n"
FORMAT = 1
_TENSORS = ("scores", "low", "high", "member_scores")
_PLAIN = (str, bool, int, float, type(None))
_NUMBERS = {"float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64"}
_WHOLE = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_KINDS: dict[str, Callable[[Any], bool]] = {
    "names": lambda found: found is None or isinstance(found, list),
    "properties": lambda found: _all(found, str),
    "higher_is_better": lambda found: _all(found, bool, type(None)),
    "interval": lambda found: isinstance(found, str),
    "warnings": lambda found: _all(found, list) and all(len(pair) == 2 and _all(pair[1], str) for pair in found),
    "notes": lambda found: _all(found, str),
    "method": lambda found: found is None or (isinstance(found, dict) and all(
        name in found and is_one(found[name]) for name, is_one in _METHOD.items()
    ) and isinstance(found.get("measured", False), bool)),
}  # fmt: skip
_METHOD: dict[str, Callable[[Any], bool]] = {
    "name": lambda found: isinstance(found, str),
    "unit": lambda found: isinstance(found, str),
    "settings": lambda found: isinstance(found, dict) and _all(list(found.values()), *_PLAIN),
    "passes": lambda found: found is None or isinstance(found, int | float),
    "seconds": lambda found: found is None or isinstance(found, int | float),
}


def saved(result: Attribution, path: Path) -> Path:
    """Write the file; see `Attribution.save`."""
    from ggda_ext.storage.files import written_whole  # late: only saving needs it

    text, tensors = encoded(result)
    pieces = {name: _bytes(tensor) for name, tensor in tensors.items()}
    shapes = {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()}
    header = json.dumps({"format": FORMAT, "order": sys.byteorder, "tensors": shapes, "result": text}).encode()
    parts = [len(header).to_bytes(8, "little"), header, *pieces.values()]
    checksum = xxhash.xxh3_128()
    for part in parts:
        checksum.update(part)
    with written_whole(path) as file:
        for part in (MAGIC, checksum.digest(), *parts):
            file.write(part)
    return path


def loaded(path: Path) -> Attribution:
    """Read the file; see `Attribution.load`."""
    from ggda_ext.storage.files import DamagedFile, read_plain

    content = memoryview(read_plain(path, sys.maxsize - 1))
    start = len(MAGIC) + 16
    if bytes(content[: len(MAGIC)]) != MAGIC:
        raise DamagedFile(f"{path} is no saved Attribution: pass a file that Attribution.save wrote.")
    if xxhash.xxh3_128_digest(content[start:]) != bytes(content[len(MAGIC) : start]):
        raise DamagedFile(f"{path} is damaged: it does not have the checksum it was written with.")
    try:
        length = int.from_bytes(content[start : start + 8], "little")
        header = json.loads(bytes(content[start + 8 : start + 8 + length]))
        if header["format"] != FORMAT:
            raise ValueError(f"it has format {header['format']}, this version of ggda-ext reads {FORMAT}")
        if header["order"] != sys.byteorder:
            raise ValueError(f"it was written on a machine of {header['order']}-endian numbers")
        tensors, at = {}, start + 8 + length
        for name, (dtype, shape) in header["tensors"].items():
            tensors[name], at = _tensor(content, at, dtype, shape)
        return rebuilt(header["result"], tensors)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedFile(f"{path} cannot be read as an Attribution: {error}.") from None


def encoded(result: NamedScores) -> tuple[str, dict[str, Tensor]]:
    """Return everything but the tensors as JSON, and the tensors by name."""
    method = result.method
    text = json.dumps(
        {
            "names": None if result.groups.names is None else [_encoded_name(name) for name in result.groups.names],
            "properties": result.properties,
            "higher_is_better": result.higher_is_better,
            "interval": result.interval,
            "warnings": [[_encoded_name(name), list(found)] for name, found in result.warnings.items()],
            "notes": result.notes,
            "method": None if method is None else vars(method) | {"settings": dict(method.settings)},
        }
    )
    labels = torch.from_numpy(result.groups.labels.copy())
    numbers = {name: getattr(result, name) for name in _TENSORS}
    return text, {"labels": labels} | {name: tensor for name, tensor in numbers.items() if tensor is not None}


def rebuilt(text: str, tensors: dict[str, Tensor]) -> Attribution:
    """Rebuild the `Attribution` from the output of `encoded`."""
    from ggda_ext.results.attribution import Attribution

    found = json.loads(text)
    _check(found, tensors)
    k = tensors["scores"].shape[1]
    names = None if found["names"] is None else [_name(name) for name in found["names"]]
    groups = Groups.with_labels(tensors["labels"].numpy(), k, names)
    return Attribution(
        groups=groups, properties=found["properties"], higher_is_better=found["higher_is_better"],
        interval=found["interval"], notes=found["notes"],
        warnings={_name(name): texts for name, texts in found["warnings"]},
        method=None if found["method"] is None else MethodFacts(**found["method"]),
        **{name: tensors[name] for name in _TENSORS if name in tensors},
    )  # fmt: skip


def _check(found: Any, tensors: dict[str, Tensor]) -> None:
    """Raise an error for entries that `encoded` cannot have written."""
    for name, is_one in _KINDS.items():
        if not isinstance(found, dict) or name not in found or not is_one(found[name]):
            raise ValueError(f"it has no {name}, or another kind of value there")
    labels, scores = tensors.get("labels"), tensors.get("scores")
    if labels is None or labels.dim() != 1 or labels.dtype not in _WHOLE:
        raise ValueError("it has no labels, or not one whole number per point")
    if scores is None or scores.dim() != 2 or scores.shape[1] > len(labels):
        raise ValueError("it has no scores of groups [m, k], or more groups than points")
    odd = [name for name in _TENSORS if name in tensors and not tensors[name].is_floating_point()]
    if odd:
        raise ValueError(f"its {odd[0]} are of type {tensors[odd[0]].dtype}")


def _all(values: Any, *kinds: type) -> bool:
    """Whether `values` is a list whose entries all have one of these types."""
    return isinstance(values, list) and all(isinstance(value, kinds) for value in values)


def _encoded_name(name: Hashable) -> Any:
    if isinstance(name, np.datetime64):
        return {"datetime64": [str(name), np.datetime_data(name)[0]]}
    if isinstance(name, np.generic):
        name = name.item()
    if isinstance(name, tuple):
        return {"tuple": [_encoded_name(part) for part in name]}
    if isinstance(name, datetime.datetime):
        return {"datetime": name.isoformat()}
    if isinstance(name, datetime.date):
        return {"date": name.isoformat()}
    if isinstance(name, datetime.timedelta):
        return {"timedelta": [name.days, name.seconds, name.microseconds]}
    if isinstance(name, _PLAIN):
        return name
    raise TypeError(
        f"group {name!r} has a name of type {type(name).__name__}, which cannot be saved: name groups with strings, "
        "numbers, dates, or tuples of these, Groups(labels, names=[…])."
    )


def _name(found: Any) -> Hashable:
    if isinstance(found, _PLAIN):
        return found
    if not isinstance(found, dict):
        raise ValueError(f"a group has the name {found!r}")
    ((kind, value),) = found.items()
    if kind == "tuple":
        return tuple(_name(part) for part in value)
    if kind == "datetime64":
        return np.datetime64(*value)
    if kind == "timedelta":
        return datetime.timedelta(*value)
    return getattr(datetime, {"datetime": "datetime", "date": "date"}[kind]).fromisoformat(value)


def _bytes(tensor: Tensor) -> Any:
    plain = tensor.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b""


def _tensor(content: memoryview, at: int, dtype: str, shape: list[int]) -> tuple[Tensor, int]:
    """Return the tensor that starts at position `at` in the file, and the position where it ends."""
    if dtype not in _NUMBERS or any(type(size) is not int or not 0 <= size <= len(content) for size in shape):
        raise ValueError(f"a tensor has type {dtype!r} and shape {shape}")
    kind: torch.dtype = getattr(torch, dtype)
    end = at + math.prod(shape) * kind.itemsize
    if end > len(content):
        raise ValueError("its tensors are cut off")
    if end == at:
        return torch.empty(shape, dtype=kind), end
    return torch.frombuffer(bytearray(content[at:end]), dtype=kind).reshape(shape), end
