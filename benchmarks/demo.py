"""A small end-to-end demonstration on real handwritten digits: which sources of training data hurt the model?

The digits come with scikit-learn. They are split among twelve made-up sources, two of which label badly; a
small network is trained on all of them, and one call asks which sources its test loss is owed to. Captum's
per-point scores, summed by source, must agree.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from captum.influence import TracInCP
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ggda_ext import GroupGradients, Groups, attribute, properties

SOURCES, BAD = 12, ("source 3", "source 8")


def run() -> None:
    """Train, attribute, compare with Captum, print."""
    torch.manual_seed(0)
    train, test, groups = noisy_digits()
    model = fit(*train)
    loss = nn.CrossEntropyLoss()
    goal = properties.mean_loss(test, loss)
    accuracy = (model(test[0]).argmax(1) == test[1]).float().mean()
    print(f"{len(train[0])} training digits from {len(groups)} sources, test accuracy {accuracy:.1%}")
    print("plan:", GroupGradients(model, loss, train, groups).plan(1).explain())

    start = time.process_time()
    scores = attribute(model, loss, train, groups, goal)[0]
    ours = time.process_time() - start
    start = time.process_time()
    per_point = captum_scores(model, train, test)
    theirs = time.process_time() - start
    summed = groups.sum(per_point) / len(test[0])
    error = float((scores - summed).abs().max() / summed.abs().max())

    print(f"\n{'source':10} {'digits':>6} {'score':>9}   (how much the source lowers the test loss; lowest first)")
    for j in scores.argsort().tolist():
        remark = "   <- labels badly" if groups.name(j) in BAD else ""
        print(f"{groups.name(j)!s:10} {groups.sizes[j]:6d} {scores[j]:9.3f}{remark}")
    print(f"\nequal to Captum's TracInCP summed by source: largest relative error {error:.1e}")
    print(f"CPU time {ours:.3f} s, Captum {theirs:.3f} s: {theirs / ours:.0f} x faster")
    worst = {groups.name(j) for j in scores.argsort()[: len(BAD)].tolist()}
    if error > 1e-4 or worst != set(BAD):
        raise SystemExit("the demonstration did not come out as it should")


def noisy_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Groups]:
    """Training and test digits, and the source of every training digit; 60 % of the bad sources' labels are wrong."""
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(x))
    test, train = order[:300], order[300:]
    sources = np.array([f"source {j}" for j in rng.integers(0, SOURCES, len(train))])
    labels = y[train].clone()
    wrong = np.isin(sources, BAD) & (rng.random(len(train)) < 0.6)
    labels[wrong] = torch.from_numpy(rng.integers(0, 10, int(wrong.sum())))
    return (x[train], labels), (x[test], y[test]), Groups(sources)


def fit(x: Tensor, y: Tensor) -> nn.Module:
    """A network 64-64-10, trained for 40 epochs."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(40):
        for batch in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.eval()


def captum_scores(model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Tensor:
    """Captum's own score of every training point for the summed test loss `[n]`."""
    tracin = TracInCP(
        model, TensorDataset(*train), [model.state_dict()], checkpoints_load_func=lambda model, state: 1.0,
        loss_fn=nn.CrossEntropyLoss(reduction="sum"), batch_size=100, sample_wise_grads_per_batch=True,
    )  # fmt: skip
    return tracin.influence(test, aggregate=True)[0]
