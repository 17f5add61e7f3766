"""What a method is: one verb, applied to the property's side before the pass over the training data.

Every method scores group G for a property g as

    τ_G = ⟨P ∇g, Σ_{i∈G} ∇ℓ_i⟩

and differs in P alone: nothing for TracIn, 1/n (H + λ)⁻¹ for influence. So a method is ``precondition(provider,
directions)``: rows `[m, p]` become rows `[m, p]`, and the pass over the training data is the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ggda_ext.gradients import GroupGradients
from ggda_ext.results.method import Setting, Unit


@dataclass(frozen=True)
class Preconditioned:
    """Directions as a method changed them, and what it did.

    Attributes:
        directions: P ∇g `[m, p]`.
        settings: what was chosen, for `MethodFacts`.
        passes: the cost, in passes over the training data (forward and backward).
        notes: what to know before the scores are trusted.
    """

    directions: Tensor
    settings: Mapping[str, Setting] = field(default_factory=dict)
    passes: float = 0.0
    notes: tuple[str, ...] = ()


class Method:
    """A method of attribution; its settings are the arguments it is made with.

    Attributes:
        name: what results call it.
        unit: ``"property"`` if scores are the predicted rise of the property if the group is removed, ``"rank"`` if
            only their sign and order mean something.
        needs_rows: whether it changes directions; if not, test points may be scored without forming their gradients.
    """

    name: ClassVar[str]
    unit: ClassVar[Unit]
    needs_rows: ClassVar[bool] = True

    def precondition(self, provider: GroupGradients, directions: Tensor) -> Preconditioned:
        """P `directions [m, p]` at the model's current parameters; linear in the directions.

        Args:
            provider: the model, its loss, and the training data.
            directions: gradients of the property, a row for each component.
        """
        raise NotImplementedError
