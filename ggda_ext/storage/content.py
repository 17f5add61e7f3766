"""Hashes of the content of Python values: numbers and arrays by their bytes, functions by code and captured values.

Two values with the same hash do the same thing. For a function, bytecode, defaults, closure and named globals are
hashed; for an object, its class and attributes; for code of an installed library, its name and version. If the content
of a value cannot be read (an open file, a lock), an error says so.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import io
import logging
import struct
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
_POINTER_BYTES = struct.calcsize("P")
_OF_THE_PROCESS = frozenset({"_original_object_hash"})
"""Attributes with another value in each process that follows from the others: the hash in a GenerationConfig."""
_UNTOLD = (types.GeneratorType, types.CoroutineType, types.FrameType, io.IOBase)


class UnknownContent(ValueError):
    """The content of a value cannot be read, therefore a store could not distinguish the value from another."""


class Content:
    """Hashes values by their content; each value is hashed only once.

    Args:
        named: objects for which only the name is hashed, such as the modules of a model that is hashed elsewhere.
        lenient: whether to hash only the type of a value whose content cannot be read, because the user gave a tag.

    Attributes:
        sampled: names of data sets of which only some points were read, because they cannot be read whole.
    """

    def __init__(self, named: Mapping[str, Any] | None = None, *, lenient: bool = False) -> None:
        self.known = {id(value): f"named {name}".encode() for name, value in (named or {}).items()}
        self._alive: list[Any] = []  # an id is valid only while its object is alive
        self._lenient, self._path = lenient, list[str]()
        self.sampled: list[str] = []

    def text(self, value: Any, what: str) -> str:
        """The hash of a value as a text of 16 characters.

        Args:
            value: the value to hash.
            what: the name of the value in errors.
        """
        return joined(self.at(what, value)).hex()[:16]

    def token(self, value: Any) -> Any:
        """What represents a value in the hash of its container: numbers, texts and None themselves, else a hash."""
        kind = type(value)
        if kind in PLAIN:
            return value
        known = self.known.get(id(value))
        if known is None:
            self._alive.append(value)
            self.known[id(value)] = b"itself"  # if the value contains itself
            rule = _rule_of.get(kind) or _new_rule(kind)
            known = self.known[id(value)] = rule(self, value)
        return known

    def at(self, name: str, value: Any) -> Any:
        """The token of a value that is found under a name; errors mention the name."""
        if type(value) in PLAIN:
            return value
        with self.inside(name):
            return self.token(value)

    def inside(self, name: str) -> _Inside:
        """Context that adds a name to the path to a value, which errors show."""
        return _Inside(self._path, name)

    def data(self, value: IndexedData) -> str:
        """A text with the number of points, a hash of them, and how many were read if the data cannot be read whole."""
        described, whole = describe_data(value, lambda part: joined(self.token(part)).hex())
        if not whole:
            self.sampled.append(value.name)
        return described

    def parts(self, kind: str, values: Iterable[Any]) -> bytes:
        """The hash of several values together, with `kind` as a label."""
        return joined(kind, *map(self.token, values))

    def attributes(self, value: Any, but: Set[str] = frozenset()) -> bytes:
        """The hash of an object's attributes, including slots; integer counters with a name in `but` are left out."""
        held = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
        held |= getattr(value, "__dict__", {})
        found: list[Any] = ["attributes"]
        for name in sorted(held, key=str):
            item = held[name]
            if not (name in but and type(item) is int) and name not in _OF_THE_PROCESS:
                found += (name, self.at(str(name), item))
        return joined(*found)

    def untold(self, value: Any, reason: str = "it is a running thing") -> bytes:
        """The hash of the type of a value whose content cannot be read; raise an error if the user gave no tag."""
        if self._lenient:
            return joined("untold", callables.full_name(type(value)))
        *where, last = self._path or ["the value"]
        raise UnknownContent(
            f"{' → '.join([*where, last])} is a {type(value).__qualname__}, whose content cannot be told ({reason}): "
            f"save_dir could not tell this {self._path[0] if self._path else 'value'} from another: pass tag=, a text "
            "that names its version, give its class a method __fingerprint__(self) -> str, or leave save_dir out."
        )


class _Inside:
    """Context that adds a name to the path to a value, which errors show."""

    __slots__ = ("name", "path")

    def __init__(self, path: list[str], name: str) -> None:
        self.path, self.name = path, name

    def __enter__(self) -> None:
        self.path.append(self.name)

    def __exit__(self, *_: object) -> None:
        self.path.pop()


def _own(content: Content, value: Any) -> bytes:
    """The hash of what an object says that it depends on: a text, or any value, which is hashed by its content."""
    return content.parts("own", (callables.full_name(type(value)), value.__fingerprint__()))


def _plain(content: Content, value: Any) -> bytes:
    """The hash of a number or a text of a subclass, such as a class derived from `int`."""
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
    """The plain tensors that a sparse or nested tensor consists of."""
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
    kind = value.dtype.str if value.dtype.names is None else str(value.dtype)  # with field names
    return joined("array", kind, value.shape, own, hash_of_bytes(plain.data))


def _table(content: Content, value: Any) -> bytes:
    """The hash of a pandas frame, series, index or array; not by their attributes, which refer to themselves."""
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
    return joined(*found, _kind(content, value, dict))  # the order may matter


def _sequence(content: Content, value: Iterable[Any]) -> bytes:
    return joined("sequence", *map(content.token, value), _kind(content, value, list))


def _kind(content: Content, value: Any, usual: type) -> Any:
    """A token for the class and the attributes of a container, an array or a number; None for the usual class."""
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
    """The hash of a data set that a function captures.

    Its points are described as by `Content.data`; a data set without a length that is not a stream is hashed as an
    object.
    """
    if isinstance(value, Dataset) and not hasattr(value, "__len__") and not isinstance(value, IterableDataset):
        return _object(content, value)
    return content.data(IndexedData(value, " → ".join(content._path) or "a data set")).encode()


def _object(content: Content, value: Any) -> bytes:
    kind = type(value)
    if not hasattr(value, "__dict__") and not _slots(kind):
        return _reduced(content, value)
    hidden = [_reduced(content, value)] if _has_more_than_attributes(kind) else []
    return joined("object", content.token(kind), content.attributes(value, counters_of(kind)), *hidden)


def _has_more_than_attributes(kind: type) -> bool:
    """Whether a base class written in C adds fields to an object, by the size of the object; as pickle finds it out."""
    pointers = len(_slots(kind)) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__itemsize__ > 0 or kind.__basicsize__ > object.__basicsize__ + pointers * _POINTER_BYTES


def _reduced(content: Content, value: Any) -> bytes:
    """The hash of what pickle would write, for objects written in C.

    Only a function that is registered for pickle is called, or the object's own `__reduce_ex__`.
    """
    try:
        known = copyreg.dispatch_table.get(type(value))
        reduced = value.__reduce_ex__(4) if known is None else known(value)
    except Exception as error:  # an object that cannot be pickled may raise anything
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
    elif kind.__name__ == "cython_function_or_method":  # every Cython has a type of its own
        rule = callables.built_in
    else:
        of_pandas = str(kind.__module__).partition(".")[0] == "pandas" and hasattr(kind, "to_numpy")
        other = _table if of_pandas and (hasattr(kind, "dtype") or hasattr(kind, "columns")) else _object
        rule = next((how for kinds, how in _RULES if issubclass(kind, kinds)), other)
    _rule_of[kind] = rule
    return rule
