"""The base class of methods: a method changes the property's directions before the pass over the training data.

Every method scores group G for a property g as

    τ_G = ⟨P ∇g, Σ_{i∈G} ∇ℓ_i⟩

and methods differ only in P: the identity for TracIn, 1/n (H + λ)⁻¹ for influence. So a method only has to define
``precondition(provider, directions)``, which turns rows `[m, p]` into rows `[m, p]`. The pass over the training data is
the same for all methods.
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
    """The directions that a method returns, and a record of what it did.

    Attributes:
        directions: P ∇g `[m, p]`.
        settings: the settings that were used, for `MethodFacts`.
        passes: the cost, in passes over the training data (forward and backward).
        notes: sentences that users should read before they trust the scores.
    """

    directions: Tensor
    settings: Mapping[str, Setting] = field(default_factory=dict)
    passes: float = 0.0
    notes: tuple[str, ...] = ()


class Method:
    """A method of attribution; its settings are the arguments it is made with.

    Attributes:
        name: the name of the method in results.
        unit: ``"property"`` if a score is the predicted rise of the property if the group is removed, ``"rank"`` if
            only the sign and the order of scores mean something.
        needs_rows: whether the method changes directions. If not, test points can be scored without forming their
            gradients.
    """

    name: ClassVar[str]
    unit: ClassVar[Unit]
    needs_rows: ClassVar[bool] = True

    def precondition(self, provider: GroupGradients, directions: Tensor) -> Preconditioned:
        """Return P `directions [m, p]` at the model's current parameters; the result is linear in the directions.

        Args:
            provider: the model, its loss, and the training data.
            directions: gradients of the property, a row for each component.
        """
        raise NotImplementedError
