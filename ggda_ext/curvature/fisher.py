"""The empirical Fisher of (projected) gradients, of points or of groups, with a ridge relative to its own size.

Let φ_i be the gradients that a method takes the Fisher of (of the loss for influence functions, of the output for
TRAK), ℓ_i the loss of a point, and |G| the size of a group. Every ``fisher=`` of this package is one of

    "exact"     F = Σ_i φ_i φ_iᵀ
    "batched"   F = Σ_G u_G u_Gᵀ / |G|,   u_G = Σ_{i∈G} φ_i      every φ_i replaced by the mean of its group
    "paper"     F = Σ_G u_G u_Gᵀ,         u_G = Σ_{i∈G} ∇ℓ_i     as printed in the paper, always of loss gradients

and is inverted with a ridge, F_λ = F + λ · mean diag(F) · I.

The batched Fisher equals the exact one for groups of one point, and for groups whose gradients are alike. If the
gradients in a group are unrelated, with mean zero, it is 1/|G| of the exact one. The paper's Fisher, compared with the
exact Fisher of loss gradients, is right on average if the gradients are unrelated, and |G| times as large if they are
alike. So for groups of one size and φ_i = ∇ℓ_i the two differ by a factor; with unequal sizes large groups count more
in the paper's Fisher.

Both are approximations: k rows say little about p directions unless k is well above p, and a ridge has to make up for
this. ``"auto"`` is λ = 0.3 · p / k, chosen on real data (``python -m benchmarks fidelity``).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ggda_ext.model import product
from ggda_ext.sharing import add_up, my_share

FisherKind = Literal["exact", "batched", "paper"]
FISHERS: tuple[FisherKind, ...] = ("exact", "batched", "paper")
Damping = float | Literal["auto"]

AUTO_DAMPING = 0.3
"""The value of λ · k / p. On data that was not used to choose it, the agreement with TRAK is at most 0.13 below the
agreement with the best λ for each group size, grouping and data set. Any single λ for all of them loses 0.18 or more in
some case."""


class EmpiricalFisher:
    """Sum of outer products of rows, added block by block.

    Args:
        dim: length p of a row.
        device: where the matrix is kept.

    >>> fisher = EmpiricalFisher(2).add(torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 1.0]]))
    >>> fisher.matrix.tolist(), fisher.rows, fisher.mean_diagonal
    ([[4.0, 0.0], [0.0, 2.0]], 3, 3.0)
    >>> damped, damping = fisher.damped(0.5)
    >>> damped.tolist(), damping
    ([[5.5, 0.0], [0.0, 3.5]], 0.5)
    """

    def __init__(self, dim: int, device: torch.device | str = "cpu") -> None:
        self.matrix = torch.zeros(dim, dim, device=device)
        self.rows = 0

    def add(self, rows: Tensor) -> EmpiricalFisher:
        """Add rows `[b, p]`."""
        rows = rows.detach().to(self.matrix.device)
        if rows.dtype not in (torch.float32, torch.float64):
            rows = rows.float()
        if rows.dtype != self.matrix.dtype and not self.rows:
            self.matrix = self.matrix.to(rows.dtype)
        self.matrix += product(rows.T, rows).to(self.matrix.dtype)
        self.rows += len(rows)
        return self

    @classmethod
    def of_matrix(cls, matrix: Tensor, rows: int) -> EmpiricalFisher:
        """Return a Fisher whose matrix `[p, p]` was already summed over this number of rows."""
        found = cls(len(matrix), matrix.device)
        found.matrix, found.rows = matrix, rows
        return found

    def add_groups(self, kind: FisherKind, sums: Tensor, sizes: np.ndarray) -> EmpiricalFisher:
        """Add one row per group, with the formula of `kind` (see `ggda_ext.curvature.fisher`).

        Args:
            kind: ``"batched"`` or ``"paper"``.
            sums: u_G of every group `[k, p]`.
            sizes: number of points in every group `[k]`.

        >>> sums = torch.tensor([[4.0, 4.0]])  # four points (1, 1)
        >>> EmpiricalFisher(2).add_groups("batched", sums, np.array([4])).matrix.tolist()
        [[4.0, 4.0], [4.0, 4.0]]
        >>> EmpiricalFisher(2).add_groups("paper", sums, np.array([4])).matrix.tolist()
        [[16.0, 16.0], [16.0, 16.0]]
        """
        if kind == "exact":
            raise ValueError("kind='exact' is made of the gradients of single points: add them with `add`.")
        if kind == "paper":
            return self.add(sums)
        return self.add(sums / torch.from_numpy(np.sqrt(sizes)).to(sums)[:, None])

    @classmethod
    def of_groups(cls, kind: FisherKind, sums: Tensor, sizes: np.ndarray) -> EmpiricalFisher:
        """Return the Fisher of groups; every rank has all sums `[k, p]` and takes a share of the work."""
        mine = slice(my_share(len(sums)).start, my_share(len(sums)).stop)
        return cls(sums.shape[1], sums.device).add_groups(kind, sums[mine], sizes[mine]).add_up()

    def add_up(self) -> EmpiricalFisher:
        """Sum the Fisher over all ranks, after each rank has added its share of the rows."""
        self.matrix, self.rows = add_up(self.matrix), int(add_up(torch.tensor(self.rows)))
        return self

    @property
    def dim(self) -> int:
        """Length p of a row."""
        return len(self.matrix)

    @property
    def mean_diagonal(self) -> float:
        """Mean of the diagonal; a relative ridge is a multiple of it."""
        return float(self.matrix.diagonal().mean())

    @property
    def auto_damping(self) -> float:
        """The automatic relative ridge for this number of rows and dimensions."""
        return AUTO_DAMPING * self.dim / max(self.rows, 1)

    def damped(self, damping: Damping = "auto", absolute: float = 0.0) -> tuple[Tensor, float]:
        """Return the damped Fisher `[p, p]` and its relative ridge λ.

        Args:
            damping: λ relative to the mean diagonal, or ``"auto"`` for `auto_damping`.
            absolute: a toolkit's own ridge (TRAK's `lambda_reg`, dattri's `regularization`), added without scaling.

        Raises:
            ValueError: if the damped Fisher cannot be inverted.
        """
        checked = check_damping(damping)
        ridge = self.auto_damping if checked == "auto" else checked
        damped = self.matrix.clone()
        added = ridge * self.mean_diagonal + absolute
        damped.diagonal().add_(added)
        enough = self.dim * torch.finfo(torch.float32).eps * self.mean_diagonal  # with more it is well conditioned
        if added <= enough or not self.mean_diagonal > 0:
            check_invertible(damped, self.rows)
        return damped, ridge


def check_fisher(kind: str) -> FisherKind:
    """Return `kind`; raise an error if it is not one of `FISHERS`."""
    for known in FISHERS:
        if kind == known:
            return known
    raise ValueError(f"fisher={kind!r} is not one of {', '.join(map(repr, FISHERS))}.")


def check_damping(damping: object) -> Damping:
    """Return `damping` as a number or ``"auto"``; raise an error if it is neither, negative or not finite."""
    if damping == "auto":
        return "auto"
    return check_ridge(damping, "damping", ", relative to the mean diagonal, or 'auto'")


def check_ridge(ridge: object, name: str, more: str = "; a relative ridge is damping=") -> float:
    """Return a ridge as a number; raise an error, with the hint `more`, if it is none, negative or not finite."""
    if isinstance(ridge, bool) or not isinstance(ridge, int | float) or not 0 <= ridge < float("inf"):
        raise ValueError(f"{name}={ridge!r}: pass a number from 0 on{more}.")
    return float(ridge)


def check_invertible(fisher: Tensor, rows: int) -> None:
    """Raise an error if the inverse of a Fisher `[p, p]` of `rows` rows would be noise; the error says what helps."""
    inverse, failed = torch.linalg.inv_ex(fisher.double())
    condition = float(torch.linalg.matrix_norm(fisher.double(), 1) * torch.linalg.matrix_norm(inverse, 1))
    # the 1-norm condition is at most p times the 2-norm condition, so above the limit the inverse is noise for certain
    if int(failed) or not condition * torch.finfo(torch.float32).eps < len(fisher):
        raise ValueError(
            f"the Fisher of {rows} rows in {len(fisher)} dimensions is singular (condition {condition:.1g}), so scores "
            "would be noise: pass a damping such as 0.1, or 'auto', or use a smaller projection dimension."
        )
