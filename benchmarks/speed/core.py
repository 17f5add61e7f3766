"""Times the core's strategies in multiples of one forward+backward pass, and against per-point toolkits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import captum.influence
import numpy as np
import torch
from dattri.algorithm.tracin import TracInAttributor
from dattri.task import AttributionTask
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import models
from benchmarks.check.captum import tracin_cp
from benchmarks.speed.memory import peak_bytes
from benchmarks.speed.timing import Row, best_times
from ggda_ext import GroupGradients, Groups, PointGradients, attribute, properties
from ggda_ext.data import DataLike, IndexedData, take
from ggda_ext.losses import OutputLoss

LOSS = nn.CrossEntropyLoss()
Pair = tuple[Tensor, Tensor]
GROUP_SIZES = (1, 4, 16, 64, 256, 1024)
TESTS = 100
SLOW_CALLS = 2_000
"""Strategies that need more backward calls or per-sample gradients than this are not timed."""


@dataclass(frozen=True)
class Setting:
    """A model with made data of the right shape: `n` points, or `quick_n` with ``--quick``."""

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[int], DataLike]
    n: int
    quick_n: int
    batch_sizes: tuple[int, ...]
    goal: float
    note: str


SETTINGS = [
    Setting("LR", models.logistic_regression, lambda n: models.tabular(n, 23, 2), 100_000, 100_000,
            (8192, 16384, 32768, 65536), 1.3, "made data of HELOC's shape"),
    Setting("ANN-S", models.ann_s, lambda n: models.tabular(n, 23, 2), 100_000, 100_000,
            (2048, 4096, 8192, 16384), 1.15, "made data of HELOC's shape"),
    Setting("ANN-M", models.ann_m, lambda n: models.tabular(n, 23, 2), 100_000, 100_000,
            (1024, 2048, 4096, 8192), 1.15, "made data of HELOC's shape"),
    Setting("ANN-L", models.ann_l, lambda n: models.tabular(n, 784, 10), 20_000, 10_000,
            (512, 1024, 2048), 1.15, "made data of MNIST's shape"),
    Setting("ResNet-18", models.resnet18, models.images, 128, 64, (16, 32), 1.15, "made data of CIFAR-10's shape"),
    Setting("ResNet-18, width 16", lambda: models.resnet18(16), models.images, 1024, 512,
            (16, 32, 64), 1.15, "made data of CIFAR-10's shape"),
    Setting("BERT, small", models.small_bert, models.texts, 1024, 512, (16, 32, 64), 1.15, "made data of QNLI's shape"),
]  # fmt: skip


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield all rows: one property for every strategy, model and group size; costs of first calls; predicted costs;
    many test points; the per-point toolkits; memory."""
    for setting in SETTINGS:
        if quick and setting.name == "ResNet-18":
            continue
        yield from one_property(setting, quick)
        yield from fixed_cost(setting)
        if setting.n > 50_000:
            yield from small_data(setting)
    yield from predictions()
    yield from many_directions(quick)
    yield from per_point_toolkits(quick)
    yield from memory(quick)


def training_pass(model: nn.Module, data: IndexedData, batch_size: int) -> None:
    """Run one forward+backward pass over the data, as training does."""
    loss, parameters = OutputLoss(LOSS), list(model.parameters())
    for _, batch in data.sequential(batch_size):
        torch.autograd.grad(loss.total(model, batch), parameters)


def passes(model: nn.Module, data: DataLike, batch_sizes: tuple[int, ...]) -> dict[str, Callable[[], None]]:
    """Return cases that run one pass at each batch size; the fastest of them is the unit of measurement."""
    indexed = IndexedData(data)
    return {f"pass {size}": lambda size=size: training_pass(model, indexed, size) for size in batch_sizes}  # type: ignore[misc]


def unit_of(times: dict[str, float]) -> float:
    """Return the seconds of the fastest pass among measured cases."""
    return min(seconds for name, seconds in times.items() if name.startswith("pass "))


