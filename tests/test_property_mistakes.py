"""Bad properties and bad input are errors that name them, and leave the model alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from property_cases import (
    CE,
    DATA,
    GROUP,
    D,
    Dicts,
    N,
    Net,
    Stream,
    X,
    Y,
    build,
    gradient,
    points,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from unusual_rare import FullExperts

from ggda_ext import GroupGradients, properties
from ggda_ext.data import IndexedData
from ggda_ext.losses import BatchLoss
from ggda_ext.properties import (
    attacked_loss,
    contrast,
    correct_logits,
    demographic_parity_gap,
    equalized_odds_gap,
    margins,
    mean_loss,
    of_outputs,
    point_losses,
    property_gradient,
    soft_accuracy,
    soft_calibration_error,
    soft_f1,
    stack,
    weighted_sum,
)
from ggda_ext.properties.attacks import fgsm, pgd


def no_grad(m: nn.Module) -> Tensor:
    with torch.no_grad():
        return m(X).sum()


OTHER = build()
BAD_CALLABLES: dict[str, tuple[Any, type[Exception], str]] = {
    "not callable": (3, TypeError, "property is a int"),
    "float": (lambda m: m(X).sum().item(), TypeError, "property returned a float"),
    "matrix": (lambda m: m(X), ValueError, r"property returned shape \[11, 3\]"),
    "empty": (lambda m: m(X)[:0, 0], ValueError, r"property returned shape \[0\]"),
    "argmax": (lambda m: m(X).argmax(1), ValueError, "no gradient.*argmax"),
    "accuracy": (lambda m: (m(X).argmax(1) == Y).double().mean(), ValueError, "no gradient.*probabilities"),
    "detach": (lambda m: m(X).detach().sum(), ValueError, "no gradient.*detach"),
    "no_grad": (no_grad, ValueError, "no gradient.*no_grad"),
    "other model": (lambda m: OTHER(X).sum(), ValueError, "does not depend on the parameters first.weight"),
    "nan": (lambda m: torch.stack([m(X).sum(), m(X).sum() * torch.nan]), ValueError, "nan at component 1"),
    "inf": (lambda m: m(X).sum() / 0, ValueError, "inf at component 0"),
    "gradient": (
        lambda m: m(X).sum() + (m.last.bias - m.last.bias.detach()).abs().sqrt().sum(),
        ValueError,
        "gradient that is not finite: .* at component 0, in parameter 'last.bias'",
    ),
}


def untouched(model: Net) -> bool:
    frozen = not any(q.requires_grad for q in model.parameters())
    return frozen and model.training and all(q.grad is None for q in model.parameters())


@pytest.mark.parametrize("name", BAD_CALLABLES)
def test_bad_callable_is_an_error_and_leaves_the_model_alone(name: str) -> None:
    bad, error, match = BAD_CALLABLES[name]
    model = build().requires_grad_(False).train()
    with pytest.raises(error, match=match):
        gradient(bad, model)
    assert untouched(model)


def test_an_exception_of_the_property_itself_leaves_the_model_alone() -> None:
    model = build().requires_grad_(False).train()

    def broken(m: nn.Module) -> Tensor:
        m.eval()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gradient(broken, model)
    assert untouched(model)


def with_nan() -> Tensor:
    x = X.clone()
    x[9] = torch.nan
    return x


def no_positives() -> Tensor:
    return torch.where(torch.from_numpy(GROUP == "b") & (Y == 1), 0, Y)


def noisy() -> Dataset:  # type: ignore[type-arg]
    class Noisy(Dicts):
        def __getitem__(self, j: int) -> dict[str, Tensor]:
            return {"x": X[j] + torch.randn(D), "labels": Y[j]}

    return Noisy()


BAD_READY: dict[str, tuple[Callable[[], Any], str]] = {
    "shuffled": (lambda: mean_loss(DataLoader(TensorDataset(X, Y), shuffle=True), CE), "data is .* shuffles"),
    "shuffled b": (
        lambda: contrast(DATA, DataLoader(TensorDataset(X, Y), shuffle=True), CE),
        "data_b is .* shuffles",
    ),
    "batch size": (lambda: soft_f1(DATA, batch_size=0), "batch_size=0"),
    "temperature": (lambda: soft_accuracy(DATA, temperature=0), "temperature=0"),
    "calibration": (lambda: soft_calibration_error(DATA, temperature=-1), "temperature=-1"),
    "bins": (lambda: soft_calibration_error(DATA, bins=0), "bins=0"),
    "average": (lambda: soft_f1(DATA, average="micro"), "average='micro'"),  # type: ignore[arg-type]
    "agg": (lambda: equalized_odds_gap(DATA, GROUP, agg="max"), "agg='max'"),  # type: ignore[arg-type]
    "eps": (lambda: fgsm(-0.1), "eps=-0.1"),
    "steps": (lambda: pgd(0.1, 0.1, 0), "steps=0"),
    "clamp": (lambda: fgsm(0.1, clamp=(1, 0)), "clamp="),
    "short sensitive": (lambda: demographic_parity_gap(DATA, GROUP[:-2]), "sensitive has 9 values for 11"),
    "short sensitive, odds": (lambda: equalized_odds_gap(DATA, GROUP[:-2]), "sensitive has 9 values for 11"),
    "short for a stream": (
        lambda: demographic_parity_gap(Stream(), GROUP[:-2]),
        "sensitive has 9 values for 11",
    ),
    "matrix sensitive": (
        lambda: demographic_parity_gap(DATA, torch.zeros(N, 2)),
        r"sensitive has shape \[11, 2\]",
    ),
    "one sensitive group": (
        lambda: equalized_odds_gap(DATA, ["a"] * N),
        r"sensitive holds 1 group\(s\) \['a'\]",
    ),
    "missing sensitive": (
        lambda: equalized_odds_gap(DATA, [None if g == "c" else g for g in GROUP]),
        "sensitive has 3 missing values, first at 6",
    ),
    "nan sensitive": (
        lambda: demographic_parity_gap(DATA, [0.0, 1.0, np.nan] + [1.0] * 8),
        "1 missing .* first at 2",
    ),
    "no positives": (
        lambda: equalized_odds_gap((X, no_positives()), GROUP),
        "'b' has no positive test point",
    ),
    "no negatives": (
        lambda: equalized_odds_gap((X, torch.where(torch.from_numpy(GROUP == "a"), 1, Y)), GROUP),
        "'a' has no negative test point",
    ),
    "no points of the class": (
        lambda: soft_f1((X, 2 * (Y // 2)), average="binary"),
        "data has no point of class positive=1",
    ),
    "class out of range": (lambda: demographic_parity_gap(DATA, GROUP, positive=3), "positive=3 is no class"),
    "label out of range": (
        lambda: soft_accuracy((X, Y + 1)),
        "labels that are no class of the model, first 3",
    ),
    "negative label": (lambda: margins((X, Y - 1)), "labels that are no class of the model, first -1"),
    "label out of range, f1": (lambda: soft_f1((X, Y + 1)), "data has 4 labels that are no class.* first 3"),
    "fractional label": (lambda: correct_logits((X, Y + 0.5)), "no class of the model, first 0.5"),
    "one-hot labels": (lambda: soft_f1((X, F.one_hot(Y))), r"targets of shape \[11, 3\]"),
    "no labels": (lambda: soft_f1(X), "data gives no targets"),
    "argmax": (
        lambda: of_outputs(DATA, lambda f, y: (f.argmax(1) == y).double().mean()),
        "no gradient.*argmax",
    ),
    "matrix": (lambda: of_outputs(DATA, lambda f, y: f), r"property returned shape \[11, 3\]"),
    "not of the outputs": (
        lambda: of_outputs(DATA, lambda f, y: OTHER(X).sum()),
        "does not depend on the outputs",
    ),
    "cut loss": (
        lambda: mean_loss(DATA, BatchLoss(lambda m, batch: m(batch[0]).detach()[:, 0])),
        "does not depend on the parameters first.weight, .*detach",
    ),
    "nan point": (lambda: point_losses((with_nan(), Y), CE), "nan at test point 9"),
    "nan mean": (lambda: mean_loss((with_nan(), Y), CE, batch_size=4), "nan at test point 9"),
    "nan f1": (lambda: soft_f1((with_nan(), Y)), "nan at component 0"),
    "random data": (
        lambda: of_outputs(noisy(), lambda f, y: f.std()),
        "gives another first example each time it is read",
    ),
    "empty stack": (lambda: stack(), "properties is empty"),
    "weights": (lambda: weighted_sum([soft_f1(DATA)], [1, 2]), "weights has 2 entries for 1 properties"),
    "shapes": (
        lambda: weighted_sum([soft_f1(DATA), point_losses(DATA, CE)], [1, 2]),
        "cannot be added: use stack",
    ),
}


@pytest.mark.parametrize("name", BAD_READY)
def test_bad_input_is_an_error_that_names_it(name: str) -> None:
    make, match = BAD_READY[name]
    model = build().requires_grad_(False).train()
    with pytest.raises(ValueError, match=match):
        gradient(make(), model)
    assert untouched(model)


OF_CLASSES = {
    "accuracy": properties.accuracy,
    "soft_accuracy": properties.soft_accuracy,
    "soft_f1": properties.soft_f1,
    "margins": lambda data: properties.margins(data).mean(),
    "gap": lambda data: properties.demographic_parity_gap(data, torch.arange(12) % 2),
}


@pytest.mark.parametrize("name", OF_CLASSES)
def test_probabilities_are_not_taken_for_logits(name: str) -> None:
    torch.manual_seed(0)
    data = torch.randn(12, 4), torch.arange(12) % 2
    sigmoid = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid(), nn.Flatten(0))
    softmax = nn.Sequential(nn.Linear(4, 2), nn.Softmax(1))
    for model in (sigmoid, softmax):
        if (name, model) == ("accuracy", softmax):  # the most probable class is the same
            assert properties.accuracy(data)(softmax) == properties.accuracy(data)(softmax[0])
            continue
        for allowed in (True, False):
            with torch.set_grad_enabled(allowed), pytest.raises(ValueError, match="the model returns probabilities"):
                OF_CLASSES[name](data)(model)
    logs = nn.Sequential(softmax[0], nn.LogSoftmax(1))
    torch.testing.assert_close(OF_CLASSES[name](data)(logs), OF_CLASSES[name](data)(softmax[0]))


@pytest.mark.parametrize("made", [margins, correct_logits])
def test_looking_for_probabilities_is_not_taken_for_a_hook_of_the_model(made: Callable[..., Any]) -> None:
    """A hook may change gradients, so no fast strategy would be trusted with the points of the property."""
    data = torch.randn(12, 4), torch.arange(12) % 3
    facts = GroupGradients(nn.Linear(4, 3), made(data).loss, data, None).plan(None).facts
    assert not facts.uncovered
    assert not facts.refused


def test_wrong_types_are_errors_that_name_them() -> None:
    tokens = (torch.arange(N), Y)
    with pytest.raises(TypeError, match=r"first input of a batch is torch\.int64"):
        gradient(attacked_loss(tokens, CE, fgsm(0.1)), nn.Embedding(N, 3))
    with pytest.raises(TypeError, match="attack is a float"):
        attacked_loss(DATA, CE, 0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loss_fn is a str"):
        mean_loss(DATA, "ce")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="parameters is empty"):
        property_gradient(mean_loss(DATA, CE), build(), {})


def test_outputs_of_other_shapes_are_errors_that_name_them() -> None:
    class Tokens(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, None].expand(-1, 2, -1)

    class Pooled(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean(0)

    with pytest.raises(ValueError, match=r"returned shape \[11, 2, 3\]: properties of classes"):
        gradient(soft_f1(DATA), Tokens(3).double())
    with pytest.raises(ValueError, match=r"returned shape \[3\] for a batch of 11 examples"):
        gradient(soft_f1(DATA), Pooled(3).double())


def test_rows_of_the_wrong_shape_are_an_error() -> None:
    class Own:
        def __call__(self, model: nn.Module) -> Tensor:
            return model(X).sum()

        def gradient(self, model: nn.Module, parameters: Any) -> Tensor:
            return torch.zeros(43)

    with pytest.raises(ValueError, match=r"property.gradient returned \[43\]: return .* \[m, 43\]"):
        gradient(Own(), build())


@pytest.mark.parametrize(
    "made", [mean_loss, lambda data, loss: point_losses(data, loss).mean(), lambda data, _: soft_f1(data)]
)
def test_test_points_that_mix_in_large_batches_only_are_refused_there(made: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, parts = FullExperts().double(), (torch.randn(300, 6).double(), torch.arange(300) % 3)
    model.ROOM = 100
    for size in (16, 100):
        goal = made(IndexedData(parts, "the test data"), CE)
        goal.batch_size = size
        value, rows = goal(model), gradient(goal, model)
        for at_once in (None, 300):
            goal.batch_size = at_once
            for ask in (goal, partial(gradient, goal)):
                with pytest.raises(
                    ValueError, match=r"mixes the examples of a batch: the test data has .* in one of 8"
                ):
                    ask(model)
        goal.batch_size = 20
        torch.testing.assert_close(goal(model), value)
        torch.testing.assert_close(gradient(goal, model), rows)


def test_random_test_data_are_refused_in_all_their_forms() -> None:
    """Two calls would give two answers."""

    class Augmented(Dataset[Any]):
        def __len__(self) -> int:
            return len(X)

        def __getitem__(self, at: int) -> Any:
            return X[at] + 0.1 * torch.randn(X.shape[1]), Y[at]

    class Sampled(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return ((X[at] + torch.randn(X.shape[1]), Y[at]) for at in range(len(X)))

    model = build()
    for data in (Augmented(), DataLoader(Augmented(), batch_size=4), Sampled()):
        for goal in (properties.mean_loss(data, CE), properties.soft_accuracy(data)):
            for ask in (goal, partial(gradient, goal)):
                with pytest.raises(ValueError, match="another first example each time it is read: switch off what is"):
                    ask(model)


def test_a_batch_is_compared_once_for_a_model_its_values_a_loss_and_data() -> None:
    seen: list[int] = []
    model, parts = build(), points(n=40)
    model.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))

    def sizes(data: Any = parts, loss: Any = CE, size: int = 16) -> list[int]:
        seen.clear()
        gradient(mean_loss(data, loss, batch_size=size), model)
        return list(seen)

    assert sizes() == [16, 8, 16, 8]
    assert sizes() == [16, 16, 8]
    assert sizes(size=20) == [20, 7, 20]
    assert sizes(points(n=40)) == [16, 8, 16, 8]
    assert sizes(loss=nn.CrossEntropyLoss(label_smoothing=0.1)) == [16, 8, 16, 8]
    with torch.no_grad():
        model.last.bias += 1
    assert sizes() == [16, 8, 16, 8]


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_not_taken_for_mixing(dtype: torch.dtype, scale: float) -> None:
    """A loss near 0 is a difference of larger numbers, and rounded in the precision of the model."""

    class Rounds(nn.Module):
        """As a product does, whose rounding depends on the size of the batch."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            eps = torch.finfo(dtype).eps * (len(x) > 8)
            return (self.weight * x * (1 + eps)).to(dtype).float()

    x = (scale * torch.rand(64, 1)).to(dtype).float()
    goal = mean_loss((x, x), nn.L1Loss())
    assert gradient(goal, Rounds()).isfinite().all()
