"""Rows of one or more result folders as one pandas frame, ready for tables and figures.

A *setting* is a data set with a model at one size, e.g. ``"HELOC / ANN-S"``. Its name tells if the data is a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.compare.table import headline
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
    """A result folder: its path, and the config that says how it was made."""

    path: Path
    config: dict[str, Any]


@dataclass(frozen=True)
class Results:
    """The data that a report is made from.

    Attributes:
        runs: the folders.
        rows: one line per row, with additional columns: `setting`, `folder` and the seconds of each part.
    """

    runs: tuple[Run, ...]
    rows: pd.DataFrame

    def of(self, experiment: str) -> pd.DataFrame:
        """Return the rows of one experiment, without the columns that are empty in it."""
        rows = self.rows[self.rows["experiment"] == experiment]
        return rows if rows.empty else rows.dropna(axis=1, how="all")

    @property
    def settings(self) -> list[str]:
        """Settings in the paper's order."""
        return list(self.rows["setting"].unique())

    @property
    def speed_ups(self) -> pd.DataFrame:
        """The cells of the comparison of speed that headlines are about, see `benchmarks.compare.table.headline`."""
        return pd.DataFrame(headline(self.of("speed").to_dict("records")))


def read(folders: Sequence[Path]) -> Results:
    """Read the rows of all folders; if two folders hold the same row, the row of the later folder counts.

    Raises:
        ValueError: no folder is given, or a folder has no rows; the message names the folder.
    """
    if not folders:
        raise ValueError("folders is empty: name at least one result folder, e.g. results/20250101-120000-check.")
    runs, rows = [], []
    for folder in folders:
        runs.append(Run(folder, read_config(folder)))
        found = read_rows(folder)
        if not found:
            raise ValueError(f"{folder} has no rows: its run stopped before the first one. Leave the folder out.")
        rows += [_flat(row) | {"folder": str(folder)} for row in found]
    frame = pd.DataFrame(rows)
    for column in ("scale", "train_points", "test_points", "epochs", "stand_in", "source"):
        if column not in frame:
            frame[column] = None
    frame = frame.drop_duplicates(["experiment", "key", "scale", "train_points"], keep="last")
    frame["setting"] = _settings(frame)
    frame = ordered(frame, ("data", "model"))
    return Results(tuple(runs), frame)


def merged(frame: pd.DataFrame, by: Iterable[str], values: str = "values") -> pd.DataFrame:
    """Return one line per combination of `by`: mean, standard error, spread over grouping seeds, and mean seconds.

    Values of the same model seed are first averaged over grouping seeds. So the standard error is over model seeds, and
    more groupings of the same models do not make it smaller.

    Returns:
        The columns of `by` with mean, stderr (nan for a single seed), seeds, grouping_seeds, spread (standard deviation
        of the means of the grouping seeds), and seconds_* if the rows have them.
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
    """Return the values of each model seed, averaged over the rows that have it.

    If a row does not name its seeds, the position of a value stands for its seed.
    """
    named = rows["model_seeds"] if "model_seeds" in rows else [None] * len(rows)
    by_seed: dict[int, list[float]] = {}
    for seeds, found in zip(named, rows[values], strict=True):
        names = seeds if isinstance(seeds, list) and len(seeds) == len(found) else range(len(found))
        for seed, value in zip(names, found, strict=True):
            by_seed.setdefault(seed, []).append(value)
    return np.array([np.mean(some) for some in by_seed.values()])


def ordered(frame: pd.DataFrame, by: Sequence[str] = ("setting", "method", "grouping", "group_size")) -> pd.DataFrame:
    """Sort rows as in the paper: first no removal and random removal, then the paper's methods, then ours; within a
    method by grouping in the paper's order, then by size."""
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
        names = dict.fromkeys([*first[column.name], *column])  # names that are not in the paper come last, in order
        return column.map({name: at for at, name in enumerate(names)})

    return frame.sort_values([name for name in by if name in frame], key=rank, kind="stable").reset_index(drop=True)


def of_protocol(rows: pd.DataFrame, protocol: str = HALVES) -> pd.DataFrame:
    """Return the rows of LDS for one protocol; protocols are never mixed."""
    return rows[rows["protocol"] == protocol] if "protocol" in rows else rows[:0]


