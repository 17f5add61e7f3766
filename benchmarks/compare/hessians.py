"""Captum's Hessians, computed once. The original and the group version use the same code of Captum for the Hessian.

The Hessian does not depend on the training points that are scored, so its time is reported separately, like the time of
grouping. Otherwise it would be computed again for every size and every turn, and its time would hide the difference.
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
    """The Hessians that were computed, and their CPU seconds.

    Attributes:
        inside: seconds that the last call spent on computing a Hessian; 0 if it computed none.
        apart: seconds that the Hessian of the last call took, in this call or an earlier one; 0 if it needed none.
    """

    def __init__(self) -> None:
        self.inside = self.apart = 0.0
        self._kept: dict[tuple[str, int], tuple[Any, float]] = {}

    def reset(self) -> None:
        """Set the seconds to 0, before a call."""
        self.inside = self.apart = 0.0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Make Captum's classes, and the drop-ins built on them, compute the Hessian of a model only once."""
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
