"""The hash of what can be called or names code: functions with what they capture and name, classes, modules."""

from __future__ import annotations

import functools
import types
from collections.abc import Set
from typing import TYPE_CHECKING, Any

from ggda_ext.storage.code import counters_in, globals_in, imported_by, library_of, names_in, version_of
from ggda_ext.storage.hashing import joined

if TYPE_CHECKING:
    from ggda_ext.storage.content import Content

BUILT_IN = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
)
_OF_CLASSES = frozenset({"__module__", "__doc__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__",
                         "__annotations__", "__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__",
                         "__annotate_func__", "__annotations_cache__", "__match_args__"})  # fmt: skip
_OPERATORS = frozenset({"aten", "prim", "prims", "quantized", "torchvision", "torchaudio"})  # of torch's own libraries


def full_name(value: Any) -> str:
    """The name of a function or a class with that of its module."""
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def partial(content: Content, value: functools.partial[Any]) -> bytes:
    """A function with some of its arguments."""
    return content.parts("partial", (value.func, value.args, value.keywords, vars(value)))


def built_in(content: Content, value: Any) -> bytes:
    """A function of C, and the object that it is of."""
    owner = getattr(value, "__self__", None)
    held = None if isinstance(owner, types.ModuleType) else content.token(owner)
    return joined("built in", full_name(value), held)


def operator(content: Content, value: Any) -> bytes:
    """An operator of torch; one that the user registered is known to torch by its name alone."""
    if str(value).partition(".")[0] in _OPERATORS:
        return joined("operator", str(value))
    return content.untold(value, "it is an operator of your own, of which torch knows the name only")


def function(content: Content, value: types.FunctionType) -> bytes:
    """A function of Python: code, defaults, attributes, what it captures, and what it names if it is the user's."""
    inner = getattr(value, "_torchdynamo_orig_callable", None)
    if inner is not None:
        return content.parts("compiled", [inner])
    with content.inside(value.__qualname__):
        library, names = library_of(value), names_in(value.__code__)
        found: list[Any] = ["function", content.parts("given", (value.__defaults__, value.__kwdefaults__, vars(value)))]
        counters = counters_in(value.__code__)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            found.append(_cell(content, name, cell, names, is_counted=name in counters))
        if library is not None:
            return joined(*found, library, full_name(value))
        around = globals_in(value.__code__) & value.__globals__.keys()
        used = [(name, value.__globals__[name]) for name in sorted(around)]
        found += (_used(content, *pair, names) for pair in (*used, *imported_by(value)))
        return joined(*found, code(content, value.__code__))


def _cell(content: Content, name: str, cell: Any, names: Set[str], *, is_counted: bool) -> Any:
    try:
        held = cell.cell_contents
    except ValueError:
        return name, "empty"
    return (name, "counter") if is_counted and type(held) is int else _used(content, name, held, names)


def _used(content: Content, name: str, value: Any, names: Set[str]) -> Any:
    """What a function uses under a name; of a module of the user's own, what is named of it and of those below."""
    if not isinstance(value, types.ModuleType) or version_of(value.__name__) is not None:
        return name, content.at(name, value)
    with content.inside(name):
        seen = sorted((names & vars(value).keys()) - {name})
        return name, *(_used(content, at, getattr(value, at), names - {name}) for at in seen)


def code(content: Content, value: types.CodeType) -> bytes:
    """Bytecode with its names and constants, without its place in a file."""
    constants = [code(content, item) if isinstance(item, types.CodeType) else content.token(item)
                 for item in value.co_consts]  # fmt: skip
    shape = value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags
    names = value.co_names, value.co_varnames, value.co_freevars
    return joined("code", value.co_code, getattr(value, "co_exceptiontable", b""), shape, names, *constants)


def of_class(content: Content, value: type) -> bytes:
    """A class: its name and version if it is of a library, else its bases and all that it defines."""
    library = library_of(value)
    if library is not None:
        return joined("class", library, full_name(value))
    with content.inside(value.__qualname__):
        found: list[Any] = ["class", value.__qualname__, *map(content.token, value.__bases__)]
        if type(value) is not type:
            found.append(content.at("its class", type(value)))
        for name, item in sorted(vars(value).items()):
            if name not in _OF_CLASSES and not isinstance(item, types.GetSetDescriptorType):
                found += (name, content.token(item))
        return joined(*found)


def descriptor(content: Content, value: Any) -> bytes:
    """A property of a class, or a method that is not bound to an object."""
    functions = [getattr(value, name, None) for name in ("__func__", "func", "fget", "fset", "fdel")]
    return content.parts(type(value).__name__, functions)


def module(content: Content, value: types.ModuleType) -> bytes:
    """A module by its name and version, or with all that it defines if it is the user's own."""
    version = version_of(value.__name__)
    if version is not None:
        return joined("module", version, value.__name__)
    with content.inside(value.__name__):
        found: list[Any] = ["module", value.__name__]
        for name, item in sorted(vars(value).items()):
            if not name.startswith("__"):
                found += (name, content.at(name, item))
        return joined(*found)
