"""Ready properties against plain autograd of the same formula on the whole test set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from property_cases import (
    CE,
    DATA,
    GROUP,
    X2,
    Y2,
    N,
    X,
    Y,
    build,
    given,
    gradient,
    plain,
    points,
    z,
)
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torch.nn import functional as F

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
    soft_accuracy,
    soft_calibration_error,
    soft_f1,
    stack,
    weighted_sum,
)
from ggda_ext.properties.attacks import fgsm, pgd


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
        again, value = gradient(ready, model), ready(model)
    assert torch.equal(again, expected)
    torch.testing.assert_close(value, ready(model).detach())
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
