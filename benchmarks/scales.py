"""How much of everything: the scales `smoke`, `quick`, `laptop` and `paper`, as numbers, nothing else.

Data sets are called heloc, mnist, cifar10, qnli; tasks (a data set with a model) as in `benchmarks.tasks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.names import CG, FISHER, GRAD_K_MEANS, GROUPINGS, PAPER_METHODS, PER_POINT, RANDOM, RATES, TRACIN


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
class ExperimentScale:
    """Size of the paper's experiments.

    Attributes:
        model_seeds: retrainings behind every accuracy.
        grouping_seeds: groupings drawn for TracIn; other methods have one.
        group_sizes: mean group sizes; 1 is ordinary attribution.
        removed: shares removed for the retraining score.
        pruned: shares removed for pruning.
        noise: share of flipped labels.
        lds_subsets: models retrained on random halves of the groups.
        left_out_groups: at most that many groups are left out one by one.
        trak_models: models of the TRAK ensemble.
        lissa_depth: steps of LiSSA.
        lissa_repeats: LiSSA runs averaged.
        groupings: which groupings.
        methods: which attribution methods.
        retrained_methods: those whose most or least important points are removed; None for all of `methods`.
        retrained_sizes: group sizes models are retrained for (all experiments but noisy labels); None for all of
            `group_sizes`.
        retrained_groupings: likewise; None for all of `groupings`.
        noisy_seeds: noises, each with a model trained on it.
        lds_seeds: models retrained on every half, and without every group left out.
        lds_grouping_seeds: groupings drawn for LDS, each with halves of its own; at most `grouping_seeds` count.
        train: training points; None for those of the data set at this scale.
        test: test points; likewise.
        epochs: of models that are retrained, and of the model whose scores decide on what; None for the task's epochs,
            which noisy labels are always trained with.
    """

    model_seeds: int
    grouping_seeds: int
    group_sizes: tuple[int, ...]
    removed: tuple[float, ...] = (0.01, 0.05, 0.1, 0.2)
    pruned: tuple[float, ...] = (0.25, 0.5, 0.75)
    noise: float = 0.2
    lds_subsets: int = 50
    left_out_groups: int = 32
    trak_models: int = 10
    lissa_depth: int = 200
    lissa_repeats: int = 20
    groupings: tuple[str, ...] = GROUPINGS
    methods: tuple[str, ...] = (*PAPER_METHODS, CG, RATES, PER_POINT)
    retrained_methods: tuple[str, ...] | None = None
    retrained_sizes: tuple[int, ...] | None = None
    retrained_groupings: tuple[str, ...] | None = None
    noisy_seeds: int = 10
    lds_seeds: int = 10
    lds_grouping_seeds: int = 3
    train: int | None = None
    test: int | None = None
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
    """

    name: str
    about: str
    data: Mapping[str, DataScale]
    epochs: Mapping[str, int]
    resnet_width: int
    text_length: int
    check: Mapping[str, CheckScale]
    experiments: Mapping[str, ExperimentScale]


def _checks(heloc: CheckScale, mnist: CheckScale, cifar10: CheckScale, qnli: CheckScale) -> dict[str, CheckScale]:
    """Task → size of its check, the same for the three models of HELOC."""
    return {
        **dict.fromkeys(("heloc-lr", "heloc-ann-s", "heloc-ann-m"), heloc),
        "mnist-ann-l": mnist,
        "cifar10-resnet18": cifar10,
        "qnli-bert": qnli,
    }


