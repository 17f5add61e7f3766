"""What has been proven about a model, kept for the next call.

A look at a large model takes seconds, so findings are kept per model, without references to it. They are used again
only if nothing that they depend on has changed: the modules with their hooks, modes and parameters, the loss function,
and the data. The values of parameters may change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ggda_ext.data import IndexedData, pick
from ggda_ext.gradients.layers import Layer, copied_layer, known_layers
from ggda_ext.gradients.observation import Signature
from ggda_ext.gradients.proof.descent import RANDOM, Descent
from ggda_ext.gradients.proof.mixing import largest, other_rows, refuse_rows
from ggda_ext.gradients.proof.truth import Tolerance, Truth, tolerance
from ggda_ext.losses import ExampleLoss
from ggda_ext.model import (
    ParameterSpace,
    SavedState,
    Versions,
    may_change,
    named_modules,
    named_values,
    only_thread,
    unwrapped,
    version,
)

_MOST_KEPT = 8  # most findings that are kept per model


@dataclass(frozen=True)
class Effort:
    """How much is compared with autograd before layers are trusted.

    Attributes:
        examples: number of examples of the data that are looked at first.
        more: number of further examples at a time, for a parameter that the first examples do not touch.
        rows: number of examples in batches whose rows were compared; after that, the order and cuts of batches are
            trusted.
        compared: number of examples that are compared in such a batch.
    """

    examples: int
    more: int
    rows: int
    compared: int


USUAL = Effort(8, 16, 32, 4)
LITTLE = Effort(2, 2, 1, 2)  # for a model that takes seconds for eight examples


LEAST_PLACES, MOST_PLACES = 32, 1024  # places of a batch to compare if the model may treat rows by their places


@dataclass
class Findings:
    """What a look at some examples has found; a pass adds to it."""

    batches: list[Any]
    truth: Truth
    allowed: Tolerance
    """Differences that rounding may explain."""
    activation_bytes: int
    """Bytes of the activations of one example."""
    changing: list[str] = field(default_factory=list)
    """Names of buffers and parameters that `forward` changes."""
    uncovered: dict[str, str] = field(default_factory=dict)
    """Parameters whose gradients the layers do not give: name → why."""
    copied: dict[str, tuple[str, str, tuple[int, ...]]] = field(default_factory=dict)
    """Parameters given as copies: name → (module, name of the parameter there, shape of a copy)."""
    copies_output: bool = False
    """Whether the model overwrites outputs of layers in place."""
    work: float = 0.0
    ghost_work: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)
    """Strategies that do not give the gradients of this model: name → why."""
    looked_at: set[str] = field(default_factory=set)
    """Strategies that were compared with autograd."""
    proven: set[Signature] = field(default_factory=set)
    alters: str | None = None
    """What makes the gradients of this model differ from derivatives: a hook, or its own autograd function."""
    forward_proven: set[int] = field(default_factory=set)
    """`Watch.called` of the runs in which `forward` was compared with autograd."""
    told: set[int] = field(default_factory=set)
    """`Watch.told` of batches that were compared with their examples alone."""
    joins: str | None = None
    """A function that may join examples; if there is one, every batch is compared with smaller ones."""
    placed: bool = False
    """Whether the model makes values for places of a batch; if so, rows are compared with the same in other places."""
    places: int = 1
    """Number of places that were compared."""
    most_places: int = LEAST_PLACES
    """Number of places to compare, if a batch has as many."""
    apart: dict[int, int] = field(default_factory=dict)
    """`Watch.called` → size of the largest batch that had the same losses and gradients as small batches."""
    unseen: set[str] = field(default_factory=set)
    rows_compared: int = 0
    effort: Effort = USUAL

    def look_at(self, seen: Descent) -> None:
        """Keep what a `Descent` saw that may mix examples."""
        self.joins = seen.joins if seen.joins == RANDOM else self.joins or seen.joins
        self.placed = self.placed or seen.placed

    def new_places(self, size: int) -> int:
        """Number of places in a batch to compare with others; 0 if none are needed, or if as many were compared."""
        wanted = min(size, self.most_places) if self.placed else 0
        return wanted if wanted > self.places else 0

    def untouched(self, space: ParameterSpace) -> list[str]:
        """Names of the parameters whose gradient is zero for every example that was looked at."""
        return [
            name
            for name, is_touched in zip(space.parameters, self.truth.touched.tolist(), strict=True)
            if not is_touched
        ]

    @property
    def hooked(self) -> bool:
        """Whether hooks change gradients of this model."""
        return self.alters is not None and "hook" in self.alters

    def layers(self, space: ParameterSpace) -> list[Layer]:
        """The layers of a model, as they were compared with autograd."""
        layers, _ = known_layers(space, self.copies_output)
        modules = dict(space.model.named_modules())
        for name, (module, key, shape) in self.copied.items():
            layers.append(copied_layer(module, modules[module], key, space.parameters[name], shape))
        return layers


class _Kept:
    """Findings with the objects that they depend on, as weak references, so that nothing is kept alive."""

    def __init__(self, key: Hashable, anchors: tuple[Any, ...], findings: Findings) -> None:
        self.key, self.findings = key, findings
        self._anchors = [weakref.ref(anchor) for anchor in anchors]

    def fits(self, key: Hashable, anchors: tuple[Any, ...]) -> bool:
        same = len(anchors) == len(self._anchors) and all(
            kept() is anchor for kept, anchor in zip(self._anchors, anchors, strict=True)
        )
        return same and self.key == key


class _Memory:
    """What was found about models, with the objects that it depends on; the newest few for each model."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[nn.Module, list[_Kept]] = weakref.WeakKeyDictionary()

    def get(self, model: nn.Module, key: Hashable, anchors: tuple[Any, ...]) -> Any:
        return next((kept.findings for kept in self._kept.get(model, []) if kept.fits(key, anchors)), None)

    def add(self, findings: Any, model: nn.Module, key: Hashable, anchors: tuple[Any, ...]) -> None:
        try:
            kept = _Kept(key, anchors, findings)
        except TypeError:  # something that cannot be referred to weakly, such as a list
            return
        self._kept.setdefault(model, []).insert(0, kept)
        del self._kept[model][_MOST_KEPT:]

    def clear(self) -> None:
        self._kept.clear()


