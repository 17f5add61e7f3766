"""Conjugate gradients whose result does not depend on the order of additions; where it would, they warn.

They start at x = v and minimise ½ xᵀ A x - vᵀ x with A = H + regularization I. Every step adds one direction and takes
one product with A for all vectors at once.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ggda_ext.curvature.hessian import Hessian, round_up

_CONVERGED = 1e-3  # a solve that lost accuracy still counts below this share of the first residual
_NOISE = 100.0  # below this many rounding errors of |d| |H d| the sign of a curvature cannot be trusted


def conjugate_gradients(
    hessian: Hessian,
    vectors: Tensor,
    *,
    max_iter: int = 10,
    tol: float = 1e-7,
    regularization: float = 0.0,
    memory_budget: int = 512 * 2**20,
) -> Tensor:
    """Return (H + regularization I)⁻¹ v for `vectors [m, p]` by at most `max_iter` steps of conjugate gradients from v.

    In exact arithmetic all residuals are orthogonal. With rounding they are not after a few steps (three to ten in
    float32), and the steps then depend on the order of additions. Therefore each residual is made orthogonal to all
    earlier ones again, as long as there is memory to keep them. A vector is done when its residual falls below `tol`.
    It stops earlier, with a warning, in two cases in which a further step would only follow rounding errors:

    * The direction has negative curvature, or none apart from rounding. The method is for positive matrices.
    * Residuals are no longer orthogonal because there is too little memory. Later steps are kept only if they still
      converge, to a thousandth of the first residual.

    Args:
        hessian: the curvature H, a `Hessian` or a `GaussNewton`; the latter has no negative curvature for a convex
            loss.
        vectors: right-hand sides `[m, p]`.
        max_iter: largest number of steps.
        tol: norm of the residual below which a vector is done.
        regularization: number added to the diagonal.
        memory_budget: bytes for earlier residuals.

    Warns:
        NegativeCurvature, LostAccuracy: the warning names the first such step, what was found there, and what helps.
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
    trusted = solution.clone()  # solution before a vector lost its accuracy
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
        for _ in range(2):  # once leaves rounding errors, twice is enough
            for unit in earlier:
                residual -= (residual * unit).sum(1, keepdim=True) * unit
        if len(earlier) < room:
            earlier.append(_unit(residual))
        else:  # with only some of them, the check below would not see that orthogonality is lost
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
    """Conjugate gradients found a direction in which the loss does not curve upwards, and stopped there."""


class LostAccuracy(UserWarning):
    """Conjugate gradients came to steps that depend on rounding, did not converge, and went back to the step before."""


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
