"""The order of groups, which groups help or hurt, and the meaning of a name in ``result[name]``."""

from __future__ import annotations

import difflib
from collections.abc import Hashable
from numbers import Integral
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ggda_ext.groups.naming import UnknownName, no_group
from ggda_ext.properties.property import HigherIsBetter

if TYPE_CHECKING:
    from ggda_ext.results.attribution import Attribution

SHOWN_PROPERTIES = 4
"""If there are more properties than this and all have the same direction, their mean is shown and used to rank."""


def property_id(result: Attribution, name: str | int | None) -> int:
    """Return the row of a property by name or number; the first row for None."""
    properties = result.properties
    if name is None:
        return 0
    if isinstance(name, str):
        if name in properties:
            return properties.index(name)
        close = difflib.get_close_matches(name, properties, n=3, cutoff=0.4) or properties[:5]
        raise UnknownName(f"there is no property {name!r}; there is {', '.join(map(repr, close))}.")
    if not isinstance(name, Integral):
        raise TypeError(f"a property is asked for by a {type(name).__name__}: pass its name or number.")
    if not -len(properties) <= name < len(properties):
        raise IndexError(f"there is no property {name}: there are {len(properties)}.")
    return int(name) % len(properties)


def by_mean(result: Attribution) -> bool:
    """Whether groups are ranked by the mean over the properties: if there are many and all have the same direction."""
    return len(result.properties) > SHOWN_PROPERTIES and len(set(result.higher_is_better)) == 1


def _values(result: Attribution, by: str | int | None) -> tuple[np.ndarray, HigherIsBetter]:
    """Return the values that groups are ranked by `[k]`, and whether higher is better for them."""
    scores = result.scores.cpu().double()
    if by is None and by_mean(result):
        return scores.mean(0).numpy(), result.higher_is_better[0]
    j = property_id(result, by)
    return scores[j].numpy(), result.higher_is_better[j]


def order(result: Attribution, by: str | int | None = None) -> list[int]:
    """Return group ids, largest absolute score first; equal scores in the order of ids, NaN last."""
    values, _ = _values(result, by)
    return np.argsort(-np.abs(values), kind="stable").tolist()


def effect_of(score: float, direction: HigherIsBetter, interval: tuple[float, float] | None = None) -> str:
    """Return what a group does to the property: the sign of its score; ``unclear`` unless the interval excludes 0."""
    if score != score:
        return "unknown"
    if interval is not None and not (interval[0] > 0 or interval[1] < 0):
        return "unclear"
    if score == 0:
        return "none"
    if direction is None:
        return "rises" if score > 0 else "falls"
    return "hurts" if (score > 0) == direction else "helps"


def ends(result: Attribution, j: int) -> list[tuple[float, float]] | None:
    """Return the interval of every group's score for property j; None if the result has no intervals."""
    if result.low is None or result.high is None:
        return None
    return list(zip(result.low[j].tolist(), result.high[j].tolist(), strict=True))


def effects(result: Attribution, j: int) -> tuple[str, ...]:
    """Return the effect of every group on property j; ``unclear`` if the interval contains 0."""
    scores, direction = result.scores[j].tolist(), result.higher_is_better[j]
    around = ends(result, j)
    if around is None:
        return tuple(effect_of(score, direction) for score in scores)
    return tuple(effect_of(score, direction, one) for score, one in zip(scores, around, strict=True))


def with_effect(result: Attribution, effect: str, by: str | int | None, sure: bool) -> list[int]:
    """Return the ids of the groups with this effect (``helps`` or ``hurts``), largest absolute score first."""
    values, direction = _values(result, by)
    if direction is None:
        name = result.properties[property_id(result, by)]
        raise ValueError(
            f"whether higher is better is not known for the property {name!r}, so no group helps or hurts: wrap it, "
            "properties.named(fn, higher_is_better=True), or look at the sign of the scores (positive: the property "
            "is predicted to rise if the group is removed)."
        )
    chosen = [j for j in order(result, by) if effect_of(float(values[j]), direction) == effect]
    if not sure:
        return chosen
    if result.low is None or (by is None and by_mean(result)):
        raise ValueError("sure=True needs an interval of one property: pass intervals= to attribute, and by=.")
    clear = effects(result, property_id(result, by))
    return [j for j in chosen if clear[j] == effect]


def is_tensor_index(key: Any) -> bool:
    """Whether PyTorch can index with this key (numbers, slices, None, ``...``, arrays), so that it is not a name."""
    if isinstance(key, tuple | list):
        return all(is_tensor_index(part) for part in key)
    return key is None or isinstance(
        key, int | slice | EllipsisType | Tensor | np.ndarray | np.integer | np.bool_ | range
    )


def by_name(result: Attribution, key: Any) -> Attribution:
    """Return the groups or the property that a key stands for: a name, a list of names, or (property, group)."""
    if isinstance(key, list):
        return result.some([result.groups.id_of(name) for name in key])
    is_group, is_property = _is_group(result, key), isinstance(key, str) and key in result.properties
    if is_group and is_property:
        raise KeyError(
            f"{key!r} is a group and a property: use result.of_group({key!r}) or result.of_property({key!r})."
        )
    if is_property:
        return result.of_property(key)
    if not is_group and isinstance(key, tuple) and len(key) == 2 and key[0] in result.properties:
        one = result.of_property(key[0])
        return by_name(one, key[1]) if isinstance(key[1], list) else one.of_group(key[1])
    if not is_group and isinstance(key, str):
        close = difflib.get_close_matches(key, result.properties, n=3, cutoff=0.6)
        if close:
            raise UnknownName(f"there is no group or property {key!r}; did you mean {', '.join(map(repr, close))}?")
    if not is_group and len(result.properties) > 1:
        raise UnknownName(
            f"{no_group(key, result.groups.all_names)} The properties are {', '.join(map(repr, result.properties))}."
        )
    return result.of_group(key)


def _is_group(result: Attribution, key: Hashable) -> bool:
    try:
        return key in result.groups.all_names
    except TypeError:
        return False
