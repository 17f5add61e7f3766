"""Hessian products and solves against the Hessian by torch.func, on small models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from ggda_ext.curvature import Hessian, conjugate_gradients, direct_solve, lissa
from ggda_ext.data import IndexedData
from ggda_ext.gradients.parameters import ParameterSpace

N = 11


def make(reduction: str = "mean", chosen: Any = None, batch_size: int = N) -> tuple[Hessian, Tensor]:
    """A Hessian, and the same as a matrix."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(N, 3, dtype=torch.float64), torch.randint(0, 2, (N,))
    space = ParameterSpace(model, chosen)

    def loss(module: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(module(batch[0]), batch[1], reduction=reduction)

    def flat(row: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, space.split(row), (x,)), y, reduction=reduction)

    at = torch.cat([value.detach().flatten() for value in space.parameters.values()])
    return Hessian(space, loss, IndexedData((x, y)), batch_size), torch.func.hessian(flat)(at)


@pytest.mark.parametrize("batch_size", [N, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chosen", [None, ["2.weight", "0.bias"]])
def test_products_are_those_of_the_matrix(chosen, reduction, batch_size):
    hessian, matrix = make(reduction, chosen, batch_size)
    vectors = torch.randn(5, len(matrix), dtype=torch.float64)
    assert torch.allclose(hessian @ vectors, vectors @ matrix, rtol=1e-10)
    assert torch.allclose(hessian @ vectors[:1], vectors[:1] @ matrix, rtol=1e-10)
    assert torch.allclose(hessian.matrix(), matrix, rtol=1e-10)
    assert hessian.reduction == reduction


def test_solves_are_those_of_the_matrix():
    hessian, matrix = make()
    ridge = 1.5 * float(torch.linalg.eigvalsh(matrix).abs().max())
    vectors = torch.randn(3, len(matrix), dtype=torch.float64)
    expected = torch.linalg.solve(matrix + ridge * torch.eye(len(matrix), dtype=torch.float64), vectors.T).T
    assert torch.allclose(direct_solve(matrix, vectors, ridge), expected)
    solved = conjugate_gradients(hessian, vectors, max_iter=100, tol=1e-12, regularization=ridge)
    assert torch.allclose(solved, expected, rtol=1e-8)
    iterated = lissa(hessian, vectors, depth=300, scaling=2 * ridge, damping=0.5, batch_size=N)
    assert torch.allclose(iterated, expected, rtol=1e-8)  # damping · scaling is the ridge


def test_a_loss_without_curvature_has_the_zero_hessian():
    model = nn.Linear(2, 1)
    hessian = Hessian(ParameterSpace(model), lambda module, batch: module(batch).mean(), IndexedData(torch.ones(4, 2)))
    assert torch.equal(hessian @ torch.ones(2, 3), torch.zeros(2, 3))


def test_a_loss_that_is_neither_mean_nor_sum_is_refused():
    model = nn.Linear(2, 1)
    data = IndexedData(torch.randn(4, 2))
    hessian = Hessian(ParameterSpace(model), lambda module, batch: module(batch).square().sum().sqrt(), data, 2)
    with pytest.raises(ValueError, match="neither the mean nor the sum"):
        hessian @ torch.ones(1, 3)
    vector = Hessian(ParameterSpace(model), lambda module, batch: module(batch), data)
    with pytest.raises(ValueError, match="return one number"):
        vector @ torch.ones(1, 3)


def test_a_singular_hessian_names_regularization():
    with pytest.raises(ValueError, match=r"singular with regularization=0\.0: pass a positive"):
        direct_solve(torch.diag(torch.tensor([1.0, 0.0])), torch.ones(1, 2))


def test_conjugate_gradients_stand_still_once_they_arrive():
    hessian, matrix = make()
    ridge = 2 * float(torch.linalg.eigvalsh(matrix).abs().max())
    vectors = torch.cat([torch.zeros(1, len(matrix)), torch.randn(1, len(matrix))]).double()
    solved = conjugate_gradients(hessian, vectors, max_iter=500, tol=1e-9, regularization=ridge)
    assert torch.equal(solved[0], vectors[0])
    assert bool(torch.isfinite(solved).all())
