"""What a property is called, and whether higher is better: what a result needs to say who helps and who hurts.

Ready properties know both; `named` says it of any other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, overload

from torch import Tensor, nn

from ggda_ext.properties.classes import LinearProperty, PointProperty, Property, ReadyProperty

HigherIsBetter = bool | None
"""Whether higher is better; None if that is not known."""


class NamedProperty:
    """A property with a name and a direction; see `named`."""

    def __init__(self, property: Property, name: str, higher_is_better: HigherIsBetter) -> None:
        self.property, self.name, self.higher_is_better = property, name, higher_is_better
        if callable(getattr(property, "gradient", None)):
            self.gradient = property.gradient  # type: ignore[attr-defined]

    def __call__(self, model: nn.Module) -> Tensor:
        return self.property(model)


@overload
def named(
    property: ReadyProperty, name: str | None = None, *, higher_is_better: HigherIsBetter = None
) -> ReadyProperty: ...
@overload
def named(property: Property, name: str | None = None, *, higher_is_better: HigherIsBetter = None) -> Property: ...
def named(property: Property, name: str | None = None, *, higher_is_better: HigherIsBetter = None) -> Property:
    """A property with a name and a direction, for the result to speak of.

    Args:
        property: any property, ready or a callable of your own.
        name: what results call it; by default the name it has.
        higher_is_better: whether a higher value is better; by default what is known.
    """
    if not callable(property):
        raise TypeError(f"property is a {type(property).__name__}: pass a callable g(model) -> Tensor.")
    name = default_name(property) if name is None else name
    if isinstance(property, ReadyProperty):
        found = copy.copy(property)
        found.name = name
        found.higher_is_better = property.higher_is_better if higher_is_better is None else higher_is_better
        return found
    return NamedProperty(property, name, higher_is_better)


def default_name(property: Any) -> str:
    """The name a property has, or that of its function."""
    name = getattr(property, "name", None) or getattr(property, "__name__", None)
    return name if isinstance(name, str) and name != "<lambda>" else "property"


def names_of(property: Any, m: int) -> list[str]:
    """Names of the m components of a property; `property` may be the names themselves, or None."""
    if isinstance(property, list | tuple):
        if len(property) != m:
            raise ValueError(f"property has {len(property)} names for scores of {m} properties.")
        return [str(name) for name in property]
    if property is None or isinstance(property, str):
        name = property or "property"
        return [name] if m == 1 else [f"{name} {j}" for j in range(m)]
    parts = _parts(property, m)
    if parts is not None:
        return _numbered([name for part, count in parts for name in names_of(part, count)])
    return names_of(default_name(property), m)


def _numbered(names: list[str]) -> list[str]:
    """Names that differ: the second `mean_loss` becomes `mean_loss (2)`."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


def whether_higher_is_better(
    property: Any, m: int, given: HigherIsBetter | Sequence[HigherIsBetter] = None
) -> list[HigherIsBetter]:
    """Whether higher is better, of the m components of a property; `given` goes before what the property says."""
    if given is not None and not isinstance(given, bool):
        found = list(given)
        if len(found) != m:
            raise ValueError(f"higher_is_better has {len(found)} entries for scores of {m} properties.")
        return found
    if given is not None:
        return [given] * m
    parts = _parts(property, m)
    if parts is not None:
        return [one for part, count in parts for one in whether_higher_is_better(part, count)]
    return [getattr(property, "higher_is_better", None)] * m


def _parts(property: Any, m: int) -> list[tuple[Any, int]] | None:
    """The parts of a stack with their numbers of components; None for what is no stack, or where they are not known."""
    if not isinstance(property, LinearProperty) or not property.is_stack:
        return None
    counts = [components(part) for part in property.properties]
    unknown, rest = counts.count(None), m - sum(count or 0 for count in counts)
    if (unknown and (rest < unknown or (unknown > 1 and rest > unknown))) or (not unknown and rest):
        return None
    each = rest if unknown == 1 else 1
    return [(part, each if count is None else count) for part, count in zip(property.properties, counts, strict=True)]


def components(property: Any) -> int | None:
    """How many numbers a property is, where that is known without calling it."""
    if isinstance(property, PointProperty):
        return property.data.n
    if isinstance(property, LinearProperty):
        counts = [components(part) for part in property.properties]
        if not property.is_stack:
            return next((count for count in counts if count is not None), None)
        return None if None in counts else sum(count or 0 for count in counts)
    return getattr(property, "components", None)
