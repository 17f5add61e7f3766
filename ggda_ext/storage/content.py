"""A hash of what a Python value is made of: numbers and arrays by their bytes, functions by code and what they capture.

Two values with one hash do the same thing. A function is its bytecode, defaults, closure and the globals it names; an
object is its class and its attributes; what comes from an installed library is its name and version. Where the content
cannot be told (an open file, a lock), that is said and refused.
"""

from __future__ import annotations

import enum
import functools
import io
import logging
import types
import weakref
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ggda_ext.data import IndexedData
from ggda_ext.storage.code import counters_in, counters_of, imported_by, library_of, names_in, version_of
from ggda_ext.storage.data_content import describe_data

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented))
_NAMED = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, np.dtype, PurePath, range, slice)
_OF_TORCH = frozenset(vars(nn.Module()))  # what torch itself keeps in a module
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BUILT_IN = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
)
_UNTOLD = (types.GeneratorType, types.CoroutineType, types.FrameType, io.IOBase)


class UnknownContent(ValueError):
    """A value whose content cannot be told, so that a store could not tell it from another."""


class Content:
    """Hashes values; one object of it hashes each value once.

    Args:
        named: objects that stand for themselves, such as the modules of a model that is hashed elsewhere, by name.
        lenient: whether a value that cannot be told counts by its type alone, as the user's tag names it.

    Attributes:
        sampled: what was looked at in part only, because it cannot be read whole.
    """

    def __init__(self, named: Mapping[str, Any] | None = None, *, lenient: bool = False) -> None:
        self._known = {id(value): f"named {name}".encode() for name, value in (named or {}).items()}
        self._alive: list[Any] = []  # an id is worth something while its object lives
        self._lenient, self._path = lenient, list[str]()
        self.sampled: list[str] = []

    def text(self, value: Any, what: str) -> str:
        """The hash as a text of 16 letters.

        Args:
            value: what is hashed.
            what: how an error calls it.
        """
        with self._inside(what):
            return self.hash(value).hex()[:16]

    def hash(self, value: Any) -> bytes:
        """The hash of any value."""
        if type(value) in _PLAIN:
            return _plain(value)
        known = self._known.get(id(value))
        if known is None:
            self._alive.append(value)
            self._known[id(value)] = b"itself"  # inside of what it holds
            known = self._known[id(value)] = self._hash(value)
        return known

    def _hash(self, value: Any) -> bytes:
        kind = type(value)
        rule = _rule_of.get(kind)
        if rule is None:
            own = getattr(kind, "__fingerprint__", None)
            of_pandas = kind.__module__.partition(".")[0] == "pandas" and hasattr(kind, "to_numpy")
            other = Content._table if of_pandas else Content._object
            known = next((how for kinds, how in _RULES if isinstance(value, kinds)), other)
            rule = _rule_of[kind] = known if own is None else Content._own
        return rule(self, value)

    def _own(self, value: Any) -> bytes:
        return _joined("own", _name(type(value)), str(value.__fingerprint__()))

    def data(self, value: IndexedData) -> str:
        """How many points a data set has, a hash of them, and how many were looked at if it cannot be read whole."""
        described, whole = describe_data(value, lambda part: self.hash(part).hex())
        if not whole:
            self.sampled.append(value.name)
        return described

    def _data_set(self, value: Any) -> bytes:
        """A data set that a function captures: its points, where they have an order, beside its attributes."""
        if isinstance(value, Dataset) and not hasattr(value, "__len__") and not isinstance(value, IterableDataset):
            return self._object(value)
        return self.data(IndexedData(value, " → ".join(self._path) or "a data set")).encode()

    def parts(self, kind: str, values: Iterable[Any]) -> bytes:
        return _joined(kind, *map(self.hash, values))

    def _tensor(self, value: Tensor) -> bytes:
        try:
            return _joined("tensor", str(value.dtype), str(list(value.shape)), hash_of_bytes(bytes_of(value)))
        except (RuntimeError, NotImplementedError, TypeError) as error:
            return self._untold(value, str(error).partition("\n")[0])

    def _array(self, value: np.ndarray) -> bytes:
        if isinstance(value, np.ma.MaskedArray):
            return self.parts("masked", (value.filled(), np.ma.getmaskarray(value), value.fill_value))
        if value.dtype.hasobject:
            return _joined("array", str(value.shape), *map(self.hash, value.reshape(-1).tolist()))
        plain = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return _joined("array", value.dtype.str, str(value.shape), hash_of_bytes(plain.data))

    def _table(self, value: Any) -> bytes:
        """A frame, a series, an index or an array of pandas, which keep references to themselves."""
        if hasattr(value, "columns"):
            columns = [value.iloc[:, at] for at in range(len(value.columns))]
            return self.parts("frame", (columns, value.columns, value.index))
        name = list(value.names) if hasattr(value, "names") else getattr(value, "name", None)
        kind = str(value.dtype), getattr(value.dtype, "categories", None)
        return self.parts(type(value).__name__, (kind, value.to_numpy(), name, getattr(value, "index", None)))

    def _mapping(self, value: Mapping[Any, Any]) -> bytes:
        items = []
        for key, item in value.items():
            with self._inside(f"[{key!r}]" if isinstance(key, str | int) else "[…]"):
                items.append(_joined(self.hash(key), self.hash(item)))
        return _joined("mapping", _name(type(value)), *items, self._attributes(value))  # the order may count

    def _sequence(self, value: Iterable[Any]) -> bytes:
        return _joined(_name(type(value)), *map(self.hash, value), self._attributes(value))

    def _set(self, value: Set[Any]) -> bytes:
        return _joined("set", *sorted(map(self.hash, value)))

    def _partial(self, value: functools.partial[Any]) -> bytes:
        return self.parts("partial", (value.func, value.args, value.keywords))

    def _method(self, value: types.MethodType) -> bytes:
        return self.parts("method", (value.__func__, value.__self__))

    def _built_in(self, value: Any) -> bytes:
        owner = getattr(value, "__self__", None)
        held = b"" if owner is None or isinstance(owner, types.ModuleType) else self.hash(owner)
        return _joined("built in", _name(value), held)

    def _function(self, value: types.FunctionType) -> bytes:
        inner = getattr(value, "_torchdynamo_orig_callable", None)
        if inner is not None:
            return self.hash(inner)
        with self._inside(value.__qualname__):
            counters = counters_in(value.__code__)
            cells = [
                self._cell(name, cell, is_counted=name in counters)
                for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            ]
            given = self.parts("given", (value.__defaults__, value.__kwdefaults__, vars(value)))
            library = library_of(value)
            if library is not None:
                return _joined("function", library, _name(value), *cells, given)
            names = names_in(value.__code__)
            used = [(name, value.__globals__[name]) for name in sorted(names) if name in value.__globals__]
            used += imported_by(value)
            return _joined(
                "function", self._code(value.__code__), *cells, given, *(self._used(*u, names) for u in used)
            )

    def _cell(self, name: str, cell: Any, *, is_counted: bool) -> bytes:
        with self._inside(name):
            try:
                content = cell.cell_contents
                return (
                    _joined(name, "counter")
                    if is_counted and type(content) is int
                    else _joined(name, self.hash(content))
                )
            except ValueError as error:
                if isinstance(error, UnknownContent):
                    raise
                return _joined(name, "empty")

    def _used(self, name: str, value: Any, names: set[str]) -> bytes:
        """What a function uses under a name; of a module of the user's own, what is named of it and of those below."""
        with self._inside(name):
            if not isinstance(value, types.ModuleType) or version_of(value.__name__) is not None:
                return _joined(name, self.hash(value))
            seen = sorted((names & set(vars(value))) - {name})
            return _joined(name, *(self._used(at, getattr(value, at), names - {name}) for at in seen))

    def _code(self, code: types.CodeType) -> bytes:
        constants = [
            self._code(item) if isinstance(item, types.CodeType) else self.hash(item) for item in code.co_consts
        ]
        names = (*code.co_names, "|", *code.co_varnames, "|", *code.co_freevars)
        shape = f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount} {code.co_flags}"
        return _joined("code", code.co_code, shape, *names, *constants)

    def _class(self, value: type) -> bytes:
        library = library_of(value)
        if library is not None:
            return _joined("class", library, _name(value))
        with self._inside(value.__qualname__):
            held = [
                _joined(name, self.hash(item))
                for name, item in sorted(vars(value).items())
                if name not in _OF_CLASSES and not isinstance(item, types.GetSetDescriptorType)
            ]
            return _joined("class", value.__qualname__, *map(self.hash, value.__bases__), *held)

    def _descriptor(self, value: Any) -> bytes:
        functions = [getattr(value, name, None) for name in ("__func__", "func", "fget", "fset", "fdel")]
        return self.parts(type(value).__name__, functions)

    def _wrapper(self, value: Any) -> bytes:
        return self.hash(value.__wrapped__)

    def _module(self, value: types.ModuleType) -> bytes:
        return _joined("module", version_of(value.__name__) or "", value.__name__)

    def _network(self, value: nn.Module) -> bytes:
        return self.network(value, values=True)

    def network(self, value: nn.Module, *, values: bool) -> bytes:
        """The hash of a module: its class, attributes, hooks and parts; with the values of its tensors or without."""
        if isinstance(value, torch.jit.ScriptModule):
            return _scripted(value, values=values)
        inner = vars(value).get("_orig_mod") or value._modules.get("_orig_mod")
        if inner is not None:  # compiled
            return self.network(inner, values=values)
        own, counters = type(value), counters_of(type(value))
        held: list[bytes] = [self.hash(own)]
        if library_of(own) is None:
            held.append(str(value.training).encode())
        for name, item in sorted(vars(value).items()):
            if name not in _OF_TORCH and not (name in counters and type(item) is int):
                with self._inside(name):
                    held.append(_joined(name, self.hash(item)))
        for name in _HOOKS:
            held += [self.hash(hook) for hook in (vars(value).get(name) or {}).values()]
        for name, tensor in (*value._parameters.items(), *value._buffers.items()):
            held.append(self._values(name, tensor, values))
        for name, part in value._modules.items():
            with self._inside(name):
                known = self._known.get(id(part)) if values else None
                held.append(_joined(name, b"" if part is None else known or self.network(part, values=values)))
        return _joined("network", *held)

    def _values(self, name: str, tensor: Tensor | None, values: bool) -> bytes:
        if tensor is None or not values:
            return _joined(name, "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}")
        return _joined(name, self.hash(tensor))

    def _object(self, value: Any) -> bytes:
        if not hasattr(value, "__dict__") and not _slots(type(value)):
            return self._reduced(value)
        return _joined("object", self.hash(type(value)), self._attributes(value, counters_of(type(value))))

    def _attributes(self, value: Any, but: Set[str] = frozenset()) -> bytes:
        slots = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
        found = []
        for name, item in sorted({**slots, **getattr(value, "__dict__", {})}.items()):
            if name in but and type(item) is int:
                continue
            with self._inside(name):
                found.append(_joined(name, self.hash(item)))
        return _joined("attributes", *found)

    def _reduced(self, value: Any) -> bytes:
        """What pickle would write, for objects of C; nothing is called but the object's own `__reduce_ex__`."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:  # whatever an object raises that cannot be pickled
            return self._untold(value, str(error))
        if isinstance(reduced, str):
            return _joined("reduced", _name(type(value)), reduced)
        items = [list(part) if isinstance(part, Iterator) else part for part in reduced]
        return self.parts("reduced", items)

    def _untold(self, value: Any, reason: str = "it is a running thing") -> bytes:
        if self._lenient:
            return _joined("untold", _name(type(value)))
        *where, last = self._path or ["the value"]
        raise UnknownContent(
            f"{' → '.join([*where, last])} is a {type(value).__qualname__}, whose content cannot be told ({reason}): "
            f"save_dir could not tell this {self._path[0] if self._path else 'value'} from another: pass tag=, a text "
            "that names its version, give its class a method __fingerprint__(self) -> str, or leave save_dir out."
        )

    def _inside(self, name: str) -> _Inside:
        return _Inside(self._path, name)


class _Inside:
    """A step on the way to a value, for errors."""

    __slots__ = ("name", "path")

    def __init__(self, path: list[str], name: str) -> None:
        self.path, self.name = path, name

    def __enter__(self) -> None:
        self.path.append(self.name)

    def __exit__(self, *_: object) -> None:
        self.path.pop()


_rule_of: weakref.WeakKeyDictionary[type, Callable[[Content, Any], bytes]] = weakref.WeakKeyDictionary()
_OF_CLASSES = frozenset({"__module__", "__doc__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__",
                         "__annotations__", "__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__",
                         "__annotate_func__", "__annotations_cache__", "__match_args__"})  # fmt: skip

_RULES: tuple[tuple[Any, Callable[[Content, Any], bytes]], ...] = (
    (_PLAIN, lambda self, value: _plain(value)),
    (Tensor, Content._tensor),
    (np.ndarray, Content._array),
    (np.generic, lambda self, value: self._array(np.asarray(value))),
    (nn.Module, Content._network),
    (IndexedData, lambda self, value: self.data(value).encode()),
    ((Dataset, DataLoader), Content._data_set),
    (enum.Enum, lambda self, value: _joined("enum", _name(type(value)), value.name)),
    (_NAMED, lambda self, value: _joined(_name(type(value)), str(value))),
    (functools.partial, Content._partial),
    (types.MethodType, Content._method),
    (types.FunctionType, Content._function),
    (_BUILT_IN, Content._built_in),
    (type, Content._class),
    ((staticmethod, classmethod, property, functools.cached_property), Content._descriptor),
    (functools._lru_cache_wrapper, Content._wrapper),
    (types.ModuleType, Content._module),
    (types.CodeType, Content._code),
    (types.MappingProxyType, Content._mapping),
    (torch.Generator, lambda self, value: self._tensor(value.get_state())),
    (logging.Logger, lambda self, value: _joined("logger", value.name)),
    (np.ufunc, lambda self, value: _joined("ufunc", value.__name__)),
    (torch._ops.OpOverloadPacket, lambda self, value: _joined("op", str(value))),
    (torch._ops.OpOverload, lambda self, value: _joined("op", str(value))),
    (torch.jit.ScriptFunction, lambda self, value: _scripted(value, values=True)),
    (dict, Content._mapping),
    ((list, tuple, deque), Content._sequence),
    ((set, frozenset), Content._set),
    ((bytearray, memoryview), lambda self, value: _joined("bytes", hash_of_bytes(bytes(value)))),
    (_UNTOLD, Content._untold),
)


def _joined(*parts: str | bytes) -> bytes:
    return xxhash.xxh3_128_digest(repr(parts).encode())  # which tells where a part ends, and texts from bytes


def _plain(value: Any) -> bytes:
    return _joined(type(value).__name__, repr(value))


def _scripted(value: Any, *, values: bool) -> bytes:
    """The hash of what torch would save of a script: code, constants and attributes; its tensors only with `values`."""
    buffer = io.BytesIO()
    torch.jit.save(value, buffer)
    with zipfile.ZipFile(buffer) as archive:
        held = {name.partition("/")[2]: _in_order(archive.read(name)) for name in archive.namelist()}
    kept = sorted(name for name in held if not name.endswith((".debug_pkl", "serialization_id")))
    parts = [_joined(name, hash_of_bytes(held[name])) for name in kept if values or not name.startswith("data/")]
    return _joined("script", *parts)


def _in_order(code: bytes) -> bytes:
    """Saved code with its constants, which torch writes in any order, sorted in front."""
    lines = code.split(b"\n")
    return b"\n".join(
        (
            *sorted(line for line in lines if b" : Final[" in line),
            b"",
            *(line for line in lines if b" : Final[" not in line),
        )
    )


def hash_of_bytes(plain: Any) -> bytes:
    """XXH3 of bytes, 128 bits: no proof against forgers, but the fastest there is, at the speed of memory."""
    return xxhash.xxh3_128_digest(plain)


def bytes_of(value: Tensor) -> memoryview:
    """The values of a tensor as bytes, without a copy where it lies in one piece on the CPU."""
    plain = value.detach().resolve_conj().resolve_neg()
    plain = (torch.view_as_real(plain) if plain.is_complex() else plain).cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        own: Sequence[str] | str = vars(base).get("__slots__", ())
        found += [own] if isinstance(own, str) else list(own)
    return [name for name in found if name not in ("__dict__", "__weakref__")]
