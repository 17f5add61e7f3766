"""A hash of what a Python value is made of: numbers and arrays by their bytes, functions by code and what they capture.

Two values with one hash do the same thing. A function is its bytecode, defaults, closure and the globals it names; an
object is its class and its attributes; what comes from an installed library is its name and version. Where the content
cannot be told (an open file, a lock), that is said and refused.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import io
import logging
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ggda_ext.data import IndexedData
from ggda_ext.storage import callable_content as callables
from ggda_ext.storage import network_content as networks
from ggda_ext.storage.code import counters_of
from ggda_ext.storage.data_content import describe_data
from ggda_ext.storage.hashing import bytes_of, hash_of_bytes, joined

PLAIN: frozenset[type] = frozenset({bool, int, float, complex, str, type(None), type(Ellipsis), type(NotImplemented)})
_NAMED = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, np.dtype, PurePath, range, slice)
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
        self.known = {id(value): f"named {name}".encode() for name, value in (named or {}).items()}
        self._alive: list[Any] = []  # an id is worth something while its object lives
        self._lenient, self._path = lenient, list[str]()
        self.sampled: list[str] = []

    def text(self, value: Any, what: str) -> str:
        """The hash as a text of 16 letters.

        Args:
            value: what is hashed.
            what: how an error calls it.
        """
        return joined(self.at(what, value)).hex()[:16]

    def token(self, value: Any) -> Any:
        """What stands for a value in the hash of its holder: a number, a text or None for itself, else a hash."""
        kind = type(value)
        if kind in PLAIN:
            return value
        known = self.known.get(id(value))
        if known is None:
            self._alive.append(value)
            self.known[id(value)] = b"itself"  # inside of what it holds
            rule = _rule_of.get(kind) or _new_rule(kind)
            known = self.known[id(value)] = rule(self, value)
        return known

    def at(self, name: str, value: Any) -> Any:
        """The token of what is found under a name, which errors tell."""
        if type(value) in PLAIN:
            return value
        with self.inside(name):
            return self.token(value)

    def inside(self, name: str) -> _Inside:
        """A step on the way to a value, for errors."""
        return _Inside(self._path, name)

    def data(self, value: IndexedData) -> str:
        """How many points a data set has, a hash of them, and how many were looked at if it cannot be read whole."""
        described, whole = describe_data(value, lambda part: joined(self.token(part)).hex())
        if not whole:
            self.sampled.append(value.name)
        return described

    def parts(self, kind: str, values: Iterable[Any]) -> bytes:
        """The hash of several values."""
        return joined(kind, *map(self.token, values))

    def attributes(self, value: Any, but: Set[str] = frozenset()) -> bytes:
        """The hash of an object's attributes, in slots or not, but for counters of the names `but`."""
        held = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
        held |= getattr(value, "__dict__", {})
        found: list[Any] = ["attributes"]
        for name in sorted(held, key=str):
            item = held[name]
            if not (name in but and type(item) is int):
                found += (name, self.at(str(name), item))
        return joined(*found)

    def untold(self, value: Any, reason: str = "it is a running thing") -> bytes:
        """What stands for a value whose content cannot be told; an error unless a tag names it."""
        if self._lenient:
            return joined("untold", callables.full_name(type(value)))
        *where, last = self._path or ["the value"]
        raise UnknownContent(
            f"{' → '.join([*where, last])} is a {type(value).__qualname__}, whose content cannot be told ({reason}): "
            f"save_dir could not tell this {self._path[0] if self._path else 'value'} from another: pass tag=, a text "
            "that names its version, give its class a method __fingerprint__(self) -> str, or leave save_dir out."
        )


class _Inside:
    """A step on the way to a value, for errors."""

    __slots__ = ("name", "path")

    def __init__(self, path: list[str], name: str) -> None:
        self.path, self.name = path, name

    def __enter__(self) -> None:
        self.path.append(self.name)

    def __exit__(self, *_: object) -> None:
        self.path.pop()


