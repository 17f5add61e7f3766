"""Rows of one or more result folders as one pandas frame, ready for tables and figures.

A *setting* is a data set with a model at one size, e.g. ``"HELOC / ANN-S"``; stand-in data is part of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.names import BASELINES, CG, EQUAL_GROUPINGS, GROUPINGS, HALVES, PAPER_METHODS, SINGLE_POINTS
from benchmarks.results import read_config, read_rows

MODELS = ("LR", "ANN-S", "ANN-M")
DATA_SETS = ("HELOC", "MNIST", "CIFAR-10", "QNLI")
KEYS = ("setting", "method", "grouping", "group_size", "aggregation")
PARTS = ("grouping", "gradients", "curvature", "scoring")
SECONDS = (*(f"seconds_{part}" for part in PARTS), "seconds_total")
STAND_IN = "stand-in data"


@dataclass(frozen=True)
class Run:
    """A result folder: where it is and how it was made."""

    path: Path
    config: dict[str, Any]


@dataclass(frozen=True)
class Results:
    """Everything a report is made from.

    Attributes:
        runs: the folders.
        rows: one line per row, with the columns `setting`, `folder`, `nearby` (copies of every model that what-if
            explains) and the seconds of each part added.
    """

    runs: tuple[Run, ...]
    rows: pd.DataFrame

    def of(self, experiment: str) -> pd.DataFrame:
        """The rows of one experiment, without columns that are empty there."""
        rows = self.rows[self.rows["experiment"] == experiment]
        return rows if rows.empty else rows.dropna(axis=1, how="all")

    @property
    def settings(self) -> list[str]:
        """Settings in the paper's order."""
        return list(self.rows["setting"].unique())


def read(folders: Sequence[Path]) -> Results:
    """The rows of all folders; where two folders hold the same row, the later folder's counts.

    Raises:
        ValueError: if no folder is given or one has no rows; the message names it.
    """
    if not folders:
        raise ValueError("folders is empty: name at least one result folder, e.g. results/20250101-120000-check.")
    runs, rows = [], []
    for folder in folders:
        runs.append(Run(folder, read_config(folder)))
        copies = (runs[-1].config.get("lds") or {}).get("nearby", 0)
        found = read_rows(folder)
        if not found:
            raise ValueError(f"{folder} has no rows: its run stopped before the first one. Leave the folder out.")
        rows += [_flat(row) | {"folder": str(folder), "nearby": copies} for row in found]
    frame = pd.DataFrame(rows)
    for column in ("scale", "train_points", "test_points", "epochs", "stand_in", "source"):
        if column not in frame:
            frame[column] = None
    frame = frame.drop_duplicates(["experiment", "key", "scale", "train_points", "nearby"], keep="last")
    frame["setting"] = _settings(frame)
    frame = ordered(frame, ("data", "model"))
    return Results(tuple(runs), frame)


def merged(frame: pd.DataFrame, by: Iterable[str], values: str = "values") -> pd.DataFrame:
    """One line per combination of `by`: mean, standard error, spread over grouping seeds, and mean seconds.

    Values of the same model seed are averaged over grouping seeds first, so the standard error is over model seeds and
    does not shrink by drawing more groupings of the same models.

    Returns:
        The columns of `by` with mean, stderr (nan for a single seed), seeds, grouping_seeds, spread (standard deviation
        of the means of the grouping seeds), and seconds_* where the rows have them.
    """
    by = list(by)
    lines = []
    for key, some in frame.groupby(by, sort=False, dropna=False):
        per_seed = _seed_means(some, values)
        means = [np.mean(one) for one in some[values]]
        line = dict(zip(by, key, strict=True))
        line |= {
            "mean": per_seed.mean(),
            "stderr": per_seed.std(ddof=1) / len(per_seed) ** 0.5 if len(per_seed) > 1 else np.nan,
            "seeds": len(per_seed),
            "grouping_seeds": len(means),
            "spread": np.std(means, ddof=1) if len(means) > 1 else np.nan,
        }
        line |= {name: some[name].mean() for name in SECONDS if name in some}
        lines.append(line)
    return pd.DataFrame(lines)


def _seed_means(rows: pd.DataFrame, values: str) -> np.ndarray:
    """Values of each model seed, averaged over the rows that have it; by place where a row does not name its seeds."""
    named = rows["model_seeds"] if "model_seeds" in rows else [None] * len(rows)
    by_seed: dict[int, list[float]] = {}
    for seeds, found in zip(named, rows[values], strict=True):
        names = seeds if isinstance(seeds, list) and len(seeds) == len(found) else range(len(found))
        for seed, value in zip(names, found, strict=True):
            by_seed.setdefault(seed, []).append(value)
    return np.array([np.mean(some) for some in by_seed.values()])


def ordered(frame: pd.DataFrame, by: Sequence[str] = ("setting", "method", "grouping", "group_size")) -> pd.DataFrame:
    """Rows sorted as in the paper: no and random removal first, its methods, then ours; its groupings; sizes."""
    first = {
        "setting": (),
        "data": DATA_SETS,
        "model": MODELS,
        "method": (*BASELINES, *PAPER_METHODS, CG),
        "grouping": (SINGLE_POINTS, *GROUPINGS, *EQUAL_GROUPINGS),
    }

    def rank(column: pd.Series) -> pd.Series:
        if column.name not in first:
            return column
        names = dict.fromkeys([*first[column.name], *column])  # what is not in the paper comes last, as it came
        return column.map({name: at for at, name in enumerate(names)})

    return frame.sort_values([name for name in by if name in frame], key=rank, kind="stable").reset_index(drop=True)


