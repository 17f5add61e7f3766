"""Captum's Hessians, computed once: original and group version take the same one from the same code of Captum's.

It does not hang on the training points that are scored, so its time stands apart, as that of grouping does. Without
this it would be computed again for every size and every turn, and hide what is compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_COMPUTED_BY = {
    "NaiveInfluenceFunction": "_retrieve_projections_naive_influence_function",
    "ArnoldiInfluenceFunction": "_retrieve_projections_arnoldi_influence_function",
}


class Hessians:
    """Those that were computed, and their CPU seconds.

    Attributes:
        inside: seconds that the last call took for a Hessian it computed.
        apart: seconds that the Hessian of the last call took, now or before; 0 if it needed none.
    """

    def __init__(self) -> None:
        self.inside = self.apart = 0.0
        self._kept: dict[tuple[str, int], tuple[Any, float]] = {}

    def reset(self) -> None:
        """Before a call."""
        self.inside = self.apart = 0.0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside, Captum's classes and the drop-ins made of them compute the Hessian of a model once."""
        from benchmarks.check.captum import CAPTUM

        before: dict[type, tuple[str, Callable[..., Any]]] = {}
        for name, method in _COMPUTED_BY.items():
            owner = getattr(CAPTUM, name)
            before[owner] = method, getattr(owner, method)
            setattr(owner, method, self._once(name, before[owner][1]))
        try:
            yield
        finally:
            for owner, (method, original) in before.items():
                setattr(owner, method, original)

    def _once(self, name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def found(influence: Any, *args: Any, **kwargs: Any) -> Any:
            key = name, id(influence.model)
            if key not in self._kept:
                start = time.process_time()
                value = compute(influence, *args, **kwargs)
                self.inside = time.process_time() - start
                self._kept[key] = value, self.inside
            value, self.apart = self._kept[key]
            return value

        return found
