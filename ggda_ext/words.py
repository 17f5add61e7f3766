"""The same keywords everywhere: a keyword of `attribute` means the same at every entry point, or raises a clear error.

The keywords are listed in `WORDS`. An entry point that cannot use one of them declares this with `without`. A user who
passes the keyword then gets an error that says why, and what to do instead. A keyword that `without` does not name
gives Python's own error. The functions below check numbers, and `check_save_dir` the place of a folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from os import PathLike
from typing import Any, TypeVar

WORDS = ("parameters", "strategy", "batch_size", "memory_budget", "save_dir", "tag", "show_progress")

Entry = TypeVar("Entry", bound=Callable[..., Any])


def without(*, keeping: str | None = None, **instead: str) -> Callable[[Entry], Entry]:
    """Decorate an entry point (a function or an ``__init__``), to raise a clear error for some keywords of `attribute`.

    Args:
        keeping: the message for `save_dir` and `tag`: why nothing is kept in a folder, and what to do instead.
        **instead: keyword → why it has no meaning here, and what to do instead.

    >>> @without(strategy="it trains models; there are no gradients to sum")
    ... def train(model, *, show_progress=None):
    ...     return model
    >>> train("model", strategy="ghost")
    Traceback (most recent call last):
    TypeError: train takes no strategy=: it trains models; there are no gradients to sum.
    """
    if keeping is not None:
        instead |= {"save_dir": keeping, "tag": keeping}

    def decorated(entry: Entry) -> Entry:
        @wraps(entry)
        def checked(*args: Any, **kwargs: Any) -> Any:
            refuse_words(kwargs, instead, entry, entry.__qualname__.removesuffix(".__init__"))
            return entry(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorated


def refuse_words(given: Mapping[str, Any], instead: Mapping[str, str], entry: Callable[..., Any], who: str) -> None:
    """Raise an error for keywords of `attribute` that an entry point does not take.

    Args:
        given: the keywords that the entry point is called with.
        instead: keyword → why the entry point does not take it, and what to do instead.
        entry: the entry point; keywords in its own signature are accepted.
        who: the name of the entry point in the error.
    """
    for word in given:
        if word in instead and word not in signature(entry).parameters:
            raise TypeError(f"{who} takes no {word}=: {instead[word]}.")


def check_counts(**counts: Any) -> None:
    """Raise an error if a value is not a whole number of at least 1; None is accepted."""
    for name, value in counts.items():
        if value is not None:
            _check_positive(name, value, ", or leave it out")


def check_required_counts(**counts: Any) -> None:
    """Raise an error if a value, which cannot be left out, is not a whole number of at least 1."""
    for name, value in counts.items():
        _check_positive(name, value, "")


def _check_positive(name: str, value: Any, otherwise: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r}: pass a whole number{otherwise}.")
    if value < 1:
        raise ValueError(f"{name}={value}: pass a positive number{otherwise}.")


def check_whole(**numbers: Any) -> None:
    """Raise an error if a value is not a whole number."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name}={value!r}: pass a whole number.")


def check_save_dir(save_dir: Any, tag: Any) -> None:
    """Raise an error if `save_dir` is not a path, or `tag` is neither text nor None."""
    if not isinstance(save_dir, str | PathLike):
        raise TypeError(f"save_dir is a {type(save_dir).__name__}: pass the path of a folder.")
    if tag is not None and not isinstance(tag, str):
        raise TypeError(f"tag is a {type(tag).__name__}: pass text, such as the version of the data.")


def whole_bytes(memory_budget: Any) -> int:
    """Return a memory budget as a whole number of bytes; it may be written as ``1e9``, and infinity is no limit."""
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, Real):
        raise TypeError(f"memory_budget={memory_budget!r}: pass a whole number of bytes, such as 2**30.")
    if not float(memory_budget) >= 1:
        raise ValueError(f"memory_budget={memory_budget}: pass at least one byte, such as 2**30.")
    return int(min(float(memory_budget), sys.maxsize))


def check_not_negative(**numbers: Any) -> None:
    """Raise an error that names the value if a value is not a finite number from 0 on; None is accepted."""
    for name, value in numbers.items():
        if value is None:
            continue
        wrong = f"{name}={value!r}: pass a number from 0 on, or leave it out."
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(wrong)
        if not 0 <= float(value) < float("inf"):
            raise ValueError(wrong)
