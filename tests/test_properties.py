"""Ready properties against plain autograd of the same formula on the whole test set, and bad input."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import gradient_rows
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ggda_ext import properties
from ggda_ext.data import IndexedData
from ggda_ext.losses import BatchLoss
from ggda_ext.model import SavedState
from ggda_ext.properties import (
    accuracy,
    attacked_loss,
    class_probabilities,
    contrast,
    correct_logits,
    demographic_parity_gap,
    equalized_odds_gap,
    f1,
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

N, D = 11, 4
CE = nn.CrossEntropyLoss()


class Net(nn.Module):
    """A small MLP; `outputs` is 1 with `squeeze` for the outputs [N] of a binary model."""

    def __init__(self, outputs: int, squeeze: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.squeeze = nn.Linear(D, 5), nn.Linear(5, outputs), squeeze

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(self.first(x).tanh())
        return out.squeeze(-1) if self.squeeze else out


def build(outputs: int = 3, squeeze: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(outputs, squeeze).double().eval()


def points(classes: int = 3, seed: int = 1, n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(n, D, generator=generator, dtype=torch.float64)
    return x, torch.arange(n) * 2 % 3 % classes


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def gradient(property: Callable[[nn.Module], Tensor], model: nn.Module) -> Tensor:
    return property_gradient(property, model, parameters_of(model))


def plain(function: Callable[[nn.Module], Tensor], model: nn.Module) -> Tensor:
    """Ground truth: `function(model)` on the whole test set in one graph, differentiated row by row."""
    return gradient_rows(function(model).reshape(-1), model.parameters())


def given(logits: list[Any]) -> nn.Module:
    """A model that gives its inputs plus a parameter of zeros: crafted outputs for data (logits, y)."""

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(len(logits[0]), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    return Given()


# The ready properties -----------------------------------------------------------------------------

X, Y = points()
X2, Y2 = points(seed=2, n=7)
GROUP = np.array(["a", "b", "c"])[np.arange(N) // 3 % 3]
"""Three sensitive groups; each has points of class 1 and of other classes."""


def z(model: nn.Module) -> Tensor:
    return model(X)


def p(model: nn.Module) -> Tensor:
    return model(X).softmax(1)


def other_logits(model: nn.Module) -> list[Tensor]:
    return [z(model)[j][torch.arange(3) != Y[j]] for j in range(N)]


def own(values: Tensor) -> Tensor:
    return values[torch.arange(N), Y]


def macro_f1(model: nn.Module) -> Tensor:
    tp = torch.stack([p(model)[c == Y, c].sum() for c in range(3)])
    fp = torch.stack([p(model)[c != Y, c].sum() for c in range(3)])
    fn = torch.stack([(1 - p(model)[c == Y, c]).sum() for c in range(3)])
    return (tp / (tp + (fp + fn) / 2)).mean()


def rates(model: nn.Module, keep: Tensor, c: int = 1) -> Tensor:
    return torch.stack([p(model)[keep & torch.from_numpy(g == GROUP), c].mean() for g in "abc"])


def spread(values: Tensor) -> Tensor:
    return values.max() - values.min()


def odds(model: nn.Module, c: int = 1) -> Tensor:
    return torch.stack([spread(rates(model, c == Y, c)), spread(rates(model, c != Y, c))])


def binned_error(model: nn.Module) -> Tensor:
    confidence = p(model).max(1).values
    correct = (p(model).argmax(1) == Y).double()
    total = confidence.new_zeros(())
    weights = torch.stack([torch.exp(-((confidence - (b + 0.5) / 7) ** 2) / 0.02) for b in range(7)])
    weights = weights / weights.sum(0)
    for b in range(7):
        size = weights[b].sum()
        total = total + size / N * ((weights[b] * correct).sum() / size - (weights[b] * confidence).sum() / size).abs()
    return total


def fgsm_loss(model: nn.Module) -> Tensor:
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x), Y, reduction="sum"), x)
    return F.cross_entropy(model(X + 0.3 * slope.sign()), Y)


def pgd_loss(model: nn.Module) -> Tensor:
    x = X.clone()
    for _ in range(4):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x), Y, reduction="sum"), x)
        x = (x.detach() + 0.2 * slope.sign()).clamp(min=X - 0.5, max=X + 0.5).clamp(-2, 2)
    return F.cross_entropy(model(x), Y)


DATA = (X, Y)
READY = {
    "point_losses": (
        lambda b: point_losses(DATA, CE, batch_size=b),
        lambda m: F.cross_entropy(z(m), Y, reduction="none"),
    ),
    "mean_loss": (lambda b: mean_loss(DATA, CE, batch_size=b), lambda m: F.cross_entropy(z(m), Y)),
    "contrast": (
        lambda b: contrast(DATA, (X2, Y2), CE, batch_size=b),
        lambda m: F.cross_entropy(z(m), Y) - F.cross_entropy(m(X2), Y2),
    ),
    "margins": (
        lambda b: margins(DATA, batch_size=b),
        lambda m: own(p(m)).log() - torch.log1p(-own(p(m))),
    ),
    "hard margins": (
        lambda b: margins(DATA, soft=False, batch_size=b),
        lambda m: own(z(m)) - torch.stack([others.max() for others in other_logits(m)]),
    ),
    "mean margin": (
        lambda b: margins(DATA, batch_size=b).mean(),
        lambda m: (own(z(m)) - torch.stack([others.logsumexp(0) for others in other_logits(m)])).mean(),
    ),
    "correct_logits": (lambda b: correct_logits(DATA, batch_size=b), lambda m: own(z(m))),
    "soft_accuracy": (lambda b: soft_accuracy(DATA, batch_size=b), lambda m: own(p(m)).mean()),
    "sharp soft_accuracy": (
        lambda b: soft_accuracy(DATA, temperature=0.3, batch_size=b),
        lambda m: own((z(m) / 0.3).softmax(1)).mean(),
    ),
    "soft_f1": (lambda b: soft_f1(DATA, batch_size=b), macro_f1),
    "binary soft_f1": (
        lambda b: soft_f1(DATA, average="binary", positive=2, batch_size=b),
        lambda m: 2 * p(m)[Y == 2, 2].sum() / (p(m)[:, 2].sum() + (Y == 2).sum()),
    ),
    "demographic_parity_gap": (
        lambda b: demographic_parity_gap(DATA, GROUP, batch_size=b),
        lambda m: spread(rates(m, Y >= 0)),
    ),
    "equalized_odds_gap": (lambda b: equalized_odds_gap(DATA, GROUP, batch_size=b), lambda m: odds(m).max()),
    "mean equalized_odds_gap": (
        lambda b: equalized_odds_gap(DATA, GROUP, agg="mean", batch_size=b),
        lambda m: odds(m).mean(),
    ),
    "equalized_odds_gap of class 2": (
        lambda b: equalized_odds_gap(DATA, GROUP, agg="mean", positive=2, batch_size=b),
        lambda m: odds(m, 2).mean(),
    ),
    "soft_calibration_error": (
        lambda b: soft_calibration_error(DATA, bins=7, temperature=0.02, batch_size=b),
        binned_error,
    ),
    "fgsm": (lambda b: attacked_loss(DATA, CE, fgsm(0.3), batch_size=b), fgsm_loss),
    "pgd": (lambda b: attacked_loss(DATA, CE, pgd(0.5, 0.2, 4, clamp=(-2, 2)), batch_size=b), pgd_loss),
    "of_outputs": (
        lambda b: of_outputs(DATA, lambda f, y: torch.stack([f.std(), f.max(), f[y == 0].norm()]), batch_size=b),
        lambda m: torch.stack([z(m).std(), z(m).max(), z(m)[Y == 0].norm()]),
    ),
    "stack": (
        lambda b: stack(soft_f1(DATA, batch_size=b), point_losses(DATA, CE), lambda m: m(X2).norm()),
        lambda m: torch.cat([macro_f1(m)[None], F.cross_entropy(z(m), Y, reduction="none"), m(X2).norm()[None]]),
    ),
}
EVERY = pytest.mark.parametrize("name", READY)


@EVERY
@pytest.mark.parametrize("batch_size", [1, 4, 11, 256])
def test_gradient_is_that_of_the_formula_on_the_whole_test_set(name: str, batch_size: int) -> None:
    make, formula = READY[name]
    model = build()
    expected = plain(formula, model)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(gradient(make(batch_size), model), expected, rtol=1e-12, atol=1e-12)


@EVERY
@pytest.mark.parametrize("batch_size", [4, 256])
def test_value_is_that_of_the_formula_and_has_the_same_graph(name: str, batch_size: int) -> None:
    make, formula = READY[name]
    model, ready = build(), make(batch_size)
    value, expected = ready(model), formula(model)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(plain(ready, model), plain(formula, model), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert not ready(model).requires_grad
        torch.testing.assert_close(ready(model), expected.detach(), rtol=1e-12, atol=1e-12)


def hidden_rows_held(run: Callable[[], Any]) -> int:
    """The most rows of the hidden layer [·, 5] that graphs hold at once; tanh and `last` hold one each."""
    held = most = 0

    class Box:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal held, most
            self.tensor = tensor.detach()  # a result held by its own node would never be freed
            self.rows = len(tensor) if tensor.shape[1:] == (5,) and not tensor.is_leaf else 0
            held += self.rows
            most = max(most, held)

        def __del__(self) -> None:
            nonlocal held
            held -= self.rows

    with torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.tensor):
        result = run()
    del result
    assert held == 0
    return most


@pytest.mark.parametrize("name", [name for name in READY if name != "stack"])  # it holds a plain callable
def test_gradient_holds_the_graph_of_one_batch_only(name: str) -> None:
    model, ready = build(), READY[name][0](3)
    assert hidden_rows_held(lambda: ready(model)) >= 2 * N  # all batches: the measure works
    # A batch of 3 has 2 * 3 rows; twice that, as one graph may live until the next one stands.
    assert 0 < hidden_rows_held(lambda: gradient(ready, model)) <= 2 * (2 * 3)


@EVERY
def test_everything_is_left_as_it_was(name: str) -> None:
    model, ready = build(), READY[name][0](4)
    model.first.train()
    model.last.bias.requires_grad_(False)
    model.last.bias.grad = marker = torch.ones(3, dtype=torch.float64)
    values = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        gradient(ready, model)
    assert not model.last.bias.requires_grad
    assert model.first.weight.requires_grad
    assert model.first.training
    assert not model.last.training
    assert model.last.bias.grad is marker
    assert torch.equal(marker, torch.ones_like(marker))
    assert all(q.grad is None for key, q in model.named_parameters() if key != "last.bias")
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())


@EVERY
def test_frozen_parameters_and_inference_mode_do_not_matter(name: str) -> None:
    model, ready = build(), READY[name][0](4)
    expected = gradient(ready, model)
    model.requires_grad_(False)
    assert torch.equal(gradient(ready, model), expected)
    with torch.inference_mode():
        again = gradient(ready, model)
    assert torch.equal(again, expected)
    assert not expected.requires_grad
    assert not any(q.requires_grad for q in model.parameters())


# Values by hand -----------------------------------------------------------------------------------


def test_soft_f1_of_certain_predictions_is_f1() -> None:
    y = torch.tensor([0, 1, 1, 2, 2, 2, 0, 1])
    predicted = torch.tensor([0, 1, 0, 2, 1, 2, 0, 1])
    logits = 1e4 * F.one_hot(predicted, 3).double()
    model = given(logits.tolist())
    assert soft_f1((logits, y))(model).item() == pytest.approx(f1_score(y, predicted, average="macro"))
    for c in range(3):
        expected = f1_score(y, predicted, average=None)[c]
        for ready in (soft_f1, f1):
            assert ready((logits, y), average="binary", positive=c)(model).item() == pytest.approx(expected)
    assert accuracy((logits, y))(model).item() == pytest.approx(6 / 8)
    with pytest.raises(ValueError, match=r"has no gradient.*soft_accuracy"):
        gradient(accuracy(DATA), build())


def test_macro_f1_of_a_class_neither_present_nor_predicted_is_zero() -> None:
    logits = 1e4 * torch.tensor([[1.0, 0, -1], [0, 1, -1]], dtype=torch.float64)
    value = soft_f1((logits, torch.tensor([0, 1])))(given(logits.tolist()))
    assert value.item() == pytest.approx(2 / 3)


def test_fairness_gaps_of_crafted_probabilities() -> None:
    y = torch.tensor([1, 1, 0, 0, 1, 1, 0, 0])
    probability = torch.tensor([0.9, 0.7, 0.2, 0.4, 0.5, 0.3, 0.1, 0.3], dtype=torch.float64)
    group = ["m", "m", "m", "m", "f", "f", "f", "f"]
    logits = torch.logit(probability)[:, None]
    model = given(logits.tolist())
    # positive rates 0.55 and 0.30; true positive rates 0.8 and 0.4; false positive rates 0.3 and 0.2
    assert demographic_parity_gap((logits, y), group)(model).item() == pytest.approx(0.25)
    assert equalized_odds_gap((logits, y), group)(model).item() == pytest.approx(0.4)
    assert equalized_odds_gap((logits, y), group, agg="mean")(model).item() == pytest.approx(0.25)
    swapped = equalized_odds_gap((logits, y), group, positive=0)(model)  # the rates of class 0: 1 - p
    assert swapped.item() == pytest.approx(0.4)


def test_soft_calibration_error_of_hard_bins_is_the_expected_calibration_error() -> None:
    confidence = torch.tensor([0.95, 0.92, 0.98, 0.65, 0.62, 0.68], dtype=torch.float64)
    y = torch.tensor([1, 1, 0, 1, 0, 1])
    logits = torch.logit(confidence)[:, None]
    value = soft_calibration_error((logits, y), bins=10, temperature=1e-5)(given(logits.tolist()))
    by_hand = 0.5 * abs(2 / 3 - 0.95) + 0.5 * abs(2 / 3 - 0.65)
    assert value.item() == pytest.approx(by_hand, abs=1e-6)


def test_class_probabilities_of_one_logit_are_its_sigmoid() -> None:
    logit = torch.tensor([-30.0, -1.0, 0.0, 2.0], dtype=torch.float64)
    expected = torch.stack([torch.sigmoid(-logit), torch.sigmoid(logit)], 1)
    for outputs in (logit, logit[:, None]):
        torch.testing.assert_close(class_probabilities(outputs), expected, rtol=1e-12, atol=0)


BINARY = {
    "margins": margins,
    "correct_logits": correct_logits,
    "soft_accuracy": soft_accuracy,
    "soft_f1": soft_f1,
    "soft_calibration_error": soft_calibration_error,
    "demographic_parity_gap": lambda data: demographic_parity_gap(data, np.arange(N) // 3 % 2),
    "equalized_odds_gap": lambda data: equalized_odds_gap(data, np.arange(N) // 3 % 2),
}


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("squeeze", [True, False])
def test_one_logit_is_two_logits_that_differ_by_it(name: str, squeeze: bool) -> None:
    x, y = points(classes=2)
    one, seen = build(1, squeeze), y.double() if squeeze else y.double()[:, None]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = one

        def forward(self, x: Tensor) -> Tensor:
            logit = self.inner(x).reshape(-1, 1)
            return torch.cat([-logit, logit] if name == "correct_logits" else [0 * logit, logit], 1)

    expected = gradient(BINARY[name]((x, y)), Two())
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(gradient(BINARY[name]((x, seen)), one), expected, rtol=1e-12, atol=1e-12)


def test_attack_stays_in_its_box_and_raises_the_loss() -> None:
    model, seen = build(), []
    attack = pgd(0.1, 0.07, 5, clamp=(-3, 3))

    def spy(*arguments: Any) -> Any:
        seen.append(attack(*arguments))
        return seen[-1]

    attacked = attacked_loss(DATA, CE, spy, batch_size=256)(model)
    (moved, target), inside = seen[0], X.clamp(-3, 3)
    assert attacked > mean_loss(DATA, CE)(model)
    assert (moved - X).abs().max() <= max(0.1, float((X - inside).abs().max())) + 1e-12
    assert moved.abs().max() <= 3
    assert not moved.requires_grad
    assert target is not None
    assert torch.equal(target, Y)
    torch.testing.assert_close(attacked_loss(DATA, CE, fgsm(0))(model), mean_loss(DATA, CE)(model))


# Laws ---------------------------------------------------------------------------------------------


def test_law_property_rows_of_the_point_losses_sum_to_n_times_the_mean_loss() -> None:
    model = build()
    rows, mean = gradient(point_losses(DATA, CE), model), gradient(mean_loss(DATA, CE), model)
    assert rows.shape[0] == N
    assert mean.shape[0] == 1
    torch.testing.assert_close(rows.sum(0), N * mean[0], rtol=1e-12, atol=1e-12)


def test_law_property_a_sum_of_properties_has_the_sum_of_the_gradients() -> None:
    model, parts = build(), [soft_f1(DATA), mean_loss(DATA, CE), lambda m: m(X2).square().sum()]
    f1, loss, norm = (gradient(part, model) for part in parts)
    ready = weighted_sum(parts, [2.0, -1.0, 0.5])
    torch.testing.assert_close(gradient(ready, model), 2 * f1 - loss + 0.5 * norm, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(lambda m: sum(part(m) for part in parts), model), f1 + loss + norm)
    assert ready(model).shape == ()


def test_law_order_permuting_the_test_points_permutes_the_rows() -> None:
    model, order = build(), torch.randperm(N, generator=torch.Generator().manual_seed(3))
    rows = gradient(point_losses(DATA, CE), model)
    torch.testing.assert_close(gradient(point_losses((X[order], Y[order]), CE), model), rows[order])
    moved = equalized_odds_gap((X[order], Y[order]), GROUP[order.numpy()])
    torch.testing.assert_close(gradient(moved, model), gradient(equalized_odds_gap(DATA, GROUP), model))


class Dicts(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return N

    def __getitem__(self, j: int) -> dict[str, Tensor]:
        return {"x": X[j], "labels": Y[j]}


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


class HuggingFace(Net):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(x))


SOURCES = {
    "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=3),
    "dicts": lambda: Dicts(),
    "loader of dicts": lambda: DataLoader(Dicts(), batch_size=5),
    "stream": lambda: Stream(),
    "indexed": lambda: IndexedData(DATA),
}


@pytest.mark.parametrize("source", SOURCES)
def test_any_kind_of_data_gives_the_same_gradients(source: str) -> None:
    model = HuggingFace(3).double()
    model.load_state_dict(build().state_dict())
    for make in (
        lambda data: point_losses(data, CE),
        lambda data: mean_loss(data, CE, batch_size=4),
        lambda data: equalized_odds_gap(data, GROUP, batch_size=4),
        lambda data: attacked_loss(data, CE, fgsm(0.2), batch_size=4),
    ):
        expected = gradient(make(DATA), build())
        torch.testing.assert_close(gradient(make(SOURCES[source]()), model), expected, rtol=1e-12, atol=1e-12)


def test_data_without_targets_reaches_fn_as_none() -> None:
    ready = of_outputs(X, lambda outputs, targets: outputs.std() if targets is None else outputs.sum())
    torch.testing.assert_close(gradient(ready, build()), plain(lambda m: z(m).std(), build()))


def test_point_properties_work_under_vmap_as_providers_use_them() -> None:
    model, ready = build(), margins(DATA)
    tensors = {name: q.detach() for name, q in model.named_parameters()}

    def of_one(tensors: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        def run(*inputs: Tensor) -> Tensor:
            return torch.func.functional_call(model, tensors, inputs)

        return ready.loss.each(run, (x[None], y[None])).sum()  # type: ignore[arg-type]

    grads = torch.func.vmap(torch.func.grad(of_one), in_dims=(None, 0, 0))(tensors, X, Y)
    rows = torch.cat([grads[name].reshape(N, -1) for name in tensors], 1)
    torch.testing.assert_close(rows, gradient(ready, model), rtol=1e-12, atol=1e-12)


def test_doctests_of_the_module() -> None:
    result = doctest.testmod(properties)
    assert result.attempted >= 4
    assert result.failed == 0


# property_gradient on plain callables -------------------------------------------------------------


def test_vector_callable_has_a_row_for_each_component() -> None:
    model = build()
    rows = gradient(lambda m: m(X)[:2].flatten(), model)
    torch.testing.assert_close(rows, plain(lambda m: m(X)[:2].flatten(), model), rtol=1e-12, atol=1e-12)
    assert rows.shape == (6, sum(q.numel() for q in model.parameters()))


def test_columns_follow_the_dict_and_unused_parameters_are_zero() -> None:
    model = build()
    chosen = {"last.bias": model.last.bias, "first.weight": model.first.weight}
    whole = model.first(X).square().sum()
    rows = property_gradient(lambda m: m.first(X).square().sum(), model, chosen)
    assert rows.shape == (1, 3 + 20)
    assert torch.equal(rows[0, :3], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(rows[0, 3:], torch.autograd.grad(whole, model.first.weight)[0].flatten())
    ready = property_gradient(mean_loss(DATA, CE), model, chosen)
    expected = torch.autograd.grad(F.cross_entropy(z(model), Y), list(chosen.values()))
    torch.testing.assert_close(ready[0], torch.cat([grad.flatten() for grad in expected]))


def test_sparse_embedding_gradients_become_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 2, sparse=True), nn.Flatten()).double()
    tokens, y = torch.tensor([[1], [4], [1]]), torch.tensor([0, 1, 1])
    rows = gradient(mean_loss((tokens, y), CE, batch_size=2), model)
    assert (rows.reshape(6, 2).abs().sum(1) > 0).tolist() == [False, True, False, False, True, False]


def test_own_gradient_method_is_used() -> None:
    class Own:
        def __call__(self, model: nn.Module) -> Tensor:
            raise AssertionError("not called")

        def gradient(self, model: nn.Module, parameters: Any) -> Tensor:
            return torch.full((2, sum(q.numel() for q in parameters.values())), 7.0)

    assert torch.equal(gradient(Own(), build()), torch.full((2, 43), 7.0))


def test_a_property_that_switches_modes_or_updates_buffers_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(D, 3), nn.BatchNorm1d(3)).double().eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}

    def training(m: nn.Module) -> Tensor:
        m.train()
        return m(X).square().mean() + m[1].running_mean.sum() + m[0].bias.sum()

    gradient(training, model)
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_values_are_copied_once_to_see_that_a_model_leaves_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    copy = SavedState.copy_values
    monkeypatch.setattr(SavedState, "copy_values", lambda saved, names=None: (copied.extend(names), copy(saved, names)))
    model = build()
    goal = mean_loss((X, Y), nn.CrossEntropyLoss())
    first = gradient(goal, model)
    assert set(copied) == {name for name, _ in model.named_parameters()}
    copied.clear()
    assert torch.equal(gradient(goal, model), first)
    assert not copied
    model.last.register_forward_hook(lambda *_: None)  # which may do anything
    gradient(goal, model)
    assert copied


def test_a_model_that_writes_to_its_parameters_is_put_back_or_refused() -> None:
    calls: list[nn.Module] = []

    class Writes(nn.Module):
        def __init__(self, from_call: int, counts: bool) -> None:
            super().__init__()
            self.linear, self.calls, self.from_call, self.counts = nn.Linear(D, 3).double(), 0, from_call, counts

        def forward(self, x: Tensor) -> Tensor:
            calls.append(self)
            self.calls += self.counts
            if calls.count(self) >= self.from_call:
                with torch.no_grad():
                    self.linear.bias += 1
            return self.linear(x)

    goal = mean_loss((X, Y), nn.CrossEntropyLoss())
    for model in (Writes(1, counts=False), Writes(2, counts=True)):  # one that counts is not the one that was looked at
        before = model.linear.bias.detach().clone()
        for _ in range(2):
            gradient(goal, model)
            assert torch.equal(model.linear.bias, before)
    late = Writes(2, counts=False)
    gradient(goal, late)
    with pytest.raises(ValueError, match=r"wrote to 'linear\.bias'.*as it did not before"):
        gradient(goal, late)


# Bad input ----------------------------------------------------------------------------------------


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
    "random data": (lambda: of_outputs(noisy(), lambda f, y: f.std()), "other outputs in a second pass"),
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
