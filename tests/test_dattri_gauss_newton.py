"""``curvature="gauss-newton"`` of dattri's influence functions against Jᵀ (∂²ℓ/∂z²) J, formed by torch.func."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dattri_cases import GROUPS, INFLUENCE, Case, N, close, make_case, ours
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from ggda_ext.curvature.conjugate_gradients import NegativeCurvature

RIDGE = 0.3
SOLVERS: dict[str, dict[str, Any]] = {
    "Explicit": {"regularization": RIDGE},
    "CG": {"regularization": RIDGE, "max_iter": 200, "tol": 1e-9},
    "LiSSA": {"batch_size": N, "recursion_depth": 400, "scaling": 2.0, "damping": RIDGE / 2.0},
}


def expected_scores(case: Case) -> Tensor:
    """Σ_{i∈G} ∇ℓ_iᵀ (G + RIDGE I)⁻¹ ∇ℓ_j `(groups, tests)`."""
    parameters = dict(case.model.named_parameters())
    names, at = list(parameters), torch.cat([value.detach().flatten() for value in parameters.values()])

    def outputs(row: Tensor, x: Tensor) -> Tensor:
        parts = row.split([parameters[name].numel() for name in names])
        state = {name: part.view_as(parameters[name]) for name, part in zip(names, parts, strict=True)}
        return functional_call(case.model, state, (x,))

    def gradients(x: Tensor, y: Tensor) -> Tensor:
        return torch.func.jacrev(lambda row: cross_entropy(outputs(row, x), y, reduction="none"))(at)

    (x, y), tests = case.train.tensors, case.test.tensors
    jacobian = torch.func.jacrev(lambda row: outputs(row, x).flatten())(at)
    logits = outputs(at, x)
    bent = torch.func.hessian(lambda z: cross_entropy(z.view_as(logits), y))(logits.flatten())
    matrix = jacobian.T @ bent @ jacobian + RIDGE * torch.eye(len(at))
    return GROUPS.sum(gradients(x, y), 0) @ torch.linalg.solve(matrix, gradients(*tests).T)


@pytest.mark.parametrize("name", SOLVERS)
def test_scores_are_those_of_the_formula(name: str) -> None:
    case = make_case()
    attributor = ours(name, case.task(), groups=GROUPS, curvature="gauss-newton", **SOLVERS[name])
    attributor.cache(case.full_loader(7))  # batches of the cached loader do not count
    close(attributor.attribute(case.train_loader(), case.test_loader()), expected_scores(case).detach(), 1e-4)


def test_singletons_too_are_solved_with_it() -> None:
    case = make_case()
    options = SOLVERS["Explicit"] | {"curvature": "gauss-newton"}
    alone = ours("Explicit", case.task(), groups=range(N), **options)
    grouped = ours("Explicit", case.task(), groups=GROUPS, **options)
    for attributor in (alone, grouped):
        attributor.cache(case.full_loader())
    points = alone.attribute(case.train_loader(), case.test_loader())
    close(grouped.attribute(case.train_loader(), case.test_loader()), GROUPS.sum(points, 0))


def test_conjugate_gradients_say_that_the_hessian_is_not_positive() -> None:
    case = make_case()
    attributor = ours("CG", case.task(), groups=GROUPS, regularization=0.0, max_iter=30)
    attributor.cache(case.full_loader())
    with pytest.warns(NegativeCurvature, match=r"curvature='gauss-newton'"):
        attributor.attribute(case.train_loader(), case.test_loader())


@pytest.mark.parametrize("name", [name for name in INFLUENCE if name not in SOLVERS])
def test_a_curvature_that_is_no_hessian_refuses_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"curvature='gauss-newton' is not one of 'whole', 'upstream' of .*{name}"):
        ours(name, make_case().task(), groups=GROUPS, curvature="gauss-newton")
