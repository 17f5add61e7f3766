"""Which parameter directions a refit may move along.

The Gauss-Newton matrix of the training loss, GN = 1/n Σ J_iᵀ A_i J_i with A the curvature of the loss in the outputs,
is sketched in one pass. Points are put into m random groups, and each point gets a random cotangent of covariance A_i.
Then the rows R `[m, p]`, summed by group, have RᵀR ≈ GN. The leading eigenvectors of GN span half of the space. The
groups add their gradients g_G. The gradients of learned points are nearly zero, so the groups also add what they have
*taught*: the gradients h_G that a model with outputs of zero would get from them, and (GN + λ)⁻¹ h_G, the way to take
that back. With the sketch, the inverse costs no pass (Woodbury). If the memory budget has no room for all rows, a large
model gets fewer eigenvectors, and many groups are put into random bundles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.counterfactual.convex import ConvexLoss
from ggda_ext.data import IndexedData
from ggda_ext.gradients import GroupGradients
from ggda_ext.groups.partition import Groups
from ggda_ext.losses import BatchLoss, model_output

Kind = Literal["auto", "all", "eigen", "groups", "both"]
KINDS: tuple[Kind, ...] = ("auto", "all", "eigen", "groups", "both")
OVERSAMPLED = 5
"""Number of rows of the sketch for every eigenvector taken from it."""
_BUNDLES = 2  # bundles of groups for each direction wanted, if there are more groups than that
_FEWEST_ROWS = 10
_KINDS_OF_ROWS = 3  # rows of every group or bundle: g_G, h_G and (GN + λ)⁻¹ h_G
_DEPENDENT = 1e-5  # share of the largest squared singular value below which a direction adds nothing
_DAMPED = 1e-4  # λ of (GN + λ)⁻¹ h_G, in units of the largest eigenvalue
_UNCOVERED = 0.01  # squared length that a unit gradient must have outside of the eigenvectors to be added


@dataclass(frozen=True)
class Directions:
    """An orthonormal set of directions, and how it was chosen.

    Attributes:
        rows: the directions `[r, p]`.
        cut: the Gauss-Newton eigenvalue at which eigenvectors were cut off; 0 if none were cut off.
        why: how the directions were chosen, in words.
    """

    rows: Tensor
    cut: float
    why: str


class WithRows(IndexedData):
    """A data set that yields batches as ``(batch, rows)``, with one row of numbers `[b, c]` for each example."""

    def __init__(self, inner: IndexedData, rows: Tensor) -> None:
        self.__dict__.update(inner.__dict__)
        self.rows = rows

    def batches(self, index_batches: Iterable[Any]) -> Iterator[Any]:
        """Yield one batch for every sequence of indices, with the rows of its examples."""
        waiting: list[np.ndarray] = []

        def noted() -> Iterator[np.ndarray]:
            for indices in index_batches:
                waiting.append(np.asarray(indices, np.int64))
                yield waiting[-1]

        for batch in super().batches(noted()):
            yield batch, self.rows[torch.from_numpy(waiting.pop(0))]


def pulled_back(provider: GroupGradients, cotangents: Tensor, groups: Groups) -> GroupGradients:
    """Return a provider of Σ_{i∈G} J_iᵀ c_i for every group, with cotangents c `[n, C]` of the outputs."""

    def products(model: nn.Module, batch: Any) -> Tensor:
        points, rows = batch
        output, _ = model_output(model, points)
        return (output.reshape(len(rows), -1) * rows.to(output)).sum(1)

    paired = WithRows(provider.data, cotangents)
    return GroupGradients(
        provider.model, BatchLoss(products), paired, groups,
        parameters=provider.space.parameters.values(), batch_size=provider._batch_size,
        memory_budget=provider.memory_budget, show_progress=provider.show_progress,
    )  # fmt: skip


def sketch(
    provider: GroupGradients, loss: ConvexLoss, outputs: Tensor, weights: Tensor, rows: int, seed: int
) -> Tensor:
    """Return rows R `[m, p]` with RᵀR ≈ the Gauss-Newton matrix of the weighted mean training loss.

    Args:
        provider: the model and the training data.
        loss: the training loss of every point.
        outputs: the output of every point `[n]` or `[n, C]`.
        weights: the weight of every point `[n]`; they sum to 1.
        rows: m.
        seed: random seed of the groups, cotangents and signs.
    """
    n = len(outputs)
    generator = torch.Generator().manual_seed(seed)
    columns = loss.columns(outputs.double().reshape(n, -1))
    signs = torch.randint(0, 2, (n, 1), generator=generator).to(columns) * 2 - 1
    cotangents = loss.noise(loss.state(columns[:, :, None]), generator) * signs
    cotangents = cotangents * weights.double().clamp_min(0).sqrt()[:, None]
    labels = torch.randperm(n, generator=generator) % min(rows, n)
    return pulled_back(provider, loss.of_columns(cotangents), Groups(labels.numpy())).rows()


def eigenvectors(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of RᵀR, largest first, and the first eigenvectors `[count, p]`."""
    values, vectors = torch.linalg.eigh((rows @ rows.T).double())
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
    found = int((values > 1e-9 * values[0]).sum()) if len(values) else 0
    count = min(count, found)
    return values, vectors[:, :count].T.to(rows) @ rows / values[:count].sqrt().to(rows)[:, None]


