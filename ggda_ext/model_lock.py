"""One thread at a time works with a model: hooks, frozen parameters and loaded checkpoints are the model's own.

A second thread waits until the first has finished, and says so after a second. The thread that has the lock may take it
again, and any thread may give it back (a generator may be closed elsewhere).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import nn

from ggda_ext.distributed import unwrapped

P = ParamSpec("P")
T = TypeVar("T")
_SECONDS = 1.0
_logger = logging.getLogger(__name__)


class _Lock:
    """A lock that its thread may take again."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._count = 0

    def take(self, name: str) -> None:
        me = threading.get_ident()
        with self._changed:
            if not self._changed.wait_for(lambda: self._owner in (None, me), _SECONDS):
                _logger.warning("waiting: the model (%s) is in use by another thread.", name)
                self._changed.wait_for(lambda: self._owner in (None, me))
            self._owner, self._count = me, self._count + 1

    def give_back(self) -> None:
        with self._changed:
            self._count -= 1
            if self._count == 0:
                self._owner = None
                self._changed.notify_all()


_locks: weakref.WeakKeyDictionary[nn.Module, _Lock] = weakref.WeakKeyDictionary()
_making = threading.Lock()


@contextmanager
def only_thread(model: nn.Module) -> Iterator[None]:
    """Hold the lock of a model."""
    inner = unwrapped(model)
    with _making:
        lock = _locks.setdefault(inner, _Lock())
    lock.take(type(inner).__name__)
    try:
        yield
    finally:
        lock.give_back()


def locks_model(method: Callable[P, T]) -> Callable[P, T]:
    """A method of an object with a `model` that holds the model's lock while it runs."""

    @wraps(method)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        owner: Any = args[0]
        with only_thread(owner.model):
            return method(*args, **kwargs)

    return locked


def locks_model_while_iterated(method: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """The same for a method that gives one thing after another: the lock is held from the first to the last."""

    @wraps(method)
    def locked(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        owner: Any = args[0]
        with only_thread(owner.model):
            yield from method(*args, **kwargs)

    return locked
