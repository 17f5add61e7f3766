"""The scales `smoke`, `quick`, `laptop` and `paper`: the numbers that set the size of a run, and nothing else.

`benchmarks.sizes` says what the numbers mean. The data sets are called heloc, mnist, cifar10 and qnli. The tasks (a
data set with a model) have the names of `benchmarks.tasks`.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.names import (
    AVERAGED,
    CG,
    EKFAC,
    EQUAL_GRAD_K_MEANS,
    EQUAL_K_MEANS,
    FISHER,
    FROM_START,
    GRAD_K_MEANS,
    GROUPINGS,
    HALVES,
    INFLUENCE,
    INFLUENCE_3,
    K_MEANS,
    OURS,
    PAPER_METHODS,
    PER_POINT,
    QNLI_SOURCES,
    RANDOM,
    RATES,
    SINGLE_POINTS,
    SOURCES,
    TRACIN,
    WARM_START,
    WHAT_IF,
    WHAT_IF_3,
)
from benchmarks.sizes import (
    CellScale,
    CheckScale,
    DataScale,
    DattriScale,
    ExperimentScale,
    LdsScale,
    MethodScale,
    NoisyScale,
    RemovalScale,
    Scale,
)


def _checks(heloc: CheckScale, mnist: CheckScale, cifar10: CheckScale, qnli: CheckScale) -> dict[str, CheckScale]:
    """Return task → size of its check. The three models of HELOC have the same size."""
    return dict(zip(_PAPER_EPOCHS, (heloc, heloc, heloc, mnist, cifar10, qnli), strict=True))


def _groups(groupings: tuple[str, ...], *sizes: int) -> dict[str, tuple[int, ...]]:
    """Return grouping → group sizes: single points, and the given groupings, all with the same sizes."""
    return {SINGLE_POINTS: (1,), **dict.fromkeys(groupings, sizes)}


_PAPER_EPOCHS = {
    "heloc-lr": 200, "heloc-ann-s": 300, "heloc-ann-m": 400, "mnist-ann-l": 50, "cifar10-resnet18": 50, "qnli-bert": 3,
}  # fmt: skip
_LARGE_TASKS = ("cifar10-resnet18", "qnli-bert")
_TWO_GROUPINGS = (RANDOM, GRAD_K_MEANS)
_METHODS = (*PAPER_METHODS, CG, *OURS, RATES, PER_POINT, WHAT_IF, WARM_START)
_FEW_METHODS = (TRACIN, FISHER, PER_POINT)
_LDS_METHODS = (*_METHODS, INFLUENCE_3, WHAT_IF_3)  # the last two average over three models
_FEW_LDS_METHODS = (TRACIN, CG, INFLUENCE, WHAT_IF, FROM_START, WARM_START)  # for trainings that stop early

_SMALL_CELLS = CellScale(_METHODS, _groups(_TWO_GROUPINGS, 16))
_SMALL = ExperimentScale(
    NoisyScale(_SMALL_CELLS, seeds=1),
    RemovalScale(_SMALL_CELLS, seeds=2, removed=(0.2,), pruned=(0.5,)),
    LdsScale(replace(_SMALL_CELLS, methods=(*_METHODS, *AVERAGED, FROM_START)), subsets=8, seeds=1, left_out_groups=4),
    MethodScale(trak_models=1, lissa_depth=10, lissa_repeats=1),
)
_SMALL_NOISY = replace(
    _SMALL, noisy=NoisyScale(replace(_SMALL_CELLS, methods=_FEW_METHODS), seeds=1), removal=None, lds=None
)

_QUICK_CELLS = CellScale(_METHODS, _groups(_TWO_GROUPINGS, 16, 64, 256))
_QUICK_LDS = LdsScale(_QUICK_CELLS, subsets=24, seeds=1, protocols=(HALVES,), left_out_groups=16)
_QUICK = ExperimentScale(
    NoisyScale(_QUICK_CELLS, seeds=1),
    RemovalScale(_QUICK_CELLS, seeds=3, removed=(0.05, 0.2), pruned=(0.5,)),
    _QUICK_LDS,
    MethodScale(trak_models=2, lissa_depth=50, lissa_repeats=1),
)
_QUICK_LR = replace(_QUICK, lds=replace(_QUICK_LDS, subsets=100, seeds=2))  # LR trains in hundredths of a second
_QUICK_NOISY = replace(
    _QUICK, noisy=NoisyScale(replace(_QUICK_CELLS, methods=_FEW_METHODS), seeds=1), removal=None, lds=None
)
_QUICK_CIFAR = replace(
    _QUICK_NOISY,
    lds=LdsScale(CellScale(_FEW_LDS_METHODS, {EQUAL_GRAD_K_MEANS: (50,)}, range(2)), subsets=16, protocols=(HALVES,)),
)

_PAPER_CELLS = CellScale(_METHODS, _groups(GROUPINGS, 4, 16, 64, 256, 1024), grouping_seeds=range(3))
_PAPER_LDS = replace(_PAPER_CELLS, methods=_LDS_METHODS)
_PAPER = ExperimentScale(NoisyScale(_PAPER_CELLS), RemovalScale(_PAPER_CELLS), LdsScale(_PAPER_LDS, seeds=10))
_LR = replace(
    _PAPER, noisy=NoisyScale(_PAPER_CELLS, seeds=5),
    lds=LdsScale(replace(_PAPER_LDS, groups=_groups((RANDOM, K_MEANS, GRAD_K_MEANS), 64, 256, 1024))),
)  # fmt: skip
_ANN_CELLS = replace(_PAPER_CELLS, grouping_seeds=range(2))
_ANN_S = replace(
    _PAPER, noisy=NoisyScale(_ANN_CELLS, seeds=3), removal=RemovalScale(_ANN_CELLS),
    lds=LdsScale(replace(_PAPER_LDS, groups={GRAD_K_MEANS: (256, 64), RANDOM: (256,), SINGLE_POINTS: (1,)})),
)  # fmt: skip
_ANN_M = replace(
    _ANN_S, epochs=50,  # with the paper's 400, thousands of retrained models would take a night
    lds=LdsScale(replace(_PAPER_LDS, groups=_groups(_TWO_GROUPINGS, 256))),
)  # fmt: skip
_ANN_L_METHODS = (*PAPER_METHODS, CG, PER_POINT, WHAT_IF, WARM_START)
_ANN_L = ExperimentScale(
    NoisyScale(replace(_PAPER_CELLS, methods=_ANN_L_METHODS, grouping_seeds=range(1)), seeds=2),
    RemovalScale(
        CellScale((*PAPER_METHODS, CG, WHAT_IF, WARM_START), _groups(_TWO_GROUPINGS, 64, 256, 1024)),
        seeds=7,
        removed=(0.2,),
    ),
    LdsScale(CellScale(_FEW_LDS_METHODS, {EQUAL_GRAD_K_MEANS: (1024,), EQUAL_K_MEANS: (1024,)}, range(3)), subsets=32),
    MethodScale(trak_models=1, lissa_repeats=1),
    epochs=5,
)
_CIFAR = ExperimentScale(
    NoisyScale(CellScale((*PAPER_METHODS, PER_POINT), _groups(_TWO_GROUPINGS, 16, 64, 256)), seeds=1),
    RemovalScale(
        CellScale((TRACIN, WHAT_IF), _groups(_TWO_GROUPINGS, 64)), seeds=2, removed=(0.2,), pruned=(0.5,)
    ),
    LdsScale(CellScale(_FEW_LDS_METHODS, {EQUAL_GRAD_K_MEANS: (200,), EQUAL_K_MEANS: (200,)}, range(3)), subsets=32),
    MethodScale(trak_models=1, lissa_depth=50, lissa_repeats=1),
    DataScale(4_000, 1_000),
)  # fmt: skip
_QNLI = replace(
    _CIFAR,
    noisy=NoisyScale(CellScale(_FEW_METHODS, _groups((GRAD_K_MEANS,), 64)), seeds=1),
    removal=RemovalScale(
        CellScale((TRACIN, WHAT_IF), _groups((GRAD_K_MEANS,), 64)), seeds=2, removed=(0.2,), pruned=(0.5,)
    ),
    lds=LdsScale(
        CellScale((TRACIN, WHAT_IF, WARM_START), {EQUAL_GRAD_K_MEANS: (50,)}), subsets=12, protocols=(HALVES,)
    ),
    data=DataScale(1_000, 250),
    epochs=3,
)
_SOURCES = ExperimentScale(
    None,
    lds=LdsScale(
        CellScale((TRACIN, EKFAC, WHAT_IF), {SOURCES: (60,), EQUAL_GRAD_K_MEANS: (60,)}),
        subsets=32,
        protocols=(HALVES,),
    ),
    data=DataScale(960, 300),
    epochs=2,
)
_FEW_SOURCES = replace(_SOURCES, data=DataScale(32, 16), epochs=1)

_FEW_DATTRI = DattriScale(
    train=100, test=20, subsets=6, epochs={"dattri-mnist-lr": 2, "dattri-mnist-mlp": 2}, margin_models=(2,),
    tracin_models=2, trak_models=(2,), trak_dimensions=16,
)  # fmt: skip

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
        epochs=dict(zip(_PAPER_EPOCHS, (2, 2, 2, 1, 1, 1), strict=True)),
        resnet_width=4,
        text_length=16,
        check=_checks(
            CheckScale(128, 128, tests=4, group_size=8, batch=64, curvature_points=32, depth=3),
            CheckScale(64, 64, tests=4, group_size=8, batch=64, curvature_points=16, depth=3),
            CheckScale(32, 32, tests=2, group_size=8, batch=16, curvature_points=8, depth=2),
            CheckScale(24, 24, tests=2, group_size=8, batch=8, curvature_points=4, depth=2, last_parameters=200_000),
        ),
        experiments=dict.fromkeys(_PAPER_EPOCHS, _SMALL)
        | dict.fromkeys(_LARGE_TASKS, _SMALL_NOISY)
        | {QNLI_SOURCES: _FEW_SOURCES},
        dattri=_FEW_DATTRI,
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
        epochs=dict(zip(_PAPER_EPOCHS, (20, 20, 20, 5, 4, 1), strict=True)),
        resnet_width=8,
        text_length=16,
        check=_checks(
            CheckScale(7_896, 2_048, tests=20, group_size=64, batch=512, curvature_points=512, depth=10),
            CheckScale(2_048, 256, tests=20, group_size=64, batch=512, curvature_points=128, depth=5),
            CheckScale(128, 32, tests=2, group_size=16, batch=48, curvature_points=16, depth=3),
            CheckScale(16, 12, tests=2, group_size=4, batch=16, curvature_points=4, depth=2, last_parameters=1_000_000),
        ),
        experiments=dict.fromkeys(_PAPER_EPOCHS, _QUICK)
        | {"heloc-lr": _QUICK_LR, "cifar10-resnet18": _QUICK_CIFAR, "qnli-bert": _QUICK_NOISY, QNLI_SOURCES: _SOURCES},
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
        epochs=_PAPER_EPOCHS | {"cifar10-resnet18": 15, "qnli-bert": 4},
        resnet_width=8,
        text_length=64,
        check=_checks(
            CheckScale(7_896, 7_896, tests=100, group_size=64, batch=512, curvature_points=2_048, depth=20),
            CheckScale(20_000, 4_096, tests=50, group_size=64, batch=512, curvature_points=512, depth=10),
            CheckScale(2_048, 512, tests=10, group_size=64, batch=64, curvature_points=64, depth=5),
            CheckScale(
                256, 128, tests=4, group_size=32, batch=16, curvature_points=16, depth=3, last_parameters=4_000_000
            ),
        ),
        experiments=dict(zip(_PAPER_EPOCHS, (_LR, _ANN_S, _ANN_M, _ANN_L, _CIFAR, _QNLI), strict=True))
        | {QNLI_SOURCES: _SOURCES},
    ),
    "paper": Scale(
        name="paper",
        about="everything at the paper's size, for a GPU",
        data={"heloc": DataScale(), "mnist": DataScale(), "cifar10": DataScale(), "qnli": DataScale(50_000, None)},
        epochs=_PAPER_EPOCHS,
        resnet_width=64,
        text_length=128,
        check=_checks(
            CheckScale(7_896, 7_896, tests=1_000, group_size=64, batch=512, curvature_points=7_896, depth=200),
            CheckScale(60_000, 10_000, tests=100, group_size=64, batch=512, curvature_points=5_000, depth=50),
            CheckScale(10_000, 2_000, tests=20, group_size=64, batch=32, curvature_points=512, depth=20),
            CheckScale(
                2_000, 512, tests=10, group_size=64, batch=8, curvature_points=64, depth=10, last_parameters=8_000_000
            ),
        ),
        experiments=dict.fromkeys(_PAPER_EPOCHS, _PAPER) | {QNLI_SOURCES: _SOURCES},
    ),
}
