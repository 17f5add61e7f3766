"""Everything that stored numbers depend on, as short JSON values. A store is used again only if they are the same.

The model's structure, its values, the loss, the property, the groups and the data each get a readable name and a hash
of their content. Directions are compared by a few sums, up to rounding, because a GPU does not repeat them exactly.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from ggda_ext.data import IndexedData
from ggda_ext.gradients import Directions, GroupGradients
from ggda_ext.groups.partition import Groups
from ggda_ext.losses import ExampleLoss
from ggda_ext.storage.code import counters_of
from ggda_ext.storage.content import Content
from ggda_ext.storage.folder import digest
from ggda_ext.storage.hashing import bytes_of, joined
from ggda_ext.storage.network_content import hooks_of_all, network

_NUMBERS = 8
_SHORT = 4_096
_SIMPLE = (bool, int, float, str, type(None))
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class SampledData(UserWarning):
    """Some data cannot be read whole, therefore a store cannot see every change of it."""


def of_training(provider: GroupGradients, tag: str | None) -> dict[str, Any]:
    """The fingerprint that all checkpoints share: model, loss, data, groups, chosen parameters, settings, versions."""
    return {
        "tag": tag,
        "groups": of_groups(provider.groups),
        "data": of_data(provider.data, tag),
        "loss": of_value(provider.loss, "loss", tag, provider.model),
        "model": of_structure(provider.model, tag),
        "parameters": [f"{name} {list(value.shape)}" for name, value in provider.space.parameters.items()],
        "dtype": str(provider.space.dtype),
        "strategy": provider.strategy,
        "batch_size": provider._batch_size,
        "memory_budget": provider.memory_budget,
        **of_surroundings(provider.space.device),
    }


def of_surroundings(device: torch.device) -> dict[str, str]:
    """What numbers may depend on beside the arguments: versions of libraries, and the dtype of autocast if it is on."""
    if not torch.is_autocast_enabled(device.type):
        return _versions()
    return {**_versions(), "autocast": str(torch.get_autocast_dtype(device.type))}


@functools.cache
def _versions() -> dict[str, str]:
    """The versions of the libraries that numbers may depend on."""
    from ggda_ext import __version__  # the package imports this module

    return {"ggda_ext": __version__, "torch": ".".join(torch.__version__.split(".")[:2])}


def of_checkpoint(provider: GroupGradients) -> dict[str, Any]:
    """The fingerprint of the model's current parameters and buffers."""
    return {"values of the parameters": of_parameters(provider.model)}


def of_value(value: Any, what: str, tag: str | None, model: nn.Module | None = None) -> str:
    """The name of a loss, a property or any other value, and a hash of its content.

    Args:
        value: the value to describe.
        what: the name of the value in errors.
        tag: the user's name for content that cannot be read; without a tag such content raises an error.
        model: a model that is hashed elsewhere; where `value` holds a part of it, only the name of the part is hashed.
    """
    named: dict[str, Any] = {}
    for where, module in () if model is None else model.named_modules():
        named[f"model.{where}"] = module
        named |= {f"model.{where}.{name}": tensor for name, tensor in module._parameters.items() if tensor is not None}
    content = Content(named, lenient=tag is not None)
    found = content.text(value, what)
    _say_what_was_sampled(content, tag)
    return f"{name_of(value)} #{found}"


def of_data(data: IndexedData, tag: str | None) -> str:
    """The number of points and a hash of the points.

    If the data cannot be read whole, only some points are hashed, and a warning asks for a tag if there is none.
    """
    content = Content(lenient=tag is not None)
    found = content.data(data)
    _say_what_was_sampled(content, tag)
    return found


def of_structure(model: nn.Module, tag: str | None) -> str:
    """A text and a hash of a model without its values: modules, their settings and code, and shared parameters."""
    content = Content(lenient=tag is not None)
    first: dict[int, str] = {}
    shared = [
        f"{name}={first.setdefault(id(value), name)}"
        for name, value in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(value), name) != name
    ]
    found = joined(network(content, model, values=False), *hooks_of_all(content)).hex()[:16]
    return f"{_ADDRESS.sub('', ' '.join(repr(model).split()))}{' '.join(['', *shared])} #{found}"


def of_directions(provider: GroupGradients, directions: Directions, tag: str | None = None) -> dict[str, Any]:
    """The fingerprint of a question: a few sums of the directions `[m, p]`, or the test points and their loss."""
    if isinstance(directions, Tensor):
        return {"asked": "directions", "m": len(directions), "sums": sums_of(directions)}
    return {
        "asked": "test points",
        "loss": of_value(directions.loss, "the loss of test points", tag, provider.model),
        "m": directions.n,
        "points": of_data(directions.data, tag),
    }


