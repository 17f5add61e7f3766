"""`Attribution`: scores `[m, k]` of groups, with names, sizes, direction, method and intervals.

The sign is the same everywhere: a score is positive if the property is predicted to *rise* when the group is removed.
Together with the property's direction, the sign tells which groups help and which hurt:

    hurts  ⇔  score > 0 and higher is better, or score < 0 and lower is better.

An `Attribution` is a tensor. Operations of PyTorch and NumPy on it return plain tensors and arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from ggda_ext.groups.naming import listed_ids
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
    """Scores `[m, k]` of k groups for m properties. Prints as a ranked table and can be used as a tensor.

    Args:
        scores: scores `[m, k]`, positive if the property is predicted to rise when the group is removed.
        groups: the groups, in the order of the columns.
        properties: names of the m properties; by default ``property 0`` ….
        higher_is_better: for each property, whether higher is better. None if not known; then no group helps or hurts.
        low: lower end of an interval around each score `[m, k]`.
        high: upper end of that interval `[m, k]`.
        interval: what the interval covers, such as ``"95 %, over test points"``.
        method: how the scores were made.
        warnings: group name → what to know before trusting the group's score.
        notes: what to know before trusting any of the scores.
        member_scores: the score of each training point alone `[m, n]`, if known. The scores of a group's members add up
            to the group's score.

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
        """Turn the group scores of any toolkit into an `Attribution`, from either shape.

        Args:
            scores: Captum's `[m, k]`, dattri's `(k, m)`, TRAK's `[k, m]`, one row `[k]`, or the result of
                `leave_group_out`.
            groups: the groups that the scores belong to.
            property: what was explained: the property, or its name, or m names.
            higher_is_better: whether higher is better; by default what the property says.
            method: the name of the method, or facts about it.
            positive: what the property does, according to a positive score, if the group is removed: it ``"rises"``
                (Captum, all of dattri but TRAK, `FisherInfluence`) or ``"falls"`` (both TRAKs; this method flips the
                sign of their scores). Required if scores are `[k, m]`, because both signs exist for that shape.
            test_axis: the axis of `scores` that holds the m test points or properties; required if m = k.
            **details: `low`, `high`, `interval`, `warnings`, `notes`, `member_scores` as in `Attribution`.
        """
        return converted(
            cls, scores, Groups.of(groups), property, higher_is_better, method, positive, test_axis, details
        )

    @property
    def per_member(self) -> Attribution:
        """The scores divided by the size of each group, to compare groups by their mean effect per member.

        Such a score is not the change without the group, so `method.unit` is ``"rank"``, and `verify` compares signs.
        """
        sizes = torch.from_numpy(np.array(self.sizes)).to(self.scores)
        note = "Scores are divided by the size of the group: each is the share of one member."
        method = None if self.method is None else dataclasses.replace(self.method, unit="rank")
        divided = self._each("scores", "low", "high", by=lambda values: values / sizes)
        return self.replace(notes=(*self.notes, note), method=method, member_scores=None, **divided)

    def effects(self, property: str | int = 0) -> tuple[str, ...]:
        """Return the effect of every group: ``helps``, ``hurts``; ``rises``, ``falls`` if the direction is not known.

        The effect is ``unknown`` if the score is NaN, ``none`` if it is 0, ``unclear`` unless the interval excludes 0.
        """
        return ranking.effects(self, self.property_id(property))

    def ranked(self, by: str | int | None = None) -> Attribution:
        """Return all groups, sorted by absolute score, largest first.

        Args:
            by: the property to rank by. By default the first, or, for many properties that all have the same direction,
                their mean.
        """
        return self.some(ranking.order(self, by))

    def top(self, count: int = 5, by: str | int | None = None) -> Attribution:
        """Return the groups that matter most, helpful or harmful, largest absolute score first."""
        check_counts(count=count)
        return self.some(ranking.order(self, by)[:count])

    def harmful(self, by: str | int | None = None, *, sure: bool = False) -> Attribution:
        """Return the groups whose removal is predicted to make the property better, most harmful group first.

        Args:
            by: the property to look at; by default as in `ranked`.
            sure: whether to return only groups whose interval excludes 0.
        """
        return self.some(ranking.with_effect(self, "hurts", by, sure))

    def helpful(self, by: str | int | None = None, *, sure: bool = False) -> Attribution:
        """Return the groups whose removal is predicted to make the property worse, most helpful first; as `harmful`."""
        return self.some(ranking.with_effect(self, "helps", by, sure))

    def some(self, ids: Sequence[int] | np.ndarray | Tensor) -> Attribution:
        """Return some of the groups by id (column), in the order of `ids`, with everything that is known about them.

        A mask `[k]`, such as ``result.scores[0] > 0``, selects the groups where it is True.
        """
        ids = listed_ids(ids, len(self.groups))
        if ids:
            self.groups.names_of(ids)  # raises an error for ids that no group has
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
        """Return one group by name, as an attribution `[m, 1]`. With one property, ``float()`` of it is the score."""
        return self.some([self.groups.id_of(name)])

    def of_property(self, name: str | int) -> Attribution:
        """Return one property by name or number, as an attribution `[1, k]`."""
        j = self.property_id(name)
        of_each = ("scores", "properties", "higher_is_better", "low", "high", "member_scores")
        return self.replace(**self._each(*of_each, by=lambda values: values[j : j + 1]))

    def property_id(self, name: str | int) -> int:
        """Return the row of a property, by name or number."""
        return ranking.property_id(self, name)

    @overload
    def __getitem__(self, key: str | list[str] | tuple[str, Hashable]) -> Attribution: ...
    @overload
    def __getitem__(self, key: Any) -> Tensor: ...
    def __getitem__(self, key: Any) -> Tensor:
        """Return an `Attribution` if the key names a group, a property or both; return a tensor for any other key.

        ``result["web"]``, ``result[["web", "books"]]``, ``result["mean_loss"]``, ``result["mean_loss", "web"]``. Whole
        numbers, slices and tensors always select rows and columns. If the names of groups are numbers, use `of_group`.
        """
        if not ranking.is_tensor_index(key):
            return ranking.by_name(self, key)
        try:
            return super().__getitem__(key)
        except (IndexError, ValueError, RuntimeError) as error:  # a number of more than 64 bits is no IndexError
            if isinstance(key, int | np.integer) and key in self.names:
                raise IndexError(f"{error}. For the group called {key}: result.of_group({key}).") from None
            raise

    def __contains__(self, key: object) -> Any:
        """Whether there is a group with this name. Numbers and tensors are searched in the scores instead."""
        if isinstance(key, int | float | complex | Tensor):
            return super().__contains__(key)
        return key in self.groups.all_names

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return table.as_text(self)

    def __format__(self, spec: str) -> str:
        """Format a single score as a number, ``f"{result['web']:.3f}"``; several scores as PyTorch formats a tensor."""
        return format(self.item() if spec and self.numel() == 1 else self.scores if spec else str(self), spec)

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks."""
        return table.as_html(self)

    def to_frame(self) -> pandas.DataFrame:
        """Return a pandas table with a row for each group (and property), in the order of the columns of `scores`.

        Columns: property, group, size, score, low and high if there are intervals, effect, warnings.
        """
        return table.as_frame(self)

    def verify(self, retrain: Retrain, top: int = 3, by: str | int | None = None) -> Verified:
        """Train again without each of the groups that matter most, and compare the truth with the predictions.

        Args:
            retrain: a function ``retrain(subsets) -> values [subsets, seeds]`` that trains models on each subset of the
                training points (arrays of indices) and measures the property, such as `ggda_ext.evaluation.Retrainer`.
            top: number of groups.
            by: the property that `retrain` measures, and that groups are ranked by; by default the first.
        """
        from ggda_ext.results.verifying import verified

        return verified(self, retrain, top, by)

    @property
    def plot(self) -> Plots:
        """Pictures drawn by matplotlib (extra ``[plot]``): ``result.plot.bars()``, ``.members()``, ``.heatmap()``, …"""
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

        The page is one file that needs no network and runs no script. Writing it needs the extra ``[plot]``. If `rows`
        or `images` are given, the page shows some of the training data, so check it before you pass it on.

        Args:
            path: the file to write. It is written completely or not at all.
            rows: what to show for the training points, one entry each: a pandas DataFrame, a list of texts or of dicts.
            images: the training points as images: `[n, H, W]`, `[n, C, H, W]`, `[n, H, W, C]`, or a list of images.
            labels: label of every training point; the page shows how the labels are mixed in each group.
            member_scores: score of every training point `[m, n]`, to find the members that carry a group; by default
                the `member_scores` of the result.
            title: title of the page.
        """
        from ggda_ext.results.page import written

        return written(
            self, Path(path), rows=rows, images=images, labels=labels, member_scores=member_scores, title=title
        )

    def save(self, path: str | Path) -> Path:
        """Write everything to one file without pickle, completely or not at all. Read it with `Attribution.load`."""
        return saving.saved(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Attribution:
        """Read a file that `save` wrote; raise an error if the file is damaged or of another kind."""
        return saving.loaded(Path(path))
