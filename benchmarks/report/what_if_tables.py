"""Tables of counterfactuals: how well predictions agree with really retrained models, in rank and in size."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from benchmarks.names import (
    CLASS_BALANCE,
    FROM_START,
    FROM_START_3,
    HALVES,
    INFLUENCE,
    INFLUENCE_3,
    KEEP_80,
    KEPT_POINTS,
    LEAVE_ONE_OUT,
    TRACIN,
    WARM_START,
    WHAT_IF,
    WHAT_IF_3,
    WHAT_IFS,
    WITH_COPIES,
    WITH_COPIES_3,
)
from benchmarks.report.formats import Table
from benchmarks.report.lds_tables import CEILING_NOTE, CEILINGS
from benchmarks.report.rows import grouping_title, known, of_protocol, of_sums

_NAMES = {HALVES: "what-if", KEEP_80: "what-if-keep-80", LEAVE_ONE_OUT: "what-if-leave-one-out"}
_COLUMNS = {
    "What-if": (WHAT_IF, WHAT_IF_3),
    "with copies": (WITH_COPIES, WITH_COPIES_3),
    "from the start": (FROM_START, FROM_START_3),
    "Warm start": (WARM_START,),
    "Influence": (INFLUENCE, INFLUENCE_3),
    "TracIn": (TRACIN,),
    "Class balance": (CLASS_BALANCE,),
    "Kept points": (KEPT_POINTS,),
}
"""Title of a column → the methods in it; the second is the first with three models."""
_KEYS = ["setting", "grouping", "group_size"]
_SHOWN_KEYS = ["Data / model", "Groups"]
_LEVELS = ("pearson", "slope", "calibrated_pearson", "calibrated_slope")
_NONE = "–"


def what_if_tables(rows: pd.DataFrame) -> Iterator[Table]:
    """Yield the LDS of all predictors, a table for each protocol, and the levels that what-if predicts.

    They have lines for every grouping on which what-if was run.
    """
    if rows.empty or WHAT_IF not in set(rows["method"]):
        return
    levels = []
    for protocol, name in _NAMES.items():
        ranks = []
        for (setting, grouping, size), some in of_sums(of_protocol(rows, protocol)).groupby(_KEYS, sort=False):
            if WHAT_IF not in set(some["method"]):
                continue
            first = [setting, f"{grouping_title(grouping)} {int(size)}"]
            lines = {
                method: found.sort_values("grouping_seed", kind="stable") for method, found in some.groupby("method")
            }
            ranks.append([*first, _models(some), *(_ranks(lines, of) for of in _COLUMNS.values()), *_ceilings(some)])
            levels += [
                [*first[:1], protocol, *first[1:], method, *(_each(known(lines[method], column)) for column in _LEVELS)]
                for method in WHAT_IFS
                if method in lines
            ]
        if ranks:
            yield _table(name, protocol, ranks)
    yield Table(
        "what-if-levels",
        "Counterfactuals: levels before and after verify",
        pd.DataFrame(
            levels,
            columns=[
                "Data / model", "Protocol", "Groups", "Predictor", "Pearson", "Slope", "Pearson, verified",
                "Slope, verified",
            ],
        ),
        keys=3,
        notes=[
            "Slope: of real on predicted mean test losses, for each grouping seed. Verified: after `verify` with eight "
            "retrainings, chosen among one half of the choices of groups and compared on the other."
        ],
    )  # fmt: skip


def _table(name: str, protocol: str, ranks: list[list[str]]) -> Table:
    frame = pd.DataFrame(ranks, columns=[*_SHOWN_KEYS, "Models", *_COLUMNS, *(title for _, title in CEILINGS)])
    return Table(
        name,
        f"Predicted against retrained, {protocol}: LDS",
        frame[[column for column in frame if column in _SHOWN_KEYS or set(frame[column]) != {_NONE}]],
        keys=2,
        notes=[
            "LDS: Spearman correlation of predicted mean test losses with those of retrained models, for each grouping "
            "seed (and each trio of explained models); after a stroke that of three models, averaged. Of other "
            "predictors: the mean. Models: choices of groups for each grouping seed, and models retrained on each "
            f"choice. {CEILING_NOTE}"
        ],
    )


def _models(some: pd.DataFrame) -> str:
    seeds = sorted(set(some["model_seeds"].map(len)))
    return f"{int(some['subsets'].max())} × {'–'.join(map(str, seeds[:: max(1, len(seeds) - 1)]))}"


def _ranks(lines: dict[str, pd.DataFrame], methods: tuple[str, ...]) -> str:
    """Return the LDS of one model and of three: what-if's for each grouping seed, that of other methods in the mean."""
    found = [known(lines[method], "mean") for method in methods if method in lines]
    texts = [_each(values) if methods[0] in WHAT_IFS else _mean(values) for values in found]
    return " / ".join(text for text in texts if text != _NONE) or _NONE


def _ceilings(some: pd.DataFrame) -> list[str]:
    return [_mean(known(some, column)) for column, _ in CEILINGS]


def _each(values: pd.Series) -> str:
    return " ".join(map(_short, values)) or _NONE


def _mean(values: pd.Series) -> str:
    return _NONE if values.empty else _short(values.mean())


def _short(value: float) -> str:
    """Return a number with two digits and without the zero before its point."""
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 0.995 else f"{value:.2f}"
