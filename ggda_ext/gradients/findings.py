"""What was found out about a model, kept for the next call: a large model takes seconds to look at.

Kept per model, without references to it, and taken up only where nothing changed that the findings rest on: the
modules and their hooks, modes and parameters, the loss function, the data. Values of parameters may change.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ggda_ext.data import IndexedData
from ggda_ext.gradients.hooks import Layer, copied_layer, known_layers
from ggda_ext.gradients.parameters import ParameterSpace
from ggda_ext.gradients.truth import Truth
from ggda_ext.losses import ExampleLoss

_MOST_KEPT = 8  # sets of findings per model


@dataclass
class Findings:
    """What a look at some examples has found."""

    batches: list[Any]
    truth: Truth
    precision: torch.dtype
    activation_bytes: int
    """Of one example."""
    changing: list[str] = field(default_factory=list)
    """Names of buffers that `forward` changes."""
    uncovered: dict[str, str] = field(default_factory=dict)
    """Parameters whose gradients the layers do not give: name → why."""
    copied: dict[str, tuple[str, str, tuple[int, ...]]] = field(default_factory=dict)
    """Parameters given as copies: name → module, name there, shape of a copy."""
    copies_output: bool = False
    """Whether the model overwrites outputs of layers in place."""
    work: float = 0.0
    ghost_work: float = 0.0
    not_ghost: str | None = None
    no_forward_mode: str | None = None
    no_vmap: str | None = None
    looked_at: set[str] = field(default_factory=set)
    """Strategies that were compared with autograd."""
    proven: set[tuple[tuple[str, int], ...]] = field(default_factory=set)
    unseen: set[str] = field(default_factory=set)
    rows_compared: int = 0

    def layers(self, space: ParameterSpace) -> list[Layer]:
        """The layers of a model, as they were compared with autograd."""
        layers, _ = known_layers(space, self.copies_output)
        modules = dict(space.model.named_modules())
        for name, (module, key, shape) in self.copied.items():
            layers.append(copied_layer(module, modules[module], key, space.parameters[name], shape))
        return layers


class _Kept:
    """Findings with what they rest on; objects by weak reference, so that nothing is kept alive."""

    def __init__(self, key: Hashable, anchors: tuple[Any, ...], findings: Findings) -> None:
        self.key, self.findings = key, findings
        self._anchors = [weakref.ref(anchor) for anchor in anchors]

    def fits(self, key: Hashable, anchors: tuple[Any, ...]) -> bool:
        same = len(anchors) == len(self._anchors) and all(
            kept() is anchor for kept, anchor in zip(self._anchors, anchors, strict=True)
        )
        return same and self.key == key


_kept: weakref.WeakKeyDictionary[nn.Module, list[_Kept]] = weakref.WeakKeyDictionary()


def recall(space: ParameterSpace, loss: ExampleLoss, data: IndexedData, settings: Hashable) -> Findings | None:
    """What was found earlier about the same model, loss and data, or None."""
    anchors = _anchors(loss, data)
    if anchors is None:
        return None
    key = _structure(space, settings)
    return next((kept.findings for kept in _kept.get(space.model, []) if kept.fits(key, anchors)), None)


def remember(
    findings: Findings, space: ParameterSpace, loss: ExampleLoss, data: IndexedData, settings: Hashable
) -> None:
    """Keep findings for the next call."""
    anchors = _anchors(loss, data)
    if anchors is None:
        return
    try:
        kept = _Kept(_structure(space, settings), anchors, findings)
    except TypeError:  # something that cannot be referred to weakly, such as a list
        return
    _kept.setdefault(space.model, []).insert(0, kept)
    del _kept[space.model][_MOST_KEPT:]


def _anchors(loss: ExampleLoss, data: IndexedData) -> tuple[Any, ...] | None:
    return None if loss.anchors is None or data.anchors is None else (*loss.anchors, *data.anchors)


def _structure(space: ParameterSpace, settings: Hashable) -> Hashable:
    modules = tuple(
        (name, type(module), *(id(vars(owner).get("forward")) for owner in (type(module), module)), module.training,
         tuple(module._forward_hooks), tuple(module._forward_pre_hooks))
        for name, module in space.model.named_modules()
    )  # fmt: skip
    parameters = tuple((id(p), tuple(p.shape), p.dtype, p.device, p in space) for p in space.model.parameters())
    device = space.device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return modules, parameters, tuple(space.parameters), autocast, settings
