"""Groups: a checked partition of the training set, built once and then only applied.

Vocabulary used everywhere in the package:

* an *index* is the position of a training point, 0 … n-1;
* a *group id* is the position of a group, 0 … k-1;
* a *label* of a point is the id of its group, or -1 for a point that was left out;
* a *segment* is a run of neighbouring points of one batch that belong to one group.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from ggda_ext.groups.labels import Rest, Rule, check_labels, read_labels, refuse_empty, sizes_by_rule
from ggda_ext.groups.naming import Share, id_of, labels_of_some, listed_ids, names_at, spread_over
from ggda_ext.words import check_counts, check_required_counts, without

if TYPE_CHECKING:
    from ggda_ext.data import DataLike
    from ggda_ext.grouping.diagnostics import Summary
    from ggda_ext.model import ParameterChoice
    from ggda_ext.properties import Property


class Column(Protocol):
    """A pandas or polars column."""

    def to_numpy(self) -> np.ndarray: ...


Indices: TypeAlias = np.ndarray | Tensor | Column | Sequence[int]
GroupsLike: TypeAlias = (
    "Groups | np.ndarray | Tensor | Column | Sequence[Hashable] | Sequence[Indices] | Mapping[Any, Indices]"
)
"""A `Groups`, one label per point, a list of index lists, or a dict ``{name: indices}``."""


@dataclass(frozen=True)
class GroupBatch:
    """Training indices of one batch, group after group.

    Attributes:
        indices: training indices `[b]`.
        ids: group id of every segment `[s]`.
        starts: where each segment starts, and where the last one ends `[s + 1]`.
        complete: False if the (only) group of this batch goes on in the next one.
    """

    indices: np.ndarray
    ids: np.ndarray
    starts: np.ndarray
    complete: bool

    def __len__(self) -> int:
        return len(self.indices)


class Groups:
    """A partition of `n` training points into `k` non-empty groups.

    Args:
        groups: one label per training point (NumPy, torch, pandas, list; numbers or strings), or a list of index lists,
            or a dict ``{name: indices}``. Among labels, negative numbers, NaN and None mark points in no group, in the
            way that scikit-learn's clusterers use -1; a category of a pandas categorical is always a group.
        n: number of training points. It is checked against the labels. With index lists it is needed only if the last
            points are in no group.
        names: names of the groups, in the order of their ids. By default the sorted user labels, the categories of a
            pandas categorical, or the keys of the dict.
        rest: what to do with points in no group: ``"error"`` (raise an error), ``"drop"`` (leave them out of every
            group) or ``"group"`` (put them into one more group, the last, named ``"rest"``).

    >>> groups = Groups(["b", "a", "b", "b"])
    >>> len(groups), groups.n, groups.names, groups.sizes.tolist()
    (2, 4, ('a', 'b'), [1, 3])
    >>> groups[1].tolist(), groups.labels.tolist()
    ([0, 2, 3], [1, 0, 1, 1])
    """

    def __init__(
        self,
        groups: GroupsLike,
        n: int | None = None,
        *,
        names: Sequence[Hashable] | None = None,
        rest: Rest = "error",
    ) -> None:
        check_counts(n=n)
        if isinstance(groups, Groups):
            given, known, checked = groups.labels.copy(), groups.names, True
        else:
            (given, known), checked = read_labels(groups, n), False
        self._set(*check_labels(given, known, n, names, rest, may_leave_out=checked))

    def _set(self, labels: np.ndarray, k: int, names: tuple[Hashable, ...] | None) -> None:
        labels = labels.astype(np.int32 if max(k, len(labels)) < 2**31 else np.int64, copy=False)
        sizes = np.bincount(labels if labels.min() >= 0 else labels[labels >= 0], minlength=k)
        if not sizes.all():
            refuse_empty(sizes)
        labels.flags.writeable = False
        sizes.flags.writeable = False
        self._n, self._sizes, self._names = len(labels), sizes, names
        self._labels: np.ndarray | None = labels
        self._rule: Rule | None = None

    @classmethod
    def of(cls, groups: GroupsLike, n: int | None = None) -> Groups:
        """Return `groups` itself if it is a `Groups` (its number of points is checked), else build one from it."""
        if isinstance(groups, Groups):
            if n is not None and groups.n != n:
                raise ValueError(
                    f"groups was built for {groups.n} training points, but the training set "
                    f"has {n}: build it from this data set."
                )
            return groups
        return cls(groups, n)

    @classmethod
    def with_labels(cls, labels: np.ndarray, k: int, names: Sequence[Hashable] | None = None) -> Groups:
        """Build groups from known group ids: `labels [n]` from 0 to k - 1, or -1 for points that are left out."""
        if len(labels) and not -1 <= int(labels.min()) <= int(labels.max()) < k:
            raise ValueError(f"labels are {labels.min()} … {labels.max()}: give -1 to {k - 1} for {k} groups.")
        if names is not None and len(names) != k:
            raise ValueError(f"names has {len(names)} entries for {k} groups.")
        groups = cls.__new__(cls)
        groups._set(np.array(labels), k, None if names is None else tuple(names))
        return groups

    @classmethod
    def by_rule(cls, n: int, k: int, rule: Rule) -> Groups:
        """Build groups whose labels are computed from indices whenever they are needed, for data too large to label.

        Args:
            n: number of training points.
            k: number of groups.
            rule: a function that returns the group ids of an array of training indices. Here it is called once for all
                points, with about a million indices at a time.

        >>> Groups.by_rule(10, 3, lambda indices: indices % 3).sizes.tolist()
        [4, 3, 3]
        """
        if callable(n) or callable(k) or not callable(rule):
            raise TypeError("by_rule takes the number of points, that of groups, and a function: by_rule(n, k, rule).")
        groups = cls.__new__(cls)
        sizes = sizes_by_rule(n, k, rule)
        sizes.flags.writeable = False
        groups._n, groups._sizes, groups._names = n, sizes, None
        groups._labels, groups._rule = None, rule
        return groups

    @classmethod
    def singletons(cls, n: int) -> Groups:
        """Build groups with one point each: plain, per-point data attribution."""
        if n < 1:
            raise ValueError(f"n={n}: a training set has at least one point.")
        return cls.with_labels(np.arange(n), n)

    @property
    def n(self) -> int:
        """Number of training points, including those that are left out."""
        return self._n

    @property
    def labels(self) -> np.ndarray:
        """Group id of every training index `[n]`; -1 for a point that was left out."""
        if self._labels is None:
            self._labels = self.labels_of(np.arange(self._n))
            self._labels.flags.writeable = False
        return self._labels

    @property
    def is_by_rule(self) -> bool:
        """Whether a rule computes the labels. If so, the labels of all points need not be in memory."""
        return self._rule is not None

    def labels_of(self, indices: np.ndarray | range) -> np.ndarray:
        """Return the group ids of some training indices `[b]`, without labels of other points; for a range, a view."""
        if self._rule is not None:
            return np.asarray(self._rule(np.asarray(indices)))
        run = isinstance(indices, range) and indices.step == 1
        return self.labels[indices[0] : indices[-1] + 1] if run and len(indices) else self.labels[np.asarray(indices)]

    @property
    def sizes(self) -> np.ndarray:
        """Number of points in every group `[k]`."""
        return self._sizes

    @property
    def names(self) -> tuple[Hashable, ...] | None:
        """The user's own names of the groups, or None if there are none."""
        return self._names

    def name(self, group_id: int) -> Hashable:
        """Return the name of a group: the user's name, or the group id if the groups have no names."""
        return self.all_names[self._within(group_id)]

    @property
    def all_names(self) -> Sequence[Hashable]:
        """Names of all groups in the order of their ids; the ids themselves if the groups have no names."""
        return range(len(self)) if self._names is None else self._names

    def id_of(self, name: Hashable) -> int:
        """Return the id of the group with this name. If there is none, the error lists similar names."""
        return id_of(name, self.all_names)

    def members(self, name: Hashable) -> np.ndarray:
        """Return the training indices of the group with this name, in ascending order.

        >>> Groups(["web", "books", "web"]).members("web").tolist()
        [0, 2]
        """
        return self[self.id_of(name)]

    def names_of(self, ids: Any) -> np.ndarray:
        """Return the names of groups by id, in the shape of `ids`, e.g. of the ids that Captum returns for `k=`.

        >>> Groups(["web", "books", "web"]).names_of([[1, 0], [0, 1]]).tolist()
        [['web', 'books'], ['books', 'web']]
        """
        return names_at(ids, self.all_names)

    def some(self, ids: Sequence[int] | np.ndarray | Tensor) -> Groups:
        """Return some of the groups, in the order of `ids`, or those where a mask `[k]` is True.

        The points of all other groups are left out.
        """
        ids = [self._within(j) for j in listed_ids(ids, len(self))]
        return Groups.with_labels(labels_of_some(self.labels, ids, len(self)), len(ids), [self.name(j) for j in ids])

    def spread(self, scores: Any, *, how: Share = "share", left_out: float = float("nan")) -> Tensor:
        """Turn scores of groups into scores of points, for code that expects scores of points (e.g. quanda's metrics).

        Args:
            scores: scores of the groups `[…, k]`, such as an `Attribution`.
            how: with ``"share"``, every member gets an equal share, score / size. The scores of the members then add up
                to the score of the group, which metrics that sum over subsets (LDS) expect. With ``"copy"``, every
                member gets the score of its group, for metrics that use the order of groups and not their size.
            left_out: the score of points in no group. NaN by default, because they were not scored; pass 0.0 for
                metrics that sum.

        Returns:
            Scores `[…, n]`.

        >>> Groups(["web", "books", "web"]).spread(torch.tensor([[3.0, 8.0]])).tolist()
        [[4.0, 3.0, 4.0]]
        """
        return spread_over(scores, self.labels, self.sizes, how, left_out)

    @property
    def are_singletons(self) -> bool:
        """Whether every group has exactly one point and no point was left out."""
        return len(self) == self.n

    @cached_property
    def order(self) -> np.ndarray:
        """Training indices sorted by group, ascending within each group."""
        order = np.argsort(self.labels, kind="stable").astype(self.labels.dtype, copy=False)
        order = order[self.n - int(self._sizes.sum()) :]
        order.flags.writeable = False
        return order

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where each group starts in `order`, and where the last one ends `[k + 1]`."""
        return np.concatenate([[0], np.cumsum(self._sizes)])

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, group_id: int) -> np.ndarray:
        group_id = self._within(group_id)
        return self.order[self.offsets[group_id] : self.offsets[group_id + 1]]

    def _within(self, group_id: int) -> int:
        """Return the id as a number from 0 to k - 1. Negative ids count from the end. Raise an error if outside."""
        k = len(self)
        try:
            at = index(group_id)
        except TypeError:
            raise TypeError(
                f"group id {group_id!r} is no whole number: pass one, or ask by name, groups.members({group_id!r})."
            ) from None
        if not -k <= at < k:
            raise IndexError(f"group id {at} is out of range: there are {k} groups.")
        return at % k

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[j] for j in range(len(self)))

    def __contains__(self, name: object) -> bool:
        """Whether there is a group with this name."""
        return name in self.all_names

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Groups):
            return NotImplemented
        return np.array_equal(self.labels, other.labels) and self.names == other.names

    __hash__ = None  # type: ignore[assignment]  # not hashable: equality compares the members

    def __repr__(self) -> str:
        sizes = f", sizes {self.sizes.min()}…{self.sizes.max()}" if len(self) else ""
        return f"Groups(k={len(self)}, n={self.n}{sizes})"

    @without(keeping="a summary takes a few passes and is not kept; print it, or keep its arrays")
    def summary(
        self,
        model: nn.Module | None = None,
        loss_fn: Any = None,
        data: DataLike | None = None,
        *,
        property: Property | None = None,
        features: Any = None,
        targets: Any = None,
        parameters: ParameterChoice = None,
        strategy: str | None = None,
        batch_size: int | None = None,
        memory_budget: int | None = None,
        show_progress: bool | None = None,
    ) -> Summary:
        """Diagnose the groups, to see whether they can be trusted. The result prints as a short table.

        Without arguments, it shows the sizes only. With `model`, `loss_fn` and `data`, it also shows how aligned the
        gradients of every group are, and which groups are too large or too coherent for first-order estimates. With
        `property`, it also shows the groups' scores and the share of members whose score has the sign of their group's
        score. This takes two to four training passes if all layers are Linear. Other layers need the gradient of every
        point, computed a block at a time, which takes longer.

        Args:
            model, loss_fn, data: as in `GroupGradients`.
            property: the property to explain; it must be one number.
            features: what to measure the spread within groups in: rows `[n, d]`, or the builder that made the groups
                (then pass `data` too).
            targets: class label of every point, for data whose targets are not whole numbers.
            parameters, strategy, batch_size, memory_budget, show_progress: as in `GroupGradients`.
        """
        from ggda_ext.grouping.diagnostics import summarize  # late: it needs gradients, which need groups

        options = {
            "parameters": parameters, "strategy": strategy, "batch_size": batch_size, "memory_budget": memory_budget,
            "show_progress": show_progress,
        }  # fmt: skip
        return summarize(
            self, model, loss_fn, data, property=property, features=features, targets=targets,
            options={name: value for name, value in options.items() if value is not None},
        )  # fmt: skip

    def sum(self, values: Any, dim: int = -1) -> Tensor:
        """Add up per-point values `[…, n, …]` by group `[…, k, …]`; as in PyTorch, sums of whole numbers are int64."""
        values = values if isinstance(values, Tensor) else torch.tensor(np.asarray(values))
        if values.shape[dim] != self.n:
            raise ValueError(f"values has {values.shape[dim]} entries along dim {dim}; groups has {self.n} points.")
        inside = torch.from_numpy(self.order.astype(np.int64)).to(values.device)
        labels = torch.from_numpy(np.repeat(np.arange(len(self)), self.sizes)).to(values.device)
        shape = list(values.shape)
        shape[dim] = len(self)
        kind = values.dtype if values.is_floating_point() or values.is_complex() else torch.int64
        wide = torch.float64 if values.is_floating_point() and values.device.type != "mps" else kind
        sums = torch.zeros(shape, dtype=wide, device=values.device)
        return sums.index_add_(dim, labels, values.index_select(dim, inside).to(wide)).to(kind)

    def batches(
        self, batch_size: int, most_groups: int | None = None, within: tuple[int, int] | None = None
    ) -> Iterator[GroupBatch]:
        """Yield index batches of at most `batch_size` points and `most_groups` groups.

        Groups that fit into a batch stay whole, one after the other. A group larger than `batch_size` is split into
        pieces, and each piece is a batch of its own.

        Args:
            batch_size: maximum number of points in a batch.
            most_groups: maximum number of groups in a batch.
            within: ``(low, high)``, to use only the points ``order[low:high]``, as if there were no others; by default
                all points are used.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: pass at least 1.")
        order, offsets, before = self.order, self.offsets, 0
        if within is not None:
            low, high = within
            before = int(np.searchsorted(offsets, low, "right")) - 1
            after = int(np.searchsorted(offsets, high, "left")) if low < high else before
            offsets = offsets[before : after + 1].clip(low, high)
        first, last = 0, len(offsets) - 1
        while first < last:
            start = int(offsets[first])
            end = int(np.searchsorted(offsets, start + batch_size, side="right")) - 1
            end = min(end, first + (most_groups or last))
            if end > first:
                indices, ids = order[start : int(offsets[end])], np.arange(before + first, before + end)
                yield GroupBatch(indices, ids, offsets[first : end + 1] - start, True)
                first = end
                continue
            stop = int(offsets[first + 1])
            for piece in range(start, stop, batch_size):
                indices = order[piece : min(piece + batch_size, stop)]
                starts = np.array([0, len(indices)])
                yield GroupBatch(indices, np.array([before + first]), starts, piece + batch_size >= stop)
            first += 1

    def batch_sampler(self, batch_size: int) -> Sampler[list[int]]:
        """Return a `batch_sampler` for `torch.utils.data.DataLoader` that keeps the points of a group together."""
        check_required_counts(batch_size=batch_size)
        return _GroupBatchSampler(self, batch_size)


class _GroupBatchSampler(Sampler[list[int]]):
    """The index batches of `Groups.batches`, as the `batch_sampler` of a DataLoader."""

    def __init__(self, groups: Groups, batch_size: int) -> None:
        self._groups, self.batch_size = groups, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.indices.tolist() for batch in self._groups.batches(self.batch_size))

    def __len__(self) -> int:
        return sum(1 for _ in self._groups.batches(self.batch_size))