def of_groups(groups: Groups) -> str:
    """The number of points and groups, and a hash of the group of every point."""
    return f"{len(groups)} groups of {groups.n} points, {digest(groups.labels)}"


def of_parameters(model: nn.Module) -> str:
    """A hash of all parameters and buffers, including buffers that are not saved with the model."""
    return of_state(
        {
            f"{where}.{name}": value
            for where, module in model.named_modules()
            for name, value in (*module._parameters.items(), *module._buffers.items())
        }
    )


def of_state(state: Mapping[str, Any]) -> str:
    """A hash of the tensors in a mapping, with their names, dtypes and shapes."""
    found = xxhash.xxh3_128()
    for name, value in state.items():
        if isinstance(value, Tensor):
            found.update(f"{name} {value.dtype} {list(value.shape)} ".encode())
            found.update(bytes_of(value))
    return found.hexdigest()[:16]


def sums_of(rows: Tensor) -> list[list[float]]:
    """A few numbers that differ for other rows `[m, p]`.

    They are weighted sums over the rows scaled to length 1, and weighted sums of the logarithms of the lengths. A small
    row therefore counts as much as a large one.
    """
    m, p = rows.shape
    every = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy(force=True)
    sums, squares, step = np.zeros((_NUMBERS, m)), np.zeros(m), max(1, 2**21 // m)
    for low in range(0, p, step):
        part = every[:, low : low + step].astype(np.float64)
        sums += _cosines(1.1, low, low + part.shape[1]) @ part.T
        squares += (part * part).sum(1)
    lengths = [math.sqrt(square) if square > 0 else 1.0 for square in squares.tolist()]
    left = _cosines(1.7, 1, m + 1)
    both = (left * sums / lengths).sum(1), left @ list(map(math.log, lengths))
    return [[value if math.isfinite(value) else 0.0 for value in numbers.tolist()] for numbers in both]


def _cosines(step: float, low: int, high: int) -> np.ndarray:
    """Cosine waves `[8, high - low]`, the weights of `sums_of`; short ones are cached."""
    return (_waves if high - low <= _SHORT else _waves.__wrapped__)(step, low, high)


@functools.lru_cache(maxsize=16)
def _waves(step: float, low: int, high: int) -> np.ndarray:
    return np.cos(np.arange(1.0, _NUMBERS + 1)[:, None] * (step * np.arange(low, high)))


def kind_of(value: Any) -> str:
    """The name of a function, or of an object's class."""
    return getattr(value, "__qualname__", type(value).__qualname__)


def name_of(value: Any, depth: int = 3) -> str:
    """A readable name: the name of a function, or the class of an object with its settings."""
    if isinstance(value, functools.partial):
        settings = [*map(_setting, value.args), *(f"{key}={_setting(item)}" for key, item in value.keywords.items())]
        return f"{name_of(value.func, depth - 1)}({', '.join(settings)})"
    own = getattr(value, "__qualname__", None)
    if own is not None:
        return own
    if isinstance(value, ExampleLoss) and set(vars(value)) == {"loss_fn"}:
        return name_of(vars(value)["loss_fn"], depth)
    settings = []
    counters = counters_of(type(value))
    for key, item in sorted(getattr(value, "__dict__", {}).items()):
        if key.startswith("_") or key == "training" or key in counters:
            continue
        if _is_plain(item):
            settings.append(f"{key}={item!r}")
        elif depth and (callable(item) or isinstance(item, ExampleLoss)):
            settings.append(f"{key}={name_of(item, depth - 1)}")
    return f"{type(value).__qualname__}({', '.join(settings)})"


def _say_what_was_sampled(content: Content, tag: str | None) -> None:
    if content.sampled and tag is None:
        warnings.warn(
            f"{content.sampled[0]} cannot be read whole, so save_dir was compared with some of its points only, and a "
            "change in others is not seen: pass tag=, a text that names its version, to be sure.",
            SampledData,
            stacklevel=2,
        )


def _setting(value: Any) -> str:
    return repr(value) if _is_plain(value) else type(value).__qualname__


def _is_plain(value: Any) -> bool:
    """Whether a value consists only of numbers, texts, bools and None, also inside mappings, lists and tuples."""
    if isinstance(value, _SIMPLE):
        return True
    if isinstance(value, Mapping):
        return all(_is_plain(part) for item in value.items() for part in item)
    return isinstance(value, list | tuple) and all(map(_is_plain, value))
