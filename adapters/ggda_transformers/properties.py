"""Properties by name, on the Trainer's evaluation set or another one: loss, accuracy, F1, perplexity, probability."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ggda_ext import properties
from ggda_ext.properties import MeanProperty, Property, named, stack, weighted_sum
from ggda_ext.properties.property import ReadyProperty
from ggda_transformers.peft_models import base_of
from ggda_transformers.setup import TrainerSetup, shifts_labels

NAMES = ("eval_loss", "difference", "accuracy", "f1", "probability", "perplexity")


def negative_exponential(loss: Tensor) -> Tensor:
    """A probability from its negative logarithm."""
    return (-loss).exp()


def negative_exponential_of_twice(loss: Tensor) -> Tensor:
    """The probability of a start and an end, of which a model that answers questions takes the mean of the losses."""
    return (-2 * loss).exp()


def property_of(setup: TrainerSetup, property: Any, eval_dataset: Any) -> Property:
    """Return the property with a name, or the property itself if it is a callable.

    Args:
        setup: turns rows into losses.
        property: a callable ``g(model)``, one of `NAMES`, or a list of these, one component after the other.
        eval_dataset: the rows that the property is computed on; a dict of several sets gives one component for each.
    """
    if isinstance(property, list | tuple) and property:
        return stack(*(property_of(setup, one, eval_dataset) for one in property))
    if not isinstance(property, str):
        return property
    if property not in NAMES:
        raise ValueError(
            f"property={property!r} is not one of {', '.join(map(repr, NAMES))}, and no callable g(model)."
        )
    if eval_dataset is None:
        eval_dataset = getattr(setup.trainer, "eval_dataset", None)
    if eval_dataset is None or (isinstance(eval_dataset, Mapping) and not eval_dataset):
        raise ValueError(
            f"property={property!r} is of an evaluation set, and there is none: pass eval_dataset=, or a Trainer that "
            "has one."
        )
    if property == "difference":
        return _difference(setup, eval_dataset)
    if property in ("accuracy", "f1", "probability") and _predicts_a_number(setup.model):
        raise ValueError(
            f"property={property!r} is of labels, and this {type(base_of(setup.model)).__name__} predicts a number "
            "(num_labels=1 or problem_type='regression'): take 'eval_loss', or a callable g(model)."
        )
    make = _MAKERS[property]
    if not isinstance(eval_dataset, Mapping):
        return named(make(setup, eval_dataset), property)
    return stack(*(named(make(setup, data), f"{property} of {name}") for name, data in eval_dataset.items()))


def _mean(setup: TrainerSetup, dataset: Any, *, higher_is_better: bool, **kind: Any) -> MeanProperty:
    """The mean over rows of the loss, or of the loss or function of it that `kind` selects, see `TrainerSetup.loss`."""
    data = setup.rows(dataset, "eval_dataset")
    return MeanProperty(data, setup.loss(**kind), setup.batch_size, higher_is_better=higher_is_better)


def _f1(setup: TrainerSetup, dataset: Any) -> ReadyProperty:
    config = getattr(setup.model, "config", None)
    if shifts_labels(setup.model) or getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"property='f1' is of one label for each row, and a {type(base_of(setup.model)).__name__} has one for each "
            "token: take 'accuracy', 'probability' or 'perplexity', or a callable g(model)."
        )
    return properties.soft_f1(setup.rows(dataset, "eval_dataset"), batch_size=setup.batch_size)


def _probability(setup: TrainerSetup, dataset: Any) -> ReadyProperty:
    answers = "QuestionAnswering" in type(base_of(setup.model)).__name__
    of_example = negative_exponential_of_twice if answers else negative_exponential
    return _mean(setup, dataset, higher_is_better=True, tokens="sum", of_example=of_example, is_models=True)


def _predicts_a_number(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    kind = getattr(config, "problem_type", None)
    one = getattr(config, "num_labels", None) == 1 and "Classification" in type(base_of(model)).__name__
    return kind == "regression" or (kind is None and one)


def _difference(setup: TrainerSetup, sets: Any) -> Property:
    if not isinstance(sets, Mapping) or len(sets) != 2:
        raise ValueError(
            "property='difference' is the loss of one set minus that of another: pass eval_dataset={'a': …, 'b': …}."
        )
    first, second = sets
    parts = [_MAKERS["eval_loss"](setup, data) for data in sets.values()]
    return weighted_sum(parts, (1.0, -1.0), name=f"eval_loss of {first} minus {second}")


class Perplexity(ReadyProperty):
    """exp of the mean of the model's own losses of all tokens of a set, ``exp(Σ losses / Σ tokens)``."""

    components = 1

    def __init__(self, setup: TrainerSetup, dataset: Any) -> None:
        self.name, self.higher_is_better = "perplexity", False
        self._total, self._tokens = (
            _mean(setup, dataset, higher_is_better=False, tokens="sum", of_token=of_token, is_models=True)
            for of_token in (None, torch.ones_like)
        )

    def __call__(self, model: nn.Module) -> Tensor:
        with torch.no_grad():
            tokens = self._tokens(model)
        return (self._total(model) / tokens).exp()

    def gradient(self, model: nn.Module, parameters: Any) -> Tensor:
        """The row `[1, p]`: the perplexity times the gradient of the mean loss."""
        with torch.no_grad():
            tokens = self._tokens(model)
            value = (self._total(model) / tokens).exp()
        return self._total.gradient(model, parameters) * (value / tokens)


_MAKERS: dict[str, Callable[[TrainerSetup, Any], ReadyProperty]] = {
    "eval_loss": partial(_mean, higher_is_better=False),
    "accuracy": partial(_mean, higher_is_better=True, of_token=negative_exponential, is_models=True),
    "f1": _f1,
    "probability": _probability,
    "perplexity": Perplexity,
}
"""``accuracy`` is the mean probability of the right label; for a language model, the mean over all tokens.
``probability`` is the probability of the whole answer, that is, of all labels of a row together. Probabilities come
from the model's own loss: exp(−loss) is none if the Trainer smooths labels or computes another loss."""
