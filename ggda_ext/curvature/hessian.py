"""Curvature of the training loss: Hessian-vector products for many vectors at once, and solves with them.

With L the mean training loss and H = ∇²L(θ), every product is ``H v = ∇⟨∇L(θ), v⟩``: one backward pass through
the graph of the gradient for each vector, the graph itself built once for all of them. LiSSA iterates

    e ← v + (1 - damping) e - H_batch e / scaling,      H⁻¹ v ≈ e / scaling

on random batches; all vectors share each batch, so for a given seed the solve is one linear map. Under several ranks
(see `ggda_ext.sharing`) products are shared out by points, LiSSA by vectors and runs, if there are enough of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ggda_ext.data import IndexedData, ProgressBar, batch_length, to_device
from ggda_ext.model import ParameterSpace, sums_on
from ggda_ext.sharing import adding_up, checksum, my_share, once, rank, world_size

BatchLossFn = Callable[[nn.Module, Any], Tensor]

_CHUNK_BYTES = 8 * 2**20  # vectors worked on at once: few enough to stay near the cache, enough to share overheads
_CHECK_EVERY = 8  # LiSSA steps between looks at the size of the iterate
_GROWTH = 10.0  # how far beyond linear growth an iterate counts as diverging


class Hessian:
    """The Hessian of a loss over a data set, with respect to some of the model's parameters.

    Args:
        space: the model and the parameters that count.
        loss: ``loss(model, batch)``, a scalar: the mean or the sum over the batch.
        data: the points the loss is taken over.
        batch_size: points per pass in products with the whole data.
        reduction: whether the loss of a batch is the mean or the sum over its points; found by trying if left out.
    """

    def __init__(
        self,
        space: ParameterSpace,
        loss: BatchLossFn,
        data: IndexedData,
        batch_size: int = 1024,
        *,
        reduction: Literal["mean", "sum"] | None = None,
    ) -> None:
        if data.n is None:
            raise TypeError(f"{data.name} is a stream without a length: pass a map-style data set for the Hessian.")
        self.space, self.loss, self.data, self.n, self.batch_size = space, loss, data, data.n, batch_size
        if reduction is not None:
            self.reduction = reduction

    def on_batch(self, batch: Any, vectors: Tensor) -> Iterator[tuple[slice, list[Tensor | None]]]:
        """Products of the Hessian on one batch with `vectors [m, p]`.

        Yields ``(rows, parts)`` for some vectors at a time: a part `[rows, *shape]` for every parameter, or None
        where it is zero. A vector is not read again after its product was given out.
        """
        parameters = list(self.space.parameters.values())
        with self.space.require_gradients(of_chosen=True), sdpa_kernel(SDPBackend.MATH):
            value = one_number(self.loss(self.space.model, to_device(batch, self.space.device)))
            first = self.space.gradients_of(value, differentiable=True)
            used = [(g, p) for g, p in zip(first, parameters, strict=True) if g is not None and g.requires_grad]
            for rows in chunks_of_vectors(vectors):
                if not used:
                    yield rows, [None] * len(parameters)
                    continue
                along, keep = [self.space.part(vectors[rows], p) for _, p in used], rows.stop < len(vectors)
                yield rows, products_with_vectors([g for g, _ in used], parameters, along, keep=keep)

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Products `[m, p]` of the Hessian over the whole data with `vectors [m, p]`."""
        result = torch.zeros_like(vectors, dtype=torch.float64, device=sums_on(vectors.device))
        with adding_up(result, same=lambda: self._same(len(vectors))):
            for indices, batch in self.data.my_share(self.batch_size):
                weight = 1.0 if len(indices) == self.n or self.reduction == "sum" else len(indices) / self.n
                for rows, parts in self.on_batch(batch, vectors):
                    self.add(result[rows], parts, weight)
        return result.to(vectors)

    def _same(self, m: int) -> dict[str, Any]:
        """What has to be the same on all ranks, so that their shares of a product add up."""
        parameters = checksum(self.space.model.parameters())
        return {"the vectors": m, "the points of the Hessian": self.n, "the parameters": parameters}

    def matrix(self) -> Tensor:
        """The Hessian itself `[p, p]`."""
        matrix = self @ torch.eye(self.space.size, dtype=self.space.dtype, device=self.space.device)
        return (matrix + matrix.T) / 2

    def add(self, target: Tensor, parts: list[Tensor | None], factor: float) -> None:
        """target `[rows, p]` += factor · parts."""
        for parameter, part in zip(self.space.parameters.values(), parts, strict=True):
            if part is not None:
                self.space.part(target, parameter).add_(part.to(target.device), alpha=factor)

    @cached_property
    def reduction(self) -> str:
        """Whether the loss of a batch is the ``"mean"`` or the ``"sum"`` over its points, found by trying two."""
        pair = to_device(self.data.first(2), self.space.device)
        ones = [to_device(batch, self.space.device) for batch in self.data.batches([[0], [min(1, self.n - 1)]])]
        with torch.no_grad():
            together = self.loss(self.space.model, pair) * batch_length(pair)
            alone = sum(self.loss(self.space.model, one) for one in ones[: batch_length(pair)])
        if torch.allclose(together, torch.as_tensor(alone), rtol=1e-4):
            return "mean"
        if torch.allclose(together / batch_length(pair), torch.as_tensor(alone), rtol=1e-4):
            return "sum"
        raise ValueError(
            f"the loss of two points together is {float(together) / 2:.6g}, which is neither the mean nor the sum of "
            f"their losses (sum {float(alone):.6g}), so batches cannot be put together to a Hessian of the whole data: "
            "use a loss with reduction='mean' or 'sum', or one batch that holds all the data."
        )


