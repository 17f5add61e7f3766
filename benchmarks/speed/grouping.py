"""Cost and quality of grouping: Grad-K-Means, compared with one training pass and with scikit-learn.

Times are for the clustering alone, after the forward pass that makes the features (its time is in the note). If the
folder in the environment variable GGDA_DATA_DIR has MNIST, the paper's observation is checked on real
digits: the most important random groups mix helpful and harmful points, clusters of gradients do not.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from benchmarks import models
from benchmarks.data import folders
from benchmarks.data.prepare import mnist_images
from benchmarks.speed.core import passes, unit_of
from benchmarks.speed.timing import Row, best_times
from ggda_ext import properties
from ggda_ext.grouping import GradKMeansGroups, Summary, random_groups
from ggda_ext.training import Recipe, initial_model, train_one

LOSS = nn.CrossEntropyLoss()
GOALS = {1024: 2.0, 256: 2.0, 64: 2.0, 16: 2.0, 4: 6.0}  # mean group size → passes for the clustering
INERTIA, SLOW_CLUSTERS = 1.05, 1000  # scikit-learn takes minutes for more clusters
OBSERVED_SIZE, MOST_IMPORTANT = 64, 20
ABOUT_HALF, NEARLY_ALL = 0.17, 0.05  # largest distance of the share of positive members from 0.5, and from 1
EPOCHS = 5
Pair = tuple[Tensor, Tensor]


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield all rows: cost by group size, inertia compared with scikit-learn, signs in the most important groups, and
    cost of the diagnostics."""
    with threadpool_limits(torch.get_num_threads()):
        train, test, source = digits(20_000 if quick else 60_000)
        model, note = fitted(*train), f"{source}, n = {len(train[0]):,}"
        yield from costs(model, train, note, quick)
        yield from signs(model, train, test, note)


def costs(model: nn.Module, data: Pair, note: str, quick: bool) -> Iterator[Row]:
    """Yield rows with the time of the clustering in training passes, and its inertia over that of scikit-learn."""
    builders = {size: GradKMeansGroups(model, LOSS, group_size=size, batch_size=1024, random_state=0) for size in GOALS}
    features = builders[64]
    cases = {**passes(model, data, (512, 1024, 2048)), "features": lambda: features.features(data)}
    cases |= {f"groups {size}": lambda builder=builder: builder.fit(data) for size, builder in builders.items()}  # type: ignore[misc]
    times = best_times(cases, 3)
    unit = unit_of(times)
    points = features.whitened_features(data)
    for size, builder in builders.items():
        seconds = times[f"groups {size}"] - times["features"]
        details = (
            f"{note}, features {times['features'] / unit:.2f} passes, largest group {builder.groups_.sizes.max():,}"
        )
        yield Row("grouping", "ANN-L", "Grad-K-Means, clustering", size, seconds, "pass", seconds / unit, "passes",
                  GOALS[size], details)  # fmt: skip
        k = len(builder.groups_)
        if quick and k > SLOW_CLUSTERS:
            continue
        reference = KMeans(k, n_init=1, max_iter=builder.max_iter, tol=builder.tol, random_state=0)
        theirs = best_times({"scikit-learn": lambda reference=reference: reference.fit(points)}, 1)["scikit-learn"]  # type: ignore[misc]
        yield Row("grouping", "ANN-L", "Grad-K-Means, inertia", size, seconds, "scikit-learn KMeans",
                  builder.inertia_ / reference.inertia_, "times", INERTIA,
                  f"{note}, k = {k:,}, scikit-learn {theirs / unit:.1f} passes")  # fmt: skip


def signs(model: nn.Module, train: Pair, test: Pair, note: str) -> Iterator[Row]:
    """Yield rows with the share of positive members in the most important groups, and with the cost of groups of
    limited size and of the diagnostics."""
    goal = properties.mean_loss(test, LOSS)
    grad = GradKMeansGroups(model, LOSS, group_size=OBSERVED_SIZE, random_state=0)
    capped = GradKMeansGroups(model, LOSS, group_size=OBSERVED_SIZE, max_size=OBSERVED_SIZE, random_state=0)
    found = {
        "Random": random_groups(len(train[0]), OBSERVED_SIZE, random_state=0),
        "Grad-K-Means": grad.fit_groups(train),
        "Grad-K-Means, max_size": capped.fit_groups(train),
    }
    cases = {**passes(model, train, (512, 1024, 2048)), "features": lambda: capped.features(train)}
    cases["capped"] = lambda: capped.fit(train)
    cases |= {name: lambda groups=groups: groups.summary(model, LOSS, train) for name, groups in found.items()}  # type: ignore[misc]
    times = best_times(cases, 2)
    unit = unit_of(times)
    seconds = times["capped"] - times["features"]
    yield Row("grouping", "ANN-L", "Grad-K-Means, max_size, clustering", OBSERVED_SIZE, seconds, "pass", seconds / unit,
              "passes", GOALS[OBSERVED_SIZE], f"{note}, max_size={OBSERVED_SIZE}")  # fmt: skip
    for name, groups in found.items():
        share = positive_share(groups.summary(model, LOSS, train, property=goal))
        meant, bound = (0.5, ABOUT_HALF) if name == "Random" else (1.0, NEARLY_ALL)
        yield Row("grouping", "ANN-L", f"{name}, positive", OBSERVED_SIZE, 0.0, f"share {meant:g}", abs(share - meant),
                  "off", bound if note.startswith("MNIST") else None,
                  f"{note}, {share:.1%} positive members in the top {MOST_IMPORTANT} groups",
                  {"positive": share})  # fmt: skip
    for name, groups in found.items():
        yield Row("grouping", "ANN-L", f"{name}, alignment", OBSERVED_SIZE, times[name], "pass", times[name] / unit,
                  "passes", None, f"{note}, groups.summary(model, …), {len(groups):,} groups")  # fmt: skip


def positive_share(summary: Summary) -> float:
    """Return the share of members with a positive score, averaged over the groups with the highest scores."""
    assert summary.scores is not None
    assert summary.same_sign is not None
    first = np.argsort(-summary.scores, kind="stable")[:MOST_IMPORTANT]
    return float(summary.same_sign[first].mean())


def digits(n: int) -> tuple[Pair, Pair, str]:
    """Return training and test points of MNIST's shape, flattened, and their source."""
    folder = folders.chosen(None)
    if folder is not None and (found := folders.read("mnist", folder)):
        content, _ = found
        train, test = ((content[f"x_{part}"], torch.from_numpy(content[f"y_{part}"])) for part in ("train", "test"))
        return (mnist_images(train[0][:n]), train[1][:n]), (mnist_images(test[0]), test[1]), "MNIST"
    generator = torch.Generator().manual_seed(0)
    styles, tests = 40, 10_000  # every class in four styles, one label in twenty wrong
    style = torch.randint(0, styles, (n + tests,), generator=generator)
    x = torch.rand(styles, 784, generator=generator)[style] + torch.randn(n + tests, 784, generator=generator)
    wrong = torch.rand(n + tests, generator=generator) < 0.05
    y = torch.where(wrong, torch.randint(0, 10, (n + tests,), generator=generator), style % 10)
    return (x[:n], y[:n]), (x[n:], y[n:]), "made clusters"


def fitted(x: Tensor, y: Tensor) -> nn.Module:
    """Return ANN-L after a few epochs of Adam."""
    recipe = Recipe(EPOCHS, 1e-3, 256, schedule="constant")
    return train_one(initial_model(models.ann_l, 0), LOSS, (x, y), recipe, seed=0).model
