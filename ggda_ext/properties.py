"""Property functions: what about the model is to be explained.

A *property* is any callable ``g(model) -> Tensor``: one number, or a vector `[m]` for m properties at
once. Attribution needs its gradient at the current parameters, a row ∇g `[p]` for each component:

>>> model, x, y = nn.Linear(3, 2), torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
>>> parameters = dict(model.named_parameters())
>>> property_gradient(lambda model: model(x).square().mean(), model, parameters).shape
torch.Size([1, 8])
>>> property_gradient(soft_f1((x, y)), model, parameters).shape
torch.Size([1, 8])

The ready properties bring their own `gradient`: exact, with the graph of one batch at a time. For a g
of all the outputs f(θ) `[N, C]` of a test set, which need not decompose over points, this takes two
passes: f without a graph, then ``∇g = Σ_batches (∂g/∂f_batch) · (∂f_batch/∂θ)``, one vector-Jacobian
product per batch. Called as functions they give the value, with a graph over all batches if grad is on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.attacks import Attack, AttackedLoss
from ggda_ext.data import DataLike, IndexedData, to_device
from ggda_ext.losses import ExampleLoss, OutputLoss, as_example_loss, model_output

Property = Callable[[nn.Module], Tensor]
Parameters = Mapping[str, nn.Parameter]
LossFn = Callable[..., Tensor] | ExampleLoss | None
OutputsFn = Callable[[Tensor, Any], Tensor]


def property_gradient(property: Property, model: nn.Module, parameters: Parameters) -> Tensor:
    """Gradient of every component of a property, ``∂g_j/∂θ``.

    Args:
        property: a callable ``g(model) -> Tensor``, scalar or `[m]`. If it has a method
            ``gradient(model, parameters) -> [m, p]``, that is used instead of plain autograd.
        model: left as it was: `requires_grad`, `.grad`, train or eval mode, buffers.
        parameters: the parameters θ of `model` by name; other parameters count as constants.

    Returns:
        Rows `[m, p]`, detached; p runs over the flattened parameters in the order of the dict.
    """
    if not callable(property):
        raise TypeError(f"property is a {type(property).__name__}: pass a callable g(model) -> Tensor.")
    if not parameters:
        raise ValueError("parameters is empty: pass at least one parameter of the model.")
    own = getattr(property, "gradient", None)
    with _differentiable(model, parameters):
        if callable(own):
            rows = own(model, parameters)
        else:
            value = _checked(property(model))
            found = _Rows(len(value), parameters)
            for j in range(len(value)):
                found.add(j, value[j], keep=j + 1 < len(value))
            rows = found.result()
    p = sum(parameter.numel() for parameter in parameters.values())
    if not isinstance(rows, Tensor) or rows.dim() != 2 or rows.shape[1] != p:
        got = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"property.gradient returned {got}: return a tensor of shape [m, {p}].")
    wrong = torch.nonzero(~rows.isfinite())
    if len(wrong):
        j, at = wrong[0].tolist()
        raise ValueError(
            f"property has a gradient that is not finite: {rows[j, at].item()} at component {j}, in "
            f"parameter {_name_at(at, parameters)!r}. Look for sqrt, log or a division at 0."
        )
    return rows.detach()


@contextmanager
def _differentiable(model: nn.Module, parameters: Parameters) -> Iterator[None]:
    """Let `parameters` require grad, and put back whatever a property may change in the model."""
    required = {name: parameter.requires_grad for name, parameter in parameters.items()}
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.inference_mode(False), torch.enable_grad():
            for parameter in parameters.values():
                parameter.requires_grad_(True)
            yield
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(required[name])
        for module, training in modes.items():
            module.training = training
        for buffer, before in buffers:
            buffer.data.copy_(before)


class _Rows:
    """Gradient rows `[m, p]`, added up from vector-Jacobian products."""

    def __init__(self, m: int, parameters: Parameters) -> None:
        self.parameters = parameters
        self.tensors = list(parameters.values())
        self.sizes = [tensor.numel() for tensor in self.tensors]
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in self.tensors))
        self.rows = torch.zeros(m, sum(self.sizes), dtype=dtype, device=self.tensors[0].device)
        self.used = False

    def add(self, j: int, value: Tensor, cotangent: Tensor | None = None, keep: bool = False) -> None:
        """Row j += ``cotangentᵀ · ∂value/∂θ``; `keep` the graph if it is needed again."""
        if not value.requires_grad:  # this batch does not use the parameters; another one may
            return
        grads = torch.autograd.grad(value, self.tensors, cotangent, retain_graph=keep, allow_unused=True)
        for piece, grad in zip(torch.split(self.rows[j], self.sizes), grads, strict=True):
            if grad is not None:
                self.used = True
                piece.add_((grad.to_dense() if grad.is_sparse else grad).flatten().to(piece))

    def result(self) -> Tensor:
        if not self.used:
            names = ", ".join(list(self.parameters)[:5]) + ", …" * (len(self.parameters) > 5)
            raise ValueError(
                f"property does not depend on the parameters {names}: compute it from the model it is called "
                "with, without detach or no_grad, or choose parameters that it uses."
            )
        return self.rows


def _checked(value: Any) -> Tensor:
    """The value of a property as a vector `[m]`, if it can be differentiated."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"property returned a {type(value).__name__}: return a tensor, one number or a vector [m], "
            "without .item() or .numpy()."
        )
    if value.dim() > 1 or value.numel() == 0:
        raise ValueError(
            f"property returned shape {list(value.shape)}: return one number or a vector [m], m ≥ 1; "
            "reduce or flatten it."
        )
    if not value.requires_grad:
        raise ValueError(
            f"property has no gradient: its value ({value.dtype}) was cut from the parameters by argmax, a "
            "comparison, detach or no_grad, or was not computed from the model it was called with. Use a "
            "smooth quantity, e.g. probabilities instead of predictions."
        )
    return _finite(value.reshape(-1), "component")


