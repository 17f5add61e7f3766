"""The Gauss–Newton matrix against curvlinops and dense autograd, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvlinops import GGNLinearOperator
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from ggda_ext.curvature import GaussNewton, Hessian
from ggda_ext.curvature.conjugate_gradients import conjugate_gradients
from ggda_ext.data import IndexedData
from ggda_ext.model import ParameterSpace

N = 11


class Tokens(nn.Module):
    """Embedding, a convolution and a Linear layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = nn.Embedding(7, 4), nn.Conv1d(4, 4, 3, padding=1), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.mix(self.tokens(ids).transpose(1, 2)).tanh().mean(2)
        return self.head(self.head(hidden).tanh())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def make(kind: str, loss: nn.Module) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    model = (mlp() if kind == "mlp" else Tokens()).double()
    x = torch.randn(N, 3, dtype=torch.float64) if kind == "mlp" else torch.randint(0, 7, (N, 5))
    outputs = model(x)
    if isinstance(loss, nn.CrossEntropyLoss):
        return model, x, torch.randint(0, outputs.shape[1], (N,))
    return model, x, torch.rand(outputs.shape, dtype=torch.float64)


def mean_or_sum(loss: nn.Module) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: loss(model(batch[0]), batch[1])


def dense(space: ParameterSpace, x: Tensor, y: Tensor, loss: nn.Module) -> Tensor:
    """Jᵀ (∂²ℓ/∂z²) J, every factor formed by torch.func."""

    def outputs(row: Tensor) -> Tensor:
        return functional_call(space.model, space.split(row), (x,)).flatten()

    at = torch.cat([value.detach().flatten() for value in space.parameters.values()])
    jacobian = torch.func.jacrev(outputs)(at)
    shape = space.model(x).shape
    bent = torch.func.hessian(lambda z: loss(z.reshape(shape), y))(outputs(at).detach())
    return jacobian.T @ bent @ jacobian


LOSSES = [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss(), nn.BCEWithLogitsLoss()]


@pytest.mark.parametrize("batch_size", [N, 4])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{type(loss).__name__}-{loss.reduction}")
@pytest.mark.parametrize("kind", ["mlp", "tokens"])
def test_products_are_those_of_curvlinops_and_of_the_dense_matrix(kind: str, loss: nn.Module, batch_size: int) -> None:
    model, x, y = make(kind, loss)
    space = ParameterSpace(model)
    vectors = torch.randn(5, space.size, dtype=torch.float64)
    found = GaussNewton(space, mean_or_sum(loss), IndexedData((x, y)), batch_size)
    expected = dense(space, x, y, loss)
    torch.testing.assert_close(found @ vectors, vectors @ expected, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(found @ vectors[:1], vectors[:1] @ expected, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(found.matrix(), expected, rtol=1e-10, atol=1e-13)
    theirs = GGNLinearOperator(model, loss, list(model.parameters()), [(x, y)], check_deterministic=False)
    torch.testing.assert_close(found @ vectors, (theirs @ vectors.T).T, rtol=1e-10, atol=1e-13)


def test_some_parameters_and_any_loss_of_the_outputs() -> None:
    model, x, y = make("mlp", nn.CrossEntropyLoss())
    space = ParameterSpace(model, ["2.weight", "0.bias"])

    class Focal(nn.Module):
        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            right = z.log_softmax(1).gather(1, y[:, None])[:, 0]
            return -((1 - right.exp()) ** 2 * right).mean()

    found = GaussNewton(space, mean_or_sum(Focal()), IndexedData((x, y)), 5)
    torch.testing.assert_close(found.matrix(), dense(space, x, y, Focal()), rtol=1e-10, atol=1e-13)


def test_a_linear_model_has_its_hessian() -> None:
    torch.manual_seed(0)
    space = ParameterSpace(nn.Linear(3, 2).double())
    data = IndexedData((torch.randn(N, 3, dtype=torch.float64), torch.randint(0, 2, (N,))))
    loss = mean_or_sum(nn.CrossEntropyLoss())
    torch.testing.assert_close(GaussNewton(space, loss, data).matrix(), Hessian(space, loss, data).matrix())


def test_curvature_is_never_negative_where_the_hessian_has_some() -> None:
    model, x, y = make("mlp", nn.CrossEntropyLoss())
    loss, data = mean_or_sum(nn.CrossEntropyLoss()), IndexedData((x, y))
    space = ParameterSpace(model)
    assert float(torch.linalg.eigvalsh(Hessian(space, loss, data).matrix()).min()) < -1e-3
    assert float(torch.linalg.eigvalsh(GaussNewton(space, loss, data).matrix()).min()) > -1e-12
    vectors = torch.randn(2, space.size, dtype=torch.float64)
    matrix = GaussNewton(space, loss, data).matrix() + 0.1 * torch.eye(space.size, dtype=torch.float64)
    solved = conjugate_gradients(GaussNewton(space, loss, data), vectors, max_iter=200, tol=1e-12, regularization=0.1)
    torch.testing.assert_close(solved, torch.linalg.solve(matrix, vectors.T).T, rtol=1e-8, atol=1e-10)


class ReturnsItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.inner(x), y)


class ReturnsADict(ReturnsItsLoss):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {"logits": self.inner(x)}


def penalized(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1]) + sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize(
    ("model", "loss", "error", "message"),
    [
        (mlp, penalized, ValueError, r"depends on '0\.weight' beside the model's output"),
        (mlp, lambda model, batch: model(batch[0]).mean(), ValueError, "linear in the model's output"),
        (ReturnsItsLoss, lambda model, batch: model(*batch), ValueError, "linear in the model's output"),
        (ReturnsADict, lambda model, batch: model(*batch)["logits"].sum(), TypeError, "returned a dict"),
        (mlp, lambda model, batch: cross_entropy(model(batch[0]) + model(-batch[0]), batch[1]), ValueError, "2 times"),
        (mlp, lambda model, batch: model[0](batch[0]).square().mean(), ValueError, "0 times"),
        (mlp, lambda model, batch: model(batch[0]).square(), ValueError, "return one number"),
    ],
)
def test_a_loss_that_is_not_of_the_outputs_is_refused(
    model: Callable[[], nn.Module], loss: Any, error: type[Exception], message: str
) -> None:
    module = model()
    matrix = GaussNewton(ParameterSpace(module), loss, IndexedData((torch.randn(4, 3), torch.arange(4) % 2)))
    with pytest.raises(error, match=message):
        matrix @ torch.ones(1, matrix.space.size)
    assert not module._forward_hooks
