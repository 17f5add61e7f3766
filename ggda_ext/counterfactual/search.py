"""Find the groups to leave out: a greedy choice followed by exchanges; each step is a block of refits.

Like any selection, the choice overfits the property that it improves: among thousands of candidate sets, some look good
on these test points by chance. So pass `holdout`, the same property of other points. The search never looks at it, and
its predicted values say what to expect.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ggda_ext.counterfactual.checks import check_count, one_number
from ggda_ext.properties import Property
from ggda_ext.properties.property import check_property
from ggda_ext.results.named_scores import names_of, whether_higher_is_better
from ggda_ext.results.table import aligned_lines, shown

if TYPE_CHECKING:
    from ggda_ext.counterfactual.what_if import WhatIf

Goal = Literal["min", "max"]


@dataclass(frozen=True)
class Search:
    """Which groups to leave out. Prints as a table.

    Attributes:
        measured: the name of the property.
        removed: names of the groups to leave out, in the order in which they were chosen, after exchanges.
        values: predicted value of the property with nothing left out, then after each choice.
        holdout: the same for the held-out property; None if there was none.
        value: predicted value without all of `removed`.
        additive: names of the groups that a ranking by the effect of each group alone would have left out.
        additive_value: predicted value without the groups in `additive`.
        note: a warning about predicted values.
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
    _check(what_if, remove, budget, exchanges)
    goal = _better(property) if goal is None else goal
    if goal not in ("min", "max"):
        raise ValueError(f"goal={goal!r} is not one of 'min', 'max'.")
    sign = 1.0 if goal == "min" else -1.0
    choices = _Choices(what_if, property, sign, budget)
    gone, alone = choices.greedy(remove)
    gone = choices.exchanged(gone, exchanges)
    ranked = choices.first(np.argsort(alone, kind="stable").tolist(), len(gone))
    steps = [gone[:count] for count in range(len(gone) + 1)]
    *values, by_scores = (sign * choices.costs([*steps, ranked])).tolist()
    names = what_if.names
    return Search(
        measured=names_of(property, 1)[0],
        removed=tuple(names[j] for j in gone),
        values=tuple(values),
        holdout=None if holdout is None else tuple(one_number(what_if.subsets(choices.kept(steps), holdout)).tolist()),
        value=values[-1],
        additive=tuple(names[j] for j in ranked),
        additive_value=by_scores,
        note=what_if.note(property),
    )


def _check(what_if: WhatIf, remove: int | None, budget: int | None, exchanges: int) -> None:
    k, least = len(what_if.groups), what_if.groups.sizes.min()
    if (remove is None) == (budget is None):
        raise ValueError("pass remove, a number of groups, or budget, a number of training points.")
    if remove is not None:
        check_count("remove", remove)
        if remove > k or (remove == k and not what_if.masses(np.zeros((1, k)))[0] > 0):
            raise ValueError(f"remove={remove} of {k} groups: leave out at least one and keep something to train on.")
    if budget is not None:
        check_count("budget", budget)
        if budget < least:
            raise ValueError(f"budget={budget} points, and the smallest group has {least}: no group fits.")
    check_count("exchanges", exchanges, 0)


@dataclass(frozen=True)
class _Choices:
    """Evaluates choices of groups to leave out, given as lists of ids; the lower the cost, the better."""

    what_if: WhatIf
    property: Property
    sign: float
    budget: int | None

    def kept(self, choices: list[list[int]]) -> np.ndarray:
        """Return which groups every choice keeps `[s, k]`."""
        return np.array([[j not in gone for j in range(len(self.what_if.groups))] for gone in choices])

    def costs(self, choices: list[list[int]]) -> np.ndarray:
        """Return predicted values `[s]`, with the sign chosen so that lower is better."""
        return self.sign * one_number(self.what_if.subsets(self.kept(choices), self.property))

    def fits(self, gone: list[int]) -> bool:
        """Whether something to train on stays, and the removed points fit the budget."""
        in_budget = self.budget is None or int(self.what_if.groups.sizes[gone].sum()) <= self.budget
        return in_budget and bool(self.what_if.masses(self.kept([gone]))[0] > 0)

    def more(self, gone: list[int]) -> list[int]:
        """Return the ids of the groups that are not removed yet."""
        return [j for j in range(len(self.what_if.groups)) if j not in gone]

    def greedy(self, remove: int | None) -> tuple[list[int], np.ndarray]:
        """Remove one group after the other, each time the best one.

        Returns:
            The ids of the removed groups, and the cost without each group alone `[k]`.
        """
        gone: list[int] = []
        alone, cost = np.full(len(self.what_if.groups), np.inf), float(self.costs([[]])[0])
        while remove is None or len(gone) < remove:
            options = [[*gone, j] for j in self.more(gone) if self.fits([*gone, j])]
            if not options:
                break
            found = self.costs(options)
            if not gone:
                alone[[option[0] for option in options]] = found
            best = int(np.argmin(found))
            if self.budget is not None and found[best] >= cost:
                break
            gone, cost = options[best], float(found[best])
        return gone, alone

    def exchanged(self, gone: list[int], rounds: int) -> list[int]:
        """Return the choice after at most `rounds` rounds, each of which replaces one removed group by a better one."""
        cost = float(self.costs([gone])[0])
        for _ in range(rounds if gone else 0):
            options = [[*gone[:at], j, *gone[at + 1 :]] for at in range(len(gone)) for j in self.more(gone)]
            options = [option for option in options if self.fits(option)]
            found = self.costs(options) if options else np.array([np.inf])
            if found.min() >= cost - 1e-12:
                break
            gone, cost = options[int(np.argmin(found))], float(found.min())
        return gone

    def first(self, ranked: list[int], count: int) -> list[int]:
        """Return the first groups of a ranking that fit the budget together, at most `count` of them."""
        found: list[int] = []
        for j in ranked:
            if len(found) < count and self.fits([*found, j]):
                found.append(j)
        return found


def _better(property: Property) -> Goal:
    """Return ``"max"`` if higher values of a property are better, else ``"min"``; raise an error if it is not known."""
    check_property(property)
    higher = whether_higher_is_better(property, 1)[0]
    if higher is None:
        raise ValueError(
            "it is not known whether more of this property is better: pass goal='min' or 'max', or "
            "properties.named(g, name, higher_is_better=…)."
        )
    return "max" if higher else "min"
