"""Working with the user's model: its chosen parameters as one flat vector, and safe ways to run and to restore it.

* Only one thread at a time works with a model, because hooks, frozen parameters and loaded checkpoints are stored in
  the model itself.
* The model runs with the kernels that training uses, even if nothing requires a gradient.
* The model is left as it was: values, modes, `requires_grad`.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from math import isfinite
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

T = TypeVar("T")
ParameterChoice = Iterable[str | nn.Module | nn.Parameter] | None

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_PATIENCE = 1.0  # seconds until a waiting thread logs a warning
_logger = logging.getLogger(__name__)


# the model inside a wrapper


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a DistributedDataParallel or DataParallel, which gives its parameters other names."""
    while isinstance(model, _WRAPPERS):
        model = model.module
    return model


def inner_name(name: str, model: nn.Module) -> str:
    """The name of a parameter, buffer or module in the unwrapped model, from its name in the wrapped model."""
    inner = unwrapped(model)
    return name if hasattr(inner, "module") else name.removeprefix("module.")


def inner_names(named: Mapping[str, T], model: nn.Module) -> dict[str, T]:
    """A state dict, which may come from a wrapped model, with the names of the unwrapped model."""
    return {inner_name(name, model): value for name, value in named.items()}


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module of a model once, with its name, in the order of PyTorch's `named_modules` but ten times faster.

    One call of the library needs the modules a dozen times, which takes noticeable time if a model has hundreds.
    """
    found, seen, waiting = list[tuple[str, nn.Module]](), set[int](), [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.append((name, module))
            if inside := module._modules:  # most have none
                prefix = f"{name}." if name else ""
                waiting += [(prefix + key, part) for key, part in reversed(inside.items()) if part is not None]
    return found


# one thread at a time


class _Lock:
    """A lock that its owner thread may take again, and any thread may give back.

    The second is needed because a generator may be closed by another thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._count = self._waiting = 0

    def take(self, name: str) -> None:
        me = threading.get_ident()
        with self._changed:
            if self._owner not in (None, me):
                self._wait(name)
            self._owner, self._count = me, self._count + 1

    def _wait(self, name: str) -> None:
        self._waiting += 1
        try:
            if not self._changed.wait_for(lambda: self._owner is None, _PATIENCE):
                _logger.warning("waiting: the model (%s) is in use by another thread.", name)
                self._changed.wait_for(lambda: self._owner is None)
        finally:
            self._waiting -= 1

    def give_back(self) -> None:
        with self._changed:
            self._count -= 1
            if self._count == 0:
                self._owner = None
                if self._waiting:
                    self._changed.notify_all()


_locks: weakref.WeakKeyDictionary[nn.Module, _Lock] = weakref.WeakKeyDictionary()
_making = threading.Lock()


@contextmanager
def only_thread(model: nn.Module) -> Iterator[None]:
    """Hold the lock of a model in this context; a second thread waits until the first has finished."""
    inner = unwrapped(model)
    lock = _locks.get(inner)
    if lock is None:
        with _making:
            lock = _locks.setdefault(inner, _Lock())
    lock.take(type(inner).__name__)
    try:
        yield
    finally:
        lock.give_back()


# how a model is run, and left as it was


def check_deterministic_modules(model: nn.Module) -> None:
    """Raise an error if a model has active dropout or batch statistics; it names the module and the fix."""
    for name, module in named_modules(model):
        mixes = isinstance(module, _BatchNorm)
        random = isinstance(module, _DropoutNd) and module.p > 0
        if module.training and (mixes or random):
            what = "mixes the examples of a batch" if mixes else "is random"
            raise ValueError(
                f"the model is in train mode, where {type(module).__name__} {name!r} {what}, so the gradient of "
                "a group has no fixed value: call model.eval() first."
            )


_fast_path_lock = threading.Lock()
_fast_path_users = 0
_fast_path = True
_uncompiled: Any = None


