"""The result of `find_label_issues`: every point's signals, a ranking, how far signals agree, and a table by group."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Literal

import numpy as np

from ggda_ext.groups.partition import Groups
from ggda_ext.results.table import aligned_lines, shown

if TYPE_CHECKING:
    import pandas


RankedBy = Literal["loss", "self_influence", "influence", "loss and influence"]
TOP_SHARE = 0.1
"""Share of the points that counts as the most suspicious, for overlaps and for groups."""
_SHOWN = 10


@dataclass(frozen=True)
class Agreement:
    """How far two signals agree.

    Attributes:
        correlation: Spearman's rank correlation of the two signals.
        overlap: share of the most suspicious tenth by one signal that is also in the most suspicious tenth by the
            other; 0.1 by chance.
    """

    correlation: float
    overlap: float


@dataclass(frozen=True, eq=False)
class LabelIssues:
    """Training points, ranked by how likely their label is wrong; prints as a table.

    Attributes:
        loss: loss of every point `[n]`.
        self_influence: squared norm of every point's gradient `[n]`.
        influence: influence of every point on the clean validation points, from −1 to 1 `[n]`: the mean cubed cosine of
            their gradients. If it is negative, the validation loss is predicted to fall without the point, so the point
            hurts. None if there are no validation points.
        suspicion: the number that points are ranked by, from 0 to 1 `[n]`: a point's rank by one signal, or the mean of
            its ranks by two.
        indices: training indices, most suspicious first `[n]`: positions, so ``df.iloc[issues.indices]`` has the rows.
        ranked_by: the signal or signals: ``"loss"``, ``"loss and influence"``, …
        why: why `ranked_by` was chosen.
        groups: the groups, if given.
    """

    loss: np.ndarray
    self_influence: np.ndarray
    influence: np.ndarray | None
    suspicion: np.ndarray
    indices: np.ndarray
    ranked_by: RankedBy
    why: str
    groups: Groups | None = None

    @classmethod
    def ranked(
        cls, loss: np.ndarray, self_influence: np.ndarray, influence: np.ndarray | None, *, ranked_by: RankedBy,
        why: str, groups: Groups | None = None,
    ) -> LabelIssues:  # fmt: skip
        """Rank the points by one of the signals, or by the mean of the ranks by two."""
        ranks = {name: _ranks(values) for name, values in _signals(loss, self_influence, influence).items()}
        chosen = [ranks[name] for name in ranked_by.split(" and ")]
        suspicion = (np.mean(chosen, axis=0) - 0.5) / len(loss)
        indices = np.argsort(-suspicion, kind="stable")
        return cls(loss, self_influence, influence, suspicion, indices, ranked_by, why, groups)

    @property
    def agreement(self) -> dict[tuple[str, str], Agreement]:
        """For each pair of signals, the rank correlation and the overlap of the most suspicious tenths."""
        signals = _signals(self.loss, self.self_influence, self.influence)
        ranks = {name: _ranks(values) for name, values in signals.items()}
        count = self._top
        tops = {name: set(np.argsort(-values, kind="stable")[:count].tolist()) for name, values in ranks.items()}
        return {
            (a, b): Agreement(_correlation(ranks[a], ranks[b]), len(tops[a] & tops[b]) / count)
            for a, b in combinations(ranks, 2)
        }

    @property
    def by_group(self) -> dict[Hashable, dict[str, float]]:
        """Each group's size, mean suspicion, share in the most suspicious tenth, …; by name, the worst group first."""
        if self.groups is None:
            raise ValueError("there are no groups: pass groups= to find_label_issues.")
        groups, top = self.groups, np.zeros(len(self.loss), bool)
        top[self.indices[: self._top]] = True
        columns = {"mean_suspicion": self.suspicion, "in_top_tenth": top.astype(float), "mean_loss": self.loss}
        columns["mean_self_influence"] = self.self_influence
        if self.influence is not None:
            columns["mean_influence"] = self.influence
        inside = groups.labels >= 0
        means = {
            name: np.bincount(groups.labels[inside], values[inside], len(groups)) / groups.sizes
            for name, values in columns.items()
        }
        order = np.argsort(-means["mean_suspicion"], kind="stable").tolist()
        return {
            groups.name(j): {"size": int(groups.sizes[j])} | {name: float(values[j]) for name, values in means.items()}
            for j in order
        }

    def to_frame(self) -> pandas.DataFrame:
        """Return a pandas table with a row for each point, most suspicious first. Its index is the training index."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_frame needs pandas: pip install pandas.") from error
        columns: dict[str, object] = {"suspicion": self.suspicion, "loss": self.loss}
        columns["self_influence"] = self.self_influence
        if self.influence is not None:
            columns["influence"] = self.influence
        if self.groups is not None:
            columns["group"] = [None if j < 0 else self.groups.name(int(j)) for j in self.groups.labels]
        return pd.DataFrame(columns).rename_axis("index").iloc[self.indices]

    def __len__(self) -> int:
        return len(self.loss)

    def __str__(self) -> str:
        parts = [f"{len(self):,} training points, ranked by {_word(self.ranked_by)}: {self.why}", "", *self._points()]
        if self.groups is not None:
            parts += ["", *self._groups()]
        agreements = [
            f"{_word(a)} and {_word(b)}: rank correlation {both.correlation:.2f}, top tenths overlap {both.overlap:.0%}"
            for (a, b), both in self.agreement.items()
        ]
        return "\n".join([*parts, "", *agreements])

    __repr__ = __str__

    @property
    def _top(self) -> int:
        return max(1, round(TOP_SHARE * len(self)))

    def _points(self) -> list[str]:
        rows = [["index", "suspicion", "loss", "self-influence"]]
        rows[0] += ["influence"] if self.influence is not None else []
        rows[0] += ["group"] if self.groups is not None else []
        for i in self.indices[:_SHOWN].tolist():
            row = [str(i), f"{self.suspicion[i]:.3f}", f"{self.loss[i]:.3g}", f"{self.self_influence[i]:.3g}"]
            row += [f"{self.influence[i]:+.2g}"] if self.influence is not None else []
            if self.groups is not None:
                group = int(self.groups.labels[i])
                row.append(shown(self.groups.name(group)) if group >= 0 else "–")
            rows.append(row)
        rest = len(self) - len(rows) + 1
        return aligned_lines(rows) + ([f"… and {rest:,} more: see .indices, .to_frame()"] if rest else [])

    def _groups(self) -> list[str]:
        found = self.by_group
        rows = [["group", "size", "mean suspicion", "in top tenth", "mean loss"]]
        for name, row in list(found.items())[:_SHOWN]:
            cells = [f"{row['size']}", f"{row['mean_suspicion']:.3f}", f"{row['in_top_tenth']:.1%}"]
            rows.append([shown(name), *cells, f"{row['mean_loss']:.3g}"])
        rest = len(found) - len(rows) + 1
        return aligned_lines(rows) + ([f"… and {rest:,} more groups: see .by_group"] if rest else [])


def _signals(loss: np.ndarray, self_influence: np.ndarray, influence: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return the signals with signs such that larger is more suspicious."""
    found = {"loss": loss, "self_influence": self_influence}
    return found if influence is None else found | {"influence": -influence}


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1 to n, smallest first; equal values share the mean of their ranks."""
    from scipy.stats import rankdata  # takes seconds to import

    return rankdata(values)


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's correlation of ranks; NaN if all points are equal."""
    with np.errstate(invalid="ignore"):
        return float(np.corrcoef(a, b)[0, 1])


def _word(name: str) -> str:
    return name.replace("self_influence", "self-influence")