_looks, _runs = _Memory(), _Memory()


def recall(space: ParameterSpace, loss: ExampleLoss, data: IndexedData, settings: Hashable) -> Findings | None:
    """Return the findings of an earlier call about the same model, loss and data, or None."""
    anchors = _anchors(loss, data)
    return None if anchors is None else _looks.get(space.model, _key(space, settings), anchors)


def remember(
    findings: Findings, space: ParameterSpace, loss: ExampleLoss, data: IndexedData, settings: Hashable
) -> None:
    """Keep findings for the next call."""
    anchors = _anchors(loss, data)
    if anchors is not None:
        _looks.add(findings, space.model, _key(space, settings), anchors)


def forget() -> None:
    """Drop all findings, so that every model is looked at again, as in a new process."""
    _looks.clear()
    _runs.clear()


def _anchors(loss: ExampleLoss, data: IndexedData) -> tuple[Any, ...] | None:
    return None if loss.anchors is None or data.anchors is None else (*loss.anchors, *data.anchors)


def _key(space: ParameterSpace, settings: Hashable) -> Hashable:
    return _structure(space.model), tuple(space.parameters), _autocast(space.device.type), settings


def _autocast(device: str) -> Hashable:
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)


def _structure(model: nn.Module) -> Hashable:
    """A value that changes if the model changes in anything but the values of its parameters and buffers."""
    seen: dict[int, Any] = {}
    modules = tuple(
        (name, type(module), id(vars(type(module)).get("forward")), tuple(module._forward_hooks),
         tuple(module._forward_pre_hooks), tuple(module._backward_hooks), _plain(vars(module), seen))
        for name, module in named_modules(model)
    )  # fmt: skip
    return modules, tuple(
        (id(p), tuple(p.shape), p.dtype, p.device) for p in named_values(model, "_parameters").values()
    )


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_OWN = frozenset(vars(nn.Module())) - {"training"}
_MOST_ENTRIES, _DEEPEST = 256, 3


