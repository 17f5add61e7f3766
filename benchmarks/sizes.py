"""Dataclasses that hold the size of a run, one for each experiment. The numbers are in `benchmarks.scales`."""

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
        train: number of training points; None for all.
        test: number of test points; None for all.
    """

    train: int | None = None
    test: int | None = None


@dataclass(frozen=True)
class CheckScale:
    """Size of the check of one task against the original toolkits.

    Attributes:
        points: training points that the original scores one by one; the group version gets the same points. None for
            all.
        dattri_points: the same for dattri, which takes many times longer for a point than the other toolkits.
        tests: number of test points; None for all.
        group_size: mean size of the (uneven) groups.
        batch: training points in a batch of the original, which holds one gradient for each of them at once.
        curvature_points: training points that the Hessian is computed on.
        depth: number of LiSSA steps, and of vectors in Arnoldi's Krylov space.
        last_parameters: methods that form a row over the parameters for every point (dattri, TRAK, Fisher) use at most
            this many parameters, the last ones of the model; None for all.
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
    """Settings of the attribution methods.

    Attributes:
        trak_models: number of models in the TRAK ensemble.
        lissa_depth: number of LiSSA steps.
        lissa_repeats: number of LiSSA runs that are averaged.
    """

    trak_models: int = 10
    lissa_depth: int = 200
    lissa_repeats: int = 20


@dataclass(frozen=True)
class CellScale:
    """Which methods an experiment tries on which groups.

    Attributes:
        methods: names of the attribution methods.
        groups: grouping → mean group sizes; single points are a grouping of size 1.
        grouping_seeds: seeds that the groupings are drawn with. In LDS every method uses all of them. In the other
            experiments TracIn uses all of them and the other methods use the first.
        refitted_groups: what-if and warm starts are run only if there are at most this many groups.
    """

    methods: tuple[str, ...]
    groups: Mapping[str, tuple[int, ...]]
    grouping_seeds: Sequence[int] = (0,)
    refitted_groups: int = 130


@dataclass(frozen=True)
class NoisyScale:
    """Size of the experiment with noisy labels.

    Attributes:
        cells: methods and groups.
        seeds: how many times noise is drawn; one model is trained on each.
        share: share of the labels that are flipped.
    """

    cells: CellScale
    seeds: int = 10
    share: float = 0.2


@dataclass(frozen=True)
class RemovalScale:
    """Size of the experiments retraining score and pruning.

    Attributes:
        cells: methods and groups. Pruning takes single points and the two largest sizes of random and Grad-K-Means
            groups among them.
        seeds: number of retrained models for every accuracy.
        removed: shares of the most important points removed for the retraining score.
        pruned: shares of the least important points removed for pruning.
    """

    cells: CellScale
    seeds: int = 10
    removed: tuple[float, ...] = (0.01, 0.05, 0.1, 0.2)
    pruned: tuple[float, ...] = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class LdsScale:
    """Size of the experiment LDS: fidelity to real retraining.

    Attributes:
        cells: methods and groups.
        subsets: number of choices of groups that models are retrained on, for every grouping and protocol.
        seeds: number of models retrained on every choice.
        protocols: which of `names.PROTOCOLS`. All but halves are run only with at most `cells.refitted_groups` groups.
        left_out_groups: groups are left out one by one only if there are at most this many.
        trios: number of trios of models that are explained. A trio is explained as a whole, and its first model alone.
            Each trio has its own seeds.
        settled_checkpoints: whether what-if explains all checkpoints of a model, settled, instead of the last one.
    """

    cells: CellScale
    subsets: int = 64
    seeds: int = 2
    protocols: tuple[str, ...] = PROTOCOLS
    left_out_groups: int = 32
    trios: int = 1
    settled_checkpoints: bool = False


@dataclass(frozen=True)
class DattriScale:
    """Size of the tasks with dattri's public settings; the defaults are as published.

    Attributes:
        train: number of training points, taken from the start of the data set.
        test: number of test points, taken from the start of the data set.
        subsets: number of random halves of the training points.
        seeds: number of models trained on every half.
        epochs: task → epochs of training.
        margin_models: numbers of models that influence on margins is averaged over, in addition to one model alone.
        tracin_models: number of models that TracIn is averaged over.
        trak_models: numbers of models in the TRAK ensembles.
        trak_dimensions: dimension of TRAK's projections.
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
    """Size of the experiments on one task; an experiment that is None is not run.

    Attributes:
        noisy: noisy labels.
        removal: retraining score and pruning.
        lds: fidelity to real retraining.
        methods: settings of the attribution methods, in all experiments.
        data: number of points if the experiments use fewer than the scale does; fields that are None take the scale's.
        epochs: epochs of the models that are retrained and of the model that is explained; None for the task's epochs.
            The models for noisy labels are always trained for the task's epochs.
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
    """Return a copy of a scale in which some tasks have the sizes of LDS that the command line gives.

    Args:
        scale: the scale.
        tasks: names of the tasks.
        chosen: the sizes that are given: fields of `LdsScale` and `CellScale`, and `points` and `epochs` of training.
    """
    sizes, of_lds = dict(scale.experiments), dict(chosen)
    data = {"train": of_lds.pop("points")} if "points" in of_lds else {}
    epochs = of_lds.pop("epochs", None)
    of_cells = {name: of_lds.pop(name) for name in ("methods", "groups", "grouping_seeds") if name in of_lds}
    if LEAVE_ONE_OUT in of_lds.get("protocols", ()):
        of_lds["left_out_groups"] = sys.maxsize  # no limit, because the user asks for the protocol by name
    for name in tasks:
        size = sizes[name]
        if size.lds is not None:
            lds = replace(size.lds, cells=replace(size.lds.cells, **of_cells), **of_lds)
            sizes[name] = replace(size, lds=lds, data=replace(size.data, **data), epochs=epochs or size.epochs)
    return replace(scale, experiments=sizes)