def _own(content: Content, value: Any) -> bytes:
    return joined("own", callables.full_name(type(value)), str(value.__fingerprint__()))


def _plain(content: Content, value: Any) -> bytes:
    """A number or a text of a class of its own."""
    base = next(kind for kind in PLAIN if isinstance(value, kind))
    shown: Any = base.__repr__
    return joined("plain", base.__name__, shown(value), _kind(content, value, base))


def _enum(content: Content, value: enum.Enum) -> bytes:
    return content.parts("enum", (type(value), value.name, value.value))


def _tensor(content: Content, value: Tensor) -> bytes:
    kind = type(value)
    own = None if kind is nn.Parameter else _kind(content, value, Tensor)
    try:
        if value.is_nested or value.layout is not torch.strided:
            return content.parts(
                "tensor", (str(value.dtype), str(value.layout), list(value.shape), own, *_pieces(value))
            )
        return joined("tensor", str(value.dtype), list(value.shape), own, hash_of_bytes(bytes_of(value)))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return content.untold(value, str(error).partition("\n")[0])


def _pieces(value: Tensor) -> Sequence[Tensor]:
    """The plain tensors that a sparse or nested one is made of."""
    if value.is_nested:
        return value.unbind()
    if value.layout is torch.sparse_coo:
        return value._indices(), value._values()
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return value.crow_indices(), value.col_indices(), value.values()
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return value.ccol_indices(), value.row_indices(), value.values()
    raise TypeError(f"its layout is {value.layout}")


def _array(content: Content, value: np.ndarray) -> bytes:
    if isinstance(value, np.ma.MaskedArray):
        return content.parts("masked", (value.filled(), np.ma.getmaskarray(value), value.fill_value))
    own = None if type(value) is np.memmap else _kind(content, value, np.ndarray)
    if value.dtype.hasobject:
        return joined("array", str(value.dtype), value.shape, own, *map(content.token, value.reshape(-1).tolist()))
    plain = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    kind = value.dtype.str if value.dtype.names is None else str(value.dtype)  # with the names of its fields
    return joined("array", kind, value.shape, own, hash_of_bytes(plain.data))


def _table(content: Content, value: Any) -> bytes:
    """A frame, a series, an index or an array of pandas, which keep references to themselves."""
    if hasattr(value, "columns"):
        columns = [value.iloc[:, at] for at in range(len(value.columns))]
        return content.parts("frame", (columns, value.columns, value.index))
    name = list(value.names) if hasattr(value, "names") else getattr(value, "name", None)
    kind = str(value.dtype), getattr(value.dtype, "categories", None)
    return content.parts(type(value).__name__, (kind, value.to_numpy(), name, getattr(value, "index", None)))


def _mapping(content: Content, value: Mapping[Any, Any]) -> bytes:
    found: list[Any] = ["mapping"]
    for key, item in value.items():
        found += (content.token(key), content.at(f"[{key!r}]" if isinstance(key, str | int) else "[…]", item))
    return joined(*found, _kind(content, value, dict))  # the order may count


def _sequence(content: Content, value: Iterable[Any]) -> bytes:
    return joined("sequence", *map(content.token, value), _kind(content, value, list))


def _kind(content: Content, value: Any, usual: type) -> Any:
    """The class of a container, an array or a number, and what else it keeps; None for the usual one."""
    kind = type(value)
    if kind is usual:
        return None
    if kind in (list, tuple, dict):
        return kind.__name__
    settings = getattr(value, "default_factory", None), getattr(value, "maxlen", None)
    return content.parts(callables.full_name(kind), (kind, content.attributes(value), *settings))


def _set(content: Content, value: Set[Any]) -> bytes:
    return joined("set", *sorted(repr(content.token(item)) for item in value), _kind(content, value, set))


