"""Noisy labels: do groups of low importance hold the mislabelled points? Measured by the paper's AUC and the ROC AUC.

A share of the training labels is replaced by other classes, all equally likely, and the model is trained on these
labels. Every seed of the model has its own noise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from benchmarks.experiments.bench import Bench, Cell, summary
from benchmarks.experiments.methods import captum_scores
from benchmarks.experiments.subject import Subject, timed
from benchmarks.names import SINGLE_POINTS, TRACIN
from ggda_ext.evaluation import Detection, noisy_label_detection

NAME = "noisy"
CURVE_POINTS = 41
DEFAULT_MODE_POINTS = 10_000  # Captum's default mode, one backward pass per point, is timed up to this many points


def flipped(labels: Tensor, classes: int, share: float, seed: int) -> tuple[Tensor, np.ndarray]:
    """Return labels `[n]` of which a share is wrong, and whether each of them is wrong `[n]`."""
    draw = np.random.default_rng(seed)
    chosen = draw.choice(len(labels), round(share * len(labels)), replace=False)
    shift = torch.from_numpy(draw.integers(1, classes, len(chosen))).to(labels)
    noisy = labels.clone()
    at = torch.from_numpy(chosen).to(labels.device)
    noisy[at] = (noisy[at] + shift) % classes
    wrong = np.zeros(len(labels), bool)
    wrong[chosen] = True
    return noisy, wrong


def run(bench: Bench) -> None:
    """Compute and write the rows that the folder does not have yet."""
    task, size = bench.task, bench.size.noisy
    if size is None:
        return
    open_cells = [cell for cell in bench.cells(size.cells) if _open_rows(bench, cell)]
    subjects: list[tuple[Subject, np.ndarray]] = []
    for seed in range(size.seeds if open_cells else 0):
        labels, wrong = flipped(task.data.train[1], task.data.classes, size.share, seed)
        subjects.append((bench.another_subject(seed, labels), wrong))
    for cell in tqdm(open_cells, f"noisy labels, {task.name}", unit="row"):
        attributions = [bench.attribution(cell, subject) for subject, _ in subjects]
        more = _default_mode(subjects[0][0]) if cell.method == TRACIN and cell.grouping == SINGLE_POINTS else {}
        for one in _open_rows(bench, cell):
            found = [
                noisy_label_detection(
                    attribution.importance, bench.groups(cell, subject), wrong, aggregation=one.aggregation
                )
                for attribution, (subject, wrong) in zip(attributions, subjects, strict=True)
            ]
            bench.folder.append(_row(bench, one, attributions, subjects, found) | {"noise": size.share} | more)


def _open_rows(bench: Bench, cell: Cell) -> list[Cell]:
    """Return the missing rows of a cell: the one by sum, and for groups also the one by mean."""
    both = [cell] if cell.grouping == SINGLE_POINTS else [cell, cell.mean]
    return [one for one in both if not bench.folder.done(bench.key(NAME, one))]


def _row(
    bench: Bench, cell: Cell, attributions: list[Any], subjects: list[tuple[Subject, np.ndarray]],
    found: list[Detection],
) -> dict[str, Any]:  # fmt: skip
    groups = bench.groups(cell, subjects[0][0])
    seconds = {part: float(np.median([one.seconds[part] for one in attributions])) for part in attributions[0].seconds}
    return {
        **bench.common(NAME),
        **bench.about(cell, attributions[0], groups),
        "key": bench.key(NAME, cell),
        "seconds": seconds,
        "accuracies": [subject.accuracy for subject, _ in subjects],
        **summary([one.auc for one in found]),
        "roc_values": [one.roc_auc for one in found],
        "roc_mean": float(np.mean([one.roc_auc for one in found])),
        "curve": _curve(found[0]),
        "model_seeds": [subject.seed for subject, _ in subjects],
    }


def _curve(found: Detection) -> list[list[float]]:
    checked = np.linspace(0, 1, CURVE_POINTS)
    return np.stack([checked, np.interp(checked, found.checked, found.found)], 1).round(4).tolist()


def _default_mode(subject: Subject) -> dict[str, float]:
    """Return the CPU seconds of Captum's TracInCP in its default mode, one backward pass per point.

    It is not timed, and the result is empty, for many points and for inputs that are not tabular.
    """
    if len(subject.train[0]) > DEFAULT_MODE_POINTS or subject.train[0].dim() > 2:
        return {}
    return {"default_mode_seconds": timed(captum_scores, subject, vectorised=False).seconds}