def _finite(values: Tensor, of: str, first: int = 0) -> Tensor:
    """`values [m]`, if all are finite; errors call them `of` number `first`, `first` + 1, …"""
    wrong = torch.nonzero(~values.isfinite())
    if len(wrong):
        j = int(wrong[0])
        raise ValueError(
            f"property is not finite: {values[j].item()} at {of} {first + j}. Check the model's outputs "
            "and the test data there."
        )
    return values


def _name_at(position: int, parameters: Parameters) -> str:
    ends = np.cumsum([parameter.numel() for parameter in parameters.values()])
    return list(parameters)[int(np.searchsorted(ends, position, side="right"))]


class _DataProperty:
    """A property of a test set, run batch by batch in the order of the data."""

    def __init__(self, data: DataLike, batch_size: int, name: str = "data") -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: pass at least 1.")
        self.data = data if isinstance(data, IndexedData) else IndexedData(data, name)
        self.batch_size = batch_size

    def _batches(self, model: nn.Module, batch_size: int | None = None) -> Iterator[tuple[np.ndarray, Any]]:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        for indices, batch in self.data.sequential(batch_size or self.batch_size):
            yield indices, to_device(batch, device)


class _LossProperty(_DataProperty):
    """A property made of what `loss.each` gives for every test point."""

    def __init__(self, data: DataLike, loss: ExampleLoss, batch_size: int = 256, name: str = "data") -> None:
        super().__init__(data, batch_size, name)
        self.loss = loss


class PointProperty(_LossProperty):
    """One component for each test point `[N]`: its loss, or another number that `loss.each` gives.

    Providers may recognise it and use `loss` and `data` directly.
    """

    def __call__(self, model: nn.Module) -> Tensor:
        return torch.cat([self.loss.each(model, batch) for _, batch in self._batches(model)])

    def gradient(self, model: nn.Module, parameters: Parameters) -> Tensor:
        """A row for each point `[N, p]`; point by point, as a row costs a backward of its whole batch."""
        n = self.data.n or sum(len(indices) for indices, _ in self.data.sequential(self.batch_size))
        found = _Rows(n, parameters)
        for indices, batch in self._batches(model, batch_size=1):
            values = _finite(self.loss.each(model, batch), "test point", int(indices[0]))
            for j in range(len(indices)):
                found.add(int(indices[j]), values[j], keep=j + 1 < len(indices))
        return found.result()

    def mean(self) -> MeanProperty:
        """The mean over the test points, a scalar property."""
        return MeanProperty(self.data, self.loss, self.batch_size)


