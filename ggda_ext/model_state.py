"""How a user's model is run while gradients are taken, and how it is left as it was.

PyTorch switches to other kernels when nothing requires a gradient: `nn.TransformerEncoder` in eval mode then takes a
fused path that zeroes padded outputs. A loss must not depend on what is frozen, so this path is off in here. Models of
`torch.compile` run uncompiled: our hooks would have them compiled again for every batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

_lock = Lock()
_users = 0
_fast_path = True
_uncompiled: Any = None


@contextmanager
def training_kernels() -> Iterator[None]:
    """Run models with the kernels that training uses, uncompiled, and out of inference mode."""
    global _users, _fast_path, _uncompiled
    with _lock:
        if _users == 0:
            _fast_path = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):  # PyTorch 2.6
                _uncompiled = torch.compiler.set_stance("force_eager")
                _uncompiled.__enter__()
        _users += 1
    try:
        with torch.inference_mode(False):
            yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                torch.backends.mha.set_fastpath_enabled(_fast_path)
                if _uncompiled is not None:
                    _uncompiled.__exit__(None, None, None)
                    _uncompiled = None


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """For our own arithmetic, which autocast is not to round, wherever it is called from."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


class Buffers:
    """The buffers of a model as they are now, for modules that change or replace them in `forward` (spectral norm,
    counters)."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = {name: (place, place.read()) for name, place in places(model).items()}

    def changed(self) -> dict[str, Place]:
        """Buffers that are not as they were, by name."""
        return {name: place for name, (place, before) in self._kept.items() if not place.holds(before)}

    def restore(self) -> None:
        """Put the old buffers back, with their old contents."""
        for name, place in self.changed().items():
            place.write(self._kept[name][1])


@dataclass(frozen=True)
class Place:
    """Where a module keeps a buffer."""

    module: nn.Module
    key: str

    def read(self) -> tuple[Tensor, Tensor]:
        """The buffer itself, and a copy of its content."""
        buffer = self.module._buffers[self.key]
        assert buffer is not None
        return buffer, buffer.detach().clone()

    def holds(self, before: tuple[Tensor, Tensor]) -> bool:
        """Whether the same buffer is there, with the same content."""
        return self.module._buffers.get(self.key) is before[0] and torch.equal(*(t.nan_to_num() for t in before))

    def write(self, before: tuple[Tensor, Tensor]) -> None:
        """Put a buffer back, with the content it had."""
        self.module._buffers[self.key] = before[0]
        with torch.no_grad():
            before[0].copy_(before[1])


def places(model: nn.Module) -> dict[str, Place]:
    """The places of a model's buffers, by name; one that is shared has several."""
    return {
        f"{path}.{key}" if path else key: Place(module, key)
        for path, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    }


def sums_on(device: torch.device) -> torch.device:
    """Where sums in double precision can be kept for a model on a device."""
    return torch.device("cpu") if device.type == "mps" else device
