"""Tables of the experiments, in the paper's layout, the paper's own numbers beside ours.

± is the standard error over model seeds everywhere; runtimes are CPU seconds of attribution, grouping included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from benchmarks.report import paper
from benchmarks.report.formats import Table, interval, percent, plus_minus, three_digits
from benchmarks.report.rows import (
    BASELINES,
    KEYS,
    NO_REMOVAL,
    PARTS,
    Results,
    grouping_title,
    mean_interval,
    merged,
    of_sums,
    ordered,
    slug,
)

STDERR = "± is the standard error over model seeds"
RUNTIME = "runtime in CPU seconds, grouping included; the paper's is on its GPU"


def experiment_tables(results: Results) -> Iterator[Table]:
    """All tables the rows allow, in the order of the report."""
    yield from noisy_tables(results.of("noisy"))
    yield from pruning_tables(results.of("pruning"))
    yield from retraining_tables(results.of("retraining"))
    yield from lds_tables(results.of("lds"))
    yield from cost_tables(results)


def noisy_tables(rows: pd.DataFrame) -> Iterator[Table]:
    """The paper's noisy-label table (AUC / runtime over sizes of Grad-K-Means groups), then every grouping."""
    if rows.empty:
        return
    sums = of_sums(rows)
    found = ordered(merged(sums, KEYS))
    roc = merged(sums, KEYS, "roc_values").set_index(list(KEYS))["mean"]
    sizes = sorted(found["group_size"].unique())
    grad = found[found["grouping"].isin(["Grad-K-Means", "none"])]
    lines = []
    for (setting, method), some in grad.groupby(["setting", "method"], sort=False):
        cells = {
            row.group_size: f"{plus_minus(row.mean_, row.stderr, 3)} / {three_digits(row.seconds_total)}"
            for row in _named(some)
        }
        lines.append([setting, method, "ours", *(cells.get(size, "–") for size in sizes)])
        theirs = paper.noisy(*_data_model(rows, setting), method)
        if theirs:
            quoted = {size: f"{cell.auc:.3f} / {three_digits(cell.seconds)}" for size, cell in theirs.items()}
            lines.append([setting, method, "paper", *(quoted.get(size, "–") for size in sizes)])
    seeds = _seeds(found)
    noise = " and ".join(sorted({f"{100 * share:g} %" for share in rows["noise"]}))
    yield Table(
        "noisy",
        f"Noisy labels ({noise} flipped): AUC / runtime by size of Grad-K-Means groups",
        pd.DataFrame(lines, columns=["Data / model", "Attributor", "", *_size_names(sizes)]),
        keys=3,
        notes=[f"AUC of mislabelled points found against points checked; {STDERR} ({seeds}); {RUNTIME}."],
    )
    wide = []
    for (setting, method, grouping), some in found.groupby(["setting", "method", "grouping"], sort=False):
        cells = {
            row.group_size: f"{row.mean_:.3f} / {roc[tuple(getattr(row, key) for key in KEYS)]:.3f}"
            for row in _named(some)
        }
        wide.append([setting, method, grouping_title(grouping), *(cells.get(size, "–") for size in sizes)])
    yield Table(
        "noisy-groupings",
        "Noisy labels, every grouping: the paper's AUC / ordinary ROC AUC by group size",
        pd.DataFrame(wide, columns=["Data / model", "Attributor", "Grouping", *_size_names(sizes)]),
        keys=3,
        notes=["The paper prints no ROC AUC, and its AUC for Grad-K-Means only (table above)."],
    )


def pruning_tables(rows: pd.DataFrame) -> Iterator[Table]:
    """Per setting the paper's pruning table (single points against groups), then every method, grouping and size."""
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
    data, model = _data_model(rows, setting)
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
    for method in dict.fromkeys(ordered(found)["method"]):
        mine = found[(found["method"] == method)]
        if method in BASELINES or mine.empty:
            continue
        theirs, runtime = paper.pruning(data, model, method), paper.pruning_runtime(data, model, method)
        for at, (name, group_size, grouping) in enumerate((("DA", 1, "none"), ("GGDA", size, "Random"))):
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
            f"Higher is better; {STDERR} ({_seeds(found)}); {RUNTIME}. The paper's groups have {wanted} points.",
        ],
    )


def retraining_tables(rows: pd.DataFrame) -> Iterator[Table]:
    """Per setting: accuracy at the largest removal by grouping and size (the paper's figure 1), then every removal."""
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
            cells = {row.group_size: percent(row.mean_, row.stderr) for row in _named(line)}
            lines.append([method, grouping_title(grouping), *(cells.get(size, "–") for size in sizes)])
        yield Table(
            f"retraining-sizes-{slug(str(setting))}",
            f"{setting}: test accuracy (%) after removing the {100 * largest:g} % most important points, by group size",
            pd.DataFrame(lines, columns=["Attributor", "Grouping", *_size_names(sizes)]),
            keys=2,
            notes=[f"Lower is better; {STDERR} ({_seeds(found)}). {paper.RETRAINING_NOTE}"],
        )
        yield _by_fraction(
            f"retraining-{slug(str(setting))}",
            f"{setting}: test accuracy (%) after removing the most important points",
            found,
            [f"Lower is better; {STDERR}. {paper.RETRAINING_NOTE}"],
        )


