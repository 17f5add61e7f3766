"""One language for users: a word of `attribute` means the same at every entry point, or is refused with what to do.

The words are `WORDS`. An entry point that has no use for one of them says so with `without`: who passes it reads
why, and what to pass instead. A word that `without` does not name gives Python's own error. `check_counts` and
`check_not_negative` look at numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from typing import Any, TypeVar

WORDS = ("parameters", "strategy", "batch_size", "memory_budget", "save_dir", "tag", "show_progress")

Entry = TypeVar("Entry", bound=Callable[..., Any])


def without(*, keeping: str | None = None, **instead: str) -> Callable[[Entry], Entry]:
    """Let an entry point, a function or an ``__init__``, refuse words of `attribute` by name.

    Args:
        keeping: why nothing is kept in a folder, and what to do: for `save_dir` and `tag`.
        **instead: word → why it has no meaning here, and what to do.

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
    """Refuse keywords of `attribute` that an entry point does not take.

    Args:
        given: the keywords it is called with.
        instead: word → why, and what to do.
        entry: what is called; words that it has itself are not refused.
        who: its name.
    """
    for word in given:
        if word in instead and word not in signature(entry).parameters:
            raise TypeError(f"{who} takes no {word}=: {instead[word]}.")


def check_counts(*, whole: bool = True, **counts: Any) -> None:
    """Refuse what is no positive number; None is passed on.

    Args:
        whole: whether it counts something; if not, any number will do.
        **counts: name → value.
    """
    for name, value in counts.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
            raise TypeError(f"{name}={value!r}: pass a whole number, or leave it out.")
        if value < 1:
            raise ValueError(f"{name}={value}: pass a positive number, or leave it out.")


def check_not_negative(**numbers: Any) -> None:
    """Refuse what is no number from 0 on, by name; None is passed on."""
    for name, value in numbers.items():
        if value is None:
            continue
        wrong = f"{name}={value!r}: pass a number from 0 on, or leave it out."
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(wrong)
        if not 0 <= float(value) < float("inf"):
            raise ValueError(wrong)
