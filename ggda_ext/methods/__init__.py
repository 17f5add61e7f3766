"""Methods of attribution, each in its own file: `TracIn`, `Influence`, `Fisher`, `EKFAC`."""

from __future__ import annotations

from typing import Literal

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
    "why_not_additive",
]