def of_protocol(rows: pd.DataFrame, protocol: str = HALVES) -> pd.DataFrame:
    """The rows of LDS by one protocol; protocols are never mixed."""
    return rows[rows["protocol"] == protocol] if "protocol" in rows else rows[:0]


def of_sums(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows whose groups add up their members' scores; the mean has a table of its own."""
    filled = completed(rows)
    return filled[filled["aggregation"] == "sum"]


def completed(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the usual value where a baseline leaves grouping, size or aggregation out."""
    filled = rows.copy()
    for column, usual in (("aggregation", "sum"), ("grouping", SINGLE_POINTS), ("group_size", 1)):
        filled[column] = rows[column].fillna(usual) if column in rows else usual
    return filled


def with_ceiling(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of LDS that know what retraining with other seeds reaches; one seed alone cannot."""
    if "ceiling" not in rows:
        return rows[:0].assign(ceiling=0.0)
    return rows.dropna(subset="ceiling").astype({"ceiling": float})


def mean_interval(intervals: pd.Series) -> tuple[float, float]:
    """The mean of the intervals of several grouping seeds: as wide as one of them, never narrower."""
    pairs = [one for one in intervals if isinstance(one, (list, tuple)) and len(one) == 2]
    if not pairs:
        return np.nan, np.nan
    low, high = np.mean(np.asarray(pairs, float), axis=0)
    return float(low), float(high)


def data_model(rows: pd.DataFrame, setting: str) -> tuple[str, str]:
    """Data set and model of a setting."""
    first = rows[rows["setting"] == setting].iloc[0]
    return str(first["data"]), str(first["model"])


def seed_count(found: pd.DataFrame) -> str:
    """In words, how many seeds are behind `merged` values, by setting where they differ."""
    counts = {str(setting): _range(some["seeds"]) for setting, some in found.groupby("setting", sort=False)}
    texts = set(counts.values())
    text = texts.pop() if len(texts) == 1 else "; ".join(f"{setting}: {count}" for setting, count in counts.items())
    groupings = int(found["grouping_seeds"].max())
    return text + (f"; averaged over up to {groupings} grouping seeds" if groupings > 1 else "")


def _range(counts: pd.Series) -> str:
    low, high = int(counts.min()), int(counts.max())
    return f"{low} seed{'' if low == 1 else 's'}" if low == high else f"{low} to {high} seeds"


def lines_by_size(rows: pd.DataFrame, keys: Sequence[str], cell: Callable[[pd.DataFrame], str]) -> list[list[str]]:
    """A line for each combination of `keys`: their names, then `cell` of the rows of every group size; else a dash."""
    sizes, lines = sorted(rows["group_size"].unique()), []
    for names, some in rows.groupby(list(keys), sort=False):
        cells = {size: cell(one) for size, one in some.groupby("group_size")}
        titles = [grouping_title(name) if key == "grouping" else name for key, name in zip(keys, names, strict=True)]
        lines.append([*titles, *(cells.get(size, "–") for size in sizes)])
    return lines


def methods_by_size(rows: pd.DataFrame) -> list[str]:
    """Methods with more than one group size: only they have a curve."""
    counts = rows.groupby("method", sort=False)["group_size"].nunique()
    return [str(name) for name, count in counts.items() if count > 1 and name not in BASELINES]


def grouping_title(name: str) -> str:
    """A grouping's name in tables and legends."""
    return "single points" if name == SINGLE_POINTS else name


def slug(name: str) -> str:
    """A name as part of a file name: ``"HELOC / ANN-S"`` → ``"heloc-ann-s"``."""
    letters = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    return "-".join(part for part in letters.split("-") if part)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row with `seconds` as columns seconds_grouping, …, and their sum, and the recipe's epochs as a column."""
    flat = {name: value for name, value in row.items() if name not in ("seconds", "recipe")}
    if isinstance(row.get("recipe"), dict):
        flat["epochs"] = row["recipe"].get("epochs")
    if isinstance(row.get("seconds"), dict):
        parts = [float(row["seconds"].get(part) or 0.0) for part in PARTS]
        flat |= dict(zip(SECONDS, [*parts, sum(parts)], strict=True))
    return flat


def _settings(frame: pd.DataFrame) -> pd.Series:
    """Names of settings, with training points and epochs where one experiment has several for a data set and model."""
    names = frame["data"].astype(str) + " / " + frame["model"].astype(str)
    marked = names
    for column, title in (("train_points", "points"), ("epochs", "epochs")):
        kinds = frame[column].groupby([frame["experiment"], names]).transform("nunique")
        several = (kinds > 1) & (frame["experiment"] != "check")
        marks = frame[column].map(lambda n, title=title: f" ({int(n):,} {title})" if pd.notna(n) else "")
        marked = marked + marks.where(several, "")
    return marked + frame["stand_in"].map(lambda yes: f" ({STAND_IN})" if pd.notna(yes) and yes else "")
