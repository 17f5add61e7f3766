"""Two tables of counterfactuals: how well predictions agree with really retrained models, in rank and in size."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from benchmarks.names import CG, INFLUENCE, INFLUENCE_3, TRACIN, TRIVIAL, WARM_START, WHAT_IF, WHAT_IFS
from benchmarks.report.formats import Table, interval
from benchmarks.report.lds_tables import CEILING_NOTE, CEILINGS
from benchmarks.report.rows import grouping_title, known, mean_interval, of_sums

_SHOWN = (*WHAT_IFS, WARM_START, INFLUENCE, INFLUENCE_3, TRACIN, CG, *TRIVIAL)
_KEYS = ["setting", "protocol", "grouping", "group_size"]
_NAMES = ["Data / model", "Protocol", "Groups"]
_NONE = "–"


def what_if_tables(rows: pd.DataFrame) -> Iterator[Table]:
    """Yield two tables: LDS of all predictors, and the levels that what-if predicts.

    They have lines for every protocol and grouping on which what-if was run.
    """
    if rows.empty or WHAT_IF not in set(rows["method"]):
        return
    ranks, levels, present = [], [], set(rows["method"])
    for (setting, protocol, grouping, size), some in of_sums(rows).groupby(_KEYS, sort=False):
        if WHAT_IF not in set(some["method"]):
            continue
        first = [setting, protocol, f"{grouping_title(grouping)} {int(size)}"]
        lines = {
            method: some[some["method"] == method].sort_values("grouping_seed", kind="stable") for method in _SHOWN
        }
        methods = [_rank(lines[method], method in WHAT_IFS) for method in _SHOWN]
        ceilings = [_mean(some, column) for column, _ in CEILINGS]
        seeds = sorted(set(some["model_seeds"].map(len)))
        choices = f"{int(some['subsets'].max())} × {'–'.join(map(str, seeds[:: max(1, len(seeds) - 1)]))}"
        ranks.append([*first, choices, *methods, *ceilings])
        levels += [[*first, method, *_level(lines[method])] for method in WHAT_IFS if not lines[method].empty]
    columns = [*_NAMES, "Models", *_SHOWN, *(title for _, title in CEILINGS)]
    frame = pd.DataFrame(ranks, columns=columns)
    yield Table(
        "what-if",
        "Counterfactuals: predicted against retrained, LDS",
        frame[[name for name in columns if name not in _SHOWN or name in present]],
        keys=3,
        notes=[
            "LDS: Spearman correlation of predicted mean test losses with those of retrained models, the mean over "
            "grouping seeds and trios of explained models; for what-if with its 95 % bootstrap interval over models "
            "and, in parentheses, its value for each of them. Models: choices of groups for each "
            f"grouping seed, and models retrained on each choice. {CEILING_NOTE}"
        ],
    )
    yield Table(
        "what-if-levels",
        "Counterfactuals: levels before and after verify",
        pd.DataFrame(
            levels, columns=[*_NAMES, "Predictor", "Pearson", "Slope", "Pearson, verified", "Slope, verified"]
        ),
        keys=3,
        notes=[
            "Slope: of real on predicted mean test losses. The mean over grouping seeds and, in parentheses, each of "
            "them. Verified: after `verify` with eight retrainings, chosen among one half of the choices of groups and "
            "compared on the other."
        ],
    )


def _rank(line: pd.DataFrame, whole: bool) -> str:
    """Return the mean LDS of a predictor over grouping seeds; with `whole`, also its interval and the single values."""
    known = line[line["mean"].notna()]
    if known.empty:
        return _NONE
    if not whole:
        return f"{known['mean'].mean():.2f}"
    return interval(known["mean"].mean(), *mean_interval(known["interval"])) + _each(known["mean"])


def _level(line: pd.DataFrame) -> list[str]:
    found = []
    for column in ("pearson", "slope", "calibrated_pearson", "calibrated_slope"):
        values = known(line, column)
        found.append(_NONE if values.empty else f"{values.mean():.2f}{_each(values)}")
    return found


def _each(values: pd.Series) -> str:
    return "" if len(values) < 2 else f" ({', '.join(f'{value:.2f}' for value in values)})"


def _mean(some: pd.DataFrame, column: str) -> str:
    values = known(some, column)
    return _NONE if values.empty else f"{values.mean():.2f}"
