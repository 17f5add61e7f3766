"""What the files of a run show, as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.trainer_sources.made import SIZES as MADE_SIZES
from benchmarks.trainer_sources.task import BROKEN

WORDS = {
    "tracker": "`GroupTracker`", "tracker, Adam": "`GroupTracker(preconditioner=\"adam\")`",
    "tracin": "`attribute_trainer(method=\"tracin\")`", "curvature": "`attribute_trainer`, by default influence",
    "other seeds": "one retraining against two others",
}  # fmt: skip
"""Rows of the tables: while training, without and with Adam's division; after it, without and with curvature; truth."""
MARKS = "<!-- trainer_sources: written by `python -m benchmarks.trainer_sources table` -->", "<!-- end -->"


def tables(folder: Path) -> str:
    """Tables of all tasks that have run."""
    makers = {"qnli": _qnli_table, "made": _made_table}
    kept = {name: [json.loads(p.read_text("utf-8")) for p in sorted(folder.glob(f"{name}-*.json"))] for name in makers}
    parts = [make(kept[name]) for name, make in makers.items()]
    return "\n\n".join(part for part in parts if part)


def last(scores: dict[str, float]) -> str:
    """The source that hurts most."""
    return min(scores, key=scores.__getitem__)


def _qnli_table(found: list[dict[str, Any]]) -> str:
    """For each seed which source comes last, and the test accuracy with all and without each of the broken ones."""
    done = [one for one in found if set(one.get("without", {})) >= set(BROKEN)]
    if not done:
        return ""
    lines = [
        "| seed | last by the tracker | last after training | accuracy with all | without the flipped "
        "| without the shuffled |",
        "|---|---|---|---|---|---|",
    ]
    for one in done:
        named = " | ".join(last(one["scores"][name]) for name in ("tracker", "curvature"))
        reached = [one["with all"], *(one["without"][source][0] for source in BROKEN)]
        accuracies = " | ".join(f"{part['tests'][1]:.1%}" for part in reached)
        lines.append(f"| {one['seed']} | {named} | {accuracies} |")
    return "\n".join(lines)


def _made_table(found: list[dict[str, Any]]) -> str:
    """How well each method ranks the sources of `made` as leaving each out does."""
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
    """By how much the property rose without a source, for each training seed."""
    pairs = zip(one["without"][source], one["without"][""], strict=True)
    return [without["goal"][0] - everything["goal"][0] for without, everything in pairs]


def write_into(page: Path, text: str) -> None:
    """Put the tables between the page's marks."""
    head, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, tail = rest.partition(MARKS[1])
    if not end:
        raise ValueError(f"{page} has no place for the tables: it needs the lines {MARKS[0]!r} and {MARKS[1]!r}.")
    page.write_text(f"{head}{MARKS[0]}\n\n{text}\n\n{end}{tail}", encoding="utf-8")
