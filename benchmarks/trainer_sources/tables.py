"""Tables of the results of a run, as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.trainer_sources.made import SIZES as MADE_SIZES
from benchmarks.trainer_sources.task import BROKEN

WORDS = {
    "tracker": "`GroupTracker`", "tracker, as Adam steps": "`GroupTracker(preconditioner=\"adam\")`",
    "tracin": "`attribute_trainer(method=\"tracin\")`", "curvature": "`attribute_trainer`, by default influence",
    "other seeds": "one retraining against two others",
}  # fmt: skip
"""Name of a score → its name in tables; "other seeds" compares retrainings with each other."""
END = "<!-- end -->"


def mark(task: str) -> str:
    """Return the line of a page that marks the start of a task's table; the table ends at `END`."""
    return f"<!-- trainer_sources {task}: written by `python -m benchmarks.trainer_sources table` -->"


def tables(folder: Path) -> dict[str, str]:
    """Return task → table, for all tasks that have run."""
    makers = {"qnli": _qnli_table, "made": _made_table}
    kept = {name: [json.loads(p.read_text("utf-8")) for p in sorted(folder.glob(f"{name}-*.json"))] for name in makers}
    return {name: table for name, make in makers.items() if (table := make(kept[name]))}


def last(scores: dict[str, float]) -> str:
    """Return the source that hurts most, which has the lowest score."""
    return min(scores, key=scores.__getitem__)


def _qnli_table(found: list[dict[str, Any]]) -> str:
    """Return a table with the last source of each seed and the results of models without the broken sources."""
    done = [one for one in found if "flipped" in one.get("without", {})]
    if not done:
        return ""
    lines = [
        "| seed | last by the tracker | last after training | loss without the flipped, predicted | real "
        "| of the tests | test accuracy with all | without the flipped | without the shuffled |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in done:
        named = " | ".join(last(one["scores"][name]) for name in ("tracker", "curvature"))
        predicted = one["scores"]["curvature"]["flipped"]
        changed = one["without"]["flipped"][0]
        real = " | ".join(f"{changed[rows][0] - one['with all'][rows][0]:+.3f}" for rows in ("goal", "tests"))
        reached = [one["with all"], *(one["without"].get(source, [None])[0] for source in BROKEN)]
        accuracies = " | ".join("not run" if part is None else f"{part['tests'][1]:.1%}" for part in reached)
        lines.append(f"| {one['seed']} | {named} | {predicted:+.3f} | {real} | {accuracies} |")
    return "\n".join(lines)


def _made_table(found: list[dict[str, Any]]) -> str:
    """Return a table that shows how well each method ranks the sources of `made`, compared with leaving each out."""
    done = [one for one in found if set(one.get("without", {})) >= {"", *MADE_SIZES}]
    if not done:
        return ""
    agreement: dict[str, list[float]] = {name: [] for name in WORDS}
    names_last = dict.fromkeys(agreement, 0)
    order = list(MADE_SIZES)
    for one in done:
        truth = {source: _effects(one, source) for source in order}
        mean = {source: float(np.mean(values)) for source, values in truth.items()}
        cases = dict(one["scores"]) | {"other seeds": {source: values[0] for source, values in truth.items()}}
        for name, scores in cases.items():
            against = mean if name != "other seeds" else {s: float(np.mean(v[1:])) for s, v in truth.items()}
            agreement[name].append(float(spearmanr([scores[s] for s in order], [against[s] for s in order])[0]))
            names_last[name] += last(scores) == last(against)
    lines = ["| | rank agreement with retraining, mean (least) | names the worst source |", "|---|---|---|"]
    for name, values in agreement.items():
        least = f"{np.mean(values):.2f} ({min(values):.2f})"
        lines.append(f"| {WORDS[name]} | {least} | {names_last[name]} of {len(values)} |")
    return "\n".join(lines)


def _effects(one: dict[str, Any], source: str) -> list[float]:
    """Return by how much the property rises without a source, for each training seed."""
    pairs = zip(one["without"][source], one["without"][""], strict=True)
    return [without["goal"][0] - everything["goal"][0] for without, everything in pairs]


def write_into(page: Path, found: dict[str, str]) -> None:
    """Write tables into a page after their marks; the table of a task that has not run is left unchanged."""
    text = page.read_text(encoding="utf-8")
    for task, table in found.items():
        head, begin, rest = text.partition(mark(task))
        _, end, tail = rest.partition(END)
        if not end:
            raise ValueError(f"{page} has no place for the table: it needs the lines {mark(task)!r} and {END!r}.")
        text = f"{head}{begin}\n\n{table}\n\n{end}{tail}"
    page.write_text(text, encoding="utf-8")
