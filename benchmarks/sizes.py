"""What is said about the size of a run, one dataclass for every experiment; the numbers are in `benchmarks.scales`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.names import LEAVE_ONE_OUT, PROTOCOLS


@dataclass(frozen=True)
class DataScale:
    """Size of a data set.

    Attributes:
        train: training points; None for all there are.
        test: test points; None for all there are.
    """

    train: int | None = None
    test: int | None = None


@dataclass(frozen=True)
class CheckScale:
    """Size of the check of one task against the original toolkits.

    Attributes:
        points: training points the original scores one by one; the group version gets the same. None for all.
        dattri_points: the same for dattri, whose time for a point is many times that of the others.
        tests: test points; None for all.
        group_size: mean size of the (uneven) groups.
        batch: training points in a batch of the original, which holds that many gradients at once.
        curvature_points: training points the Hessian is taken over.
        depth: steps of LiSSA; vectors of Arnoldi's Krylov space.
        last_parameters: at most that many parameters, the last ones, where a row of all of them is formed for every
            point (dattri, TRAK, Fisher); None for all.
    """

    points: int | None
    dattri_points: int
    tests: int | None
    group_size: int
    batch: int
    curvature_points: int
    depth: int
    last_parameters: int | None = None


@dataclass(frozen=True)
class MethodScale:
    """What attribution methods take.

    Attributes:
        trak_models: models of the TRAK ensemble.
        lissa_depth: steps of LiSSA.
        lissa_repeats: LiSSA runs averaged.
    """

    trak_models: int = 10
    lissa_depth: int = 200
    lissa_repeats: int = 20


@dataclass(frozen=True)
class CellScale:
    """Which methods an experiment tries on which groups.

    Attributes:
        methods: which attribution methods.
        groups: grouping → mean group sizes; single points are a grouping of size 1.
        grouping_seeds: of the groupings drawn, all for every method in LDS, for TracIn elsewhere; else the first.
        refitted_groups: what-if and warm starts take at most that many groups.
    """

    methods: tuple[str, ...]
    groups: Mapping[str, tuple[int, ...]]
    grouping_seeds: Sequence[int] = (0,)
    refitted_groups: int = 130


@dataclass(frozen=True)
class NoisyScale:
    """Noisy labels.

    Attributes:
        cells: methods and groups.
        seeds: noises, each with a model trained on it.
        share: of the labels that are flipped.
    """

    cells: CellScale
    seeds: int = 10
    share: float = 0.2


@dataclass(frozen=True)
class RemovalScale:
    """Retraining score and pruning.

    Attributes:
        cells: methods and groups; pruning takes the two largest sizes of random and Grad-K-Means groups among them.
        seeds: retrained models behind every accuracy.
        removed: shares of the most important points removed for the retraining score.
        pruned: shares of the least important points removed for pruning.
    """

    cells: CellScale
    seeds: int = 10
    removed: tuple[float, ...] = (0.01, 0.05, 0.1, 0.2)
    pruned: tuple[float, ...] = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class LdsScale:
    """Fidelity to real retraining.

    Attributes:
        cells: methods and groups.
        subsets: choices of groups that models are retrained on, for every grouping and protocol.
        seeds: models retrained on every choice.
        protocols: which of `names.PROTOCOLS`; others than halves take at most `cells.refitted_groups` groups.
        left_out_groups: at most that many groups are left out one by one.
        trios: how many times three models are explained, together and the first of them alone; of other seeds each.
        nearby: copies of every model that what-if explains.
        settled_checkpoints: whether it explains all checkpoints of a model, settled, in place of the last.
    """

    cells: CellScale
    subsets: int = 64
    seeds: int = 2
    protocols: tuple[str, ...] = PROTOCOLS
    left_out_groups: int = 32
    trios: int = 1
    nearby: int = 0
    settled_checkpoints: bool = False


@dataclass(frozen=True)
class DattriScale:
    """dattri's public settings, by default as they were published.

    Attributes:
        train: the first training points.
        test: the first test points.
        subsets: random halves of the training points.
        seeds: models trained on every half.
        epochs: task → epochs of training.
        margin_models: models that influence on margins is averaged over, beside one.
        tracin_models: models that TracIn is averaged over.
        trak_models: models of the TRAK ensembles.
        trak_dimensions: of their projections.
    """

    train: int = 5_000
    test: int = 500
    subsets: int = 50
    seeds: int = 2
    epochs: Mapping[str, int] = field(default_factory=lambda: {"dattri-mnist-lr": 20, "dattri-mnist-mlp": 50})
    margin_models: tuple[int, ...] = (3, 5)
    tracin_models: int = 10
    trak_models: tuple[int, ...] = (10, 50)
    trak_dimensions: int = 512


@dataclass(frozen=True)
class ExperimentScale:
    """Size of the experiments on one task; one that is None is not run.

    Attributes:
        noisy: noisy labels.
        removal: retraining score and pruning.
        lds: fidelity to real retraining.
        methods: what attribution methods take, in all of them.
        data: points, where they are fewer than the data set's own at this scale.
        epochs: of models that are retrained, and of the model whose scores decide on what; None for the task's epochs,
            which noisy labels are always trained with.
    """

    noisy: NoisyScale | None
    removal: RemovalScale | None = None
    lds: LdsScale | None = None
    methods: MethodScale = field(default_factory=MethodScale)
    data: DataScale = field(default_factory=DataScale)
    epochs: int | None = None


@dataclass(frozen=True)
class Scale:
    """All numbers of a run.

    Attributes:
        name: ``"smoke"``, ``"quick"``, ``"laptop"`` or ``"paper"``.
        about: one line for `--help`.
        data: data set → its size.
        epochs: task → epochs of training.
        resnet_width: channels of ResNet-18's first stage (64 in the paper).
        text_length: tokens per question and sentence.
        check: task → size of the check.
        experiments: task → size of the experiments.
        dattri: size of the tasks with dattri's public settings.
    """

    name: str
    about: str
    data: Mapping[str, DataScale]
    epochs: Mapping[str, int]
    resnet_width: int
    text_length: int
    check: Mapping[str, CheckScale]
    experiments: Mapping[str, ExperimentScale]
    dattri: DattriScale = field(default_factory=DattriScale)


def narrowed(scale: Scale, tasks: Sequence[str], chosen: Mapping[str, Any]) -> Scale:
    """A scale with other sizes of LDS for some tasks: those that the command line gives in place of the scale's own.

    Args:
        scale: the scale.
        tasks: which tasks.
        chosen: fields of `LdsScale` and `CellScale`, and `points` and `epochs` of training, those that are given.
    """
    sizes, of_lds = dict(scale.experiments), dict(chosen)
    data = {"train": of_lds.pop("points")} if "points" in of_lds else {}
    epochs = of_lds.pop("epochs", None)
    of_cells = {name: of_lds.pop(name) for name in ("methods", "groups", "grouping_seeds") if name in of_lds}
    if LEAVE_ONE_OUT in of_lds.get("protocols", ()):
        of_lds["left_out_groups"] = sys.maxsize  # asked for by name
    for name in tasks:
        size = sizes[name]
        if size.lds is not None:
            lds = replace(size.lds, cells=replace(size.lds.cells, **of_cells), **of_lds)
            sizes[name] = replace(size, lds=lds, data=replace(size.data, **data), epochs=epochs or size.epochs)
    return replace(scale, experiments=sizes)
