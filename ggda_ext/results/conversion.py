"""Conversion of the group scores of any toolkit into an `Attribution` with one shape and one sign (docs/signs.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ggda_ext.groups.partition import Groups
from ggda_ext.properties.property import HigherIsBetter
from ggda_ext.results.method import MethodFacts
from ggda_ext.results.named_scores import as_texts, names_of, real_numbers, whether_higher_is_better

if TYPE_CHECKING:
    from ggda_ext.results.attribution import Attribution


def converted(
    cls: type[Attribution],
    scores: Any,
    groups: Groups,
    property: Any,
    higher_is_better: HigherIsBetter | Sequence[HigherIsBetter],
    method: MethodFacts | str | None,
    positive: str | None,
    test_axis: Any,
    details: Mapping[str, Any],
) -> Attribution:
    """Build the `Attribution`; see `Attribution.of`."""
    if positive not in (None, "rises", "falls"):
        raise ValueError(f"positive={positive!r} is not one of 'rises', 'falls'.")
    own = getattr(scores, "attribution", None)
    if callable(own) and hasattr(scores, "per_seed"):  # leave-group-out has its own interval, sign and shape
        if positive == "falls" or test_axis not in ("auto", 0):
            name, value = ("positive", positive) if positive == "falls" else ("test_axis", test_axis)
            raise ValueError(f"{name}={value!r}: leave_group_out knows its sign and shape, so leave {name} out.")
        measured = own(groups, property, higher_is_better)
        facts = {} if method is None else {"method": _facts(method)}
        notes = (*measured.notes, *as_texts(details.get("notes", ())))
        return measured.replace(**{**details, **facts, "notes": notes})
    if isinstance(scores, tuple):
        raise TypeError(
            "scores is a tuple: pass the scores of all groups, influence(…) without k=; groups.names_of(ids) names "
            "what a k= result holds."
        )
    found, turned = _upright(real_numbers(scores, "scores"), len(groups), test_axis)
    if turned and positive is None:
        raise ValueError(
            f"scores is {list(found.T.shape)}, a row for each group, as dattri and TRAK give it, whose signs differ: "
            "pass positive='falls' for TRAKer and dattri's TRAKAttributor, positive='rises' for the rest of dattri."
        )
    if positive == "falls":
        found, details = -found, _turned_round(details)
    m = len(found)
    return cls(
        found, groups, names_of(property, m), whether_higher_is_better(property, m, higher_is_better),
        method=_facts(method), **details,
    )  # fmt: skip


def _facts(method: MethodFacts | str | None) -> MethodFacts | None:
    return MethodFacts(method) if isinstance(method, str) else method


def _upright(scores: Tensor, k: int, test_axis: Any) -> tuple[Tensor, bool]:
    """Return scores `[m, k]`, and whether they were given as `[k, m]`."""
    if test_axis not in ("auto", 0, 1):
        raise ValueError(f"test_axis={test_axis!r} is not one of 'auto', 0, 1.")
    if scores.dim() == 1 and len(scores) == k:
        return scores[None], False
    if scores.dim() != 2 or k not in scores.shape:
        raise ValueError(f"scores has shape {list(scores.shape)}: pass [m, {k}] or [{k}, m] for {k} groups.")
    rows, columns = scores.shape
    if test_axis == "auto":
        if rows == columns:
            raise ValueError(
                f"scores is {rows} × {columns} for {k} groups, so its shape does not tell which axis the groups are: "
                "pass test_axis=0 for [m, k] (Captum, attribute) or test_axis=1 for [k, m] (dattri, TRAK)."
            )
        test_axis = 0 if columns == k else 1
    if scores.shape[1 - test_axis] != k:
        raise ValueError(f"test_axis={test_axis}, but the other axis of {list(scores.shape)} is not the {k} groups.")
    return (scores.T, True) if test_axis == 1 else (scores, False)


def _turned_round(details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the details with the sign of the interval and of the members' scores flipped, as for the scores."""
    found = dict(details)
    low, high, members = (details.get(name) for name in ("low", "high", "member_scores"))
    if low is not None and high is not None:
        found |= {"low": -torch.as_tensor(high), "high": -torch.as_tensor(low)}
    if members is not None:
        found["member_scores"] = -torch.as_tensor(members)
    return found