@cache
def _keep_freed_memory() -> None:
    """Let the C library keep the memory of a batch for the next batch; fresh pages cost a tenth of a pass or more.

    On Linux, for example, the library decides how much freed memory to keep, from the largest block that was freed. So
    one block is freed here that is nearly the largest it looks at; nothing is written to it. Once is enough: later
    blocks would come from the memory that is kept, and make it grow.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


@contextmanager
def training_kernels() -> Iterator[None]:
    """Run models with the kernels that training uses, uncompiled, and outside inference mode.

    PyTorch switches to other kernels when nothing requires a gradient: `nn.TransformerEncoder` in eval mode then takes
    a fused path that zeroes padded outputs. A loss must not depend on which parameters are frozen, so this path is
    turned off here. Models of `torch.compile` run uncompiled, because our hooks would cause a new compilation for every
    batch. Autocast keeps rounded copies of the parameters until the user's context ends; they are dropped before and
    after, because checkpoints are loaded.
    """
    global _fast_path_users, _fast_path, _uncompiled
    with _fast_path_lock:
        if _fast_path_users == 0:
            _fast_path = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            _keep_freed_memory()
            if "torch._dynamo" in sys.modules:
                _uncompiled = torch.compiler.set_stance("force_eager")
                _uncompiled.__enter__()
        _fast_path_users += 1
    torch.clear_autocast_cache()
    try:
        with torch.inference_mode(False):
            yield
    finally:
        torch.clear_autocast_cache()
        with _fast_path_lock:
            _fast_path_users -= 1
            if _fast_path_users == 0:
                torch.backends.mha.set_fastpath_enabled(_fast_path)
                if _uncompiled is not None:
                    _uncompiled.__exit__(None, None, None)
                    _uncompiled = None


_AS_IT_IS = nullcontext()


def full_precision(values: Tensor) -> AbstractContextManager[Any]:
    """Context that turns autocast off for our own arithmetic with `values`, because autocast would round them.

    Backward passes run in it too, as PyTorch recommends: they compute in the dtypes that the forward pass chose.
    """
    kind = values.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _AS_IT_IS


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in `full_precision`."""
    with full_precision(a):
        return a @ b


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products `[m, n]` of long rows `[m, p]` and `[n, p]` in `full_precision`.

    With the fewer rows on the left this is up to forty times as fast, if the other ones are stored by columns.
    """
    return product(a, b.T) if len(a) <= len(b) else product(b, a.T).T


def all_finite(values: Tensor) -> bool:
    """Whether all numbers are finite; mostly their sum is enough to see this, in a third of the steps."""
    values = values.detach()
    return isfinite(float(values.sum())) or bool(values.isfinite().all())


def sums_on(device: torch.device) -> torch.device:
    """The device on which double-precision sums can be kept for a model on `device`."""
    return torch.device("cpu") if device.type == "mps" else device


def may_change(model: nn.Module) -> list[str]:
    """Names of the buffers and parameters that a forward pass may change.

    Frozen parameters are left out if together they are too large to be copied.
    """
    values = named_values(model)
    frozen = {name for name, value in values.items() if isinstance(value, nn.Parameter) and not value.requires_grad}
    large = sum(values[name].nbytes for name in frozen) > _COPIED
    return [name for name in values if not (large and name in frozen)]


_COPIED = 2**30
"""Largest number of bytes of frozen parameters that are copied."""


class SavedState:
    """The state of a model at this moment: modes of the modules, parameters and buffers, and copies of their values.

    Args:
        model: the model.
        names: names of the parameters and buffers whose values are copied; all by default.

    Attributes:
        named: the parameters and buffers of the model, by name.
    """

    def __init__(self, model: nn.Module, names: Iterable[str] | None = None) -> None:
        self.model = model
        modules = [module for _, module in named_modules(model)]
        self._modes = [(module, module.training) for module in modules]
        self._held = [(held, dict(held)) for module in modules for held in _held_by(module)]
        self.named = named_values(model)
        self._required = {name: value.requires_grad for name, value in self.named.items()}
        self._values: dict[str, Tensor] = {}
        self._versions: dict[str, Any] = {}
        self._hashes: dict[str, bytes | None] = {}
        self.copy_values(names)

    def copy_values(self, names: Iterable[str] | None = None, *, but_for: Any = None) -> None:
        """Copy the current values of more parameters and buffers.

        Args:
            names: names of the parameters and buffers to copy; all by default.
            but_for: a state dict. Parameters and buffers that share their memory with its entries are not copied.
        """
        held = but_for if isinstance(but_for, Mapping) else {}
        for name in self.named if names is None else names:
            if name not in self._values and not _same_memory(self.named[name], held.get(name)):
                self._values[name] = self.named[name].detach().clone()
                self._versions[name] = version(self.named[name])

    def changed(self) -> list[str]:
        """Names of the copied parameters and buffers whose values differ now, or that were written to."""
        now = named_values(self.model)
        return [
            name
            for name, before in self._values.items()
            if version(self.named[name]) != self._versions[name] or not self._is_as_before(name, now[name], before)
        ]

    def _is_as_before(self, name: str, now: Tensor, before: Tensor) -> bool:
        """Whether a parameter or buffer has the copied values; this is asked often, and a hash reads only one side."""
        if name not in self._hashes:
            self._hashes[name] = _hash_of(before)
        known = self._hashes[name]
        return _same(now, before) if known is None else known == _hash_of(now)

    def _moved(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The dicts of modules that hold other parameters or buffers than before, each with its entries before."""
        return [
            (held, own)
            for held, own in self._held
            if len(held) != len(own) or any(held.get(key) is not value for key, value in own.items())
        ]

    def check_held(self) -> None:
        """Raise an error if the model has parameters that it did not have before."""
        if not self._moved():
            return
        before, now = self.named, named_values(self.model, "_parameters")
        for name, value in now.items():
            if before.get(name) is not value:
                what = f"puts another parameter in place of {name!r}" if name in before else f"makes parameter {name!r}"
                raise ValueError(
                    f"the model {what} when it runs, so its loss depends on no parameter that it had before: run it "
                    "once before, or let it change values in place."
                )

    def restore(self) -> bool:
        """Restore the model; return whether a copied value had changed or a parameter or buffer was replaced."""
        changed = False
        for held, entries in self._moved():
            changed = True
            held.clear()
            held.update(entries)
        with torch.no_grad():
            for name, before in self._values.items():
                if not _same(self.named[name], before):
                    changed = True
                    self.named[name].copy_(before)
        for module, training in self._modes:
            if module.training != training:
                module.training = training
        for name, required in self._required.items():
            if self.named[name].requires_grad != required:
                self.named[name].requires_grad_(required)
        return changed


