"""LiSSA: solve with a Hessian by a recursion over random batches.

    e ← v + (1 - damping) e - H_batch e / scaling,      H⁻¹ v ≈ e / scaling

All vectors share each batch, so for a given seed the solve is a linear map. With several ranks (see
`ggda_ext.sharing`) each rank takes a share of the vectors and runs, or, if these are too few, of the points of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ggda_ext.curvature.hessian import Hessian, round_up
from ggda_ext.sharing import ProgressBar, adding_up, my_share, once, rank, world_size

_CHECK_EVERY = 8  # steps between checks of the size of the iterate
_GROWTH = 10.0  # an iterate diverges if it is this many times as large as linear growth allows


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
    """Return H⁻¹ v by LiSSA for `vectors [m, p]`, all on the same random batches.

    The estimate of every vector has the same distribution as if it were solved alone; only the errors of different
    vectors are correlated. The global random state is not changed.

    Args:
        hessian: the Hessian.
        vectors: right-hand sides `[m, p]`.
        depth: number of steps of the recursion.
        scaling: divides the Hessian; it must be larger than the largest eigenvalue on the batches.
        damping: shrinks the iterate in every step, which helps against negative curvature.
        repeat: number of independent runs that are averaged.
        batch_size: points drawn without replacement for each step.
        seed: seed of the batches.
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
        nullcontext() if cut else adding_up(total, same=lambda: hessian.same(m)),
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
    """Return the iterate `[m, p]` after all steps of one run; with `cut` every rank takes a share of each batch."""
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
    """Return the products `[m, p]` of the Hessian on a batch that all ranks share; `batch` is this rank's share."""
    product = torch.zeros_like(vectors)
    with adding_up(product):
        size = min(batch_size, hessian.n)
        weight = 1.0 if hessian.reduction == "sum" else len(my_share(size)) / size
        for rows, parts in hessian.on_batch(batch, vectors):
            hessian.add(product[rows], parts, weight)
    return product


def _draws(hessian: Hessian, count: int, batch_size: int, seed: list[int], cut: bool = False) -> Iterator[Any]:
    """Return random batches without replacement, of at most all points; with `cut`, this rank's share of each."""
    random, size = np.random.default_rng(seed), min(batch_size, hessian.n)
    mine = my_share(size) if cut else range(size)
    drawn = (random.choice(hessian.n, size, replace=False) for _ in range(count))
    return hessian.data.batches(indices[mine.start : mine.stop] for indices in drawn)


def _bounded(estimate: Tensor, sizes: Tensor, steps: int) -> bool:
    """Whether the iterate is within `_GROWTH` times the bound (steps + 1) |v|, which holds if every step contracts."""
    return bool((estimate.norm(dim=1) <= _GROWTH * (steps + 1) * sizes.clamp_min(1e-30)).all())


def _diverged(hessian: Hessian, vectors: Tensor, step: int, steps: _Steps, run: int) -> ValueError:
    """Return the error for an iterate that grows; it names settings that would keep it bounded."""
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
    """Return roughly the eigenvalue of largest size of the Hessian on a batch, by power iteration."""
    vector, value = vectors[:1] / vectors[:1].norm().clamp_min(1e-30), 0.0
    for _ in range(10):
        product = torch.zeros_like(vector)
        for rows, parts in hessian.on_batch(batch, vector):
            hessian.add(product[rows], parts, 1.0)
        value = float((product * vector).sum())
        vector = product / product.norm().clamp_min(1e-30)
    return value
