"""Methods of attribution, one file each: `TracIn`, `Influence`, `Fisher`, `EKFAC`."""

from __future__ import annotations

from typing import Any, Literal

from ggda_ext.methods.cautions import why_not_additive
from ggda_ext.methods.ekfac import EKFAC
from ggda_ext.methods.fisher import Fisher
from ggda_ext.methods.influence import Influence
from ggda_ext.methods.method import Method, Preconditioned
from ggda_ext.methods.tracin import TracIn

MethodName = Literal["tracin", "influence", "fisher", "ekfac"]
METHODS: dict[str, type[Method]] = {kind.name: kind for kind in (TracIn, Influence, Fisher, EKFAC)}

__all__ = [
    "METHODS",
    "EKFAC",
    "Fisher",
    "Influence",
    "Method",
    "MethodName",
    "Preconditioned",
    "TracIn",
    "chosen",
    "why_not_additive",
]


def chosen(method: MethodName | Method, **settings: Any) -> Method:
    """A method by name with settings, of which those that are None are left to it; or one that has its settings.

    Args:
        method: its name, or the method itself.
        **settings: `damping`, `recipe`.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if isinstance(method, Method):
        if given:
            name, value = next(iter(given.items()))
            raise ValueError(f"{name}={value!r} is given beside a method with its own settings: pass it there.")
        return method
    kind = METHODS.get(method) if isinstance(method, str) else None
    if kind is None:
        raise ValueError(
            f"method={method!r} is not one of {', '.join(map(repr, METHODS))}; for other settings pass one of "
            "ggda_ext.methods, such as Influence(curvature='hessian')."
        )
    if kind is TracIn and given:
        name, value = next(iter(given.items()))
        raise ValueError(f"{name}={value!r} is given, which method='tracin' does not use: leave it out.")
    return kind(**given)