class MeanProperty(_LossProperty):
    """Mean over the test points of what `loss.each` gives: one pass, as it decomposes."""

    def __call__(self, model: nn.Module) -> Tensor:
        losses = [self.loss.each(model, batch) for _, batch in self._batches(model)]
        return torch.cat(losses).mean()

    def gradient(self, model: nn.Module, parameters: Parameters) -> Tensor:
        """The row `[1, p]`."""
        found, n = _Rows(1, parameters), 0
        for indices, batch in self._batches(model):
            values = _finite(self.loss.each(model, batch), "test point", int(indices[0]))
            found.add(0, values.sum())
            n += len(indices)
        return found.result() / n


class OutputsProperty(_DataProperty):
    """``fn(outputs [N, …], targets [N, …])`` of the whole test set, scalar or `[m]`; see `of_outputs`."""

    def __init__(self, data: DataLike, fn: OutputsFn, batch_size: int = 256) -> None:
        super().__init__(data, batch_size)
        self.fn = fn

    def __call__(self, model: nn.Module) -> Tensor:
        return self.fn(*self._outputs(model))

    def gradient(self, model: nn.Module, parameters: Parameters) -> Tensor:
        """Rows `[m, p]` in two passes over the data."""
        with torch.no_grad():
            outputs, targets = self._outputs(model)
        outputs.requires_grad_()
        value = _checked(self.fn(outputs, targets))
        m = len(value)
        slopes = [
            torch.autograd.grad(value[j], outputs, retain_graph=j + 1 < m, allow_unused=True)[0] for j in range(m)
        ]
        if any(slope is None for slope in slopes):
            raise ValueError("property does not depend on the outputs: compute it from fn's first argument.")
        found = _Rows(m, parameters)
        for indices, batch in self._batches(model):
            again, _ = model_output(model, batch)
            run = slice(int(indices[0]), int(indices[-1]) + 1)
            _check_repeats(again.detach(), outputs.detach()[run])
            for j, slope in enumerate(slopes):
                found.add(j, again, slope[run], keep=j + 1 < m)
        return found.result()

    def _outputs(self, model: nn.Module) -> tuple[Tensor, Any]:
        """All outputs `[N, …]`, and all targets or None."""
        outputs: list[Tensor] = []
        targets: list[Any] = []
        for indices, batch in self._batches(model):
            output, target = model_output(model, batch)
            if output.shape[:1] != (len(indices),) or (outputs and output.shape[1:] != outputs[0].shape[1:]):
                raise ValueError(
                    f"the model returned shape {list(output.shape)} for a batch of {len(indices)} examples: "
                    "a property of all outputs needs one row per example, of the same shape in every batch."
                )
            outputs.append(output)
            targets.append(target)
        return torch.cat(outputs), None if targets[0] is None else torch.cat(targets)


def _check_repeats(again: Tensor, before: Tensor) -> None:
    if again.shape != before.shape or float((again - before).abs().max()) > 1e-2 * float(before.abs().max()):
        raise ValueError(
            "data gives other outputs in a second pass: use model.eval(), and test data without random augmentation."
        )


class LinearProperty:
    """A linear map of several properties, the same for values and gradients; see `stack`, `weighted_sum`."""

    def __init__(self, properties: Sequence[Property], join: Callable[[list[Tensor]], Tensor]) -> None:
        if not properties:
            raise ValueError("properties is empty: pass at least one property.")
        self.properties, self.join = tuple(properties), join

    def __call__(self, model: nn.Module) -> Tensor:
        return self.join([part(model) for part in self.properties])

    def gradient(self, model: nn.Module, parameters: Parameters) -> Tensor:
        """Rows `[m, p]`."""
        return self.join([property_gradient(part, model, parameters) for part in self.properties])


def stack(*properties: Property) -> LinearProperty:
    """Several properties as one vector `[m_1 + m_2 + …]`, component after component."""
    return LinearProperty(properties, lambda parts: torch.cat([part.reshape(-1, *part.shape[1:]) for part in parts]))


def weighted_sum(properties: Sequence[Property], weights: Sequence[float]) -> LinearProperty:
    """``Σ_i weights[i] · properties[i]``, for properties with the same number of components."""
    if len(properties) != len(weights):
        raise ValueError(f"weights has {len(weights)} entries for {len(properties)} properties.")

    def join(parts: list[Tensor]) -> Tensor:
        shapes = [list(part.shape) for part in parts]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"properties of shapes {shapes} cannot be added: use stack.")
        return torch.stack([weight * part for weight, part in zip(weights, parts, strict=True)]).sum(0)

    return LinearProperty(properties, join)


