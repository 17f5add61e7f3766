"""Pairs of groups whose joint effect is not the sum of their single effects: redundant and conflicting sources.

I_ab = change without a and b − change without a − change without b. For a loss, the groups of a positive pair can
replace each other (each alone is dispensable, both together are not). In a negative pair, the removals of the two
groups overlap in what they do.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from ggda_ext.counterfactual.checks import one_number
from ggda_ext.properties import Property
from ggda_ext.results.named_scores import names_of
from ggda_ext.results.table import aligned_lines, number, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ggda_ext.counterfactual.what_if import WhatIf

_SHOWN = 10


@dataclass(frozen=True)
class Interactions:
    """Interactions of pairs of groups. Prints the strongest as a table.

    Attributes:
        measured: the name of the property.
        matrix: I `[k, k]`, symmetric, with zeros on the diagonal.
        alone: the change of the property without each group `[k]`.
        names: names of the groups.
        note: a warning about predicted values.
    """

    measured: str
    matrix: np.ndarray
    alone: np.ndarray
    names: tuple[Hashable, ...]
    note: str = ""

    def __repr__(self) -> str:
        rows = [["without", "", "first", "second", "both", "beyond the sum"]]
        for one, other, beyond in self.strongest(_SHOWN):
            changes = [float(self.alone[self.names.index(name)]) for name in (one, other)]
            rows.append([shown(one), shown(other), *map(number, (*changes, sum(changes) + beyond, beyond))])
        pairs = len(self.names) * (len(self.names) - 1) // 2
        more = f", the strongest {_SHOWN} of {pairs}" if pairs > _SHOWN else ""
        title = f"Changes of {self.measured} without pairs of groups{more}"
        return "\n".join([title, "", *aligned_lines(rows, {0, 1}), *(["", self.note] if self.note else [])])

    def strongest(self, count: int = 5) -> list[tuple[Hashable, Hashable, float]]:
        """Return the `count` pairs with the largest interaction of either sign: two names and the interaction."""
        pairs = sorted(combinations(range(len(self.names)), 2), key=lambda pair: -abs(self.matrix[pair]))
        return [(self.names[a], self.names[b], float(self.matrix[a, b])) for a, b in pairs[:count]]

    def plot(self, *, most: int = 20, ax: Axes | None = None) -> Axes:
        """Draw the matrix.

        Args:
            most: largest number of groups to draw; the groups with the strongest interactions are drawn.
            ax: matplotlib axes to draw into; a new figure by default.
        """
        from ggda_ext.results import drawing

        chosen = np.sort(np.argsort(-np.abs(self.matrix).max(1), kind="stable")[:most])
        matrix, names = self.matrix[np.ix_(chosen, chosen)], [shown(self.names[j], drawing.WIDEST_NAME) for j in chosen]
        np.fill_diagonal(matrix, np.nan)  # a group makes no pair with itself: draw neither a number nor a colour
        side = 2.5 + 0.5 * len(chosen)
        ax = drawing.new_axes(ax, side, side)
        limit = float(np.abs(self.matrix).max()) or 1.0
        image = ax.imshow(matrix, cmap="PuOr_r", vmin=-limit, vmax=limit)
        drawing.write_cells(ax, matrix, matrix / limit)
        drawing.name_sides(ax, names, names, steep=60)
        ax.figure.colorbar(image, ax=ax, label=f"rise of {self.measured} beyond the sum of both")
        if len(chosen) < len(self.names):
            drawing.plain_title(ax, f"not shown: {len(self.names) - len(chosen):,} groups of weaker pairs")
        return ax


def found_interactions(what_if: WhatIf, property: Property, ids: list[int] | None) -> Interactions:
    """Return the interactions of all pairs of groups, or of the groups in `ids`, from one refit for each pair."""
    chosen = list(range(len(what_if.groups))) if ids is None else ids
    twice = [j for at, j in enumerate(chosen) if j in chosen[:at]]
    if twice:
        raise ValueError(f"names holds {what_if.names[twice[0]]!r} twice: name every group once.")
    if len(chosen) < 2:
        raise ValueError("interactions need at least two groups.")
    pairs = list(combinations(range(len(chosen)), 2))
    left_out = [[], *([j] for j in chosen), *([chosen[a], chosen[b]] for a, b in pairs)]
    what_if.check_rest(left_out)
    kept = np.ones((len(left_out), len(what_if.groups)))
    for row, gone in zip(kept, left_out, strict=True):
        row[gone] = 0
    values = one_number(what_if.subsets(kept, property))
    changes = values[1:] - values[0]
    alone, joint = changes[: len(chosen)], changes[len(chosen) :]
    matrix = np.zeros((len(chosen), len(chosen)))
    for (a, b), change in zip(pairs, joint, strict=True):
        matrix[a, b] = matrix[b, a] = change - alone[a] - alone[b]
    return Interactions(
        names_of(property, 1)[0], matrix, alone, tuple(what_if.names[j] for j in chosen), what_if.note(property)
    )