def one_number(value: Tensor) -> Tensor:
    """The loss of a batch as a scalar, if it is one number."""
    if value.numel() != 1:
        raise ValueError(f"the loss of a batch has shape {list(value.shape)}: return one number, its mean or sum.")
    return value.reshape(())


def chunks_of_vectors(vectors: Tensor) -> Iterator[slice]:
    """Rows of `vectors [m, p]` that are worked on at once."""
    chunk = max(1, _CHUNK_BYTES // (vectors.shape[1] * vectors.element_size()))
    return (slice(low, min(low + chunk, len(vectors))) for low in range(0, len(vectors), chunk))


def products_with_vectors(
    of: list[Tensor], by: Sequence[Tensor], vectors: list[Tensor], *, keep: bool
) -> list[Tensor | None]:
    """∂⟨of, vectors⟩/∂by for some vectors at a time `[c, *shape]`; zero where None. `keep` keeps the graph."""
    if len(vectors[0]) == 1:
        single = [vector[0] for vector in vectors]
        found = torch.autograd.grad(of, by, single, retain_graph=keep, allow_unused=True)
        return [None if part is None else part[None] for part in found]
    return list(torch.autograd.grad(of, by, vectors, retain_graph=keep, allow_unused=True, is_grads_batched=True))


def lissa(
    hessian: Hessian,
    vectors: Tensor,
    *,
    depth: int,
    scaling: float,
    damping: float = 0.0,
    repeat: int = 1,
    batch_size: int = 1,
    seed: int = 0,
    show_progress: bool = False,
) -> Tensor:
    """H⁻¹ v by LiSSA for `vectors [m, p]`, all on the same random batches.

    Every vector's estimate has the distribution it would have alone; only the errors of different vectors are
    correlated. The global random state is not touched.

    Args:
        hessian: the Hessian.
        vectors: right-hand sides `[m, p]`.
        depth: steps of the recursion.
        scaling: divides the Hessian; must exceed its largest eigenvalue on the batches.
        damping: shrinks the iterate in every step; helps against negative curvature.
        repeat: independent runs to average.
        batch_size: points drawn without replacement for each step.
        seed: of the batches.
        show_progress: whether to show a progress bar.
    """
    for name, value, least in (("depth", depth, 0), ("repeat", repeat, 1), ("batch_size", batch_size, 1)):
        if value < least:
            raise ValueError(f"{name}={value}: LiSSA needs at least {least}.")
    m, steps = len(vectors), _Steps(depth, scaling, damping, batch_size, once(lambda: seed))
    cut = repeat * m < world_size() <= min(batch_size, hessian.n)
    mine = range(repeat * m) if cut else my_share(repeat * m)
    vectors = vectors.detach()
    total = torch.zeros_like(vectors)
    with (
        nullcontext() if cut else adding_up(total, same=lambda: hessian._same(m)),
        ProgressBar(total=repeat * depth, desc="LiSSA", leave=False, disable=not show_progress or rank() > 0) as bar,
    ):
        for run in range(repeat):
            rows = slice(max(mine.start - run * m, 0), min(mine.stop - run * m, m))
            if rows.start < rows.stop:
                total[rows] += _estimate(hessian, vectors[rows], steps, run, cut, bar)
    return total.div_(repeat * scaling)


@dataclass(frozen=True)
class _Steps:
    """The settings of a LiSSA solve."""

    depth: int
    scaling: float
    damping: float
    batch_size: int
    seed: int


def _estimate(hessian: Hessian, vectors: Tensor, steps: _Steps, run: int, cut: bool, bar: Any) -> Tensor:
    """The iterate `[m, p]` after all steps of one run; with `cut` every rank takes a share of each batch."""
    estimate, sizes = vectors.clone(), vectors.norm(dim=1)
    for step, batch in enumerate(_draws(hessian, steps.depth, steps.batch_size, [steps.seed, run], cut)):
        if cut:
            product = _shared_product(hessian, batch, estimate, steps.batch_size)
            estimate.mul_(1 - steps.damping).add_(vectors).sub_(product, alpha=1 / steps.scaling)
        else:
            for rows, parts in hessian.on_batch(batch, estimate):
                if steps.damping:
                    estimate[rows].mul_(1 - steps.damping)
                estimate[rows].add_(vectors[rows])
                hessian.add(estimate[rows], parts, -1 / steps.scaling)
        look = step % _CHECK_EVERY == _CHECK_EVERY - 1 or step == steps.depth - 1
        if look and not _bounded(estimate, sizes, step + 1):
            raise _diverged(hessian, vectors, step + 1, steps, run)
        bar.update()
    return estimate


def _shared_product(hessian: Hessian, batch: Any, vectors: Tensor, batch_size: int) -> Tensor:
    """Products `[m, p]` of the Hessian on a batch of which this rank has a share."""
    product = torch.zeros_like(vectors)
    with adding_up(product):
        size = min(batch_size, hessian.n)
        weight = 1.0 if hessian.reduction == "sum" else len(my_share(size)) / size
        for rows, parts in hessian.on_batch(batch, vectors):
            hessian.add(product[rows], parts, weight)
    return product


def _draws(hessian: Hessian, count: int, batch_size: int, seed: list[int], cut: bool = False) -> Iterator[Any]:
    """Random batches without replacement, all the data where a batch is that large; this rank's share if `cut`."""
    random, size = np.random.default_rng(seed), min(batch_size, hessian.n)
    mine = my_share(size) if cut else range(size)
    drawn = (random.choice(hessian.n, size, replace=False) for _ in range(count))
    return hessian.data.batches(indices[mine.start : mine.stop] for indices in drawn)


def _bounded(estimate: Tensor, sizes: Tensor, steps: int) -> bool:
    """Whether the iterate grew no faster than it can while every step contracts: |e| ≤ (steps + 1) |v|."""
    return bool((estimate.norm(dim=1) <= _GROWTH * (steps + 1) * sizes.clamp_min(1e-30)).all())


def _diverged(hessian: Hessian, vectors: Tensor, step: int, steps: _Steps, run: int) -> ValueError:
    """The error for an iterate that grows, with values that would have held it."""
    damping, scaling = steps.damping, steps.scaling
    draws = _draws(hessian, 4, steps.batch_size, [steps.seed, run])
    curvature = max((_extreme(hessian, vectors, batch) for batch in draws), key=abs)
    if curvature > (2 - damping) * scaling / 2:
        fix = f"scaling={round_up(1.5 * curvature)} (the batches have curvature up to about {curvature:.3g})"
    else:
        enough = min(0.5, round_up(max(0.001, 2 * damping, -1.5 * curvature / scaling)))
        fix = f"damping={enough} (the loss has directions of negative curvature), a larger batch_size or the "
        fix += "Gauss–Newton matrix"
    return ValueError(
        f"LiSSA diverged at step {step} of recursion_depth={steps.depth}, with damping={damping}, scaling={scaling}: "
        f"the iterate grows. Try {fix}; a recursion_depth below {step} would only hide it."
    )


def _extreme(hessian: Hessian, vectors: Tensor, batch: Any) -> float:
    """The eigenvalue of largest size of the Hessian on a batch, roughly, by power iteration."""
    vector, value = vectors[:1] / vectors[:1].norm().clamp_min(1e-30), 0.0
    for _ in range(10):
        product = torch.zeros_like(vector)
        for rows, parts in hessian.on_batch(batch, vector):
            hessian.add(product[rows], parts, 1.0)
        value = float((product * vector).sum())
        vector = product / product.norm().clamp_min(1e-30)
    return value


def round_up(value: float) -> float:
    """To two significant digits, upwards."""
    unit = 10.0 ** (np.floor(np.log10(value)) - 1)
    return float(f"{np.ceil(value / unit) * unit:.2g}")


def direct_solve(matrix: Tensor, vectors: Tensor, regularization: float = 0.0) -> Tensor:
    """(matrix + regularization I)⁻¹ v for `vectors [m, p]`."""
    damped = matrix.clone()
    damped.diagonal().add_(regularization)
    try:
        return torch.linalg.solve(damped, vectors.T).T
    except torch.linalg.LinAlgError as error:
        raise ValueError(
            f"the Hessian is singular with regularization={regularization}: pass a positive regularization, e.g. "
            f"{round_up(1e-3 * max(float(matrix.diagonal().abs().mean()), 1e-12)):g}."
        ) from error
