"""How a user's model is run while gradients are taken, and how it is left as it was.

PyTorch switches to other kernels when nothing requires a gradient: `nn.TransformerEncoder` in eval mode then takes a
fused path that zeroes padded outputs. A loss must not depend on what is frozen, so this path is off in here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor, nn

_lock = Lock()
_users = 0
_fast_path = True


@contextmanager
def training_kernels() -> Iterator[None]:
    """Run models with the kernels that training uses, and out of inference mode."""
    global _users, _fast_path
    with _lock:
        if _users == 0:
            _fast_path = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _users += 1
    try:
        with torch.inference_mode(False):
            yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                torch.backends.mha.set_fastpath_enabled(_fast_path)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """For our own arithmetic, which autocast is not to round, wherever it is called from."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


class Buffers:
    """The buffers of a model as they are now, for modules that change them in `forward` (spectral norm, counters)."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = {name: (buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()}

    def changed(self) -> dict[str, Tensor]:
        """Buffers that are not as they were, by name."""
        return {
            name: now
            for name, (now, before) in self._kept.items()
            if not torch.equal(now.nan_to_num(), before.nan_to_num())
        }

    def restore(self) -> None:
        """Put the old contents back where they changed."""
        restore([self._kept[name] for name in self.changed()])


def restore(buffers: list[tuple[Tensor, Tensor]]) -> None:
    """Give buffers the contents they had."""
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def sums_on(device: torch.device) -> torch.device:
    """Where sums in double precision can be kept for a model on a device."""
    return torch.device("cpu") if device.type == "mps" else device