def _held_by(module: nn.Module) -> list[dict[str, Any]]:
    """The dicts of a module's parameters and buffers; none for a scripted module, where nobody can replace them."""
    if isinstance(module, torch.jit.ScriptModule):
        return []
    return [module._parameters, module._buffers]


def version(tensor: Tensor) -> tuple[int, int]:
    """How often a tensor was written to, as far as autograd knows, and the address of its numbers."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr() if tensor.layout is torch.strided else 0


def _same_memory(value: Tensor, other: Any) -> bool:
    """Whether two tensors are the same memory, with the same dtype, shape and strides."""
    return (
        isinstance(other, Tensor) and value.layout is other.layout is torch.strided and value.dtype is other.dtype
        and value.device == other.device and value.data_ptr() == other.data_ptr() != 0
        and value.shape == other.shape and value.stride() == other.stride()
    )  # fmt: skip


def _hash_of(value: Tensor) -> bytes | None:
    """A hash of the values of a tensor on the CPU; None for other tensors and for a dtype that NumPy lacks."""
    try:
        return xxhash.xxh3_128_digest(np.ascontiguousarray(value.detach().numpy()).data)
    except (TypeError, RuntimeError):
        return None


def _same(now: Tensor, before: Tensor) -> bool:
    """Whether all values are equal; NaN counts as equal to NaN."""
    return torch.equal(now, before) or torch.equal(now.nan_to_num(), before.nan_to_num())


def named_values(model: nn.Module, *kinds: str) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once.

    This is several times as fast as `named_parameters`, which matters because it is called often.

    Args:
        model: the model.
        kinds: ``"_parameters"`` or ``"_buffers"``; both by default.
    """
    found, seen = dict[str, Tensor](), set[int]()
    for prefix, module in named_modules(model):
        for kind in kinds or ("_parameters", "_buffers"):
            for name, value in (vars(module).get(kind) or getattr(module, kind)).items():  # a traced module hides them
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    found[f"{prefix}.{name}" if prefix else name] = value
    return found


