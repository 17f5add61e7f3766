"""Facts about the code of a function or a class: its library, the names it uses, its imports, the calls it counts.

Code of an installed library is identified by its name and version; the user's own code is examined.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import os
import re
import sys
import sysconfig
import types
from contextlib import suppress
from importlib.machinery import ModuleSpec
from typing import Any

_OURS = ("ggda_ext", "ggda_captum", "ggda_dattri", "ggda_trak", "ggda_transformers")
_BY_TEXT = frozenset({"globals", "vars", "getattr", "__dict__", "eval", "exec"})
_AROUND = _BY_TEXT | {"modules", "import_module", "__import__", "__globals__", "f_globals"}  # ways to reach globals
_WORD = re.compile(r"[^\W\d]\w*")
_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_MADE_BY_PYTHON = 1 << 9  # flag of a class: Py_TPFLAGS_HEAPTYPE


def library_of(value: types.FunctionType | type) -> str | None:
    """The installed package of a function or a class, with its version; None for the user's own code.

    A function belongs to the module whose globals it uses, even if its `__module__` says something else, as after
    `functools.wraps`. A class that was defined by `exec` claims to be built in, but only classes written in C are.
    """
    if isinstance(value, type):
        module = value.__module__
        claims = module == "builtins" and value.__flags__ & _MADE_BY_PYTHON
        return None if claims or not isinstance(module, str) else version_of(module)
    name = value.__globals__.get("__name__")
    return None if name is None else version_of(name)


@functools.cache
def version_of(module: str | None) -> str | None:
    """The installed package of a module, with its version; None for the user's own code."""
    top = (module or "builtins").partition(".")[0]
    if top == "__main__":
        return None
    found = sys.modules.get(top)
    file = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", [])), None)
    if file is None:
        return top if top in sys.stdlib_module_names else None
    if top in _OURS or os.path.realpath(file).startswith(_installed()):  # not the user's file of that name
        return f"{top} {getattr(found, '__version__', '')}"
    return None


@functools.cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({os.path.realpath(paths[name]) + os.sep for name in ("purelib", "platlib", "stdlib", "platstdlib")})


@functools.lru_cache(maxsize=1024)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Names of globals and attributes in a piece of code and in the functions defined in it.

    Words in text constants are included if the code can look up names by text, for example with `getattr`.
    """
    found = set(code.co_names)
    if found & _BY_TEXT:
        found.update(*(_WORD.findall(item) for item in code.co_consts if isinstance(item, str)))
    return frozenset(found).union(*(names_in(item) for item in code.co_consts if isinstance(item, types.CodeType)))


@functools.lru_cache(maxsize=1024)
def globals_in(code: types.CodeType) -> frozenset[str]:
    """The names that may be globals of a piece of code.

    Names of attributes are left out, unless the code has other ways to reach globals, for example `globals()`.
    """
    every = names_in(code)
    if every & _AROUND:
        return every
    found = {item.argval for item in dis.get_instructions(code) if item.opname in _LOADS}
    return frozenset(found).union(*(globals_in(item) for item in code.co_consts if isinstance(item, types.CodeType)))


def imported_by(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The modules that a function imports while it runs, as pairs of name and module."""
    found, package = [], function.__globals__.get("__package__") or ""
    for name, level in sorted(_imports(function.__code__)):
        parents = package.split(".")[: len(package.split(".")) - level + 1] if level else []
        full = ".".join(filter(None, (*parents, name)))
        for part in {full.partition(".")[0], full}:
            with suppress(ImportError, ValueError):
                spec = sys.modules.get(part) or importlib.util.find_spec(part)
                if isinstance(spec, ModuleSpec) and not (spec.origin or "").startswith(_installed()):
                    spec = importlib.import_module(part)  # as the function will do
                if isinstance(spec, types.ModuleType):
                    found.append((part, spec))
    return sorted(found)


@functools.lru_cache(maxsize=1024)
def _imports(code: types.CodeType) -> frozenset[tuple[str, int]]:
    """Names that a piece of code, or a function defined in it, imports, each with the number of dots before it."""
    found, before = set[tuple[str, int]](), list[dis.Instruction]()
    for item in dis.get_instructions(code):
        if item.opname == "IMPORT_NAME":  # follows the number of dots and the imported names
            found.add((item.argval, int(before[-2].argval)))
        if item.opname not in ("CACHE", "EXTENDED_ARG"):
            before.append(item)
    return frozenset(found).union(*(_imports(item) for item in code.co_consts if isinstance(item, types.CodeType)))


@functools.lru_cache(maxsize=1024)
def counters_in(code: types.CodeType) -> frozenset[str]:
    """Names of variables and attributes to which a function adds a constant: they count calls and are not settings.

    Other names that are assigned to are not counters: in ``self.weight = self.weight.to(device)``, `weight` is still a
    setting.
    """
    found, instructions = set[str](), [item for item in dis.get_instructions(code) if item.opname != "CACHE"]
    for at, item in enumerate(instructions):
        if item.opname in ("STORE_DEREF", "STORE_GLOBAL", "STORE_ATTR"):
            before = instructions[max(at - 3, 0) : at]
            before = before[:-1] if item.opname == "STORE_ATTR" else before[1:]  # skip the swap of the object
            adds = before and (before[-1].opname == "INPLACE_ADD" or before[-1].argrepr == "+=")
            if adds and len(before) > 1 and before[-2].opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                found.add(item.argval)
    inner = [counters_in(item) for item in code.co_consts if isinstance(item, types.CodeType)]
    return frozenset(found.union(*inner))


def counters_of(kind: type) -> frozenset[str]:
    """Names of the attributes in which a class of the user counts its calls; empty for a class of a library."""
    if library_of(kind) is not None:
        return frozenset()
    codes = [getattr(getattr(kind, name, None), "__code__", None) for name in ("__call__", "forward")]
    return frozenset().union(*(counters_in(code) for code in codes if code is not None))