_PAPER_SIZES = (1, 4, 16, 64, 256, 1024)
_TWO_GROUPINGS = (RANDOM, GRAD_K_MEANS)
_SMALL = ExperimentScale(
    model_seeds=2, grouping_seeds=1, group_sizes=(1, 16), removed=(0.2,), pruned=(0.5,), lds_subsets=8,
    left_out_groups=4, trak_models=1, lissa_depth=10, lissa_repeats=1, groupings=_TWO_GROUPINGS, noisy_seeds=1,
    lds_seeds=1,
)  # fmt: skip
_QUICK = ExperimentScale(
    model_seeds=3, grouping_seeds=1, group_sizes=(1, 16, 64, 256), removed=(0.05, 0.2), pruned=(0.5,), lds_subsets=24,
    left_out_groups=16, trak_models=2, lissa_depth=50, lissa_repeats=1, groupings=_TWO_GROUPINGS, noisy_seeds=1,
    lds_seeds=1,
)  # fmt: skip
_QUICK_LR = replace(_QUICK, lds_subsets=100, lds_seeds=2)  # trained in hundredths of a second
_FEW_METHODS = (TRACIN, FISHER, PER_POINT)
_SMALL_NOISY = replace(_SMALL, methods=_FEW_METHODS, lds_subsets=0, removed=(), pruned=())  # nothing is retrained
_QUICK_NOISY = replace(_QUICK, methods=_FEW_METHODS, lds_subsets=0, removed=(), pruned=())
_PAPER = ExperimentScale(model_seeds=10, grouping_seeds=3, group_sizes=_PAPER_SIZES)
_LR = replace(_PAPER, lds_subsets=100, noisy_seeds=5, lds_seeds=2)
_ANN_S = replace(_LR, grouping_seeds=2, lds_subsets=32, noisy_seeds=3, lds_grouping_seeds=1)
_ANN_M = replace(_ANN_S, epochs=50)  # the paper's 400, for thousands of retrained models, would take a night
_ANN_L = ExperimentScale(
    model_seeds=7, grouping_seeds=1, group_sizes=_PAPER_SIZES, removed=(0.2,), lds_subsets=24, left_out_groups=0,
    trak_models=1, lissa_repeats=1, methods=(*PAPER_METHODS, CG, PER_POINT),
    retrained_methods=(*PAPER_METHODS, CG), retrained_sizes=(1, 64, 256, 1024), retrained_groupings=_TWO_GROUPINGS,
    noisy_seeds=2, lds_seeds=2, epochs=5,
)  # fmt: skip
_CIFAR = replace(
    _ANN_L, model_seeds=2, group_sizes=(1, 16, 64, 256), groupings=_TWO_GROUPINGS, pruned=(0.5,), lds_subsets=12,
    lissa_depth=50, methods=(*PAPER_METHODS, PER_POINT), retrained_methods=(TRACIN,), retrained_sizes=(1, 64),
    noisy_seeds=1, lds_seeds=1, epochs=None, train=4_000, test=1_000,
)  # fmt: skip
_QNLI = replace(
    _CIFAR, group_sizes=(1, 64), groupings=(GRAD_K_MEANS,), retrained_groupings=None, lds_subsets=0,
    methods=_FEW_METHODS, epochs=3, train=1_000, test=250,
)  # fmt: skip
_PAPER_EPOCHS = {
    "heloc-lr": 200, "heloc-ann-s": 300, "heloc-ann-m": 400, "mnist-ann-l": 50, "cifar10-resnet18": 50, "qnli-bert": 3,
}  # fmt: skip