def one_property(setting: Setting, quick: bool) -> Iterator[Row]:
    """Time the whole call, with its checks, for one property: the mean loss of test points.

    There are 1 % as many test points as training points, at least 4 and at most 100.
    """
    torch.manual_seed(0)
    n = setting.quick_n if quick else setting.n
    model, data = setting.build(), setting.data(n)
    goal = properties.mean_loss(take(data, min(TESTS, max(4, n // 100))), LOSS)
    cases: dict[str, Callable[[], Any]] = dict(passes(model, data, setting.batch_sizes))
    sizes = [size for size in GROUP_SIZES if size <= n]
    for strategy in ("auto", "directional", "forward", "segmented", "backward", "persample"):
        if quick and strategy not in ("auto", "directional"):
            continue
        for size in sizes if strategy == "auto" or not (quick or setting.name == "ResNet-18") else sizes[::3]:
            groups = Groups(np.arange(n) // size)
            if (strategy == "backward" and len(groups) > SLOW_CALLS) or (strategy == "persample" and n > SLOW_CALLS):
                continue
            if strategy == "persample" and (size > 1 or setting.name.startswith("BERT")):
                continue
            cases[f"{strategy} {size}"] = _call(model, data, groups, goal, strategy)
    heavy = n < SLOW_CALLS
    times = best_times(cases, 2 if heavy else 9)
    unit = unit_of(times)
    for name, seconds in times.items():
        strategy, group_size = name.split()
        if strategy == "pass":
            continue
        bound = setting.goal if strategy == "auto" else None
        yield Row("core", setting.name, f"{strategy}, one property", int(group_size), seconds, "pass", seconds / unit,
                  "passes", bound, f"{setting.note}, n = {n:,}")  # fmt: skip


def first_and_next(
    setting: Setting, data: DataLike, batch_sizes: tuple[int, ...], call: Callable[[nn.Module], object], repeats: int
) -> tuple[float, float, float]:
    """Return the CPU seconds of a call with a new model, of a call with a model that is known, and of a pass."""
    fresh = iter([setting.build() for _ in range(12)])
    model = next(fresh)
    call(model)
    cases: dict[str, Callable[[], Any]] = dict(passes(model, data, batch_sizes))
    times = best_times(cases | {"first": lambda: call(next(fresh)), "next": lambda: call(model)}, repeats)
    return times["first"], times["next"], unit_of(times)


def fixed_cost(setting: Setting) -> Iterator[Row]:
    """Time the work before the pass, which is the probe: in a first call, and in a second call with the same model."""
    n = min(setting.quick_n, 1000)
    data, groups, repeats = setting.data(n), Groups(np.arange(n) // 4), 10 if setting.n > 10_000 else 3

    def look(model: nn.Module) -> None:
        GroupGradients(model, LOSS, data, groups).plan(1)

    first, again, unit = first_and_next(setting, data, setting.batch_sizes, look, repeats)
    for seconds, case in ((first, "fixed cost of a first call"), (again, "fixed cost of the next call")):
        yield Row("core", setting.name, case, None, seconds, "pass over 1,000 points", seconds * n / unit / 1000,
                  "passes", None, f"{setting.note}, {seconds * 1e3:.1f} ms")  # fmt: skip


def small_data(setting: Setting) -> Iterator[Row]:
    """Time a whole call on as many points as HELOC has, for a new model and again.

    With so few points, the work that is done once per call matters.
    """
    n = 7_896
    data, groups = setting.data(n), Groups(np.arange(n) // 64)
    goal = properties.mean_loss(take(data, n // 100), LOSS)

    def whole(model: nn.Module) -> None:
        _call(model, data, groups, goal, "auto")()

    first, again, unit = first_and_next(setting, data, (*setting.batch_sizes, n), whole, 10)
    for seconds, case in ((first, "a first call, one property"), (again, "the next call, one property")):
        yield Row("core", setting.name, f"{case}, n = {n:,}", 64, seconds, "pass", seconds / unit, "passes", 1.4,
                  setting.note)  # fmt: skip


class _Encoder(nn.Module):
    """Attention layers that use weights of modules without calling the modules.

    So only strategies that do not need layers can be used.
    """

    def __init__(self) -> None:
        super().__init__()
        width = 64
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.tokens, self.encoder = nn.Embedding(1000, width), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(tokens)).mean(1))


def _normalised() -> nn.Module:
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(64, 128)), nn.ReLU(), norm(nn.Linear(128, 128)), nn.ReLU(), nn.Linear(128, 2))


def predictions() -> Iterator[Row]:
    """Compare the cost that the plan predicts with the measured cost, on models that some strategies cannot handle."""
    torch.manual_seed(0)
    tokens, features = torch.randint(0, 1000, (512, 32)), torch.randn(8192, 64)  # a pass takes longer than call set-up
    for name, model, x in (("Encoder", _Encoder().eval(), tokens), ("weight norm", _normalised(), features)):
        n, y = len(x), torch.randint(0, 2, (len(x),))
        cases: dict[str, Callable[[], Any]] = dict(passes(model, (x, y), (64, 128, 512)))
        promised = {}
        for strategy in ("auto", "forward", "backward", "persample"):
            for size in (1, 16, 256):
                if strategy == "backward" and n // size > SLOW_CALLS:
                    continue
                provider = GroupGradients(model, LOSS, (x, y), Groups(np.arange(n) // size), strategy=strategy)
                try:
                    promised[f"{strategy} {size}"] = provider.plan(1).passes
                except ValueError:
                    continue  # this strategy cannot handle the model and raises an error
                v = torch.randn(1, provider.p)
                cases[f"{strategy} {size}"] = lambda provider=provider, v=v: provider.scores(v)  # type: ignore[misc]
        times = best_times(cases, 3)
        for case, passes_promised in promised.items():
            strategy, group_size = case.split()
            measured = times[case] / unit_of(times)
            yield Row("core", name, f"{strategy}, predicted / measured", int(group_size), times[case], "pass",
                      passes_promised / measured, "times", None,
                      f"{passes_promised:.1f} predicted, {measured:.1f} measured, n = {n:,}")  # fmt: skip


def _call(model: nn.Module, data: DataLike, groups: Groups, goal: Any, strategy: str) -> Callable[[], Tensor]:
    return lambda: attribute(model, LOSS, data, groups, goal, strategy=strategy, method="tracin")


def many_directions(quick: bool) -> Iterator[Row]:
    """Time ANN-L with 100 test points: P = I at group sizes 1 and 64, and any P on the test side (100 dense
    directions)."""
    torch.manual_seed(0)
    n = 10_000 if quick else 20_000
    model, (x, y) = models.ann_l(), models.tabular(n, 784, 10)
    points = PointGradients(OutputLoss(LOSS), IndexedData((x[:TESTS], y[:TESTS])))
    dense = torch.randn(TESTS, sum(parameter.numel() for parameter in model.parameters()))
    single, grouped = Groups.singletons(n), Groups(np.arange(n) // 64)

    def call(groups: Groups, directions: Any) -> Callable[[], Tensor]:
        return lambda: GroupGradients(model, LOSS, (x, y), groups).scores(directions)

    cases = dict(passes(model, (x, y), (512, 1024, 2048))) | {
        "100 test points, P = I": call(single, points),
        "100 test points, P = I, groups": call(grouped, points),
        "100 directions, any P, groups": call(grouped, dense),
    }
    times = best_times(cases, 3)
    unit = unit_of(times)
    for name, size, bound in (
        ("100 test points, P = I", 1, 2.0),
        ("100 test points, P = I, groups", 64, 3.0),
        ("100 directions, any P, groups", 64, 2.5),
    ):
        note = f"made data of MNIST's shape, n = {n:,}"
        yield Row("core", "ANN-L", name.replace(", groups", ""), size, times[name], "pass", times[name] / unit,
                  "passes", bound, note)  # fmt: skip


def per_point_toolkits(quick: bool) -> Iterator[Row]:
    """Compare ANN-L, one property, group size 1 with Captum's TracInCP (both modes), dattri's TracIn and vmap(grad)."""
    torch.manual_seed(0)
    n = 2_000 if quick else 5_000
    model, (x, y) = models.ann_l(), models.tabular(n, 784, 10)
    tests = (x[:TESTS], y[:TESTS])
    goal = properties.mean_loss(tests, LOSS)
    cases: dict[str, Callable[[], Any]] = {
        "auto": _call(model, (x, y), Groups.singletons(n), goal, "auto"),
        "dattri TracIn, no projection": _dattri(model, (x, y), tests),
        "vmap(grad)": _call(model, (x, y), Groups.singletons(n), goal, "persample"),
    }
    for size in (10, 16, 32, 100):  # for Captum the fastest batch size counts
        for mode, sample_wise in (("sample-wise trick", True), ("default", False)):
            tracin = tracin_cp(captum.influence, model, TensorDataset(x, y), size, sample_wise)
            cases[f"Captum TracInCP, {mode}, batch {size}"] = partial(tracin.influence, tests, aggregate=True)
    times = best_times(cases, 5, {name: 2 for name in cases if name != "auto"})
    for toolkit in ("Captum TracInCP, sample-wise trick", "Captum TracInCP, default", "dattri", "vmap(grad)"):
        name = min((name for name in times if name.startswith(toolkit)), key=times.__getitem__)
        ratio = times[name] / times["auto"]
        bound = 15.0 if toolkit.endswith("trick") else None
        yield Row("core", "ANN-L", "auto, one property", 1, times["auto"], name, ratio, "x faster",
                  bound, f"made data of MNIST's shape, n = {n:,}")  # fmt: skip


def _dattri(model: nn.Module, train: Pair, tests: Pair) -> Callable[[], Tensor]:
    task = AttributionTask(models.loss_of_one(model), model, model.state_dict())
    tracin = TracInAttributor(task, weight_list=torch.ones(1), normalized_grad=False)
    tracin.projector_kwargs = None  # dattri always projects unless this is set after construction
    train_loader, test_loader = (DataLoader(TensorDataset(*data), batch_size=50) for data in (train, tests))

    def run() -> Tensor:
        with torch.no_grad():
            return tracin.attribute(train_loader, test_loader).mean(1)

    return run


def memory(quick: bool) -> Iterator[Row]:
    """Measure the peak memory beyond model and data while ANN-L is scored, for k from 10 to 50,000 groups."""
    n = 50_000
    model, (x, y) = models.ann_l(), models.tabular(n, 784, 10)
    goal = properties.mean_loss((x[:TESTS], y[:TESTS]), LOSS)
    first = None
    for k in (10, 1_000, 50_000):
        peak = peak_bytes(_call(model, (x, y), Groups(np.arange(n) % k), goal, "auto"))
        if peak is None:
            return
        first = first or max(peak, 1)
        yield Row("core", "ANN-L", f"peak memory, {k:,} groups", n // k, 0.0, "10 groups", peak / first, "times",
                  1.2, f"{peak / 2**20:.0f} MB beyond model and data, n = {n:,}")  # fmt: skip
