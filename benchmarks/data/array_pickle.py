"""Pickles of plain containers and byte arrays, read without unpickling: the opcodes such a file needs, and no others.

`pickle` builds whatever objects a file asks for, and even NumPy's own can be bent until they point into memory. Here a
file is run on a small machine of our own that knows numbers, texts, lists, dicts and arrays of bytes (``u1``).
"""

from __future__ import annotations

import math
import pickle
import pickletools
from collections.abc import Callable
from typing import IO, Any

import numpy as np

_NAMES = frozenset({"_reconstruct", "ndarray", "dtype", "_frombuffer"})
_BYTES = ("u1", "|u1", "uint8")
_VALUES = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BYTEARRAY8"),
)
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple,
}  # fmt: skip


class _Mark:
    """Where the items of a list, tuple or dict begin."""


class _Name:
    """A function or class that the file asks for; only its name."""

    def __init__(self, module: str, name: str) -> None:
        self.name = "encode" if module == "_codecs" else name


class _Dtype:
    """The dtype of bytes, whatever state the file gives it."""


class _Array:
    """An array of bytes that is being made."""

    values: np.ndarray | None = None


class ArrayUnpickler:
    """Reads one pickle of containers and byte arrays.

    Args:
        file: the open file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        """What the file holds; byte strings of Python 2 as bytes.

        Raises:
            pickle.UnpicklingError: the file asks for something else than an array needs.
            ValueError, IndexError, KeyError, TypeError: it is damaged.
        """
        for opcode, argument, _ in pickletools.genops(self._file):
            if opcode.name == "STOP":
                (result,) = self._stack
                return _plain(result)
            self._run(opcode.name, argument)
        raise EOFError("it ends in the middle")

    def find_class(self, module: str, name: str) -> _Name:
        """The name of a function or class, if it is one that an array needs."""
        of_numpy = module == "numpy" or module.startswith(("numpy.core.", "numpy._core."))
        if (of_numpy and name in _NAMES) or (module, name) == ("_codecs", "encode"):
            return _Name(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")

    def _run(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in ("PROTO", "FRAME"):
            return
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _VALUES:
            stack.append(bytes(argument) if isinstance(argument, bytearray) else argument)
        elif name in ("STRING", "BINSTRING", "SHORT_BINSTRING"):
            stack.append(argument.encode("latin-1"))
        elif name == "MARK":
            stack.append(_Mark())
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("TUPLE", "LIST", "APPENDS", "SETITEMS", "DICT"):
            self._gather(name, self._since_mark())
        elif name in ("APPEND", "SETITEM"):
            count = 1 if name == "APPEND" else 2
            items = stack[-count:]
            del stack[-count:]
            self._gather(f"{name}S", items)
        elif name == "GLOBAL":
            stack.append(self.find_class(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            module, attribute = stack.pop(-2), stack.pop()
            stack.append(self.find_class(str(module), str(attribute)))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_called(function, arguments))
        elif name == "BUILD":
            state = stack.pop()
            _build(stack[-1], state)
        else:
            raise pickle.UnpicklingError(f"it has the opcode {name}, which no array needs")

    def _since_mark(self) -> list[Any]:
        at = max(i for i, item in enumerate(self._stack) if isinstance(item, _Mark))
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def _gather(self, name: str, items: list[Any]) -> None:
        if name in ("TUPLE", "LIST"):
            self._stack.append(tuple(items) if name == "TUPLE" else items)
            return
        if name == "DICT":
            self._stack.append({})
        target = self._stack[-1]
        if name == "APPENDS" and isinstance(target, list):
            target.extend(items)
        elif name in ("SETITEMS", "DICT") and isinstance(target, dict) and len(items) % 2 == 0:
            target.update(zip(items[::2], items[1::2], strict=True))
        else:
            raise pickle.UnpicklingError(f"it puts items into a {type(target).__name__}")


def _called(function: Any, arguments: Any) -> Any:
    if not isinstance(function, _Name) or not isinstance(arguments, tuple):
        raise pickle.UnpicklingError("it calls something that is no function of an array")
    if function.name == "dtype":
        text = arguments[0].decode("ascii") if isinstance(arguments[0], bytes) else arguments[0]
        if text not in _BYTES:
            raise pickle.UnpicklingError(f"it holds an array of {str(text)[:40]!r}; only bytes are read")
        return _Dtype()
    if function.name == "encode":
        text, encoding = arguments
        if encoding not in ("latin1", b"latin1", "latin-1"):
            raise pickle.UnpicklingError(f"it encodes a text as {str(encoding)[:40]!r}")
        return text.encode("latin-1")
    made = _Array()
    if function.name == "_frombuffer":
        raw, dtype, shape, order = arguments
        _fill(made, raw, dtype, shape, order in ("F", b"F"))
    elif function.name != "_reconstruct":
        raise pickle.UnpicklingError(f"it calls {function.name}")
    return made


def _build(made: Any, state: Any) -> None:
    if isinstance(made, _Dtype):
        return  # a byte has no byte order, fields or shape
    if not isinstance(made, _Array):
        raise pickle.UnpicklingError(f"it gives a state to a {type(made).__name__}")
    _, shape, dtype, is_fortran, raw = state
    _fill(made, raw, dtype, shape, bool(is_fortran))


def _fill(made: _Array, raw: Any, dtype: Any, shape: Any, is_fortran: bool) -> None:
    sizes = tuple(shape)
    if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes) or not all(type(n) is int and n >= 0 for n in sizes):
        raise pickle.UnpicklingError("it holds an array that is not of bytes")
    if len(sizes) > 8 or math.prod(sizes) != len(raw):
        raise ValueError(f"its array {list(sizes)[:8]} does not fit {len(raw)} bytes")
    made.values = np.frombuffer(raw, np.uint8).reshape(sizes, order="F" if is_fortran else "C")


def _plain(result: Any) -> Any:
    """A dict with its arrays in place."""
    if not isinstance(result, dict):
        raise pickle.UnpicklingError(f"it holds a {type(result).__name__}, not a dict")
    return {key: value.values if isinstance(value, _Array) else value for key, value in result.items()}