@contextmanager
def left_as_it_was(
    model: nn.Module, names: Iterable[str] | None = None, *, only_on_failure: bool = False
) -> Iterator[SavedState]:
    """Hold the model's lock in this context, and restore the model's `SavedState` at the end.

    Args:
        model: the model.
        names: names of the parameters and buffers whose values are restored; all by default.
        only_on_failure: whether to restore only after an exception, and to keep all changes otherwise.
    """
    with only_thread(model):
        saved, restore = SavedState(model, names), True
        try:
            yield saved
            restore = not only_on_failure
        finally:
            if restore:
                saved.restore()


class Versions:
    """Record of how often some parameters and buffers were written to so far."""

    def __init__(self, values: Iterable[Tensor]) -> None:
        self._values = [(value, version(value)) for value in values]

    def written(self, model: nn.Module) -> list[str]:
        """Names of the parameters and buffers of a model that were written to since this object was made."""
        changed = {id(value) for value, before in self._values if version(value) != before}
        return [name for name, value in named_values(model).items() if id(value) in changed] if changed else []


def called_with(
    model: nn.Module, values: Mapping[str, Tensor], *arguments: Any, function: Callable[..., Any] | None = None
) -> Any:
    """Call ``function(model, *arguments)`` with other tensors in place of parameters of the model.

    Each place that holds a parameter gets its tensor once. `functional_call` alone would put the tensor there once for
    every name of the module, and a module with two names would then not get its parameter back.

    Args:
        model: the model.
        values: the tensors, by the names of the parameters.
        arguments: passed on to the function.
        function: the function to call; None calls the model itself.
    """
    held = dict(model.named_parameters())
    given = {id(held[name]): value for name, value in values.items()}
    places = {
        f"model.{path}.{key}" if path else f"model.{key}": given[id(own)]
        for path, part in named_modules(model)
        for key, own in part._parameters.items()
        if id(own) in given
    }
    return functional_call(_Called(model, function), places, arguments, tie_weights=False)


class _Called(nn.Module):
    """A function of a model, wrapped as a module because `functional_call` takes only modules."""

    def __init__(self, model: nn.Module, function: Callable[..., Any] | None) -> None:
        super().__init__()
        self.training = model.training
        self.model, self.function = model, function

    def forward(self, *arguments: Any) -> Any:
        return self.model(*arguments) if self.function is None else self.function(self.model, *arguments)


# the parameters that the gradients are taken for


