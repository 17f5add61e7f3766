"""Tables of accuracy after removal: pruning in the paper's layout, next to its numbers, and the retraining score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from benchmarks.names import BASELINES, NO_REMOVAL, PAPER_METHODS, RANDOM, SINGLE_POINTS
from benchmarks.report import paper
from benchmarks.report.formats import RUNTIME, STDERR, Table, percent, size_names, three_digits
from benchmarks.report.rows import KEYS, data_model, grouping_title, merged, of_sums, ordered, seed_count, slug


def pruning_tables(rows: pd.DataFrame) -> Iterator[Table]:
    """Yield for each setting the paper's pruning table (single points compared with groups), then a table of every
    method, grouping and size."""
    for setting, some in rows.groupby("setting", sort=False):
        found = merged(of_sums(some), [*KEYS, "fraction"])
        yield _paper_pruning(str(setting), some, found)
        yield _by_fraction(
            f"pruning-{slug(str(setting))}",
            f"{setting}: test accuracy (%) after removing the least important points, every grouping",
            found,
            ["Higher is better. The paper's numbers are in the table above."],
        )


def _paper_pruning(setting: str, rows: pd.DataFrame, found: pd.DataFrame) -> Table:
    data, model = data_model(rows, setting)
    wanted = paper.PRUNING_GROUP_SIZE.get(data, 256)
    sizes = [size for size in found["group_size"].dropna().unique() if size > 1]
    size = int(min(sizes, key=lambda one: abs(np.log(one / wanted)))) if sizes else wanted
    columns: list[tuple[str, str]] = [("", "Removal %")]
    lists: list[list[str]] = []
    fractions = sorted(found.loc[~found["method"].isin([NO_REMOVAL]), "fraction"].unique())
    labels = [f"{100 * fraction:g}" for fraction in fractions] + ["Runtime (s)"]
    for baseline in BASELINES:
        cells = _cells(found[found["method"] == baseline], fractions)
        if any(cell != "–" for cell in cells):
            columns.append(("Baselines", baseline))
            lists.append([*cells, "–"])
    for method in PAPER_METHODS:
        mine = found[found["method"] == method]
        if mine.empty:
            continue
        theirs, runtime = paper.pruning(data, model, method), paper.pruning_runtime(data, model, method)
        for at, (name, group_size, grouping) in enumerate((("DA", 1, SINGLE_POINTS), ("GGDA", size, RANDOM))):
            chosen = mine[(mine["group_size"] == group_size) & (mine["grouping"] == grouping)]
            if chosen.empty and not theirs:
                continue
            columns.append((method, name))
            seconds = chosen["seconds_total"].mean() if "seconds_total" in chosen else np.nan
            lists.append([*_cells(chosen, fractions), three_digits(seconds)])
            if theirs:
                columns.append((method, f"{name}, paper"))
                quoted = [theirs[round(100 * f)][at] if round(100 * f) in theirs else None for f in fractions]
                lists.append(
                    [
                        *("–" if cell is None else f"{cell.mean:.1f} ± {cell.stderr:.1f}" for cell in quoted),
                        "–" if runtime is None else f"{runtime[at].mean:g} ± {runtime[at].stderr:g}",
                    ]
                )
    frame = pd.DataFrame([labels, *lists]).T
    frame.columns = pd.MultiIndex.from_tuples(columns)
    return Table(
        f"pruning-paper-{slug(setting)}",
        f"{setting}: test accuracy (%) after pruning; DA: single points, GGDA: random groups of {size}",
        frame,
        keys=1,
        notes=[
            f"Higher is better; {STDERR} ({seed_count(found)}); {RUNTIME}. The paper's groups have {wanted} points.",
        ],
    )


def retraining_tables(rows: pd.DataFrame) -> Iterator[Table]:
    """Yield for each setting a table of accuracy at the largest removal by grouping and size (the paper's figure 1),
    then a table of every removal."""
    for setting, some in rows.groupby("setting", sort=False):
        found = merged(of_sums(some), [*KEYS, "fraction"])
        largest = found["fraction"].max()
        at_largest = ordered(found[(found["fraction"] == largest) | (found["method"] == NO_REMOVAL)])
        sizes = sorted(at_largest.loc[~at_largest["method"].isin(BASELINES), "group_size"].unique())
        lines = []
        for (method, grouping), line in at_largest.groupby(["method", "grouping"], sort=False):
            if method in BASELINES:
                lines.append([method, "", *[percent(line["mean"].iloc[0], line["stderr"].iloc[0])] * len(sizes)])
                continue
            cells = {row.group_size: percent(row.mean, row.stderr) for row in line.itertuples()}
            lines.append([method, grouping_title(grouping), *(cells.get(size, "–") for size in sizes)])
        yield Table(
            f"retraining-sizes-{slug(str(setting))}",
            f"{setting}: test accuracy (%) after removing the {100 * largest:g} % most important points, by group size",
            pd.DataFrame(lines, columns=["Attributor", "Grouping", *size_names(sizes)]),
            keys=2,
            notes=[f"Lower is better; {STDERR} ({seed_count(found)}). {paper.RETRAINING_NOTE}"],
        )
        yield _by_fraction(
            f"retraining-{slug(str(setting))}",
            f"{setting}: test accuracy (%) after removing the most important points",
            found,
            [f"Lower is better; {STDERR}. {paper.RETRAINING_NOTE}"],
        )


def _by_fraction(name: str, title: str, found: pd.DataFrame, notes: Sequence[str]) -> Table:
    """Return a table with a line for each method, grouping and size, and a column for each share removed."""
    fractions = sorted(found.loc[found["method"] != NO_REMOVAL, "fraction"].unique())
    lines = []
    for (method, grouping, size), some in ordered(found).groupby(
        ["method", "grouping", "group_size"], sort=False, dropna=False
    ):
        baseline = method in BASELINES
        lines.append(
            [
                method,
                "" if baseline else grouping_title(grouping),
                "" if baseline else f"{size:g}",
                *_cells(some, fractions),
            ]
        )
    columns = ["Attributor", "Grouping", "Group size", *(f"{100 * fraction:g} %" for fraction in fractions)]
    return Table(name, title, pd.DataFrame(lines, columns=columns), keys=3, notes=notes)


def _cells(found: pd.DataFrame, fractions: Sequence[float]) -> list[str]:
    """Return the accuracy at every share removed; without removal it is the same in every cell."""
    if not found.empty and (found["method"] == NO_REMOVAL).all():
        return [percent(found["mean"].iloc[0], found["stderr"].iloc[0])] * len(fractions)
    by_fraction = {row.fraction: percent(row.mean, row.stderr) for row in found.itertuples()}
    return [by_fraction.get(fraction, "–") for fraction in fractions]
