"""The runs behind RESULTS.md. `python -m benchmarks results` makes those that are missing and writes the document.

Groupings are drawn with seeds on which nothing was chosen. A run that was stopped goes on where it was. Runs do not
depend on each other: two commands can work at the same time, each with some of the names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.names import (
    CG,
    EKFAC,
    EQUAL_GRAD_K_MEANS,
    EQUAL_K_MEANS,
    FISHER,
    FROM_START,
    FROM_START_3,
    GRAD_K_MEANS,
    HALVES,
    INFLUENCE,
    INFLUENCE_3,
    K_MEANS,
    KEEP_80,
    LEAVE_ONE_OUT,
    QNLI_SOURCES,
    RANDOM,
    SOURCES,
    TRACIN,
    TRAK,
    WARM_START,
    WHAT_IF,
    WHAT_IF_3,
    WITH_COPIES,
    WITH_COPIES_3,
)

SEEDS = (80, 81, 82)
"""Seeds of the groupings. Nothing was looked at with them before."""
_PLAIN = (TRACIN, INFLUENCE, INFLUENCE_3, WHAT_IF, WHAT_IF_3, WARM_START)
_ALL = (FISHER, TRAK, CG, EKFAC, *_PLAIN)
_COPIES = (WITH_COPIES, WITH_COPIES_3)
_STARTS = (FROM_START, FROM_START_3)
_REMOVALS = ("retraining", "pruning", "noisy")
_ONE_MODEL = (TRACIN, INFLUENCE, WHAT_IF, WARM_START)


@dataclass(frozen=True)
class Published:
    """A run whose rows the document shows.

    Attributes:
        tasks: names of the tasks.
        experiments: names of the experiments.
        scale: name of the scale.
        lds: sizes of LDS that replace those of the scale, as for `benchmarks.sizes.narrowed`.
    """

    tasks: tuple[str, ...]
    experiments: tuple[str, ...] = ("lds",)
    scale: str = "laptop"
    lds: Mapping[str, Any] = field(default_factory=dict)


def _lds(task: str, groups: Mapping[str, Sequence[int]], protocols: Sequence[str], **sizes: Any) -> Published:
    scale = sizes.pop("scale", "laptop")
    usual = {"methods": _PLAIN, "grouping_seeds": SEEDS, "subsets": 64, "seeds": 2}
    return Published((task,), scale=scale, lds=usual | {"groups": groups, "protocols": protocols} | sizes)


_MORE = (KEEP_80, LEAVE_ONE_OUT)
RUNS: Mapping[str, Published] = {
    "lr": _lds(
        "heloc-lr", dict.fromkeys((RANDOM, K_MEANS, GRAD_K_MEANS), (64, 256, 1024)), (HALVES, *_MORE), methods=_ALL
    ),
    "ann-s": _lds("heloc-ann-s", {GRAD_K_MEANS: [64, 256]}, (HALVES,), methods=(*_ALL, *_COPIES)),
    "ann-s-random": _lds("heloc-ann-s", {RANDOM: [256]}, (HALVES,), methods=(*_PLAIN, *_COPIES), seeds=4),
    "ann-s-more": _lds("heloc-ann-s", {GRAD_K_MEANS: [256]}, _MORE),
    "ann-m": _lds("heloc-ann-m", {GRAD_K_MEANS: [256]}, (HALVES, *_MORE), methods=(EKFAC, *_PLAIN)),
    "ann-m-random": _lds("heloc-ann-m", {RANDOM: [256]}, (HALVES,), methods=(*_PLAIN, *_COPIES)),
    "mnist": _lds(
        "mnist-ann-l", {EQUAL_GRAD_K_MEANS: [1024]}, (HALVES, KEEP_80), methods=(EKFAC, *_PLAIN, *_STARTS), subsets=32
    ),
    "mnist-4000": _lds(
        "mnist-ann-l", {EQUAL_K_MEANS: [100, 40]}, (HALVES,), methods=(*_PLAIN, *_STARTS),
        subsets=32, points=4_000, epochs=15,
    ),
    "cifar": _lds(
        "cifar10-resnet18", {EQUAL_GRAD_K_MEANS: [50]}, (HALVES,), methods=(*_ONE_MODEL, FROM_START),
        scale="quick", subsets=32, points=1_000, epochs=5,
    ),
    "qnli": _lds(QNLI_SOURCES, {EQUAL_GRAD_K_MEANS: [60]}, (HALVES,), methods=(EKFAC, *_ONE_MODEL), subsets=32),
    "qnli-sources": _lds(
        QNLI_SOURCES, {SOURCES: [60]}, (HALVES,), methods=(EKFAC, *_ONE_MODEL), subsets=32, grouping_seeds=SEEDS[:1]
    ),
    "removal-lr": Published(("heloc-lr",), _REMOVALS),
    "removal": Published(("heloc-ann-s", "heloc-ann-m", "mnist-ann-l"), _REMOVALS, scale="quick"),
    "dattri-lr": Published(("dattri-mnist-lr",)),
    "dattri-mlp": Published(("dattri-mnist-mlp",)),
}  # fmt: skip
"""Name of a run → what it runs."""


def run(names: Sequence[str], out: Path, data_dir: Path | None = None) -> list[Path]:
    """Make the runs that are missing, and return the folders of all runs that are finished.

    Args:
        names: names of `RUNS`.
        out: where the result folders are.
        data_dir: folder with the data sets; if a data set is not in it, other sources are tried.
    """
    import torch

    from benchmarks import experiments
    from benchmarks.results import FolderInUse, ResultFolder, read_config
    from benchmarks.scales import SCALES
    from benchmarks.sizes import narrowed

    for name in names:
        one, folder = RUNS[name], folder_of(name, out)
        if folder is not None and read_config(folder)["finished"]:
            continue
        print(f"\n{name}: {', '.join(one.experiments)} on {', '.join(one.tasks)}, scale {one.scale}\n", flush=True)
        config = vars(one) | {"command": "results", "arguments": f"results {name}", "threads": torch.get_num_threads()}
        try:
            opened = ResultFolder.open(name, config, folder, out)
        except FolderInUse as error:
            print(error)
            continue
        scale = SCALES[one.scale]
        scale = narrowed(scale, one.tasks, one.lds) if one.lds else scale
        experiments.run(one.experiments, one.tasks, scale, opened, data_dir)
        opened.finish()
    found = [folder_of(name, out) for name in RUNS]
    return [folder for folder in found if folder is not None and read_config(folder)["finished"]]


def folder_of(name: str, out: Path) -> Path | None:
    """Return the newest folder of a run; None if the run was never begun."""
    found = sorted(path for path in out.glob(f"*-{name}") if path.name.split("-", 2)[-1] == name)
    return found[-1] if found else None