def of_outputs(data: DataLike, fn: OutputsFn, *, batch_size: int = 256) -> OutputsProperty:
    """Any function of all the model's outputs on a test set, ``g(θ) = fn(f(X; θ), Y)``.

    Args:
        data: a DataLoader that does not shuffle, a Dataset, or tensors.
        fn: ``fn(outputs [N, …], targets [N, …])`` gives a scalar or `[m]`. It may depend on the
            parameters through `outputs` only. `targets` is None if the data has none.
        batch_size: examples per forward pass; does not change the result.
    """
    return OutputsProperty(data, fn, batch_size)


def point_losses(data: DataLike, loss_fn: LossFn, *, batch_size: int = 256) -> PointProperty:
    """Loss of each test point `[N]`, ``g_j = loss(f(x_j), y_j)``."""
    return PointProperty(data, as_example_loss(loss_fn), batch_size)


def mean_loss(data: DataLike, loss_fn: LossFn, *, batch_size: int = 256) -> MeanProperty:
    """Mean loss of a test set, ``1/N Σ_j loss(f(x_j), y_j)``."""
    return MeanProperty(data, as_example_loss(loss_fn), batch_size)


def contrast(data_a: DataLike, data_b: DataLike, loss_fn: LossFn, *, batch_size: int = 256) -> LinearProperty:
    """Mean loss of set A minus mean loss of set B."""
    loss = as_example_loss(loss_fn)
    sets = [MeanProperty(data, loss, batch_size, name) for data, name in ((data_a, "data_a"), (data_b, "data_b"))]
    return weighted_sum(sets, (1.0, -1.0))


def attacked_loss(data: DataLike, loss_fn: LossFn, attack: Attack, *, batch_size: int = 256) -> MeanProperty:
    """Mean loss ``1/N Σ_j loss(f(x'_j), y_j)``, with x' from `attack` at the current parameters, then fixed.

    `attack` is ``fgsm(eps)``, ``pgd(eps, step, steps)`` or any `ggda_ext.attacks.Attack`.
    """
    return MeanProperty(data, AttackedLoss(as_example_loss(loss_fn), attack), batch_size)


def margins(data: DataLike, *, soft: bool = True, batch_size: int = 256) -> PointProperty:
    """Margin of each test point `[N]`, ``z_y - log Σ_{c≠y} exp z_c`` (TRAK's output function).

    With ``soft=False``, ``z_y - max_{c≠y} z_c``. ``margins(data).mean()`` is their mean.
    """
    return PointProperty(data, OutputLoss(partial(_margin, soft=soft)), batch_size)


def correct_logits(data: DataLike, *, batch_size: int = 256) -> PointProperty:
    """Logit of the correct class of each test point `[N]`, ``z_y``; of one-logit models ``±z``."""
    return PointProperty(data, OutputLoss(_correct_logit), batch_size)


def soft_accuracy(data: DataLike, *, temperature: float = 1.0, batch_size: int = 256) -> MeanProperty:
    """Mean probability of the correct class, ``1/N Σ_j softmax(z_j / temperature)[y_j]``."""
    _check_positive("temperature", temperature)
    return MeanProperty(data, OutputLoss(partial(_correct_probability, temperature=temperature)), batch_size)


def soft_f1(
    data: DataLike,
    *,
    average: Literal["macro", "binary"] = "macro",
    positive: int = 1,
    batch_size: int = 256,
) -> OutputsProperty:
    """F1 with probabilities P `[N, C]` for predictions, ``F1_c = 2 Σ_{y=c} P_c / (Σ P_c + #{y=c})``.

    Args:
        average: "macro", the mean over all C classes, or "binary", the F1 of class `positive`.
    """
    if average not in ("macro", "binary"):
        raise ValueError(f"average={average!r} is not one of 'macro', 'binary'.")

    def f1(probabilities: Tensor, labels: Tensor) -> Tensor:
        is_class = labels[:, None] == torch.arange(probabilities.shape[1], device=labels.device)
        hits, sizes = (probabilities * is_class).sum(0), is_class.sum(0)
        scores = 2 * hits / (probabilities.sum(0) + sizes).clamp_min(torch.finfo(hits.dtype).tiny)
        if average == "macro":
            return scores.mean()
        if not sizes[_checked_class(positive, probabilities)]:
            raise ValueError(f"data has no point of class positive={positive}: its F1 is 0 for every model.")
        return scores[positive]

    return _of_probabilities(data, f1, batch_size)


