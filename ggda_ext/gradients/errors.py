"""Errors of a pass: numbers that are not finite, and batches for which nothing was proven."""

from __future__ import annotations

from collections.abc import Mapping

from ggda_ext.groups.partition import Groups


class NonFinite(ValueError):
    """Some groups have gradients or scores that are not finite.

    Args:
        ids: the ids of these groups.
        groups: all groups.
        what: ``"gradients"`` or ``"scores"``.
    """

    def __init__(self, ids: list[int], groups: Groups, what: str) -> None:
        self.ids, self.what = ids, what
        first = ids[0]
        super().__init__(
            f"{len(ids)} of {len(groups)} groups have non-finite {what}, first group {groups.name(first)!r} (training "
            f"points {groups[first][:5].tolist()}{', …' if groups.sizes[first] > 5 else ''}): look for NaN or infinite "
            "inputs there, or a loss that overflows in this dtype."
        )


class Unproven(ValueError):
    """Layer inputs and output gradients do not give the gradient of some parameters, given as name → why."""

    refused: Mapping[str, str] = {}
    """Strategies that were found to be wrong: name → why."""

    def __init__(self, why: dict[str, str]) -> None:
        self.why = why
        name, reason = next(iter(why.items()))
        super().__init__(f"the gradient of parameter {name!r} cannot be had from the layers: {reason}")


class NotForward(Unproven):
    """Forward-mode differentiation does not give the gradients of a batch."""

    def __init__(self, reason: str) -> None:
        self.why, self.refused = {}, {"forward": reason}
        ValueError.__init__(self, reason)
