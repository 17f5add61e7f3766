"""Hessian products and solves against the Hessian by torch.func, on small models."""

from __future__ import annotations

import re
import warnings
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from ggda_ext.curvature import GaussNewton, Hessian, direct_solve, lissa
from ggda_ext.curvature.conjugate_gradients import LostAccuracy, NegativeCurvature, conjugate_gradients
from ggda_ext.data import IndexedData
from ggda_ext.model import ParameterSpace

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


def test_conjugate_gradients_leave_a_vector_that_has_converged_alone():
    hessian, matrix = make()
    ridge = 2 * float(torch.linalg.eigvalsh(matrix).abs().max())
    vectors = torch.cat([torch.zeros(1, len(matrix)), torch.randn(1, len(matrix))]).double()
    solved = conjugate_gradients(hessian, vectors, max_iter=500, tol=1e-9, regularization=ridge)
    assert torch.equal(solved[0], vectors[0])
    assert bool(torch.isfinite(solved).all())


def indefinite(seed: int, dtype: torch.dtype, kind: type[Hessian] = Hessian) -> tuple[Hessian, Tensor]:
    """The curvature of an untrained network, and two right-hand sides."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3))
    x, y = torch.randn(64, 6), torch.randint(0, 3, (64,))
    vectors = torch.randn(2, sum(parameter.numel() for parameter in model.parameters()))

    def loss(module: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(module(batch[0]), batch[1])

    space = ParameterSpace(model.to(dtype))
    return kind(space, loss, IndexedData((x.to(dtype), y)), 64), vectors.to(dtype)


def test_conjugate_gradients_stop_at_negative_curvature_and_say_so():
    hessian, vectors = indefinite(0, torch.float64)
    values, at = torch.linalg.eigh(hessian.matrix())
    assert values[0] < -1e-3
    start = at[:, :1].T * 2 + at[:, -1:].T  # its first residual has negative curvature
    with pytest.warns(NegativeCurvature, match=r"met curvature -\S+ at step \d+ of max_iter=50, .*regularization"):
        solved = conjugate_gradients(hessian, torch.cat([start, vectors]), max_iter=50)
    assert bool(torch.isfinite(solved).all())
    enough = -2 * float(values[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solved = conjugate_gradients(hessian, vectors, max_iter=300, tol=1e-10, regularization=enough)
    expected = direct_solve(hessian.matrix(), vectors, enough)
    torch.testing.assert_close(solved, expected, rtol=1e-6, atol=1e-8)


def test_a_vector_that_stops_keeps_the_solution_it_had():
    """By hand: diag(1, -1), from v = (1, 2): the residual is v - A v = (0, 4), of curvature -1."""
    matrix = torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64))
    hessian = cast(Hessian, _Matrix(matrix))
    with pytest.warns(NegativeCurvature, match=r"curvature -1 at step 1 .* 1 of 2 vectors"):
        solved = conjugate_gradients(hessian, torch.tensor([[1.0, 2.0], [3.0, 0.0]], dtype=torch.float64))
    assert solved.tolist() == [[1.0, 2.0], [3.0, 0.0]]


class _Matrix:
    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def __matmul__(self, vectors: Tensor) -> Tensor:
        return vectors @ self.matrix


@pytest.mark.parametrize("memory_budget", [2**20, 20_000, 1])
@pytest.mark.parametrize("steps", [5, 20, 40])
@pytest.mark.parametrize("regularization", [0.0, 1e-3, 1e-2])
@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
def test_float32_and_float64_agree_unless_a_warning_says_otherwise(kind, regularization, steps, memory_budget):
    for seed in range(2):
        found = []
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for dtype in (torch.float32, torch.float64):
                hessian, vectors = indefinite(seed, dtype, kind)
                options = {"max_iter": steps, "regularization": regularization, "memory_budget": memory_budget}
                found.append(conjugate_gradients(hessian, vectors, **options).double())
        warned = any(issubclass(one.category, NegativeCurvature | LostAccuracy) for one in said)
        assert not (warned and kind is GaussNewton and (regularization == 1e-2 or memory_budget == 2**20))
        if not warned:
            difference = (found[0] - found[1]).norm(dim=1) / found[1].norm(dim=1)
            assert float(difference.max()) < 1e-2


def test_steps_that_depend_on_rounding_are_taken_back():
    hessian, vectors = indefinite(0, torch.float32, GaussNewton)
    with pytest.warns(LostAccuracy, match=r"from step \d+ of max_iter=40 .* be content with max_iter=\d+") as said:
        found = conjugate_gradients(hessian, vectors[:1], max_iter=40, memory_budget=1)
    step = int(re.search(r"content with max_iter=(\d+)", str(said[0].message)).group(1))
    assert 5 < step < 20
    exact, double = indefinite(0, torch.float64, GaussNewton)
    expected = conjugate_gradients(exact, double[:1], max_iter=step)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-2 * float(expected.abs().max()))