def orthonormal(rows: Tensor, most: int | None = None, basis: Tensor | None = None) -> Tensor:
    """Return an orthonormal basis `[r, p]` of the space that rows span. Every row counts alike, whatever its length.

    Args:
        rows: the rows `[m, p]`.
        most: largest number of directions to take; the leading ones are taken.
        basis: an orthonormal basis to extend. Only directions in which unit rows leave its space by at least a tenth of
            their length are added: the other remainders have hardly any curvature, and a refit would run along them.
    """
    sizes = rows.norm(dim=1)
    found = rows[sizes > 0] / sizes[sizes > 0, None]
    least = _DEPENDENT
    if basis is not None:
        found, least = found - (found @ basis.T) @ basis, _UNCOVERED
    for relative in (True, False):  # the second round removes the rounding errors of the first
        values, vectors = torch.linalg.eigh((found @ found.T).double())
        values, vectors = values.flip(0), vectors.flip(1)
        kept = values > (least * (values[0] if basis is None else 1.0) if relative else 0.0)
        if most is not None:
            kept[most:] = False
        if not bool(kept.any()):
            break
        found = (vectors[:, kept] / values[kept].sqrt()).T.to(rows) @ found
    if basis is None:
        return found
    return torch.cat([basis, found]) if bool(kept.any()) else basis


def find_directions(
    kind: Kind,
    rank: int,
    provider: GroupGradients,
    loss: ConvexLoss,
    outputs: Tensor,
    weights: Tensor,
    seed: int,
) -> Directions:
    """Find the directions of a refit; see `WhatIf` for the arguments."""
    space, k = provider.space, len(provider.groups)
    if kind == "all" or (kind == "auto" and space.size <= rank):
        eye = torch.eye(space.size, dtype=space.dtype, device=space.device)
        return Directions(eye, 0.0, f"all {space.size} parameters")
    basis, cut, parts, sketched = None, 0.0, [], None
    room = max(_FEWEST_ROWS, provider.memory_budget // (space.size * space.dtype.itemsize))
    if kind in ("auto", "eigen", "both"):
        wanted = max(1, min(rank if kind == "eigen" else rank // 2, space.size))
        count = min(wanted, room // OVERSAMPLED)
        sketched = sketch(provider, loss, outputs, weights, OVERSAMPLED * count, seed)
        values, vectors = eigenvectors(sketched, count)
        cut = float(values[min(count, len(values) - 1)])
        basis = orthonormal(vectors)
        fewer = "" if count == wanted else ", as many as memory_budget has room for,"
        parts.append(f"{len(basis)} leading Gauss-Newton eigenvectors{fewer}")
    if kind in ("auto", "groups", "both"):
        before = 0 if basis is None else len(basis)
        groups, signs = bundled(provider.groups, min(_BUNDLES * rank, room // _KINDS_OF_ROWS), seed)
        signed = weights.double() * signs.to(weights.device)
        basis = orthonormal(_of_groups(provider, loss, outputs, signed, groups, sketched), rank, basis)
        parts.append(f"{len(basis) - before} directions of what the {k} groups teach")
    assert basis is not None
    if not len(basis):
        raise ValueError("the gradients of all groups are zero: there is no direction in which a refit could move.")
    return Directions(basis, cut, f"{len(basis)} directions: {' and '.join(parts)}")


def bundled(groups: Groups, most: int, seed: int) -> tuple[Groups, Tensor]:
    """Return the groups, or `most` random bundles of them if there are more, and a sign for every point `[n]`.

    In bundles, every group has a random sign, and points in no group have 0. Otherwise all signs are 1.
    """
    if len(groups) <= most:
        return groups, torch.ones(groups.n, dtype=torch.float64)
    draw = np.random.default_rng(seed)
    bundles, signs = draw.permutation(len(groups)) % most, draw.choice([-1.0, 1.0], len(groups))
    labels = groups.labels_of(np.arange(groups.n))
    found = Groups(np.where(labels < 0, -1, bundles[labels]), rest="drop")
    return found, torch.from_numpy(np.where(labels < 0, 0.0, signs[labels]))


def slopes(loss: ConvexLoss, outputs: Tensor) -> Tensor:
    """Return the first derivatives of the loss at outputs `[n]` or `[n, C]`, in double precision `[n, C]`."""
    columns = loss.columns(outputs.double().reshape(len(outputs), -1))
    return loss.of_columns(loss.slope(loss.state(columns[:, :, None]))[:, :, 0])


def _of_groups(
    provider: GroupGradients, loss: ConvexLoss, outputs: Tensor, weights: Tensor, groups: Groups,
    sketched: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the groups' gradients g_G, h_G at outputs of zero and, given a sketch, (GN + λ)⁻¹ h_G: `[2k or 3k, p]`."""
    found = []
    for at in (outputs, torch.zeros_like(outputs)):
        slope = slopes(loss, at)
        if bool(torch.isfinite(slope).all()):
            found.append(pulled_back(provider, slope * weights[:, None], groups).rows())
    if sketched is not None:
        found.append(_inverted(sketched, found[-1]))
    return torch.cat(found)


def _inverted(sketched: Tensor, rows: Tensor) -> Tensor:
    """Return (RᵀR + λ)⁻¹ times rows `[k, p]`, up to a constant factor, by Woodbury's identity."""
    inner = (sketched @ sketched.T).double()
    damping = _DAMPED * torch.linalg.matrix_norm(inner, 2) + 1e-30
    inner.diagonal().add_(damping)
    covered = torch.linalg.solve(inner, (sketched @ rows.T).double())
    return rows - covered.T.to(sketched) @ sketched
