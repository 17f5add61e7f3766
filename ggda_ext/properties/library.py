"""The ready properties: losses, margins, accuracy, F1, fairness, robustness, calibration; one line of code each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ggda_ext.data import DataLike, IndexedData
from ggda_ext.losses import ExampleLoss, OutputLoss, as_example_loss, cannot_take
from ggda_ext.model import product
from ggda_ext.properties.attacks import Attack, AttackedLoss
from ggda_ext.properties.class_outputs import (
    Rates,
    class_labels,
    class_logits,
    class_probabilities,
    on_probabilities,
    refuse_sigmoid,
)
from ggda_ext.properties.classes import LinearProperty, OutputsFn, OutputsProperty, weighted_sum
from ggda_ext.properties.property import DataProperty, MeanProperty, PointProperty
from ggda_ext.tables import aligned

LossFn = Callable[..., Tensor] | ExampleLoss | None
Average = Literal["macro", "binary"]
T = TypeVar("T", bound=DataProperty)


def of_outputs(
    data: DataLike,
    fn: OutputsFn,
    *,
    name: str | None = None,
    higher_is_better: bool | None = None,
    batch_size: int | None = None,
) -> OutputsProperty:
    """Return a property that is any function of all the model's outputs on a test set, ``g(θ) = fn(f(X; θ), Y)``.

    Args:
        data: a DataLoader that does not shuffle, a Dataset, or tensors.
        fn: ``fn(outputs [N, …], targets [N, …])`` returns a scalar or `[m]`. It may depend on the parameters only
            through `outputs`. `targets` is None if the data has none.
        name: the name of the property in results; by default the name of `fn`.
        higher_is_better: whether a higher value is better, so that results can say which groups help; None if it is
            not known.
        batch_size: examples per forward pass; by default the batch size of a DataLoader, else 256. It does not change
            the result.
    """
    if not callable(fn) or cannot_take(fn, 2):
        raise TypeError(f"fn={fn!r}: pass a function fn(outputs, targets) that gives a number or a vector.")
    own = getattr(fn, "__name__", "<lambda>")
    name = name or ("property" if own == "<lambda>" else own)
    return OutputsProperty(data, fn, batch_size, name=name, higher_is_better=higher_is_better)


def point_losses(data: DataLike, loss_fn: LossFn, *, batch_size: int | None = None) -> PointProperty:
    """Loss of each test point `[N]`, ``g_j = loss(f(x_j), y_j)``."""
    loss = as_example_loss(loss_fn)
    return PointProperty(data, loss, batch_size, name="loss", higher_is_better=False)


def mean_loss(data: DataLike, loss_fn: LossFn, *, batch_size: int | None = None) -> MeanProperty:
    """Mean loss of a test set, ``1/N Σ_j loss(f(x_j), y_j)``; N includes points with ignored targets, with loss 0."""
    loss = as_example_loss(loss_fn)
    return MeanProperty(data, loss, batch_size, name="mean_loss", higher_is_better=False)


def contrast(data_a: DataLike, data_b: DataLike, loss_fn: LossFn, *, batch_size: int | None = None) -> LinearProperty:
    """Mean loss of set A minus mean loss of set B; use `named` to say whether higher is better for your question."""
    loss = as_example_loss(loss_fn)
    sets = [
        MeanProperty(data, loss, batch_size, source, name="mean_loss", higher_is_better=False)
        for data, source in ((data_a, "data_a"), (data_b, "data_b"))
    ]
    return weighted_sum(sets, (1.0, -1.0), name="contrast")


def attacked_loss(data: DataLike, loss_fn: LossFn, attack: Attack, *, batch_size: int | None = None) -> MeanProperty:
    """Mean loss ``1/N Σ_j loss(f(x'_j), y_j)``; `attack` makes x' at the current parameters, then x' is held fixed.

    `attack` is ``fgsm(eps)``, ``pgd(eps, step, steps)`` or any `ggda_ext.properties.attacks.Attack`.
    """
    loss = AttackedLoss(as_example_loss(loss_fn), attack)
    return MeanProperty(data, loss, batch_size, name="attacked_loss", higher_is_better=False)


def margins(data: DataLike, *, soft: bool = True, batch_size: int | None = None) -> PointProperty:
    """Margin of each test point `[N]`, ``z_y - log Σ_{c≠y} exp z_c`` (TRAK's output function).

    With ``soft=False`` the margin is ``z_y - max_{c≠y} z_c``. ``margins(data).mean()`` is the mean margin.
    """
    loss = OutputLoss(partial(_margin, soft=soft))
    return _of_logits(PointProperty(data, loss, batch_size, name="margin", higher_is_better=True))


def correct_logits(data: DataLike, *, batch_size: int | None = None) -> PointProperty:
    """Logit of the correct class of each test point `[N]`: ``z_y``, or ``±z`` for a model with a single logit z."""
    loss = OutputLoss(_correct_logit)
    return _of_logits(PointProperty(data, loss, batch_size, name="correct_logit", higher_is_better=True))


def soft_accuracy(data: DataLike, *, temperature: float = 1.0, batch_size: int | None = None) -> MeanProperty:
    """Mean probability of the correct class, ``1/N Σ_j softmax(z_j / temperature)[y_j]``."""
    _check_positive("temperature", temperature)
    loss = OutputLoss(partial(_correct_probability, temperature=temperature))
    return _of_logits(MeanProperty(data, loss, batch_size, name="soft_accuracy", higher_is_better=True))


def accuracy(data: DataLike, *, batch_size: int | None = None) -> OutputsProperty:
    """Share of test points whose most probable class is the correct one.

    It has no gradient. Use it with `WhatIf`, `leave_group_out` and retraining; use `soft_accuracy` with `attribute`.
    """

    def share(probabilities: Tensor, labels: Tensor) -> Tensor:
        return (probabilities.argmax(1) == labels).to(probabilities).mean()

    return _of_probabilities(data, share, batch_size, "accuracy", True, ranks=True)


def f1(
    data: DataLike, *, average: Average = "macro", positive: int = 1, batch_size: int | None = None
) -> OutputsProperty:
    """F1 of the most probable classes; like `accuracy` it has no gradient. It takes the arguments of `soft_f1`."""
    of = _f1_of(average, positive)

    def hard(probabilities: Tensor, labels: Tensor) -> Tensor:
        predicted = functional.one_hot(probabilities.argmax(1), probabilities.shape[1])
        return of(predicted.to(probabilities), labels)

    return _of_probabilities(data, hard, batch_size, "f1", True, ranks=True)


def soft_f1(
    data: DataLike, *, average: Average = "macro", positive: int = 1, batch_size: int | None = None
) -> OutputsProperty:
    """F1 with probabilities P `[N, C]` in place of predictions, ``F1_c = 2 Σ_{y=c} P_c / (Σ P_c + #{y=c})``.

    Args:
        average: "macro" for the mean over all C classes, or "binary" for the F1 of class `positive`.
    """
    return _of_probabilities(data, _f1_of(average, positive), batch_size, "soft_f1", True)


def _f1_of(average: Average, positive: int) -> OutputsFn:
    if average not in ("macro", "binary"):
        raise ValueError(f"average={average!r} is not one of 'macro', 'binary'.")

    def of(probabilities: Tensor, labels: Tensor) -> Tensor:
        is_class = labels[:, None] == torch.arange(probabilities.shape[1], device=labels.device)
        hits, sizes = (probabilities * is_class).sum(0), is_class.sum(0)
        scores = 2 * hits / (probabilities.sum(0) + sizes).clamp_min(torch.finfo(hits.dtype).tiny)
        if average == "macro":
            return scores.mean()
        if not sizes[_checked_class(positive, probabilities)]:
            raise ValueError(f"data has no point of class positive={positive}: its F1 is 0 for every model.")
        return scores[positive]

    return of


def demographic_parity_gap(
    data: DataLike, sensitive: Any, *, positive: int = 1, batch_size: int | None = None
) -> OutputsProperty:
    """Largest minus smallest mean probability of class `positive` over the sensitive groups.

    Args:
        sensitive: the group of each test point `[N]`, numbers or strings; two or more groups.
    """

    def gap(probabilities: Tensor, labels: Tensor, rates: Rates) -> Tensor:
        return rates.gap(probabilities[:, _checked_class(positive, probabilities)], "test point")

    return _of_rates(data, gap, batch_size, "demographic_parity_gap", sensitive)


def equalized_odds_gap(
    data: DataLike,
    sensitive: Any,
    *,
    agg: Literal["worst_case", "mean"] = "worst_case",
    positive: int = 1,
    batch_size: int | None = None,
) -> OutputsProperty:
    """The larger, or the mean, of the gaps in true and in false positive rate over the sensitive groups.

    A group has two rates: the mean probability of class `positive` over its points of this class, and over its other
    points. This is fairlearn's `equalized_odds_difference` with probabilities in place of predictions.

    Args:
        sensitive: the group of each test point `[N]`, numbers or strings; two or more groups.
        agg: "worst_case" for the larger of the two gaps, or "mean" for their mean.
    """
    if agg not in ("worst_case", "mean"):
        raise ValueError(f"agg={agg!r} is not one of 'worst_case', 'mean'.")

    def gap(probabilities: Tensor, labels: Tensor, rates: Rates) -> Tensor:
        chosen = probabilities[:, _checked_class(positive, probabilities)]
        true, false = labels == positive, labels != positive
        gaps = torch.stack(
            [rates.gap(chosen, "positive test point", true), rates.gap(chosen, "negative test point", false)]
        )
        return gaps.amax() if agg == "worst_case" else gaps.mean()

    return _of_rates(data, gap, batch_size, "equalized_odds_gap", sensitive)


def soft_calibration_error(
    data: DataLike, *, bins: int = 15, temperature: float = 0.01, batch_size: int | None = None
) -> OutputsProperty:
    """Expected calibration error with soft bins, ``1/N Σ_b |Σ_j u_jb (correct_j - c_j)|``.

    The confidence c_j is the largest probability of point j. The point is in bin b, centred at t_b, with weight
    ``u_j = softmax_b(-(c_j - t_b)² / temperature)``; the bins become hard as the temperature goes to 0. Whether a
    prediction is correct is treated as a constant.
    """
    _check_positive("temperature", temperature)
    _check_positive("bins", bins)

    def error(probabilities: Tensor, labels: Tensor) -> Tensor:
        confidence, predicted = probabilities.max(1)
        centres = (torch.arange(bins, device=labels.device).to(confidence) + 0.5) / bins
        weights = (-(confidence[:, None] - centres).square() / temperature).softmax(1)
        correct = (predicted == labels).to(confidence)
        return product((correct - confidence).to(weights), weights).abs().sum() / len(labels)

    return _of_probabilities(data, error, batch_size, "soft_calibration_error", False)


def _margin(outputs: Tensor, targets: Any = None, *, soft: bool) -> Tensor:
    logits = class_logits(outputs)
    labels = class_labels(targets, logits)[:, None]
    others = logits.masked_fill(labels == torch.arange(logits.shape[1], device=labels.device), -torch.inf)
    return logits.gather(1, labels).squeeze(1) - (others.logsumexp(1) if soft else others.amax(1))


def _correct_logit(outputs: Tensor, targets: Any = None) -> Tensor:
    logits = class_logits(outputs)
    correct = logits.gather(1, class_labels(targets, logits)[:, None]).squeeze(1)
    return 2 * correct if outputs.numel() == len(outputs) else correct


def _correct_probability(outputs: Tensor, targets: Any = None, *, temperature: float) -> Tensor:
    probabilities = class_probabilities(outputs, temperature)
    return probabilities.gather(1, class_labels(targets, probabilities)[:, None]).squeeze(1)


def _of_probabilities(
    data: DataLike, fn: OutputsFn, batch_size: int | None, name: str, higher_is_better: bool, *, ranks: bool = False
) -> OutputsProperty:
    """Return the property ``fn(probabilities [N, C], labels [N])`` of the whole test set; for `ranks`: their order."""
    of = on_probabilities(fn, ranks=ranks)
    found = OutputsProperty(data, of, batch_size, name=name, higher_is_better=higher_is_better, components=1)
    return _of_logits(found, ranks=ranks)


def _of_logits(property: T, *, ranks: bool = False) -> T:
    """Return a property that takes the model's outputs for logits, and refuses those of a sigmoid."""
    property.check_graph = partial(refuse_sigmoid, ranks=ranks)
    return property


def _of_rates(
    data: DataLike, gap: Callable[[Tensor, Tensor, Rates], Tensor], batch_size: int | None, name: str, sensitive: Any
) -> OutputsProperty:
    """Return the property ``gap(probabilities [N, C], labels [N], rates)`` of sensitive groups; lower is better.

    Rows of a pandas column `sensitive` are matched with those of a test table by their index.
    """

    def between(groups: Rates) -> OutputsFn:
        return on_probabilities(lambda probabilities, labels: gap(probabilities, labels, groups))

    inside = data if isinstance(data, IndexedData) else IndexedData(data, "data")
    rates = Rates(aligned(sensitive, inside.index, "sensitive", "the test data"))
    if inside.n is not None:
        rates.check_length(inside.n)
    found = OutputsProperty(data, between(rates), batch_size, name=name, higher_is_better=False, components=1)
    found.fn_of_points = lambda points: between(rates.of_points(points))
    return _of_logits(found)


def _checked_class(positive: int, probabilities: Tensor) -> int:
    if not 0 <= positive < probabilities.shape[1]:
        raise ValueError(f"positive={positive} is no class of the model, which has {probabilities.shape[1]}.")
    return positive


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name}={value}: pass a number above 0.")
