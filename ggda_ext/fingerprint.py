"""What stored numbers depend on, as short JSON values: so that a store is used again only where it belongs.

What has bytes (parameters, groups) is hashed. What cannot be compared (a loss, a property, test points) is described
by its name and by numbers it gives; these are compared up to rounding, because a GPU does not repeat them exactly.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.data import IndexedData, to_device
from ggda_ext.gradients import Directions, GroupGradients
from ggda_ext.groups import Groups
from ggda_ext.losses import ExampleLoss
from ggda_ext.store import digest

_EXAMPLES = 32
_NUMBERS = 8
_SIMPLE = (bool, int, float, str, type(None))


def of_training(provider: GroupGradients, tag: str | None) -> dict[str, Any]:
    """What all checkpoints share: groups, loss, chosen parameters, settings and versions."""
    from ggda_ext import __version__  # the package imports this module

    return {
        "tag": tag,
        "groups": of_groups(provider.groups),
        "loss": name_of(provider.loss),
        "parameters": [f"{name} {list(value.shape)}" for name, value in provider.space.parameters.items()],
        "dtype": str(provider.space.dtype),
        "strategy": provider.strategy,
        "batch_size": provider._batch_size,
        "memory_budget": provider.memory_budget,
        "ggda_ext": __version__,
        "torch": ".".join(torch.__version__.split(".")[:2]),
    }


def of_checkpoint(provider: GroupGradients) -> dict[str, Any]:
    """The model's current parameters and buffers, and the losses of some training points under them."""
    return {
        "values of the parameters": of_parameters(provider.model),
        "losses of training points": losses_of(provider, provider.data),
    }


def losses_of(provider: GroupGradients, data: IndexedData) -> list[float]:
    """The losses of some points from all over the data, the first ones of a stream."""
    return _losses(provider.model, provider.loss, _some(data), provider)


def of_directions(provider: GroupGradients, directions: Directions) -> dict[str, Any]:
    """What is asked: a sketch of the directions `[m, p]`, or the losses of the test points behind them."""
    if isinstance(directions, Tensor):
        return {"asked": "directions", "m": len(directions), "sketch": sketch_of(directions)}
    losses: list[float] = []
    for _, batch in directions.data.sequential(256):
        losses += _losses(provider.model, directions.loss, batch, provider)
    sketch = sketch_of(torch.tensor(losses, dtype=torch.float64)[None])
    return {"asked": "test points", "loss": name_of(directions.loss), "m": directions.n, "sketch": sketch}


def of_groups(groups: Groups) -> str:
    """Number of points and groups, and a hash of who is where."""
    return f"{len(groups)} groups of {groups.n} points, {digest(groups.labels)}"


def of_parameters(model: nn.Module) -> str:
    """A hash of all parameters and buffers."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            plain = value.detach().cpu().contiguous().reshape(-1)
            found.update(f"{name}{value.dtype}{list(value.shape)}".encode())
            found.update(plain.view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def sketch_of(rows: Tensor) -> list[float]:
    """A few numbers that differ for other rows `[m, p]`: their norm, and sums with fixed signs and sizes."""
    m, p = rows.shape
    numbers = torch.arange(1, _NUMBERS + 1, dtype=torch.float64, device=rows.device)
    left = torch.cos(
        1.7 * numbers[:, None] * torch.arange(m, dtype=torch.float64, device=rows.device) + numbers[:, None]
    )
    total, squares = numbers.new_zeros(_NUMBERS), 0.0
    step = max(1, 2**21 // m)
    for low in range(0, p, step):
        part = rows[:, low : low + step].detach().double()
        at = torch.arange(low, low + part.shape[1], dtype=torch.float64, device=rows.device)
        for j in range(_NUMBERS):
            total[j] += left[j] @ part @ torch.cos(1.1 * (j + 1) * at)
        squares += float(part.square().sum())
    return [*torch.nan_to_num(total).tolist(), float(np.nan_to_num(squares**0.5))]


def name_of(value: Any, depth: int = 3) -> str:
    """A name that a person would give: of a function its own, of an object its class with its settings."""
    if isinstance(value, functools.partial):
        settings = [*map(str, value.args), *(f"{key}={item}" for key, item in value.keywords.items())]
        return f"{name_of(value.func, depth - 1)}({', '.join(settings)})"
    own = getattr(value, "__qualname__", None)
    if own is not None:
        return own
    if isinstance(value, ExampleLoss) and set(vars(value)) == {"loss_fn"}:
        return name_of(vars(value)["loss_fn"], depth)
    settings = []
    for key, item in sorted(getattr(value, "__dict__", {}).items()):
        if key.startswith("_") or key == "training":
            continue
        if _is_plain(item):
            settings.append(f"{key}={item!r}")
        elif depth and (callable(item) or isinstance(item, ExampleLoss)):
            settings.append(f"{key}={name_of(item, depth - 1)}")
    return f"{type(value).__qualname__}({', '.join(settings)})"


def _is_plain(value: Any) -> bool:
    """Whether a value is made of numbers and texts."""
    if isinstance(value, Mapping):
        return all(_is_plain(part) for item in value.items() for part in item)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _SIMPLE)


def _some(data: IndexedData) -> Any:
    """A batch of examples from all over the data; the first ones of a stream."""
    if data.n is None or data.is_stream:
        return data.first(_EXAMPLES)
    return next(iter(data.batches([np.unique(np.linspace(0, data.n - 1, _EXAMPLES).astype(np.int64))])))


def _losses(model: nn.Module, loss: ExampleLoss, batch: Any, provider: GroupGradients) -> list[float]:
    with torch.no_grad():
        return torch.nan_to_num(loss.each(model, to_device(batch, provider.space.device)).double()).tolist()