def _plain(value: Any, seen: dict[int, Any], depth: int = 0) -> Any:
    """Reduce a Python value (a flag, a setting, an object with settings) to a plain value that shows a change."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor | nn.Module):
        return type(value)  # `_structure` looks at these
    if id(value) in seen:
        return seen[id(value)]
    told: Any = (type(value), id(value)) if depth else type(value)
    seen[id(value)] = told
    parts: dict[Any, Any] = {}
    if isinstance(value, dict):
        told, parts = type(value), value
    elif isinstance(value, list | tuple | set | frozenset):
        told, parts = type(value), dict(enumerate(value))
    elif depth and hasattr(value, "__dict__") and not callable(value):
        parts = vars(value)
    if depth < _DEEPEST and len(parts) <= (_MOST_ENTRIES if depth else len(parts)):
        held = ((key, part) for key, part in parts.items() if depth or key not in _OWN)
        told = told, tuple((str(key), _plain(part, seen, depth + 1)) for key, part in held)
    seen[id(value)] = told
    return told


# runs that mix nothing

_FEW = 8  # examples of a large batch in a small one


@dataclass
class Compared:
    """Which batches were compared with small ones: those of up to `size` examples."""

    size: int = 1


class Apart:
    """Compares a few examples of a batch with the same examples in a small batch, in passes that only run the model.

    Only a batch larger than all before is looked at, so a pass costs a small batch more.

    Args:
        model: the model.
        run: ``run(model, batch)`` returns the rows of the examples `[b, …]`: their losses, or what the model returned.
        name: name of the data.
        compared: which batches were compared in earlier passes; this one adds to it.
        what: what the rows hold.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[nn.Module, Any], Tensor],
        name: str,
        compared: Compared | None = None,
        what: str = "loss",
    ) -> None:
        self.model, self.run, self.name, self.what = model, run, name, what
        self.compared = compared or Compared()

    def check(self, batch: Any, rows: Tensor) -> None:
        """Raise an error if examples have other rows in a small batch than in this batch, which gave `rows`."""
        self._compare(batch, rows, refuse=True)

    def holds(self, batch: Any, rows: Tensor) -> bool:
        """Whether examples are known to have the same rows in a small batch as in this batch, which gave `rows`."""
        return self._compare(batch, rows, refuse=False)

    def _compare(self, batch: Any, rows: Tensor, *, refuse: bool) -> bool:
        size = len(rows)
        if size <= self.compared.size or torch._C._functorch.is_functorch_wrapped_tensor(rows):
            return True
        some = range(size - 1, -1, -size // min(_FEW, size // 2))
        with torch.inference_mode(False):  # a loss may take gradients of its inputs
            few = pick(batch, some)
        found, again = rows.detach()[list(some)], self.run(self.model, few).detach()
        if found.shape != again.shape or not found.is_floating_point():  # as long as the longest example, say
            return False
        room = tolerance(found.dtype).each * again.abs().max()
        if not bool(((found - again).abs() <= room).all()):  # a strict measure, which takes little time
            rerun = partial(self.run, self.model, few)
            off = other_rows(self.model, rerun, found, again, largest(rows.detach()))
            if bool(off.any()):
                if refuse:
                    refuse_rows(self.model, rerun, (found, again), off, size, self.name, self.what)
                return False
        self.compared.size = size
        return True


def compared_before(model: nn.Module, loss: ExampleLoss, data: IndexedData) -> Compared:
    """Return which batches were compared in runs of this model, at these values of its parameters; a run adds to it."""
    found, anchors = Compared(), _anchors(loss, data)
    if anchors is None:
        return found
    values = tuple(model.parameters())
    key = _structure(model), _autocast(values[0].device.type if values else "cpu"), tuple(map(version, values))
    known = _runs.get(model, key, anchors)
    if known is None:
        _runs.add(found, model, key, anchors)
    return known or found


# runs that change nothing

_harmless: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""Models whose runs changed nothing, with their `_structure` at that time."""


@contextmanager
def left_as_it_was_by_runs(model: nn.Module) -> Iterator[None]:
    """Like `left_as_it_was`, for a context that only runs the model; such runs mostly change nothing.

    The first time, all values are copied and compared. For a large model that takes as long as a run. After that,
    parameters are only checked for having been written to; if the model writes to one only now, an error is raised. A
    model whose attributes differ from call to call, such as a counter, is copied and compared each time.
    """
    inner = unwrapped(model)
    with only_thread(model):
        structure = _structure(inner)
        known = _harmless.get(inner) == structure
        parameters = Versions(named_values(inner, "_parameters").values() if known else ())
        saved = SavedState(inner, named_values(inner, "_buffers") if known else may_change(inner))
        try:
            yield
        finally:
            changed = saved.restore()
        if not known and not changed:
            _harmless[inner] = structure
        for name in parameters.written(inner):
            raise ValueError(
                f"the model wrote to {name!r} when it ran, as it did not before, so it is no longer as it was: "
                "let its forward pass leave parameters alone."
            )
