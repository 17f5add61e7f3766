"""`NamedScores`: the base class of `Attribution`, a tensor that knows the names of its rows and columns.

Operations of PyTorch and NumPy on it return plain tensors and arrays; copies and files keep the names and other fields.
`names_of` and `whether_higher_is_better` ask a property for the names and directions of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import Tensor

from ggda_ext.groups.partition import Groups, GroupsLike
from ggda_ext.properties.property import HigherIsBetter, default_name
from ggda_ext.results.method import MethodFacts, Unit

if TYPE_CHECKING:
    from typing_extensions import Self

_FIELDS = (
    "groups", "properties", "higher_is_better", "low", "high", "interval", "method", "warnings", "notes",
    "member_scores",
)  # fmt: skip


class NamedScores(Tensor):
    """Scores `[m, k]` with names, sizes, intervals and notes, checked once. It takes the arguments of `Attribution`."""

    groups: Groups
    """The groups, with names, sizes and members."""
    properties: tuple[str, ...]
    """Names of the m properties."""
    higher_is_better: tuple[HigherIsBetter, ...]
    """For each property, whether higher is better; None if not known."""
    low: Tensor | None
    """Lower end of the interval around each score `[m, k]`."""
    high: Tensor | None
    """Upper end of the interval around each score `[m, k]`."""
    interval: str
    """What the interval covers."""
    method: MethodFacts | None
    """How the scores were made."""
    warnings: Mapping[Hashable, tuple[str, ...]]
    """Group name → what to know before trusting the group's score."""
    notes: tuple[str, ...]
    """What to know about all scores."""
    member_scores: Tensor | None
    """The score of each training point alone `[m, n]`; None if not known."""

    @staticmethod
    def __new__(
        cls,
        scores: Any,
        groups: GroupsLike,
        properties: str | Sequence[str] | None = None,
        higher_is_better: HigherIsBetter | Sequence[HigherIsBetter] = None,
        *,
        low: Any = None,
        high: Any = None,
        interval: str = "",
        method: MethodFacts | None = None,
        warnings: Mapping[Hashable, Sequence[str]] | None = None,
        notes: str | Sequence[str] = (),
        member_scores: Any = None,
    ) -> Self:
        groups = Groups.of(groups)
        plain, names, directions = _checked(scores, groups, properties, higher_is_better)
        if (low is None) != (high is None):
            raise ValueError("low and high are the two ends of an interval: pass both, or neither.")
        new = plain.as_subclass(cls)
        new.groups, new.properties, new.higher_is_better = groups, names, directions
        new.low, new.high = (_shaped(end, name, plain.shape) for end, name in ((low, "low"), (high, "high")))
        if new.low is not None and new.high is not None and bool((new.low > new.high).any()):
            raise ValueError("low is above high for some scores: low is the lower end of the interval, high the upper.")
        new.interval, new.method, new.notes = str(interval or ""), _checked_method(method), as_texts(notes)
        new.warnings = MappingProxyType(_checked_warnings(warnings or {}, groups))
        new.member_scores = _shaped(member_scores, "member_scores", (len(plain), groups.n))
        return new

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other `scores`, `low`, `high`, `interval`, `method`, `warnings`, `notes`, …"""
        fields = {name: getattr(self, name) for name in _FIELDS} | {"scores": self.scores} | changes
        return type(self)(**fields)

    def _each(self, *names: str, by: Callable[[Any], Any]) -> dict[str, Any]:
        """Apply `by` to some fields and return name → new value, for `replace`. Fields that are None stay None."""
        parts = {name: getattr(self, name) for name in names}
        return {name: None if part is None else by(part) for name, part in parts.items()}

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a PyTorch function so that it returns plain tensors, because e.g. a sum of scores has no groups."""
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @property
    def scores(self) -> Tensor:
        """The scores `[m, k]` as a plain tensor that shares memory with this one."""
        return _plain(self)

    @property
    def tensor(self) -> Tensor:
        """The same as `scores`."""
        return self.scores

    @property
    def names(self) -> tuple[Hashable, ...]:  # replaces PyTorch's names of dimensions
        """Names of the groups in the order of the columns; the group ids if the groups have no names."""
        return tuple(self.groups.all_names)

    @property
    def sizes(self) -> np.ndarray:
        """Number of training points in every group `[k]`."""
        return self.groups.sizes

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        plain = self.scores.float() if self.dtype == torch.bfloat16 else self.scores  # NumPy does not know bfloat16
        return np.array(plain.numpy(), dtype=dtype, copy=copy) if copy else np.asarray(plain, dtype=dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        from ggda_ext.results.saving import encoded, rebuilt

        return rebuilt, encoded(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            memo[id(self)] = self.replace(**self._each("scores", "low", "high", "member_scores", by=torch.clone))
        return memo[id(self)]


def _plain(values: Any) -> Tensor:
    """Return numbers as a plain tensor without a graph, on the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        read_only = isinstance(values, np.ndarray) and not values.flags.writeable  # as arrays of pandas are
        found = values if isinstance(values, Tensor) else torch.as_tensor(values.copy() if read_only else values)
        return found.detach().as_subclass(Tensor)


def real_numbers(values: Any, name: str) -> Tensor:
    """Return numbers as a plain tensor of floats without a graph, on the same memory if they are floats."""
    kind = type(values).__name__
    if hasattr(values, "to_numpy"):
        raise TypeError(f"{name} is a {kind}: pass {name}.to_numpy(), its columns in the order of groups.names.")
    try:
        plain = _plain(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} is a {kind}: pass a tensor or an array of numbers ({error}).") from None
    if plain.is_complex():
        raise TypeError(f"{name} holds {plain.dtype}: pass real numbers.")
    return plain if plain.is_floating_point() else plain.float()


def as_texts(found: str | Iterable[Any]) -> tuple[str, ...]:
    """Return one text or several as a tuple of texts."""
    return (found,) if isinstance(found, str) else tuple(map(str, found))


def _direction(value: Any) -> HigherIsBetter:
    """Return whether higher is better as True, False or None; numbers of NumPy and PyTorch may be given."""
    found = value.item() if getattr(value, "ndim", None) == 0 else value
    if found is not None and (not isinstance(found, int) or found not in (0, 1)):
        raise TypeError(f"higher_is_better={found!r}: pass True, False or None, or a list of these.")
    return None if found is None else bool(found)


def _checked(
    scores: Any,
    groups: Groups,
    properties: str | Sequence[str] | None,
    higher_is_better: HigherIsBetter | Sequence[HigherIsBetter],
) -> tuple[Tensor, tuple[str, ...], tuple[HigherIsBetter, ...]]:
    """Check the arguments; return scores `[m, k]` as a plain tensor, and a name and a direction for each property."""
    plain = real_numbers(scores, "scores")
    if plain.dim() != 2 or plain.shape[1] != len(groups):
        raise ValueError(
            f"scores has shape {list(plain.shape)} for {len(groups)} groups: pass [m, {len(groups)}], or use "
            "Attribution.of, which takes other shapes."
        )
    m = len(plain)
    given = [f"property {j}" for j in range(m)] if properties is None else properties
    names = (given,) if isinstance(given, str) else tuple(map(str, given))
    directions = tuple(map(_direction, whether_higher_is_better(None, m, higher_is_better)))
    if len(names) != m:
        raise ValueError(f"properties has {len(names)} entries for scores of {m} properties.")
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < m else None
    if twice is not None:
        raise ValueError(f"two properties are called {twice!r}: give them names of their own (properties.named).")
    return plain, names, directions


def _checked_method(method: Any) -> MethodFacts | None:
    """Return `method` with plain numbers and texts; raise an error unless it is None or has a known unit."""
    if not isinstance(method, MethodFacts | None):
        raise TypeError(
            f"method is a {type(method).__name__}: pass MethodFacts(name, unit), or use Attribution.of, which takes "
            "the name alone."
        )
    if method is not None and method.unit not in get_args(Unit):
        raise ValueError(f"unit={method.unit!r} of the method is not one of {', '.join(map(repr, get_args(Unit)))}.")
    if method is None:
        return None
    settings = {str(name): _as_setting(value) for name, value in method.settings.items()}
    passes, seconds = (_as_setting(cost) for cost in (method.passes, method.seconds))
    return replace(method, settings=settings, passes=passes, seconds=seconds)


def _as_setting(value: Any) -> Any:
    """Return a number of NumPy or PyTorch as a Python number, and what is neither a number nor text as text."""
    found = value.item() if getattr(value, "ndim", None) == 0 else value
    return found if found is None or isinstance(found, str | int | float) else str(found)


def _shaped(values: Any, name: str, shape: Sequence[int]) -> Tensor | None:
    """Return values as a plain tensor of floats, or None for None; raise an error if they have another shape."""
    if values is None:
        return None
    found = real_numbers(values, name)
    if found.shape != torch.Size(shape):
        raise ValueError(f"{name} has shape {list(found.shape)}: pass {list(shape)}.")
    return found


def _checked_warnings(warnings: Mapping[Hashable, Sequence[str]], groups: Groups) -> dict[Hashable, tuple[str, ...]]:
    """Return group name → tuple of warnings; raise an error for a name that no group has."""
    found = {name: as_texts(texts) for name, texts in warnings.items()}
    names = set(groups.all_names) if found else set()
    for name in found:
        if name not in names:
            raise ValueError(f"warnings has an entry for {name!r}, which is no group.")
    return found


def names_of(property: Any, m: int) -> list[str]:
    """Return the names of the m components of a property. `property` may also be the names themselves, or None."""
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
    """Return the names with numbers on repeated ones: the second `mean_loss` becomes `mean_loss (2)`."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


def whether_higher_is_better(
    property: Any, m: int, given: HigherIsBetter | Sequence[HigherIsBetter] = None
) -> list[HigherIsBetter]:
    """Return whether higher is better, for each of the m components of a property; `given` overrides the property."""
    if isinstance(given, Iterable) and np.ndim(given) > 0:  # type: ignore[arg-type]
        found = list(given)
        if len(found) != m:
            raise ValueError(f"higher_is_better has {len(found)} entries for scores of {m} properties.")
        return found
    if given is not None:
        return [_direction(given)] * m
    parts = _parts(property, m)
    if parts is not None:
        return [one for part, count in parts for one in whether_higher_is_better(part, count)]
    return [getattr(property, "higher_is_better", None)] * m


def _parts(property: Any, m: int) -> list[tuple[Any, int]] | None:
    """Return the parts of a stacked property, each with its number of components; None if not stacked or not known."""
    stacked: Sequence[Any] = getattr(property, "stacked", ())
    if not stacked:
        return None
    counts = [getattr(part, "components", None) for part in stacked]
    unknown, rest = counts.count(None), m - sum(count or 0 for count in counts)
    if (unknown and (rest < unknown or (unknown > 1 and rest > unknown))) or (not unknown and rest):
        return None
    each = rest if unknown == 1 else 1
    return [(part, each if count is None else count) for part, count in zip(stacked, counts, strict=True)]
