"""Reads pickles of plain containers and byte arrays, with Python's unpickler reduced to what such a file needs.

`pickle` builds any object that a file asks for, and even NumPy's objects can be misused to point into memory. Here the
unpickler knows only the opcodes of numbers, texts, lists and dicts, and makes arrays of bytes (``u1``) itself.
"""

from __future__ import annotations

import math
import pickle
from typing import IO, Any

import numpy as np

_OPCODES = (
    *("PROTO", "FRAME", "STOP", "MARK", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE"),
)


class _Dtype:
    """The dtype of bytes. The state in the file is ignored, because a byte has no byte order, fields or shape."""


class _Array:
    """An array of bytes that is being made."""

    values: np.ndarray | None = None

    def fill(self, raw: Any, dtype: Any, shape: Any, is_fortran: bool) -> None:
        sizes = tuple(shape)
        is_shape = all(type(size) is int and size >= 0 for size in sizes)
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes) or not is_shape:
            raise pickle.UnpicklingError("it holds an array that is not of bytes")
        if len(sizes) > 8 or math.prod(sizes) != len(raw):
            raise ValueError(f"its array {list(sizes)[:8]} does not fit {len(raw)} bytes")
        self.values = np.frombuffer(raw, np.uint8).reshape(sizes, order="F" if is_fortran else "C")


def _dtype(kind: Any, *_: Any) -> _Dtype:
    text = kind.decode("ascii") if isinstance(kind, bytes) else kind
    if text not in ("u1", "|u1", "uint8"):
        raise pickle.UnpicklingError(f"it holds an array of {str(text)[:40]!r}; only bytes are read")
    return _Dtype()


def _encode(text: str, encoding: Any) -> bytes:
    if encoding not in ("latin1", b"latin1", "latin-1"):
        raise pickle.UnpicklingError(f"it encodes a text as {str(encoding)[:40]!r}")
    return text.encode("latin-1")


def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    made = _Array()
    made.fill(raw, dtype, shape, order in ("F", b"F"))
    return made


_OF_NUMPY = {"_reconstruct": lambda *_: _Array(), "ndarray": None, "dtype": _dtype, "_frombuffer": _from_buffer}


class _Opcodes(dict[int, Any]):
    def __missing__(self, code: int) -> Any:
        raise pickle.UnpicklingError(f"it has the opcode {chr(code)!r}, which no array needs")


class ArrayUnpickler(pickle._Unpickler):
    """Reads one pickle of containers and byte arrays; strings of Python 2 become bytes.

    Args:
        file: the open file.
    """

    dispatch = _Opcodes({code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, n)[0] for n in _OPCODES)})
    stack: list[Any]

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="bytes")

    def load(self) -> dict[Any, Any]:
        """Return the dict that the file holds.

        Raises:
            pickle.UnpicklingError: the file asks for something that no array needs.
            ValueError, IndexError, KeyError, TypeError, AttributeError, EOFError: the file is damaged.
        """
        found = super().load()
        if not isinstance(found, dict):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}, not a dict")
        return {key: value.values if isinstance(value, _Array) else value for key, value in found.items()}

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a function or class that an array needs; raise an error for any other."""
        if (module, name) == ("_codecs", "encode"):
            return _encode
        of_numpy = module == "numpy" or module.startswith(("numpy.core.", "numpy._core."))
        if of_numpy and name in _OF_NUMPY:
            return _OF_NUMPY[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, _Array):
            _, shape, dtype, is_fortran, raw = state
            made.fill(raw, dtype, shape, bool(is_fortran))
        elif not isinstance(made, _Dtype):
            raise pickle.UnpicklingError(f"it gives a state to a {type(made).__name__}")

    def _bytearray(self) -> None:  # Python's version allocates memory before it checks that the file has so many bytes
        reader: Any = self
        self.stack.append(reader.read(int.from_bytes(reader.read(8), "little")))

    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.BYTEARRAY8[0]] = _bytearray
