"""One small problem, two checkpoints with rates, and the five classes built alike from Captum and ggda_captum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import captum.influence
import ggda_captum
import torch
from captum.influence._core.arnoldi_influence_function import ArnoldiInfluenceFunction
from torch import Tensor, nn
from torch.utils.data import TensorDataset

CAPTUM = SimpleNamespace(**{name: getattr(captum.influence, name) for name in captum.influence.__all__})
CAPTUM.ArnoldiInfluenceFunction = ArnoldiInfluenceFunction
TRACIN = ("TracInCP", "TracInCPFast", "TracInCPFastRandProj")
CURVED = ("NaiveInfluenceFunction", "ArnoldiInfluenceFunction")
CLASSES = TRACIN + CURVED
LAST_LAYER = ("TracInCPFast", "TracInCPFastRandProj")
N, M = 17, 5
UNEVEN = [[16, 3, 8, 0, 5], [2], [1, 4, 6, 7, 9, 10, 15], [11, 12, 13, 14]]
RATES = (0.3, 0.7)


class Net(nn.Module):
    """A small network whose last layer is its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).sigmoid())


class Normalised(nn.Module):
    """Layers that Captum's sample-wise gradients do not know: Embedding, LayerNorm, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.batch_norm = nn.Embedding(7, 3), nn.LayerNorm(3), nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.batch_norm(self.norm(self.tokens(x)).mean(1)).tanh())


@dataclass
class Problem:
    """A model, training and test data, and checkpoints `(state, rate)`."""

    model: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    checkpoints: list[tuple[dict[str, Tensor], float]]

    @property
    def train_set(self) -> TensorDataset:
        return TensorDataset(*self.train)


def load(model: nn.Module, checkpoint: tuple[dict[str, Tensor], float]) -> float:
    """A `checkpoints_load_func` with learning rates."""
    model.load_state_dict(checkpoint[0])
    return checkpoint[1]


def problem(dtype: torch.dtype = torch.float64, net: type[nn.Module] = Net) -> Problem:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)

    def inputs(count: int) -> Tensor:
        if net is Normalised:
            return torch.randint(0, 7, (count, 4), generator=generator)
        return torch.randn(count, 4, generator=generator, dtype=dtype)

    def labels(count: int) -> Tensor:
        return torch.randint(0, 3, (count,), generator=generator)

    states = [net().to(dtype).state_dict() for _ in RATES]
    return Problem(
        net().to(dtype).eval(), (inputs(N), labels(N)), (inputs(M), labels(M)), list(zip(states, RATES, strict=True))
    )


def build(
    toolkit: ModuleType | SimpleNamespace,
    name: str,
    given: Problem,
    *,
    reduction: str = "sum",
    layers: list[str] | None = None,
    other_test_loss: bool = False,
    **options: Any,
) -> Any:
    """An instance of the class `name` of Captum or of ggda_captum."""
    options.setdefault("checkpoints_load_func", load)
    options.setdefault("loss_fn", nn.CrossEntropyLoss(reduction=reduction))
    options.setdefault("batch_size", 9)
    if other_test_loss:
        options["test_loss_fn"] = nn.MultiMarginLoss(reduction=reduction)
    cls = getattr(toolkit, name)
    if name in LAST_LAYER:
        both_choose_annoy = options.get("groups") is None and find_spec("annoy") is not None
        if name == "TracInCPFastRandProj" and (toolkit is CAPTUM or both_choose_annoy):
            options.setdefault("nearest_neighbors", ggda_captum.ExactNearestNeighbors())
        return cls(given.model, "last", given.train_set, given.checkpoints, **options)
    options |= {"layers": layers, "sample_wise_grads_per_batch": reduction != "none"}
    if name == "TracInCP":
        return cls(given.model, given.train_set, given.checkpoints, **options)
    options.setdefault("projection_dim", 8)
    if name == "ArnoldiInfluenceFunction":
        options.setdefault("arnoldi_dim", 12)
    return cls(given.model, given.train_set, given.checkpoints[-1], **options)


def score(influence: Any, inputs: Any = None, **options: Any) -> Tensor:
    """All scores, also from the class that gives the best five by default."""
    return influence.influence(inputs, k=None, **options)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest score."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    return float((found - expected).abs().max() / expected.abs().max())


ours = partial(build, ggda_captum)
captums = partial(build, CAPTUM)


def assert_most_influential(indices: Tensor, scores: Tensor, k: int, proponents: bool = True) -> None:
    """`indices [m, k]` are different ones whose `scores [m, n]` are the k best in order; ties in any order."""
    best = scores.sort(dim=1, descending=proponents).values[:, :k]
    assert all(len(set(row)) == len(row) for row in indices.tolist())
    torch.testing.assert_close(scores.gather(1, indices), best, rtol=1e-12, atol=1e-12 * float(scores.abs().max()))
