"""Shapley and Banzhaf values of groups from many refits, with standard errors.

The score of group G is the mean of v(S) − v(S ∪ G) over random sets S of other groups: how much a property rises, on
average, if the group is missing. For a loss, it is positive for groups that help. Points in no group are in every
training set. A model that saw nothing, or only points without weight, is taken to give outputs of zero.

Plain Shapley values of groups can be gamed: a source that is split into two with the same content gets more in total.
With `atoms`, groups are cut into pieces of about that many points. All pieces count alike, and the value of a group is
the sum over its pieces. Splitting a group then changes nothing but the order in which pieces are drawn.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from ggda_ext.counterfactual.checks import check_count, one_number
from ggda_ext.counterfactual.property_values import of_outputs_only, value_of
from ggda_ext.data import IndexedData
from ggda_ext.groups.partition import Groups
from ggda_ext.properties import Property
from ggda_ext.results import Attribution, MethodFacts

if TYPE_CHECKING:
    from ggda_ext.counterfactual.what_if import WhatIf

Kind = Literal["shapley", "banzhaf"]
_AT_ONCE = 1024
_CAN_BE_GAMED = (
    "Whoever splits a group into two gets more in total: pass atoms= to share something out by these values."
)
_NOT_AS_VERIFIED = "Values are as before verify: most sets of groups drawn here are far from those that were retrained."


@dataclass(frozen=True)
class Semivalues:
    """Values of groups. Prints as a ranked table.

    Attributes:
        scores: mean rise of the property without the group `[k]`.
        stderr: standard errors of the scores `[k]`.
        groups: the groups that the scores belong to.
        measured: the property.
        kind: ``"shapley"`` or ``"banzhaf"``.
        refits: how many sets of groups were evaluated.
        note: warnings about sharing something out by these values, and about predicted values.
    """

    scores: np.ndarray
    stderr: np.ndarray
    groups: Groups
    measured: Property
    kind: str
    refits: int
    note: str = ""

    @property
    def names(self) -> tuple[Hashable, ...]:
        """Names of the groups, or their ids."""
        return tuple(self.groups.all_names)

    def attribution(self) -> Attribution:
        """The values as an `Attribution`, with 95 % intervals over the sets that were drawn."""
        scores, width = (torch.from_numpy(values)[None] for values in (self.scores, 1.96 * self.stderr))
        return Attribution.of(
            scores, self.groups, self.measured, method=MethodFacts(self.kind, "property", {"refits": self.refits}),
            test_axis=0, low=scores - width, high=scores + width, interval="95 %, over the sets of groups drawn",
            notes=(self.note,) if self.note else (),
        )  # fmt: skip

    def __repr__(self) -> str:
        return repr(self.attribution())


def found_semivalues(
    what_if: WhatIf, property: Property, samples: int, kind: Kind, atoms: int | None, seed: int
) -> Semivalues:
    """See `WhatIf.shapley`."""
    if kind not in ("shapley", "banzhaf"):
        raise ValueError(f"kind={kind!r} is not one of 'shapley', 'banzhaf'.")
    check_count("samples", samples, 2)  # a single sample has no standard error
    if atoms is not None:
        check_count("atoms", atoms)
    if not of_outputs_only(property):
        raise ValueError(
            "property is not known to be a function of outputs, whose value without any data would be defined: use "
            "ggda_ext.properties.of_outputs(data, fn)."
        )
    groups = what_if.groups
    if len(groups) < 2:
        what_if.check_rest([[0]])
    pieces, owner = (groups, np.arange(len(groups))) if atoms is None else _cut(groups, atoms)
    draw = np.random.default_rng(seed)
    k = len(pieces)
    if kind == "shapley":
        orders = [draw.permutation(k) for _ in range(samples)]
        sets = np.concatenate([np.tril(np.ones((k + 1, k)), -1)[:, np.argsort(order)] for order in orders])
    else:
        kept = draw.random((samples, k)) < 0.5
        flipped = np.repeat(kept[:, None], k + 1, 1)
        flipped[:, np.arange(k), np.arange(k)] ^= True
        sets = flipped.reshape(-1, k).astype(float)
    values = _values(what_if, property, pieces, sets).reshape(samples, k + 1)
    gains = np.empty((samples, k))
    for row, (gain, value) in enumerate(zip(gains, values, strict=True)):
        if kind == "shapley":
            gain[orders[row]] = value[:-1] - value[1:]
        else:
            gain[:] = np.where(kept[row], value[:-1] - value[-1], value[-1] - value[:-1])
    summed = gains @ (owner[:, None] == np.arange(len(groups)))
    error = summed.std(0, ddof=1) / np.sqrt(samples)
    verified = what_if.calibration_of(property) is not None
    notes = (
        _CAN_BE_GAMED if atoms is None else "", what_if.note(property), _NOT_AS_VERIFIED if verified else "",
    )  # fmt: skip
    return Semivalues(summed.mean(0), error, groups, property, kind, len(sets), " ".join(filter(None, notes)))


def _values(what_if: WhatIf, property: Property, pieces: Groups, sets: np.ndarray) -> np.ndarray:
    """Return the property `[s]` for sets of pieces `[s, k]`, the mean over models.

    Sets that leave nothing to train on get the property of outputs of zero.
    """
    found = np.full(len(sets), np.nan)
    filled = np.flatnonzero(what_if.masses(sets, pieces) > 0)
    if len(filled) < len(sets):
        found[:] = _of_nothing(what_if, property)
    total = np.zeros(len(filled))
    for one in what_if.models:
        whole = pieces is what_if.groups
        refits = [(model.refit if whole else model.regrouped(pieces), model.penalty()) for model in one.models]
        for low in range(0, len(filled), _AT_ONCE):
            weights = torch.from_numpy(sets[filled[low : low + _AT_ONCE]])
            values = one.values(property, [refit.solve(weights, penalty) for refit, penalty in refits])
            total[low : low + _AT_ONCE] += one_number(values.cpu())
    found[filled] = total / len(what_if.models)
    return found


def _of_nothing(what_if: WhatIf, property: Property) -> float:
    def zeros(data: IndexedData) -> tuple[Tensor, Tensor | None]:
        features = what_if.models[0].features(data)[0]
        return torch.zeros_like(features.outputs), features.targets

    return float(one_number(value_of(property, zeros)[None])[0])


def _cut(groups: Groups, size: int) -> tuple[Groups, np.ndarray]:
    """Cut every group into pieces of about `size` points; return the pieces and the group id of every piece."""
    labels = np.full(groups.n, -1)
    owner: list[int] = []
    for j, members in enumerate(groups):
        for part in np.array_split(members, max(1, round(len(members) / size))):
            labels[part] = len(owner)
            owner.append(j)
    return Groups(labels, rest="drop"), np.array(owner)
