"""Pictures of a result: ``result.plot.bars()``, ``.members()``, ``.heatmap()``, ``.timeline()``, ``.removal_curve(…)``.

Each method draws into ``ax`` or into a new figure and returns the axes. If there are many groups, only some are drawn,
and words sum up the rest. matplotlib is imported when the first picture is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ggda_ext.results import drawing, ranking
from ggda_ext.results.drawing import STYLES
from ggda_ext.results.members import carried, draw_members, members_of
from ggda_ext.results.table import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ggda_ext.results.attribution import Attribution


class Plots:
    """The pictures of one result. Calling the object draws the bars."""

    def __init__(self, result: Attribution) -> None:
        self._result = result

    def __call__(self, property: str | int = 0, **options: Any) -> Axes:
        """Draw the bars; the same as `bars`."""
        return self.bars(property, **options)

    def __repr__(self) -> str:
        return "pictures of a result: .bars(), .members(), .heatmap(), .timeline(), .removal_curve(retrain)"

    def bars(self, property: str | int = 0, *, most: int = 20, ax: Axes | None = None) -> Axes:
        """Draw a bar with an interval for each group: those that hurt most at the top, those that help at the bottom.

        Args:
            property: which property, by name or number.
            most: maximum number of groups to draw; words sum up the rest.
            ax: matplotlib axes to draw into; a new figure by default.
        """
        result = self._result
        j, values = drawing.scores_of(result, property)
        effects = ranking.effects(result, j)
        chosen = drawing.both_ends(values, most, result.higher_is_better[j])
        ax = drawing.new_axes(ax, 6.4, 1.5 + 0.27 * len(chosen.ids))
        names = []
        for row, group in enumerate(chosen.ids):
            if group is None:
                names.append("⋮")
                ax.axhspan(row - 0.45, row + 0.45, color="0.94", zorder=0)
                ax.text(
                    0.5, row, f"… {drawing.in_room(ax, chosen.words)}", transform=ax.get_yaxis_transform(), ha="center",
                    va="center", fontsize=8,
                )  # fmt: skip
                continue
            style = STYLES[effects[group]]
            length = values[group] if np.isfinite(values[group]) else 0.0
            ax.barh(row, length, color=style.colour, hatch=style.hatch, edgecolor="black", lw=0.6)
            warned = result.groups.name(group) in result.warnings
            names.append(drawing.group_name(result, group, size=True) + " ⚠" * warned)
        drawn = {row: group for row, group in enumerate(chosen.ids) if group is not None}
        ends = ranking.ends(result, j)
        if ends is not None:
            x, (low, high) = values[list(drawn.values())], np.array([ends[group] for group in drawn.values()]).T
            lengths = np.maximum([x - low, high - x], 0)
            ax.errorbar(x, list(drawn), xerr=lengths, fmt="none", ecolor="black", elinewidth=1.2, capsize=3)
        drawing.name_rows(ax, names, drawing.score_label(result, j), above=0.6)
        drawing.legend(ax, {effects[group] for group in drawn.values()})
        return ax

    def members(
        self, property: str | int = 0, *, member_scores: Any = None, most: int = 10, ax: Axes | None = None
    ) -> Axes:
        """Draw the members' own scores in the groups that matter most, to see whether one point carries a group.

        Small groups are drawn as swarms with a dot for each member, large groups as violins with their five largest
        members. The number at the right is the largest member's share in the sum of all members with the group's sign.

        Args:
            property: which property, by name or number.
            member_scores: score of every training point `[m, n]`; by default the `member_scores` of the result.
            most: maximum number of groups to draw.
            ax: matplotlib axes to draw into; a new figure by default.
        """
        result = self._result
        j, values = drawing.scores_of(result, property)
        each = members_of(result, member_scores)[j]
        effects, chosen = ranking.effects(result, j), drawing.largest(values, most)
        ax = drawing.new_axes(ax, 6.4, 1.5 + 0.5 * len(chosen.ids))
        groups = [group for group in chosen.ids if group is not None]
        for row, group in enumerate(groups):
            own = each[result.groups[group]]
            draw_members(ax, row, own, STYLES[effects[group]])
            share = carried(own).largest
            ax.text(1.01, row, f"{share:.0%}", transform=ax.get_yaxis_transform(), va="center", fontsize=8)
        ax.text(1.01, -0.75, "largest", transform=ax.get_yaxis_transform(), va="center", fontsize=8)
        names = [drawing.group_name(result, group, size=True) for group in groups]
        drawing.name_rows(ax, names, f"for each member:\n{drawing.score_label(result, j, what='it')}", above=0.9)
        if chosen.words:
            drawing.plain_title(ax, f"not shown: {chosen.words}")
        return ax

    def heatmap(
        self, *, rows: Literal["groups", "properties"] = "groups", most: int = 30, ax: Axes | None = None
    ) -> Axes:
        """Draw a table of groups × properties. Colours show each score relative to the largest of its property.

        Args:
            rows: ``"groups"``, strongest group first; or ``"properties"``, with rows and columns in the order of
                `scores`.
            most: maximum number of groups to draw, those with the largest relative scores; words sum up the rest.
            ax: matplotlib axes to draw into; a new figure by default.
        """
        if rows not in ("groups", "properties"):
            raise ValueError(f"rows={rows!r} is not one of 'groups', 'properties'.")
        result = self._result
        drawing.refuse_empty(result)
        scores = result.scores.detach().cpu().double().numpy()
        top = np.max(np.abs(scores), axis=1, keepdims=True, initial=0.0, where=np.isfinite(scores))
        relative = np.divide(scores, top, out=np.zeros_like(scores), where=top > 0)
        strongest = np.nan_to_num(np.abs(relative)).max(0)
        chosen = np.array(drawing.largest(strongest, most).ids)
        chosen = chosen if rows == "groups" else np.sort(chosen)
        sides = (
            [shown(name, drawing.WIDEST_NAME) for name in result.properties],
            [drawing.group_name(result, int(group)) for group in chosen],
        )
        cells, colours = scores[:, chosen], relative[:, chosen]
        if rows == "groups":
            cells, colours, sides = cells.T, colours.T, sides[::-1]
        ax = drawing.new_axes(ax, min(3 + 0.8 * cells.shape[1], 14), 1.6 + 0.27 * len(cells))
        picture = ax.imshow(colours, cmap="PuOr_r", vmin=-1, vmax=1, aspect="auto")
        drawing.write_cells(ax, cells, colours)
        narrow = not drawing.is_wide(ax)
        drawing.name_sides(ax, *sides, steep=60 if narrow and cells.shape[1] > 3 else 30)
        bar = ax.figure.colorbar(picture, ax=ax, ticks=[-1, 0, 1], aspect=30 if narrow else 20)
        if not narrow:
            bar.set_label("score / largest\nof its property")
        bar.ax.set_yticklabels(["−1: falls\nwithout it", "0", "+1: rises\nwithout it"], fontsize=8)
        left = scores.shape[1] - len(chosen)
        if left:
            weakest = float(np.delete(strongest, chosen).max())
            drawing.plain_title(ax, f"not shown: {left:,} groups,\neach below {weakest:.0%} of the largest")
        return ax

    def timeline(self, property: str | int = 0, *, dates: Sequence[Any] | None = None, ax: Axes | None = None) -> Axes:
        """Draw scores over time, for groups whose names are dates, years or numbers.

        Args:
            property: which property, by name or number.
            dates: the date of each group, in the order of the groups; by default the names of the groups.
            ax: matplotlib axes to draw into; a new figure by default.
        """
        from ggda_ext.results.times import as_times

        result = self._result
        j, values = drawing.scores_of(result, property)
        times = as_times(result.names if dates is None else dates, len(values), "dates" if dates is not None else "")
        order = np.argsort(times, kind="stable")
        times, values, effects = times[order], values[order], np.array(ranking.effects(result, j))[order]
        ax = drawing.new_axes(ax, 7.2, 3.6)
        ends = ranking.ends(result, j)
        if ends is not None:
            covers = shown(result.interval.partition(";")[0]) or "interval"
            ax.fill_between(times, *np.array(ends)[order].T, color="0.85", label=covers)
        ax.plot(times, values, color="black", lw=1, zorder=2)
        for effect in [e for e in STYLES if e in effects]:
            at = effects == effect
            style, label = STYLES[effect], drawing.MEANINGS.get(effect, effect)
            ax.scatter(
                times[at], values[at], marker=style.marker, color=style.colour, edgecolor="black", linewidth=0.6,
                s=28 if len(values) <= 80 else 12, zorder=3, label=label,
            )  # fmt: skip
        ax.axhline(0, color="black", lw=0.8)
        if times.dtype.kind == "M":
            drawing.few_dates(ax)
        ax.set_ylabel(drawing.score_label(result, j).rpartition("\n")[0], parse_math=False)
        drawing.legend_above(ax, ncols=2)
        drawing.tidy(ax)
        return ax

    def removal_curve(
        self,
        measured: Any,
        *,
        property: str | int = 0,
        fractions: Sequence[float] = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5),
        label: str | None = None,
        seed: int = 0,
        ax: Axes | None = None,
    ) -> Axes:
        """Draw how the model changes as groups are removed, in three orders.

        The first line removes the groups that hurt most first, the second those that help most first, the third removes
        groups at random. If the scores are right, the first line gets better than the third, and the second worse.

        Args:
            measured: a function ``retrain(subsets) -> values [subsets, seeds]`` such as `evaluation.Retrainer`, which
                trains models on every subset of the training points; or curves that were computed before,
                ``{name: evaluation.RemovalCurve}``.
            property: the property whose scores decide the order of removal.
            fractions: shares of the training points to remove; a share above that of the points in groups is cut to it.
            label: label of the values; by default the name of the property.
            seed: seed of the random order, and of the choice among the members of the last group.
            ax: matplotlib axes to draw into; a new figure by default.
        """
        result = self._result
        j, values = drawing.scores_of(result, property)
        curves = measured if isinstance(measured, Mapping) else self._curves(j, values, measured, fractions, seed)
        ax = drawing.new_axes(ax, 6.4, 3.8)
        styles = cycle(zip("oX^sDv", ("-", "--", ":", "-.", "-", "--"), strict=True))
        for (name, curve), (marker, line) in zip(curves.items(), styles, strict=False):
            error = np.nan_to_num(curve.stderr)
            x = 100 * np.asarray(curve.fractions)
            ax.errorbar(x, curve.mean, yerr=error, marker=marker, ls=line, capsize=3, label=shown(name))
        ax.set_xlabel("training points removed, %")
        ax.set_ylabel(label or shown(result.properties[j]), parse_math=False)
        drawing.legend_above(ax, ncols=3)
        drawing.tidy(ax)
        return ax

    def _curves(
        self, j: int, values: np.ndarray, retrain: Any, fractions: Sequence[float], seed: int
    ) -> dict[str, Any]:
        from ggda_ext.evaluation import pruning_score, retraining_score  # late: evaluation builds on results
        from ggda_ext.evaluation.removal import listed_fractions

        if not callable(retrain):
            raise TypeError(
                f"measured is a {type(retrain).__name__}: pass a function retrain(subsets), e.g. evaluation.Retrainer, "
                "or a dict of evaluation.RemovalCurve by name."
            )
        direction, groups = self._result.higher_is_better[j], self._result.groups
        importance = -values if direction else values  # the sign of a loss: positive helps
        names = ("hurts most first", "helps most first") if direction is not None else ("lowest first", "highest first")
        random = np.random.default_rng(seed).permutation(len(groups)).astype(float)
        most = groups.sizes.sum() / groups.n  # points in no group are not removed
        fractions = list(dict.fromkeys(min(fraction, most) for fraction in listed_fractions(fractions)))
        return {
            names[0]: pruning_score(importance, groups, retrain, fractions, seed=seed),
            names[1]: retraining_score(importance, groups, retrain, fractions, seed=seed),
            "random order": retraining_score(random, groups, retrain, fractions, seed=seed),
        }
