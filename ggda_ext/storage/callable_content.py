"""Hashes of code: functions with the values that they capture and the globals that they name, classes, modules."""

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
_OPERATORS = frozenset({"aten", "prim", "prims", "quantized", "torchvision", "torchaudio"})  # torch's own libraries


def full_name(value: Any) -> str:
    """The name of a function or a class, with the name of its module in front; for another value, of its class."""
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def partial(content: Content, value: functools.partial[Any]) -> bytes:
    """The hash of a `functools.partial`: its function, arguments and attributes."""
    return content.parts("partial", (value.func, value.args, value.keywords, vars(value)))


def built_in(content: Content, value: Any) -> bytes:
    """The hash of a function written in C, and of the object that it is bound to."""
    owner = getattr(value, "__self__", None)
    held = None if isinstance(owner, types.ModuleType) else content.token(owner)
    return joined("built in", full_name(value), held)


def operator(content: Content, value: Any) -> bytes:
    """The hash of a torch operator; of an operator that the user registered, torch knows only the name."""
    if str(value).partition(".")[0] in _OPERATORS:
        return joined("operator", str(value))
    return content.untold(value, "it is an operator of your own, of which torch knows the name only")


def function(content: Content, value: types.FunctionType) -> bytes:
    """The hash of a Python function: defaults, attributes and captured values, and the code or the library.

    For the user's own function, the code and the globals and modules that it uses are hashed; for a function of an
    installed library, its name and version.
    """
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
    """The hash of a value that a function uses under a name.

    Of a module of the user's own, only the contents that the function names are hashed, also in modules inside it.
    """
    if not isinstance(value, types.ModuleType) or version_of(value.__name__) is not None:
        return name, content.at(name, value)
    with content.inside(name):
        seen = sorted((names & vars(value).keys()) - {name})
        return name, *(_used(content, at, getattr(value, at), names - {name}) for at in seen)


def code(content: Content, value: types.CodeType) -> bytes:
    """The hash of bytecode with its names and constants, without its position in a file."""
    constants = [code(content, item) if isinstance(item, types.CodeType) else content.token(item)
                 for item in value.co_consts]  # fmt: skip
    shape = value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags
    names = value.co_names, value.co_varnames, value.co_freevars
    return joined("code", value.co_code, getattr(value, "co_exceptiontable", b""), shape, names, *constants)


def of_class(content: Content, value: type) -> bytes:
    """The hash of a class: name and version for a class of a library, else its bases and everything it defines."""
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
    """The hash of a property of a class, or of a static or class method."""
    functions = [getattr(value, name, None) for name in ("__func__", "func", "fget", "fset", "fdel")]
    return content.parts(type(value).__name__, functions)


def module(content: Content, value: types.ModuleType) -> bytes:
    """The hash of a module: its name and version, or everything it defines if it is the user's own."""
    version = version_of(value.__name__)
    if version is not None:
        return joined("module", version, value.__name__)
    with content.inside(value.__name__):
        found: list[Any] = ["module", value.__name__]
        for name, item in sorted(vars(value).items()):
            if not name.startswith("__"):
                found += (name, content.at(name, item))
        return joined(*found)
