"""Curvature of the mean training loss on a sample of the data, as products with vectors.

There are three kinds; only the Hessian can have negative eigenvalues:

* ``"gauss-newton"``  1/N Σ Jᵢᵀ (∂²ℓᵢ/∂z²) Jᵢ, for losses that are curved, convex functions of the model's outputs z;
* ``"hessian"``       1/N Σ ∇²ℓᵢ;
* ``"fisher"``        1/N Σ ∇ℓᵢ ∇ℓᵢᵀ, the empirical Fisher, for any loss.

A few thousand points are enough for the curvature; the remaining error is measured on other points. The Fisher keeps
the gradients of its points if they fit into memory, so that its products need no further pass. If ``"auto"`` chooses
the Fisher, it takes no more points than fit into memory, but at least `FEWEST`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.curvature.hessian import GaussNewton, Hessian, NoCurvature
from ggda_ext.data import IndexedData, RememberedPoints, SomePoints, first_points, to_device
from ggda_ext.gradients import GroupGradients
from ggda_ext.groups.partition import Groups
from ggda_ext.losses import ExampleLoss, OutputLoss, model_output
from ggda_ext.losses.model_loss import OwnLoss
from ggda_ext.model import product
from ggda_ext.sharing import adding_up

CurvatureKind = Literal["auto", "gauss-newton", "hessian", "fisher"]
KINDS: tuple[str, ...] = get_args(CurvatureKind)
_PROBED = 8
"""Number of points for the first test whether there is any curvature; if they show none, all points are tested."""
KEPT_BYTES, FEWEST = 2**30, 128
"""Memory for the gradients of the Fisher's points, and the smallest number of points if ``"auto"`` limits them."""
_PASSES, _PASSES_OF_VECTOR, PASSES_OF_ROWS = 1.0, 1.3, 2.5
"""Passes over the sample: for a product, for each vector of the product, and for the gradients of single points."""


def checked_kind(kind: str) -> str:
    """Return the kind; raise an error that lists all kinds if it is not one of them."""
    if kind not in KINDS:
        raise ValueError(f"curvature={kind!r} is not one of {', '.join(map(repr, KINDS))}.")
    return kind


class SampledCurvature:
    """Products with the curvature of the mean training loss on some of the points.

    Args:
        provider: the model, its loss and the training data.
        kind: which curvature; ``"auto"`` is Gauss–Newton, or the empirical Fisher if the Gauss–Newton matrix cannot be
            computed (for example if the model returns its own loss).
        points: largest number of points to use, drawn at random.
        seed: seed of the draw.
    """

    def __init__(self, provider: GroupGradients, kind: str, points: int, seed: int) -> None:
        self.provider, self.kind, self.seed, self.note = provider, checked_kind(kind), seed, ""
        self.sample, self.total = sample_of(provider, points, seed)
        if kind == "auto":
            self.kind = "gauss-newton"
            why = self._no_gauss_newton()
            if why is not None:
                self.kind, self.note = "fisher", f"The curvature is the empirical Fisher, because {why}"
                self.sample, _ = sample_of(provider, min(points, max(FEWEST, self._points_to_keep)), seed)

    @property
    def points(self) -> int:
        """Number of points in the sample."""
        return self.sample.n or 0

    @property
    def whole(self) -> bool:
        """Whether the sample holds all training points."""
        return self.points == self.total

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Return the products `[m, p]` of the curvature on the sample with vectors `[m, p]`."""
        return self.on(self.sample, vectors)

    def elsewhere(self, vectors: Tensor) -> Tensor:
        """Return products on as many points as the sample has, outside the sample as far as there are such points."""
        return self.on(_draw(self.provider.data, self.points, self.seed, others=True), vectors)

    def passes(self, steps: int, vectors: int) -> float:
        """Return the cost of a solve and of one product on other points, in passes over all training points."""
        product = _PASSES + _PASSES_OF_VECTOR * vectors
        solve = PASSES_OF_ROWS if self._keeps else steps * product
        return (solve + (0 if self.whole else product)) * self.points / self.total

    @property
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self.provider.space.dtype, torch.float32)

    @property
    def _points_to_keep(self) -> int:
        """Number of points whose gradients fit into memory."""
        return KEPT_BYTES // (self.provider.p * self._dtype.itemsize)

    @property
    def _keeps(self) -> bool:
        return self.kind == "fisher" and self.points <= self._points_to_keep

    @cached_property
    def _gradients(self) -> Tensor:
        """Gradients of the sample's points `[N, p]`."""
        return self.provider.on(self.sample, Groups.singletons(self.points)).rows().to(self._dtype)

    def on(self, data: IndexedData, vectors: Tensor) -> Tensor:
        """Return the products of the curvature on this data with vectors `[m, p]`."""
        if self._keeps and data is self.sample:
            rows = self._gradients
            return (product(product(vectors.to(rows), rows.T), rows) / self.points).to(vectors)
        if self.kind == "fisher":
            return _fisher_product(self.provider, data, vectors)
        cast = vectors.to(self.provider.space.dtype)
        return (self._operator(data) @ cast).to(vectors) / (data.n or 1)

    def _operator(self, data: IndexedData) -> Hessian:
        kind = GaussNewton if self.kind == "gauss-newton" else Hessian
        return kind(self.provider.space, self._loss.total, data, self.provider.batch_size, reduction="sum")

    @cached_property
    def _loss(self) -> ExampleLoss:
        """The loss; an `NLLLoss` of log-probabilities becomes the equal cross-entropy, which is curved."""
        loss = self.provider.loss
        if not isinstance(loss, OutputLoss) or type(loss.loss_fn) is not nn.NLLLoss:
            return loss
        (batch,) = self.sample.batches([np.arange(min(_PROBED, self.points))])
        with torch.no_grad():
            outputs, _ = model_output(self.provider.model, to_device(batch, self.provider.space.device))
        same = as_cross_entropy(loss.loss_fn, outputs)
        return loss if same is None else OutputLoss(same)

    def _no_gauss_newton(self) -> str | None:
        """Return the reason why the Gauss–Newton matrix of this loss cannot be computed, or None if it can."""
        if isinstance(self.provider.loss, OwnLoss):
            return "the model returns its own loss."
        if self.provider.loss.vectorized:
            return "the loss is written for one example in the manner of torch.func."
        space = self.provider.space
        random = torch.Generator().manual_seed(self.seed)  # equal entries could move all outputs equally
        vector = torch.randn(1, space.size, generator=random).to(space.device, space.dtype)
        try:
            for some in (SomePoints(self.sample, np.arange(min(_PROBED, self.points))), self.sample):
                if (self._operator(some) @ vector).any():
                    return None
        except NoCurvature as error:
            return str(error)
        except RuntimeError as error:
            if "derivative" not in str(error) and "double backward" not in str(error):
                raise
            return f"a layer cannot be differentiated twice ({error})."
        return "the loss has no curvature in the outputs of the model."