class ParameterSpace:
    """The chosen parameters of a model as one flat vector, in the model's own order.

    Args:
        model: the model; a DistributedDataParallel is unwrapped, so names have no ``module.`` in front.
        chosen: names of parameters or modules, modules, or parameters; by default every parameter that
            requires a gradient. A frozen parameter is included if it is chosen here.
    """

    def __init__(self, model: nn.Module, chosen: ParameterChoice = None) -> None:
        self.model = unwrapped(model)
        self.parameters = _chosen(self.model, chosen)
        self._every = list(named_values(self.model, "_parameters").values())
        self._written = [*self._every, *named_values(self.model, "_buffers").values()]
        self.spans = _spans(self.parameters.values())
        self.size = sum(parameter.numel() for parameter in self.parameters.values())
        first = next(iter(self.parameters.values()))
        self.dtype, self.device = first.dtype, first.device
        self.changing: list[str] | None = None
        """Names of buffers and parameters that `forward` changes; None until they are known. They are restored."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, spans=_spans(state["parameters"].values()))  # a copy has other parameters

    def __len__(self) -> int:
        return self.size

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self.spans

    def part(self, rows: Tensor, parameter: nn.Parameter) -> Tensor:
        """The columns of rows `[m, p]` that belong to one parameter, `[m, *shape]`, as a view."""
        low, high = self.spans[id(parameter)]
        return rows[:, low:high].unflatten(1, parameter.shape) if parameter.dim() else rows[:, low]

    def split(self, row: Tensor) -> dict[str, Tensor]:
        """Split a flat row `[p]` into one tensor per parameter, by name."""
        return {name: self.part(row[None], value)[0] for name, value in self.parameters.items()}

    def flatten(self, tensors: Sequence[Tensor | None], row: Tensor) -> Tensor:
        """Write one tensor per parameter (None for zeros) into a flat row `[p]`."""
        for tensor, (low, high) in zip(tensors, self.spans.values(), strict=True):
            row[low:high] = 0 if tensor is None else tensor.reshape(-1)
        return row

    def gradients_of(
        self, value: Tensor, *also: Tensor, keep_graph: bool = False, differentiable: bool = False
    ) -> list[Tensor | None]:
        """The gradient of a number, one tensor per parameter.

        It is None for a parameter that the number does not depend on, and for all parameters if the number is constant.

        Args:
            value: the number, computed while the parameters required a gradient.
            also: tensors whose gradients are returned before the gradients of the parameters.
            keep_graph: whether another gradient of the same graph will be taken later.
            differentiable: whether the gradient itself can be differentiated.
        """
        by = [*also, *self.parameters.values()]
        if not value.requires_grad:  # the loss of a batch whose targets are all ignored
            return [None] * len(by)
        with full_precision(value):
            found = torch.autograd.grad(
                value, by, retain_graph=keep_graph or differentiable, create_graph=differentiable, allow_unused=True
            )
        return [part.to_dense() if part is not None and part.is_sparse else part for part in found]  # embeddings

    @contextmanager
    def require_gradients(self, of_chosen: bool, also: Iterable[nn.Parameter] = ()) -> Iterator[None]:
        """In this context only the chosen parameters require gradients, or only `also` if ``of_chosen=False``."""
        with only_thread(self.model):
            before = [(parameter, parameter.requires_grad) for parameter in self._every]
            wanted = self.spans.keys() if of_chosen else {id(parameter) for parameter in also}
            saved = SavedState(self.model, self.changing) if self.changing else None
            values = Versions(self._written)
            try:
                for parameter, _ in before:
                    parameter.requires_grad_(id(parameter) in wanted)
                with training_kernels(), torch.enable_grad():
                    yield
            finally:
                for parameter, required in before:
                    parameter.requires_grad_(required)
                if saved is not None:
                    saved.restore()
            known = self.changing
            others = [] if known is None else [name for name in values.written(self.model) if name not in known]
        if others:
            raise ValueError(
                f"the model wrote to {others[0]!r} when it ran on a batch, as it did not on the examples that were "
                "looked at first, so gradients depend on the order of the data, and the model is no longer as it was: "
                "let its forward pass leave parameters and buffers alone."
            )


def _spans(parameters: Iterable[nn.Parameter]) -> dict[int, tuple[int, int]]:
    """The first and the last column (exclusive) of every parameter in a flat row, by the parameter's id."""
    spans, end = dict[int, tuple[int, int]](), 0
    for parameter in parameters:
        spans[id(parameter)] = (end, end + parameter.numel())
        end += parameter.numel()
    return spans