def lds_tables(rows: pd.DataFrame) -> Iterator[Table]:
    """LDS by group size, and the correlation with leaving groups out where it was run."""
    if rows.empty:
        return
    kinds = [("mean", "interval", "lds", "Fidelity: group LDS by group size")]
    if "loo_mean" in rows:
        kinds.append(
            ("loo_mean", "loo_interval", "leave-group-out", "Fidelity: rank correlation with leaving groups out")
        )
    for mean, bounds, name, title in kinds:
        some = ordered(of_sums(rows[rows[mean].notna()]))
        sizes = sorted(some["group_size"].unique())
        lines = []
        for (setting, method, grouping), line in some.groupby(["setting", "method", "grouping"], sort=False):
            cells = {
                size: interval(one[mean].mean(), *mean_interval(one[bounds]))
                for size, one in line.groupby("group_size")
            }
            lines.append([setting, method, grouping_title(grouping), *(cells.get(size, "–") for size in sizes)])
        yield Table(
            name,
            title,
            pd.DataFrame(lines, columns=["Data / model", "Attributor", "Grouping", *_size_names(sizes)]),
            keys=3,
            notes=[f"Spearman correlation with models really retrained, with 95 % interval. {paper.LDS_NOTE}"],
        )


def cost_tables(results: Results) -> Iterator[Table]:
    """Where the time goes: grouping, gradients, curvature, scoring; beside the paper's runtime."""
    costs = cost(results)
    if costs.empty:
        return
    lines = []
    for row in costs.itertuples():
        theirs = paper.noisy(*_data_model(results.rows, row.setting), row.method)
        quoted = theirs.get(row.group_size) if row.grouping in ("Grad-K-Means", "none") else None
        lines.append(
            [
                row.setting, row.method, grouping_title(row.grouping), f"{row.group_size:g}",
                *(three_digits(getattr(row, f"seconds_{part}")) for part in PARTS),
                three_digits(row.seconds_total),
                "–" if pd.isna(row.faster) else three_digits(row.faster, "×"),
                "–" if quoted is None else three_digits(quoted.seconds),
                "–" if quoted is None else three_digits(theirs[1].seconds / quoted.seconds, "×"),
            ]
        )  # fmt: skip
    yield Table(
        "cost",
        "Attribution cost in CPU seconds, by part",
        pd.DataFrame(
            lines,
            columns=[
                "Data / model", "Attributor", "Grouping", "Group size", *(part.capitalize() for part in PARTS), "Total",
                "Faster than size 1", "Paper's total", "Paper: faster than size 1",
            ],
        ),
        keys=4,
        notes=["Means over the experiments' runs. The paper's seconds are those of its noisy-label tables."],
    )  # fmt: skip


def cost(results: Results) -> pd.DataFrame:
    """Mean CPU seconds of each part by setting, method, grouping and size, and the speed-up over group size 1."""
    if "seconds_total" not in results.rows:
        return pd.DataFrame()
    rows = of_sums(results.rows[results.rows["seconds_total"].notna()])
    rows = rows[~rows["method"].isin(BASELINES)]
    keys = ["setting", "method", "grouping", "group_size"]
    seconds = [*(f"seconds_{part}" for part in PARTS), "seconds_total"]
    found = ordered(rows.groupby(keys, sort=False)[seconds].mean().reset_index())
    single = found[found["group_size"] == 1].groupby(["setting", "method"])["seconds_total"].first()
    base = [single.get((row.setting, row.method), np.nan) for row in found.itertuples()]
    found["faster"] = (pd.Series(base, index=found.index) / found["seconds_total"]).where(found["group_size"] > 1)
    return found


def _by_fraction(name: str, title: str, found: pd.DataFrame, notes: Sequence[str]) -> Table:
    """Rows: method, grouping, size; columns: shares removed."""
    fractions = sorted(found.loc[found["method"] != NO_REMOVAL, "fraction"].unique())
    lines = []
    for (method, grouping, size), some in ordered(found).groupby(
        ["method", "grouping", "group_size"], sort=False, dropna=False
    ):
        if method == NO_REMOVAL:
            cells = [percent(some["mean"].iloc[0], some["stderr"].iloc[0])] * len(fractions)
        else:
            cells = _cells(some, fractions)
        baseline = method in BASELINES
        lines.append([method, "" if baseline else grouping_title(grouping), "" if baseline else f"{size:g}", *cells])
    columns = ["Attributor", "Grouping", "Group size", *(f"{100 * fraction:g} %" for fraction in fractions)]
    return Table(name, title, pd.DataFrame(lines, columns=columns), keys=3, notes=notes)


def _cells(found: pd.DataFrame, fractions: Sequence[float]) -> list[str]:
    """Accuracy at every share removed; a run without removal has the same one everywhere."""
    if not found.empty and (found["method"] == NO_REMOVAL).all():
        return [percent(found["mean"].iloc[0], found["stderr"].iloc[0])] * len(fractions)
    by_fraction = {row.fraction: percent(row.mean_, row.stderr) for row in _named(found)}
    return [by_fraction.get(fraction, "–") for fraction in fractions]


def _named(frame: pd.DataFrame) -> Iterator:
    """Rows as named tuples; `mean_` because a frame's `mean` is a method."""
    return frame.rename(columns={"mean": "mean_"}).itertuples()


def _data_model(rows: pd.DataFrame, setting: str) -> tuple[str, str]:
    first = rows[rows["setting"] == setting].iloc[0]
    return str(first["data"]), str(first["model"])


def _size_names(sizes: Sequence[float]) -> list[str]:
    return ["1 (DA)" if size == 1 else f"{size:g}" for size in sizes]


def _seeds(found: pd.DataFrame) -> str:
    low, high = int(found["seeds"].min()), int(found["seeds"].max())
    count = f"{low} seeds" if low == high else f"{low} to {high} seeds"
    groupings = int(found["grouping_seeds"].max())
    return count + (f", averaged over {groupings} grouping seeds" if groupings > 1 else "")
