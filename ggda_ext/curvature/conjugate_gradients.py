"""Conjugate gradients that give the same answer in every order of additions, or say where they cannot.

From x = v they minimise ½ xᵀ A x - vᵀ x with A = H + regularization I over one more direction in every step, by one
product with A for all vectors at once.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ggda_ext.curvature.hessian import Hessian, round_up

_CONVERGED = 1e-3  # share of the first residual at which conjugate gradients that lost accuracy count all the same
_NOISE = 100.0  # a curvature below so many roundings of |d| |H d| has no sign that can be trusted


def conjugate_gradients(
    hessian: Hessian,
    vectors: Tensor,
    *,
    max_iter: int = 10,
    tol: float = 1e-7,
    regularization: float = 0.0,
    memory_budget: int = 512 * 2**20,
) -> Tensor:
    """(H + regularization I)⁻¹ v by at most `max_iter` steps of conjugate gradients from v, for `vectors [m, p]`.

    In exact arithmetic all residuals are orthogonal. Rounding spoils that after a few steps, in float32 after three to
    ten, and then the steps depend on the order of additions: so residuals are made orthogonal to all earlier ones
    again, as long as there is memory to keep those. A vector is done when its residual falls below `tol`. It stops
    earlier, with a warning, where a further step would be rounding errors rather than mathematics:

    * in a direction of negative curvature, or of none but for rounding: the method is for positive matrices;
    * where residuals are no longer orthogonal for want of memory. Steps after that are kept only if they converge all
      the same, to a thousandth of the first residual.

    Args:
        hessian: the curvature H, a `Hessian` or a `GaussNewton`, which has no negative curvature for a convex loss.
        vectors: right-hand sides `[m, p]`.
        max_iter: most steps.
        tol: residual norm at which a vector is done.
        regularization: added to the diagonal.
        memory_budget: bytes for earlier residuals.

    Warns:
        NegativeCurvature, LostAccuracy: with the first such step, what was found there, and what helps.
    """
    vectors = vectors.detach()
    eps = torch.finfo(vectors.dtype).eps

    def product(x: Tensor) -> Tensor:
        return (hessian @ x).add_(x, alpha=regularization)

    solution = vectors.clone()
    residual = vectors - product(solution)
    direction, start = residual.clone(), residual.clone()
    room = memory_budget // max(vectors.nbytes, 1)
    earlier = [_unit(residual)][:room]
    squares = residual.square().sum(1, keepdim=True)
    negative, lost = (torch.zeros_like(squares, dtype=torch.bool) for _ in range(2))
    trusted = solution.clone()  # the last solution before a vector lost its accuracy
    first_negative: tuple[int, float] | None = None
    first_lost: int | None = None
    for number in range(1, max_iter + 1):
        going = (squares > tol**2) & ~negative
        if not bool(going.any()):
            break
        bent = product(direction)
        curved = (direction * bent).sum(1, keepdim=True)
        noise = _NOISE * eps * _lengths(direction) * _lengths(bent)
        if bool((found := going & (curved <= noise)).any()):
            least = torch.where(found, curved / direction.square().sum(1, keepdim=True), float("inf")).min()
            first_negative = first_negative or (number, float(least))
            negative |= found
            going &= ~found
        step = torch.where(going, squares / curved, 0)
        solution += step * direction
        residual -= step * bent
        for _ in range(2):  # twice is enough, once is not
            for unit in earlier:
                residual -= (residual * unit).sum(1, keepdim=True) * unit
        if len(earlier) < room:
            earlier.append(_unit(residual))
        else:  # some of them would hide from the look below that the others are lost
            earlier, room = [], 0
        before, squares = squares, residual.square().sum(1, keepdim=True)
        turned = (residual * start).sum(1, keepdim=True).abs() > eps**0.5 * _lengths(residual) * _lengths(start)
        if first_lost is None and bool((going & turned).any()):
            first_lost = number
        lost |= going & turned
        trusted = torch.where(lost, trusted, solution)
        direction = residual + torch.where(going, squares / before, 0) * direction
    noisy = lost & (squares > (_CONVERGED * _lengths(start)) ** 2)
    if first_negative is not None:
        _warn_of_negative_curvature(*first_negative, int(negative.sum()), len(vectors), max_iter, regularization)
    if first_lost is not None and bool(noisy.any()):
        left = float((squares.sqrt() / _lengths(start))[noisy].max())
        _warn_of_lost_accuracy(first_lost, left, int(noisy.sum()), len(vectors), max_iter, regularization)
    return torch.where(noisy, trusted, solution)


def _lengths(rows: Tensor) -> Tensor:
    return rows.norm(dim=1, keepdim=True)


def _unit(rows: Tensor) -> Tensor:
    return rows / _lengths(rows).clamp_min(torch.finfo(rows.dtype).tiny)


class NegativeCurvature(UserWarning):
    """Conjugate gradients met a direction in which the loss is not curved upwards, and stopped there."""


class LostAccuracy(UserWarning):
    """Conjugate gradients reached steps that depend on rounding, did not converge, and went back to the step before."""


def _warn_of_negative_curvature(
    step: int, curvature: float, stopped: int, count: int, max_iter: int, regularization: float
) -> None:
    enough = round_up(max(2 * (regularization - curvature), 1e-8))
    warnings.warn(
        f"conjugate gradients met curvature {curvature:.3g} at step {step} of max_iter={max_iter}, with "
        f"regularization={regularization:g}: the Hessian is not positive, so {stopped} of {count} vectors stopped at "
        f"the solution they had. Pass a larger regularization (try {enough:g}), or use the Gauss–Newton matrix "
        "(`GaussNewton`, or curvature='gauss-newton'), which has no negative curvature for a convex loss.",
        NegativeCurvature,
        stacklevel=3,
    )


def _warn_of_lost_accuracy(
    step: int, left: float, stopped: int, count: int, max_iter: int, regularization: float
) -> None:
    warnings.warn(
        f"conjugate gradients depend on rounding from step {step} of max_iter={max_iter} on, with regularization="
        f"{regularization:g}, and did not converge ({left:.2g} of the first residual is left): {stopped} of {count} "
        "vectors have the solution before that step. Pass fewer vectors at once or a larger memory_budget, a larger "
        f"regularization, or be content with max_iter={step - 1}.",
        LostAccuracy,
        stacklevel=3,
    )