def demographic_parity_gap(
    data: DataLike, sensitive: Any, *, positive: int = 1, batch_size: int = 256
) -> OutputsProperty:
    """Largest minus smallest mean probability of class `positive` over the sensitive groups.

    Args:
        sensitive: the group of each test point `[N]`, numbers or strings; two or more groups.
    """
    rates = _Rates(sensitive)

    def gap(probabilities: Tensor, labels: Tensor) -> Tensor:
        return rates.gap(probabilities[:, _checked_class(positive, probabilities)], "point")

    return _of_probabilities(data, gap, batch_size, rates)


def equalized_odds_gap(
    data: DataLike,
    sensitive: Any,
    *,
    agg: Literal["worst_case", "mean"] = "worst_case",
    positive: int = 1,
    batch_size: int = 256,
) -> OutputsProperty:
    """The larger, or the mean, of the gaps in true and in false positive rate over the sensitive groups.

    The rates of a group are the mean probabilities of class `positive` over its points that are of this
    class, and over those that are not. As fairlearn's `equalized_odds_difference`, with probabilities.

    Args:
        sensitive: the group of each test point `[N]`, numbers or strings; two or more groups.
        agg: "worst_case", the larger of the two gaps, or "mean".
    """
    if agg not in ("worst_case", "mean"):
        raise ValueError(f"agg={agg!r} is not one of 'worst_case', 'mean'.")
    rates = _Rates(sensitive)

    def gap(probabilities: Tensor, labels: Tensor) -> Tensor:
        chosen = probabilities[:, _checked_class(positive, probabilities)]
        true, false = labels == positive, labels != positive
        gaps = torch.stack([rates.gap(chosen, "positive", true), rates.gap(chosen, "negative", false)])
        return gaps.amax() if agg == "worst_case" else gaps.mean()

    return _of_probabilities(data, gap, batch_size, rates)


def soft_calibration_error(
    data: DataLike, *, bins: int = 15, temperature: float = 0.01, batch_size: int = 256
) -> OutputsProperty:
    """Expected calibration error with soft bins, ``1/N Σ_b |Σ_j u_jb (correct_j - c_j)|``.

    The confidence c_j is the largest probability; point j is in bin b, centred at t_b, with weight
    ``u_j = softmax_b(-(c_j - t_b)² / temperature)``, a hard bin as the temperature goes to 0. Whether a
    prediction is correct counts as a constant.
    """
    _check_positive("temperature", temperature)
    _check_positive("bins", bins)

    def error(probabilities: Tensor, labels: Tensor) -> Tensor:
        confidence, predicted = probabilities.max(1)
        centres = (torch.arange(bins, device=labels.device).to(confidence) + 0.5) / bins
        weights = (-(confidence[:, None] - centres).square() / temperature).softmax(1)
        return ((predicted == labels).to(confidence) - confidence).matmul(weights).abs().sum() / len(labels)

    return _of_probabilities(data, error, batch_size)


def class_probabilities(outputs: Tensor, temperature: float = 1.0) -> Tensor:
    """Probabilities `[N, C]` of outputs that are C logits, or the one logit of class 1 (`[N]`, `[N, 1]`)."""
    return (_class_logits(outputs) / temperature).softmax(1)


def _class_logits(outputs: Tensor) -> Tensor:
    """Logits `[N, C]`; one logit z of class 1 becomes ``(-z/2, z/2)``, whose softmax is the sigmoid of z."""
    if outputs.dim() not in (1, 2):
        raise ValueError(
            f"the model returned shape {list(outputs.shape)}: properties of classes need outputs [N, C], "
            "[N, 1] or [N]; for others use of_outputs."
        )
    logits = outputs.reshape(len(outputs), -1)
    return torch.cat([-logits / 2, logits / 2], 1) if logits.shape[1] == 1 else logits