def of_sums(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows in which a group's score is the sum over its members; another table shows the mean."""
    filled = completed(rows)
    return filled[filled["aggregation"] == "sum"]


def completed(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows in which missing values of grouping, size and aggregation, as in baselines, have the usual value."""
    filled = rows.copy()
    for column, usual in (("aggregation", "sum"), ("grouping", SINGLE_POINTS), ("group_size", 1)):
        filled[column] = rows[column].fillna(usual) if column in rows else usual
    return filled


def with_ceiling(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of LDS that have a ceiling, which is what retraining with other seeds reaches.

    Rows with one seed have none.
    """
    if "ceiling" not in rows:
        return rows[:0].assign(ceiling=0.0)
    return rows.dropna(subset="ceiling").astype({"ceiling": float})


def known(rows: pd.DataFrame, column: str) -> pd.Series:
    """Return the numbers of a column that are there; none if there is no such column."""
    return rows[column].dropna().astype(float) if column in rows else pd.Series(dtype=float)


def mean_interval(intervals: pd.Series) -> tuple[float, float]:
    """Return the mean of the intervals of several grouping seeds; it is as wide as they are on average."""
    pairs = [one for one in intervals if isinstance(one, (list, tuple)) and len(one) == 2]
    if not pairs:
        return np.nan, np.nan
    low, high = np.mean(np.asarray(pairs, float), axis=0)
    return float(low), float(high)


def data_model(rows: pd.DataFrame, setting: str) -> tuple[str, str]:
    """Return the data set and the model of a setting."""
    first = rows[rows["setting"] == setting].iloc[0]
    return str(first["data"]), str(first["model"])


def seed_count(found: pd.DataFrame) -> str:
    """Return words that say how many seeds the `merged` values have, for each setting if the numbers differ."""
    counts = {str(setting): _range(some["seeds"]) for setting, some in found.groupby("setting", sort=False)}
    texts = set(counts.values())
    text = texts.pop() if len(texts) == 1 else "; ".join(f"{setting}: {count}" for setting, count in counts.items())
    groupings = int(found["grouping_seeds"].max())
    return text + (f"; averaged over up to {groupings} grouping seeds" if groupings > 1 else "")


def _range(counts: pd.Series) -> str:
    low, high = int(counts.min()), int(counts.max())
    return f"{low} seed{'' if low == 1 else 's'}" if low == high else f"{low} to {high} seeds"


def lines_by_size(rows: pd.DataFrame, keys: Sequence[str], cell: Callable[[pd.DataFrame], str]) -> list[list[str]]:
    """Return a line for each combination of `keys`: their names, then `cell` of the rows of every group size.

    A group size without rows gets a dash.
    """
    sizes, lines = sorted(rows["group_size"].unique()), []
    for names, some in rows.groupby(list(keys), sort=False):
        cells = {size: cell(one) for size, one in some.groupby("group_size")}
        titles = [grouping_title(name) if key == "grouping" else name for key, name in zip(keys, names, strict=True)]
        lines.append([*titles, *(cells.get(size, "–") for size in sizes)])
    return lines


def methods_by_size(rows: pd.DataFrame) -> list[str]:
    """Return the methods with more than one group size, because only these have a curve."""
    counts = rows.groupby("method", sort=False)["group_size"].nunique()
    return [str(name) for name, count in counts.items() if count > 1 and name not in BASELINES]


def grouping_title(name: str) -> str:
    """Return the name of a grouping for tables and legends."""
    return "single points" if name == SINGLE_POINTS else name


def slug(name: str) -> str:
    """Return a name as part of a file name: ``"HELOC / ANN-S"`` → ``"heloc-ann-s"``."""
    letters = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    return "-".join(part for part in letters.split("-") if part)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with separate columns for the parts of `seconds`, their sum, and the epochs of the recipe."""
    flat = {name: value for name, value in row.items() if name not in ("seconds", "recipe")}
    if isinstance(row.get("recipe"), dict):
        flat["epochs"] = row["recipe"].get("epochs")
    if isinstance(row.get("seconds"), dict):
        parts = [float(row["seconds"].get(part) or 0.0) for part in PARTS]
        flat |= dict(zip(SECONDS, [*parts, sum(parts)], strict=True))
    return flat


def _settings(frame: pd.DataFrame) -> pd.Series:
    """Return the names of settings.

    A name has training points and epochs if one experiment has several of them for the same data set and model.
    """
    names = frame["data"].astype(str) + " / " + frame["model"].astype(str)
    marked = names
    for column, title in (("train_points", "points"), ("epochs", "epochs")):
        kinds = frame[column].groupby([frame["experiment"], names]).transform("nunique")
        several = (kinds > 1) & (frame["experiment"] != "check")
        marks = frame[column].map(lambda n, title=title: f" ({int(n):,} {title})" if pd.notna(n) else "")
        marked = marked + marks.where(several, "")
    return marked + frame["stand_in"].map(lambda yes: f" ({STAND_IN})" if pd.notna(yes) and yes else "")