def _chosen(model: nn.Module, chosen: ParameterChoice) -> dict[str, nn.Parameter]:
    parameters = _unchecked_choice(model, chosen)
    for name, value in parameters.items():
        _check_usable(name, value)
    parameters = {name: value for name, value in parameters.items() if value.numel()}
    if not parameters:
        raise ValueError("the chosen parameters hold no numbers.")
    kinds = {(value.dtype, value.device): name for name, value in parameters.items()}
    if len(kinds) > 1:
        said = ", ".join(f"{name!r} is {dtype} on {device}" for (dtype, device), name in kinds.items())
        raise ValueError(
            f"the chosen parameters differ in dtype or device: {said}. Choose those of one kind with parameters=, or "
            "convert the model, as model.float() and model.to(device) do."
        )
    return parameters


def _unchecked_choice(model: nn.Module, chosen: ParameterChoice) -> dict[str, nn.Parameter]:
    named = dict(model.named_parameters())
    if chosen is not None:
        own = {id(value) for value in model.parameters()}
        listed = [(item, _members(model, item)) for item in _as_list(chosen)]
        for at, (item, members) in enumerate(listed):
            if any(id(value) not in own for value in members):
                what = "parameter" if isinstance(item, nn.Parameter) else type(item).__name__
                raise ValueError(
                    f"parameters[{at}] is a {what} that is not of the model: pass those of the model, or their names."
                )
        wanted = {id(value) for _, members in listed for value in members}
        parameters = {name: value for name, value in named.items() if id(value) in wanted}
        if not parameters:
            raise ValueError("parameters= chooses no parameter of the model.")
        return parameters
    if not named:
        kind = type(model).__name__
        raise ValueError(f"the model, a {kind}, has no parameters: pass the trained model first, then loss_fn.")
    parameters = {name: value for name, value in named.items() if value.requires_grad}
    if not parameters:
        raise ValueError(
            f"the model has {len(named)} parameters, none of which requires a gradient: "
            "choose some with parameters=, or unfreeze the model."
        )
    return parameters


def _check_usable(name: str, value: nn.Parameter) -> None:
    """Raise an error if a parameter can have no gradient, or if scores from its gradient would mean nothing."""
    if is_lazy(value):
        raise ValueError(f"parameter {name!r} of a lazy module has no shape yet: run the model once on a batch first.")
    if value.is_complex():
        raise TypeError(
            f"parameter {name!r} is complex ({value.dtype}), so an inner product of gradients has no order: leave "
            "it out with parameters=, or store its real and imaginary part (torch.view_as_real)."
        )
    if value.is_meta:
        raise ValueError(f"parameter {name!r} is on the meta device and holds no numbers: load the model first.")
    if value.is_inference():
        raise ValueError(
            f"parameter {name!r} was made in torch.inference_mode and cannot have a gradient: make the model "
            "outside of it."
        )


def _as_list(chosen: ParameterChoice) -> list[str | nn.Module | nn.Parameter]:
    single = isinstance(chosen, str | nn.Module | nn.Parameter) or not isinstance(chosen, Iterable)
    return [chosen] if single else list(chosen)  # type: ignore[list-item, arg-type]


def _members(model: nn.Module, item: str | nn.Module | nn.Parameter) -> list[nn.Parameter]:
    if isinstance(item, nn.Parameter):
        return [item]
    if isinstance(item, nn.Module):
        return list(item.parameters())
    if not isinstance(item, str):
        raise TypeError(
            f"parameters holds a {type(item).__name__}: pass names of parameters or modules, or these themselves."
        )
    every = dict(model.named_parameters(remove_duplicate=False))
    item = inner_name(item, model)
    if item in every:
        return [every[item]]
    modules = dict(model.named_modules())
    if item in modules:
        return list(modules[item].parameters())
    known = ", ".join(list(every)[:8]) + (", …" if len(every) > 8 else "")
    raise ValueError(f"parameters= names {item!r}, which is no parameter or module of the model; it has {known}.")