def _class_labels(targets: Any, logits: Tensor) -> Tensor:
    """Class indices `[N]` from targets `[N]` or `[N, 1]`, checked against `logits [N, C]`."""
    if not isinstance(targets, Tensor) or targets.numel() != len(logits):
        got = f"shape {list(targets.shape)}" if isinstance(targets, Tensor) else f"a {type(targets).__name__}"
        raise ValueError(
            f"data has targets of {got} for {len(logits)} examples: properties of classes need one class "
            "index per example, [N]."
        )
    classes = logits.shape[1]
    labels = targets.reshape(-1)
    wrong = (labels < 0) | (labels >= classes) | (labels != labels.long())
    try:
        found = bool(wrong.any())
    except RuntimeError:  # under vmap values cannot be looked at
        found = False
    if found:
        raise ValueError(
            f"data has {int(wrong.sum())} labels that are no class of the model, first "
            f"{labels[wrong][0].item()}: it has {classes} classes, so pass whole numbers 0 … {classes - 1}."
        )
    return labels.long()


def _margin(outputs: Tensor, targets: Any, soft: bool) -> Tensor:
    logits = _class_logits(outputs)
    labels = _class_labels(targets, logits)[:, None]
    others = logits.masked_fill(labels == torch.arange(logits.shape[1], device=labels.device), -torch.inf)
    return logits.gather(1, labels).squeeze(1) - (others.logsumexp(1) if soft else others.amax(1))


def _correct_logit(outputs: Tensor, targets: Any) -> Tensor:
    logits = _class_logits(outputs)
    correct = logits.gather(1, _class_labels(targets, logits)[:, None]).squeeze(1)
    return 2 * correct if outputs.numel() == len(outputs) else correct


def _correct_probability(outputs: Tensor, targets: Any, temperature: float) -> Tensor:
    probabilities = class_probabilities(outputs, temperature)
    return probabilities.gather(1, _class_labels(targets, probabilities)[:, None]).squeeze(1)


def _of_probabilities(data: DataLike, fn: OutputsFn, batch_size: int, rates: _Rates | None = None) -> OutputsProperty:
    """A property ``fn(probabilities [N, C], labels [N])`` of the whole test set."""

    def of(outputs: Tensor, targets: Any) -> Tensor:
        probabilities = class_probabilities(outputs)
        return fn(probabilities, _class_labels(targets, probabilities))

    found = OutputsProperty(data, of, batch_size)
    if rates is not None and found.data.n is not None:
        rates.check_length(found.data.n)
    return found


class _Rates:
    """Mean probabilities by sensitive group."""

    def __init__(self, sensitive: Any) -> None:
        values = np.asarray(sensitive.cpu() if isinstance(sensitive, Tensor) else sensitive)
        if values.ndim != 1:
            raise ValueError(f"sensitive has shape {list(values.shape)}: pass one value per test point, [N].")
        missing = [j for j, value in enumerate(values.tolist()) if value is None or value != value]
        if missing:
            raise ValueError(
                f"sensitive has {len(missing)} missing values, first at {missing[0]}: leave these points "
                "out of the test data, or give them a group."
            )
        names, ids = np.unique(values, return_inverse=True)
        if len(names) < 2:
            raise ValueError(f"sensitive holds {len(names)} group(s) {names.tolist()}: a gap needs at least 2.")
        self.names, self.ids = names.tolist(), torch.from_numpy(ids)

    def check_length(self, n: int) -> None:
        if len(self.ids) != n:
            raise ValueError(
                f"sensitive has {len(self.ids)} values for {n} test points: pass one per point, in the "
                "order of the data."
            )

    def gap(self, chosen: Tensor, kind: str, mask: Tensor | None = None) -> Tensor:
        """Largest minus smallest group mean of `chosen [N]`, over the points in `mask` (of this `kind`)."""
        self.check_length(len(chosen))
        members = self.ids.to(chosen.device)[:, None] == torch.arange(len(self.names), device=chosen.device)
        if mask is not None:
            members = members & mask[:, None]
        sizes = members.sum(0)
        if not bool(sizes.all()):
            name = self.names[int(sizes.argmin())]
            raise ValueError(
                f"sensitive group {name!r} has no {kind} test point, so its rate is undefined: "
                "add some, or merge or leave out the group."
            )
        means = chosen @ members.to(chosen) / sizes
        return means.amax() - means.amin()


def _checked_class(positive: int, probabilities: Tensor) -> int:
    if not 0 <= positive < probabilities.shape[1]:
        raise ValueError(f"positive={positive} is no class of the model, which has {probabilities.shape[1]}.")
    return positive


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name}={value}: pass a number above 0.")
