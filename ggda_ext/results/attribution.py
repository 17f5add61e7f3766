"""`Attribution`: scores `[m, k]` of groups that know their names, sizes, direction, method and how sure they are.

One sign everywhere: a score is positive where the property is predicted to *rise* if the group is removed. With the
property's direction this says who helps and who hurts:

    hurts  ⇔  score > 0 and higher is better, or score < 0 and lower is better.

It is a tensor: whatever PyTorch or NumPy does with one gives plain tensors and arrays.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from ggda_ext.groups.partition import Groups, GroupsLike
from ggda_ext.properties.property import HigherIsBetter
from ggda_ext.results import ranking, saving, table
from ggda_ext.results.conversion import converted
from ggda_ext.results.method import MethodFacts
from ggda_ext.results.named_scores import NamedScores
from ggda_ext.words import check_counts

if TYPE_CHECKING:
    import pandas

    from ggda_ext.properties import Property
    from ggda_ext.results.plots import Plots
    from ggda_ext.results.verifying import Retrain, Verified


class Attribution(NamedScores):
    """Scores `[m, k]` of k groups for m properties; prints as a ranked table, and is used as a tensor.

    Args:
        scores: `[m, k]`, positive where the property is predicted to rise if the group is removed.
        groups: the groups, in the order of the columns.
        properties: names of the m properties; ``property 0`` … if left out.
        higher_is_better: of each property; None where it is not known, and then nothing helps or hurts.
        low: lower end of an interval around each score `[m, k]`.
        high: its upper end `[m, k]`.
        interval: what the interval covers, such as ``"95 %, over test points"``.
        method: how the scores were made.
        warnings: by name of a group, what to know before its score is trusted.
        notes: the same about all scores.
        member_scores: the score of each training point alone `[m, n]`, where known; they add up to the group's.

    >>> result = Attribution(torch.tensor([[0.5, -0.25]]), Groups(["web", "web", "forum"]), ["loss"], [False])
    >>> print(result)
    Attribution of loss (lower is better) to 2 groups of 3 points
    <BLANKLINE>
    group  size  score
    forum     1   +0.5  helps
    web       2  -0.25  hurts
    """

    @classmethod
    def of(
        cls,
        scores: Any,
        groups: GroupsLike,
        property: Property | str | Sequence[str] | None = None,
        higher_is_better: HigherIsBetter | Sequence[HigherIsBetter] = None,
        *,
        method: MethodFacts | str | None = None,
        positive: Literal["rises", "falls"] | None = None,
        test_axis: Literal["auto", 0, 1] = "auto",
        **details: Any,
    ) -> Attribution:
        """The group scores of any toolkit, in either shape, as an `Attribution`.

        Args:
            scores: Captum's `[m, k]`, dattri's `(k, m)`, TRAK's `[k, m]`, one row `[k]`, or the result of
                `leave_group_out`.
            groups: those that the scores are of.
            property: what was explained: the property, or its name, or m names.
            higher_is_better: whether higher is better; by default what the property says.
            method: its name, or facts about it.
            positive: what a positive score says about the property if the group is removed: that it ``"rises"``
                (Captum, all of dattri but TRAK, `FisherInfluence`) or ``"falls"`` (both TRAKs, whose scores are turned
                round here). Asked for where scores are `[k, m]`, as both exist.
            test_axis: which axis of `scores` are the m test points or properties; asked for where m = k.
            **details: `low`, `high`, `interval`, `warnings`, `notes`, `member_scores` as in `Attribution`.
        """
        return converted(
            cls, scores, Groups.of(groups), property, higher_is_better, method, positive, test_axis, details
        )

    @property
    def per_member(self) -> Attribution:
        """Scores divided by the size of the group, to compare what a member counts."""
        sizes = torch.from_numpy(np.array(self.sizes)).to(self.scores)
        note = "Scores are divided by the size of the group."
        divided = self._each("scores", "low", "high", by=lambda values: values / sizes)
        return self.replace(notes=(*self.notes, note), member_scores=None, **divided)

    def effects(self, property: str | int = 0) -> tuple[str, ...]:
        """For every group: ``helps`` or ``hurts``, ``rises`` or ``falls`` if the direction is not known.

        ``unclear`` where the interval contains 0, ``none`` where the score is 0.
        """
        return ranking.effects(self, self.property_id(property))

    def ranked(self, by: str | int | None = None) -> Attribution:
        """All groups, those that matter most first (by the size of the score).

        Args:
            by: the property that counts; by default the first, or the mean of many of one direction.
        """
        return self.some(ranking.order(self, by))

    def top(self, count: int = 5, by: str | int | None = None) -> Attribution:
        """The groups that matter most, helpful or harmful, largest score first."""
        check_counts(count=count)
        return self.some(ranking.order(self, by)[:count])

    def harmful(self, by: str | int | None = None, *, sure: bool = False) -> Attribution:
        """The groups without which the property is predicted to get better, worst group first.

        Args:
            by: the property that counts; by default the first.
            sure: only those whose interval does not contain 0.
        """
        return self.some(ranking.with_effect(self, "hurts", by, sure))

    def helpful(self, by: str | int | None = None, *, sure: bool = False) -> Attribution:
        """The groups without which the property is predicted to get worse, best group first; as `harmful`."""
        return self.some(ranking.with_effect(self, "helps", by, sure))

    def some(self, ids: Sequence[int]) -> Attribution:
        """Some of the groups by id (column), in that order, with everything that is known about them."""
        ids = [int(j) for j in ids]
        if ids:
            self.groups.names_of(ids)  # which refuses ids that no group has
        if len(set(ids)) < len(ids):
            raise ValueError(f"ids holds a group more than once: {ids}.")
        at = torch.tensor(ids, dtype=torch.int64, device=self.device)
        kept = {self.groups.name(j) for j in ids}
        return self.replace(
            groups=self.groups.some(ids),
            warnings={name: found for name, found in self.warnings.items() if name in kept},
            **self._each("scores", "low", "high", by=lambda values: values[:, at]),
        )

    def of_group(self, name: Hashable) -> Attribution:
        """One group by name, as an attribution `[m, 1]`; ``float()`` of it is the score if there is one property."""
        return self.some([self.groups.id_of(name)])

    def of_property(self, name: str | int) -> Attribution:
        """One property by name or number, as an attribution `[1, k]`."""
        j = self.property_id(name)
        of_each = ("scores", "properties", "higher_is_better", "low", "high", "member_scores")
        return self.replace(**self._each(*of_each, by=lambda values: values[j : j + 1]))

    def property_id(self, name: str | int) -> int:
        """The row of a property, by name or number."""
        return ranking.property_id(self, name)

    @overload
    def __getitem__(self, key: str | list[str] | tuple[str, Hashable]) -> Attribution: ...
    @overload
    def __getitem__(self, key: Any) -> Tensor: ...
    def __getitem__(self, key: Any) -> Tensor:
        """A group, a property, or both by name, as an `Attribution`; by anything else as a tensor.

        ``result["web"]``, ``result[["web", "books"]]``, ``result["mean_loss"]``, ``result["mean_loss", "web"]``. Whole
        numbers, slices and tensors are rows and columns, also where groups are named by numbers: see `of_group`.
        """
        if ranking.is_tensor_index(key):
            return super().__getitem__(key)
        return ranking.by_name(self, key)

    def __contains__(self, key: object) -> Any:
        """Whether there is a group of this name; numbers and tensors are looked for among the scores."""
        if isinstance(key, int | float | complex | Tensor):
            return super().__contains__(key)
        return key in self.groups.all_names

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return table.as_text(self)

    def __format__(self, spec: str) -> str:
        """One score as the number it is, ``f"{result['web']:.3f}"``; else as any tensor."""
        return format(self.item() if spec and self.numel() == 1 else self.scores if spec else str(self), spec)

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        return table.as_html(self)

    def to_frame(self) -> pandas.DataFrame:
        """A pandas table, a row for each group (and property), in the order of the columns of `scores`.

        Columns: property, group, size, score, low and high if there are intervals, effect, warnings.
        """
        return table.as_frame(self)

    def verify(self, retrain: Retrain, top: int = 3, by: str | int | None = None) -> Verified:
        """Train again without each of the groups that matter most, and put truth beside prediction.

        Args:
            retrain: ``retrain(subsets) -> values [subsets, seeds]``: trains a model on each subset of the training
                points (arrays of indices) and measures the property, such as `ggda_ext.evaluation.Retrainer`.
            top: how many groups.
            by: the property that counts, which `retrain` measures; by default the first.
        """
        from ggda_ext.results.verifying import verified

        return verified(self, retrain, top, by)

    @property
    def plot(self) -> Plots:
        """Pictures, with matplotlib (extra ``[plot]``): ``result.plot.bars()``, ``.members()``, ``.heatmap()``, …"""
        from ggda_ext.results.plots import Plots

        return Plots(self)

    def to_html(
        self,
        path: str | Path,
        *,
        rows: Any = None,
        images: Any = None,
        labels: Any = None,
        member_scores: Any = None,
        title: str | None = None,
    ) -> Path:
        """Write a page about the result: answer, ranked table, pictures, the groups that matter and their members.

        One file that needs no network and runs no script; it needs the extra ``[plot]``. It shows some of the training
        data if `rows` or `images` are given, so look before passing it on.

        Args:
            path: where to; written as a whole or not at all.
            rows: what to show of the training points, one for each: a pandas DataFrame, a list of texts or of dicts.
            images: training points that are images: `[n, H, W]`, `[n, C, H, W]`, `[n, H, W, C]`, or a list of such.
            labels: label of every training point, for the mix of labels in a group.
            member_scores: score of every training point `[m, n]`, to find the members that carry a group; by default
                those of the result.
            title: of the page.
        """
        from ggda_ext.results.page import written

        return written(
            self, Path(path), rows=rows, images=images, labels=labels, member_scores=member_scores, title=title
        )

    def save(self, path: str | Path) -> Path:
        """Write everything to one file, as a whole or not at all; no pickle. Read it with `Attribution.load`."""
        return saving.saved(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Attribution:
        """Read what `save` wrote; a file that is damaged, or of another kind, is refused."""
        return saving.loaded(Path(path))
