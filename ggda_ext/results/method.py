"""Facts about how the scores were made, and what their size means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Setting = float | int | str
Unit = Literal["property", "rank"]


@dataclass(frozen=True)
class MethodFacts:
    """How scores were made. Prints as a sentence.

    Attributes:
        name: name of the method, such as ``"tracin"``.
        unit: ``"property"`` if a score is the change of the property when the group is removed, in the property's own
            unit; ``"rank"`` if only the sign and the order of scores have a meaning.
        settings: the settings of the method, such as ``{"damping": 0.01}``.
        passes: the cost in passes over the training data (forward and backward), if known.
        seconds: the cost in seconds, if known.
        measured: whether models were trained without each group. If so, scores are measured changes, not predictions.

    >>> print(MethodFacts("influence", "property", {"damping": 0.01}, seconds=6))
    influence with damping 0.01; scores are predicted changes in the property's unit; cost: 6 s
    """

    name: str
    unit: Unit = "rank"
    settings: Mapping[str, Setting] = field(default_factory=dict)
    passes: float | None = None
    seconds: float | None = None
    measured: bool = False

    @property
    def cost(self) -> str:
        """The cost in words; empty if it is not known."""
        parts = []
        if self.passes is not None:
            parts.append(f"{self.passes:.3g} {'pass' if self.passes == 1 else 'passes'} over the training data")
        if self.seconds is not None:
            parts.append(f"{self.seconds:.3g} s")
        return ", ".join(parts)

    @property
    def meaning(self) -> str:
        """What the size of a score means, in words."""
        if self.unit == "property":
            return f"scores are {'measured' if self.measured else 'predicted'} changes in the property's unit"
        return "scores rank groups: their size is not in the property's unit"

    def __str__(self) -> str:
        settings = ", ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.settings.items()
        )
        parts = [self.name + (f" with {settings}" if settings else ""), self.meaning]
        return "; ".join(parts + ([f"cost: {self.cost}"] if self.cost else []))