def as_cross_entropy(loss_fn: Any, outputs: Tensor) -> nn.CrossEntropyLoss | None:
    """Return the cross-entropy that equals an `NLLLoss`; None if the outputs are not log-probabilities."""
    if type(loss_fn) is not nn.NLLLoss or outputs.dim() < 2:
        return None
    sums = outputs.detach().logsumexp(1)
    if not torch.allclose(sums, torch.zeros_like(sums), atol=64 * torch.finfo(sums.dtype).eps):
        return None
    return nn.CrossEntropyLoss(loss_fn.weight, ignore_index=loss_fn.ignore_index, reduction=loss_fn.reduction)


def sample_of(provider: GroupGradients, points: int, seed: int) -> tuple[IndexedData, int]:
    """Return a sample of points for the curvature, and the number of all training points."""
    total = provider.data.n if provider.data.n is not None else provider.groups.n
    return _draw(provider.data, min(points, total), seed), total


def _draw(data: IndexedData, points: int, seed: int, *, others: bool = False) -> IndexedData:
    """Return random points of the data, in the order of the data; for a stream, its first points.

    Args:
        data: all points.
        points: number of points to return.
        seed: seed of the draw.
        others: whether to prefer points that are not in the draw with this seed.
    """
    if data.is_stream:
        return first_points(data, points)
    order = np.random.default_rng(seed).permutation(data.n or 0)
    chosen = order[points : 2 * points] if others else order[:points]
    if len(chosen) < points:
        chosen = np.concatenate([chosen, order[: points - len(chosen)]])
    some = np.sort(chosen)
    return SomePoints(data, some) if data.tensors is not None else RememberedPoints(data, some)


def _fisher_product(provider: GroupGradients, data: IndexedData, vectors: Tensor) -> Tensor:
    """Return 1/N Σ g_i ⟨g_i, v⟩ for vectors `[m, p]`, with one pass for inner products and one for weighted sums."""
    n = data.n or 0
    points = provider.on(data, Groups.singletons(n))
    inner = points.scores(vectors.to(provider.space.dtype)) / n
    total = torch.zeros(len(vectors), provider.p, dtype=provider.space.dtype, device=provider.space.device)
    whole = provider.on(data, np.zeros(n, np.int64))
    whole.strategy, whole.show_progress = "auto", False  # a strategy that forms rows
    with adding_up(total):
        for _, rows in whole.blocks(weights=inner):
            total += rows[0]
    return total.to(vectors)
