"""Which groups to leave out: greedy choice with exchange, each step a block of refits.

The choice overfits the property it is made by, as any selection does: among thousands of candidate sets some look good
on these test points by chance. So pass `holdout`, the same property of other points; the search never looks at it, and
its predicted values say what to expect.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ggda_ext.counterfactual.checks import check_count, one_number
from ggda_ext.properties import Property
from ggda_ext.properties.property import check_property, names_of, whether_higher_is_better
from ggda_ext.results.table import aligned_lines, shown

if TYPE_CHECKING:
    from ggda_ext.counterfactual.what_if import WhatIf

Goal = Literal["min", "max"]


@dataclass(frozen=True)
class Search:
    """Which groups to leave out. Prints as a table.

    Attributes:
        measured: the name of the property.
        removed: names of the groups, in the order in which they were chosen, after exchanges.
        values: predicted value of the property with nothing left out, then after each choice.
        holdout: the same for the held-out property; None if there was none.
        value: predicted value without all of `removed`.
        additive: names that a ranking by one-group effects would have left out.
        additive_value: predicted value without those.
        note: what to know about predicted values.
    """

    measured: str
    removed: tuple[Hashable, ...]
    values: tuple[float, ...]
    holdout: tuple[float, ...] | None
    value: float
    additive: tuple[Hashable, ...]
    additive_value: float
    note: str = ""

    def __repr__(self) -> str:
        rows = [["left out", self.measured], ["nothing", f"{self.values[0]:.4g}"]]
        for at, (name, value) in enumerate(zip(self.removed, self.values[1:], strict=True)):
            rows.append([f"{'and ' * (at > 0)}{shown(name)}", f"{value:.4g}"])
        if self.holdout is not None:
            for row, cell in zip(rows, ["held out", *(f"{value:.4g}" for value in self.holdout)], strict=True):
                row.append(cell)
        by_scores = ", ".join(map(shown, self.additive)) or "nothing"
        below = [f"by the effect of each group alone: without {by_scores} {self.additive_value:.4g}", self.note]
        return "\n".join([*aligned_lines(rows, {0}), "", *filter(None, below)])


def found_search(
    what_if: WhatIf,
    property: Property,
    remove: int | None,
    budget: int | None,
    goal: Goal | None,
    holdout: Property | None,
    exchanges: int,
) -> Search:
    """See `WhatIf.search`."""
    k, sizes = len(what_if.groups), what_if.groups.sizes
    if (remove is None) == (budget is None):
        raise ValueError("pass remove, a number of groups, or budget, a number of training points.")
    if remove is not None:
        check_count("remove", remove)
        if remove >= k:
            raise ValueError(f"remove={remove} of {k} groups: leave out at least one and keep at least one.")
    if budget is not None:
        check_count("budget", budget)
        if budget < sizes.min():
            raise ValueError(f"budget={budget} points, and the smallest group has {sizes.min()}: no group fits.")
    check_count("exchanges", exchanges, 0)
    goal = _better(property) if goal is None else goal
    if goal not in ("min", "max"):
        raise ValueError(f"goal={goal!r} is not one of 'min', 'max'.")
    sign = 1.0 if goal == "min" else -1.0

    def costs(choices: list[list[int]]) -> np.ndarray:
        kept = np.ones((len(choices), k))
        for row, gone in zip(kept, choices, strict=True):
            row[gone] = 0
        return sign * one_number(what_if.subsets(kept, property))

    def fits(choice: list[int]) -> bool:
        return len(choice) < k and (budget is None or int(sizes[choice].sum()) <= budget)

    gone: list[int] = []
    path = [float(costs([[]])[0])]
    alone: np.ndarray | None = None
    while remove is None or len(gone) < remove:
        options = [[*gone, j] for j in range(k) if j not in gone and fits([*gone, j])]
        if not options:
            break
        found = costs(options)
        if alone is None:
            alone = np.full(k, np.inf)
            alone[[option[-1] for option in options]] = found
        best = int(np.argmin(found))
        if budget is not None and found[best] >= path[-1]:
            break
        gone = options[best]
        path.append(float(found[best]))
    value = path[-1]
    for _ in range(exchanges if gone else 0):
        options = [
            [*gone[:at], j, *gone[at + 1 :]] for at in range(len(gone)) for j in range(k) if j not in gone
        ]  # fmt: skip
        options = [option for option in options if fits(option)]
        found = costs(options) if options else np.array([np.inf])
        if found.min() >= value - 1e-12:
            break
        gone, value = options[int(np.argmin(found))], float(found.min())
    steps = [gone[:count] for count in range(len(gone) + 1)]
    path = (sign * costs(steps)).tolist()
    kept = np.array([[j not in step for j in range(k)] for step in steps])
    names = what_if.names
    ranked: list[int] = []
    for j in np.argsort(alone if alone is not None else np.zeros(k), kind="stable"):
        if len(ranked) < len(gone) and fits([*ranked, int(j)]):
            ranked.append(int(j))
    return Search(
        measured=names_of(property, 1)[0],
        removed=tuple(names[j] for j in gone),
        values=tuple(path),
        holdout=None if holdout is None else tuple(one_number(what_if.subsets(kept, holdout)).tolist()),
        value=sign * value,
        additive=tuple(names[j] for j in ranked),
        additive_value=float(sign * costs([ranked])[0]),
        note=what_if.note(property),
    )


def _better(property: Property) -> Goal:
    """Where a property is better."""
    check_property(property)
    higher = whether_higher_is_better(property, 1)[0]
    if higher is None:
        raise ValueError(
            "it is not known whether more of this property is better: pass goal='min' or 'max', or "
            "properties.named(g, name, higher_is_better=…)."
        )
    return "max" if higher else "min"