SCALES: dict[str, Scale] = {
    "smoke": Scale(
        name="smoke",
        about="seconds: shows that everything runs; its numbers mean nothing",
        data={
            "heloc": DataScale(256, 64),
            "mnist": DataScale(256, 64),
            "cifar10": DataScale(64, 16),
            "qnli": DataScale(48, 16),
        },
        epochs={
            "heloc-lr": 2,
            "heloc-ann-s": 2,
            "heloc-ann-m": 2,
            "mnist-ann-l": 1,
            "cifar10-resnet18": 1,
            "qnli-bert": 1,
        },
        resnet_width=4,
        text_length=16,
        check=_checks(
            heloc=CheckScale(
                points=128, dattri_points=128, tests=4, group_size=8, batch=64, curvature_points=32, depth=3
            ),
            mnist=CheckScale(
                points=64, dattri_points=64, tests=4, group_size=8, batch=64, curvature_points=16, depth=3
            ),
            cifar10=CheckScale(
                points=32, dattri_points=32, tests=2, group_size=8, batch=16, curvature_points=8, depth=2
            ),
            qnli=CheckScale(
                points=24,
                dattri_points=24,
                tests=2,
                group_size=8,
                batch=8,
                curvature_points=4,
                depth=2,
                last_parameters=200_000,
            ),
        ),
        experiments={
            "heloc-lr": _SMALL,
            "heloc-ann-s": _SMALL,
            "heloc-ann-m": _SMALL,
            "mnist-ann-l": _SMALL,
            "cifar10-resnet18": _SMALL_NOISY,
            "qnli-bert": _SMALL_NOISY,
        },
    ),
    "quick": Scale(
        name="quick",
        about="minutes on two cores: all four data sets, the two large ones reduced (the default)",
        data={
            "heloc": DataScale(),
            "mnist": DataScale(10_000, 2_000),
            "cifar10": DataScale(1_000, 500),
            "qnli": DataScale(128, 64),
        },
        epochs={
            "heloc-lr": 20,
            "heloc-ann-s": 20,
            "heloc-ann-m": 20,
            "mnist-ann-l": 5,
            "cifar10-resnet18": 4,
            "qnli-bert": 1,
        },
        resnet_width=8,
        text_length=32,
        check=_checks(
            heloc=CheckScale(
                points=7_896, dattri_points=2_048, tests=20, group_size=64, batch=512, curvature_points=512, depth=10
            ),
            mnist=CheckScale(
                points=2_048, dattri_points=256, tests=20, group_size=64, batch=512, curvature_points=128, depth=5
            ),
            cifar10=CheckScale(
                points=256, dattri_points=64, tests=2, group_size=16, batch=48, curvature_points=16, depth=3
            ),
            qnli=CheckScale(
                points=32,
                dattri_points=16,
                tests=2,
                group_size=8,
                batch=16,
                curvature_points=4,
                depth=2,
                last_parameters=2_000_000,
            ),
        ),
        experiments={
            "heloc-lr": _QUICK_LR,
            "heloc-ann-s": _QUICK,
            "heloc-ann-m": _QUICK,
            "mnist-ann-l": _QUICK,
            "cifar10-resnet18": _QUICK_NOISY,
            "qnli-bert": _QUICK_NOISY,
        },
    ),
    "laptop": Scale(
        name="laptop",
        about="hours on two cores: HELOC and MNIST at the paper's size, CIFAR-10 and QNLI reduced",
        data={
            "heloc": DataScale(),
            "mnist": DataScale(),
            "cifar10": DataScale(10_000, 2_000),
            "qnli": DataScale(4_000, 1_000),
        },
        epochs={
            "heloc-lr": 200,
            "heloc-ann-s": 300,
            "heloc-ann-m": 400,
            "mnist-ann-l": 50,
            "cifar10-resnet18": 15,
            "qnli-bert": 4,
        },
        resnet_width=8,
        text_length=64,
        check=_checks(
            heloc=CheckScale(
                points=7_896, dattri_points=7_896, tests=100, group_size=64, batch=512, curvature_points=2_048, depth=20
            ),
            mnist=CheckScale(
                points=20_000, dattri_points=4_096, tests=50, group_size=64, batch=512, curvature_points=512, depth=10
            ),
            cifar10=CheckScale(
                points=2_048, dattri_points=512, tests=10, group_size=64, batch=64, curvature_points=64, depth=5
            ),
            qnli=CheckScale(
                points=256,
                dattri_points=128,
                tests=4,
                group_size=32,
                batch=16,
                curvature_points=16,
                depth=3,
                last_parameters=4_000_000,
            ),
        ),
        experiments={
            "heloc-lr": _LR,
            "heloc-ann-s": _ANN_S,
            "heloc-ann-m": _ANN_M,
            "mnist-ann-l": _ANN_L,
            "cifar10-resnet18": _CIFAR,
            "qnli-bert": _QNLI,
        },
    ),
    "paper": Scale(
        name="paper",
        about="everything at the paper's size, for a GPU",
        data={"heloc": DataScale(), "mnist": DataScale(), "cifar10": DataScale(), "qnli": DataScale(50_000, None)},
        epochs=_PAPER_EPOCHS,
        resnet_width=64,
        text_length=128,
        check=_checks(
            heloc=CheckScale(
                points=7_896,
                dattri_points=7_896,
                tests=1_000,
                group_size=64,
                batch=512,
                curvature_points=7_896,
                depth=200,
            ),
            mnist=CheckScale(
                points=60_000,
                dattri_points=10_000,
                tests=100,
                group_size=64,
                batch=512,
                curvature_points=5_000,
                depth=50,
            ),
            cifar10=CheckScale(
                points=10_000, dattri_points=2_000, tests=20, group_size=64, batch=32, curvature_points=512, depth=20
            ),
            qnli=CheckScale(
                points=2_000,
                dattri_points=512,
                tests=10,
                group_size=64,
                batch=8,
                curvature_points=64,
                depth=10,
                last_parameters=8_000_000,
            ),
        ),
        experiments=dict.fromkeys(_PAPER_EPOCHS, _PAPER),
    ),
}