def _data_set(content: Content, value: Any) -> bytes:
    """A data set that a function captures: its points, where they have an order, beside its attributes."""
    if isinstance(value, Dataset) and not hasattr(value, "__len__") and not isinstance(value, IterableDataset):
        return _object(content, value)
    return content.data(IndexedData(value, " → ".join(content._path) or "a data set")).encode()


def _object(content: Content, value: Any) -> bytes:
    kind = type(value)
    if not hasattr(value, "__dict__") and not _slots(kind):
        return _reduced(content, value)
    return joined("object", content.token(kind), content.attributes(value, counters_of(kind)))


def _reduced(content: Content, value: Any) -> bytes:
    """What pickle would write, for objects of C; nothing is called but what is registered for it, or its own method."""
    try:
        known = copyreg.dispatch_table.get(type(value))
        reduced = value.__reduce_ex__(4) if known is None else known(value)
    except Exception as error:  # whatever an object raises that cannot be pickled
        return content.untold(value, str(error))
    if isinstance(reduced, str):
        return joined("reduced", callables.full_name(type(value)), reduced)
    items = [list(part) if isinstance(part, Iterator) else part for part in reduced]
    return content.parts("reduced", items)


def _ufunc(content: Content, value: np.ufunc) -> bytes:
    if getattr(np, value.__name__, None) is value:
        return joined("ufunc", value.__name__)
    return content.untold(value, "it is no function of NumPy's own")


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        own: Sequence[str] | str = vars(base).get("__slots__", ())
        for name in [own] if isinstance(own, str) else own:
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


Rule = Callable[[Content, Any], bytes]
_RULES: tuple[tuple[Any, Rule], ...] = (
    (enum.Enum, _enum),
    (tuple(PLAIN), _plain),
    (Tensor, _tensor),
    (np.ndarray, _array),
    (np.generic, lambda content, value: _array(content, np.asarray(value))),
    (nn.Module, lambda content, value: networks.network(content, value, values=True)),
    (IndexedData, lambda content, value: content.data(value).encode()),
    ((Dataset, DataLoader), _data_set),
    (_NAMED, lambda content, value: joined(callables.full_name(type(value)), str(value))),
    (functools.partial, callables.partial),
    (types.MethodType, lambda content, value: content.parts("method", (value.__func__, value.__self__))),
    (types.FunctionType, callables.function),
    (callables.BUILT_IN, callables.built_in),
    (type, callables.of_class),
    ((staticmethod, classmethod, property, functools.cached_property), callables.descriptor),
    (functools._lru_cache_wrapper, lambda content, value: content.parts("cached", [value.__wrapped__])),
    (types.ModuleType, callables.module),
    (types.CodeType, callables.code),
    (types.MappingProxyType, _mapping),
    (torch.Generator, lambda content, value: _tensor(content, value.get_state())),
    (logging.Logger, lambda content, value: joined("logger", value.name)),
    (np.ufunc, _ufunc),
    ((torch._ops.OpOverloadPacket, torch._ops.OpOverload), callables.operator),
    (torch.jit.ScriptFunction, lambda content, value: networks.scripted(value, values=True)),
    ((dict, defaultdict), _mapping),
    ((list, tuple, deque), _sequence),
    ((set, frozenset), _set),
    ((bytes, bytearray), lambda content, value: joined("bytes", type(value).__name__, hash_of_bytes(value))),
    (memoryview, lambda content, value: _array(content, np.asarray(value))),
    (_UNTOLD, Content.untold),
)  # fmt: skip
_rule_of: weakref.WeakKeyDictionary[type, Rule] = weakref.WeakKeyDictionary()


def _new_rule(kind: type) -> Rule:
    if getattr(kind, "__fingerprint__", None) is not None:
        rule: Rule = _own
    else:
        of_pandas = kind.__module__.partition(".")[0] == "pandas" and hasattr(kind, "to_numpy")
        other = _table if of_pandas else _object
        rule = next((how for kinds, how in _RULES if issubclass(kind, kinds)), other)
    _rule_of[kind] = rule
    return rule
