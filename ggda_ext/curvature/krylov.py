"""Damped solves for many right-hand sides at once, in one space that all of them share.

(A + λ I) x = v is solved in the block Krylov space of all vectors: span{v, A v, A² v, …}. One product with A for all
vectors adds a block of directions Q to it, which are kept orthonormal, so that A is there a small matrix T = Q A Qᵀ:

    x = Qᵀ (T + λ I)⁻¹ Q v

For one vector these are the steps of conjugate gradients; several share what each finds. The space does not depend on
λ, so λ may be chosen once the spectrum of T is known. The eigenvalues of T show negative curvature, which conjugate
gradients would walk past.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ggda_ext.model import sums_on

Product = Callable[[Tensor], Tensor]
"""Vectors `[m, p]` → their products with a symmetric matrix `[m, p]`."""
SPACE_BYTES = 2**30
"""For the directions of the space, but room for four blocks of them at least."""
ChooseDamping = Callable[[Tensor], float]
"""Eigenvalues of A in the space found so far, rising → λ."""


@dataclass(frozen=True)
class Solution:
    """What a solve found.

    Attributes:
        rows: solutions `[m, p]`.
        damping: λ.
        residual: the largest |v − (A + λ) x| / |v| of any vector.
        steps: products with A, each of all vectors.
        lowest: the smallest eigenvalue of A in the space.
    """

    rows: Tensor
    damping: float
    residual: float
    steps: int
    lowest: float


def krylov_solve(
    product: Product, vectors: Tensor, damping: ChooseDamping, *, max_steps: int, tolerance: float
) -> Solution:
    """(A + λ)⁻¹ v for all `vectors [m, p]` in one space.

    Args:
        product: multiplies with A.
        vectors: right-hand sides.
        damping: chooses λ from the eigenvalues of A that are known; asked after every step, so it must not change
            anything.
        max_steps: most products.
        tolerance: residual, relative to the vector, at which all are done.
    """
    lengths = vectors.norm(dim=1, keepdim=True)
    space = _Space(vectors / lengths.clamp_min(torch.finfo(vectors.dtype).tiny))
    most = min(max_steps, max(4, SPACE_BYTES // max(vectors.nbytes, 1)))
    inside, chosen, residual, values = space.sides, 0.0, 0.0, space.sides.new_zeros(1)
    while len(space.newest) and len(space.blocks) < most:
        space.extend(product(space.newest))
        values, turn = torch.linalg.eigh(space.matrix)
        chosen = damping(values)
        inside = turn @ ((turn.T @ space.sides) / (values + chosen)[:, None])
        residual = space.residual(inside)
        if residual <= tolerance:
            break
    return Solution(space.lift(inside) * lengths, chosen, residual, len(space.blocks), float(values[0]))


class _Space:
    """An orthonormal basis that grows block by block, and the matrix in it.

    Attributes:
        newest: the block that was not multiplied yet `[r, p]`.
        matrix: T `[d, d]` of the blocks that were.
        sides: the right-hand sides in the basis `[d, m]`.
    """

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors
        self.blocks: list[Tensor] = []
        self.newest = _orthonormal(vectors, 1.0)
        self.matrix = vectors.new_zeros(0, 0, dtype=torch.float64, device=sums_on(vectors.device))
        self.sides = self.matrix.new_zeros(0, len(vectors))
        self.outside = vectors.new_zeros(0, vectors.shape[1])

    def extend(self, products: Tensor) -> None:
        """Take the products of the newest block; the space grows by what they have outside of it."""
        self.blocks.append(self.newest)
        size, wide = len(self.newest), len(self.matrix) + len(self.newest)
        columns = torch.cat([self._inner(block, products) for block in self.blocks])
        grown = self.matrix.new_zeros(wide, wide)
        grown[: wide - size, : wide - size] = self.matrix
        grown[:, wide - size :] = columns
        grown[wide - size :, :] = columns.T
        grown[wide - size :, wide - size :] = (columns[wide - size :] + columns[wide - size :].T) / 2
        self.matrix = grown
        self.sides = torch.cat([self.sides, self._inner(self.newest, self.vectors)])
        outside = products.clone()
        for _ in range(2):  # twice is enough, once is not
            for block in self.blocks:
                outside -= (outside @ block.T) @ block
        self.outside = outside
        self.newest = _orthonormal(outside, float(products.norm(dim=1).max()))

    def residual(self, inside: Tensor) -> float:
        """The largest residual of solutions `[d, m]` in the basis: only the newest products leave the space."""
        last = inside[-len(self.blocks[-1]) :]
        gram = self._inner(self.outside, self.outside)
        return float((last * (gram @ last)).sum(0).clamp_min(0).sqrt().max())

    def lift(self, inside: Tensor) -> Tensor:
        """Vectors `[m, p]` of coordinates `[d, m]` in the basis."""
        rows, at = torch.zeros_like(self.vectors), 0
        for block in self.blocks:
            rows += inside[at : at + len(block)].T.to(block) @ block
            at += len(block)
        return rows

    def _inner(self, a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T).to(self.matrix)


def _orthonormal(rows: Tensor, size: float) -> Tensor:
    """An orthonormal basis `[r, p]` of rows `[m, p]`; what is rounding next to rows of that size is left out."""
    found, least = rows, (100 * torch.finfo(rows.dtype).eps * size) ** 2
    for _ in range(2):  # the second round removes what rounding left of the first
        values, turn = torch.linalg.eigh(found.double() @ found.double().T)
        kept = values > least
        found = (turn[:, kept] / values[kept].sqrt()).T.to(rows) @ found
        least = 0.25
    return found
