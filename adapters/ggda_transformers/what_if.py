"""`what_if_trainer` refits a fine-tuned classifier to show how it would be without one or several sources.

Scores of large sources do not add up; a refit includes what the sources do together. It needs one output vector for
each row, so it works for classifiers, of one label or several for a row, and for regressions. It works best if few
parameters were trained (adapters, heads, upper layers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ggda_ext.counterfactual import WhatIf
from ggda_ext.curvature.damping import TrainingSteps
from ggda_transformers.attribution import training_steps
from ggda_transformers.columns import groups_of
from ggda_transformers.peft_models import base_of, counted_parameters
from ggda_transformers.setup import TrainerSetup


def what_if_trainer(
    trainer_or_model: Any,
    train_dataset: Any,
    groups: Any,
    *,
    recipe: TrainingSteps | None = None,
    data_collator: Callable[[list[Any]], Any] | None = None,
    processing_class: Any = None,
    batch_size: int | None = None,
    parameters: Any = None,
    **options: Any,
) -> WhatIf:
    """Return a `WhatIf` for a fine-tuned classifier; use it as ``.without(["forum", "news"]).change(property)``.

    Args:
        trainer_or_model: as in `attribute_trainer`. The model must be in eval mode, and stay in it as long as the
            `WhatIf` is used.
        train_dataset: as in `attribute_trainer`.
        groups: as in `attribute_trainer`.
        recipe: the steps of the training; by default those of the Trainer. It matters: without a recipe, the answers
            are for a model trained to its optimum.
        data_collator: as in `attribute_trainer`.
        processing_class: as in `attribute_trainer`.
        batch_size: as in `attribute_trainer`.
        parameters: as in `attribute_trainer`.
        **options: further arguments of `WhatIf`.

    Returns:
        A `WhatIf`. It takes properties of outputs, such as
        ``properties.mean_loss(setup.loader(rows), nn.CrossEntropyLoss())`` with ``setup = TrainerSetup.of(trainer)``.
    """
    setup = TrainerSetup.of(
        trainer_or_model, data_collator=data_collator, processing_class=processing_class, batch_size=batch_size
    )
    partition = groups_of(train_dataset, groups)
    loader = setup.loader(setup.prepared(train_dataset))
    loss = _loss_of(setup, loader)
    if setup.model.training:
        raise ValueError("the model is in train mode, with dropout: call model.eval() before asking what if.")
    if recipe is None and "weight_decay" not in options:
        recipe = training_steps(setup.trainer)
    return WhatIf(
        setup.model, loss, loader, partition, recipe=recipe,
        parameters=counted_parameters(setup.model) if parameters is None else parameters,
        batch_size=setup.batch_size, **options,
    )  # fmt: skip


def _loss_of(setup: TrainerSetup, loader: DataLoader[Any]) -> nn.Module:
    """The loss of a classifier or regression as a function of outputs. Raise an error for other models and losses."""
    own = setup.loss()
    changed = own.compute_loss_func or own.smoother or own.compute_loss
    name = type(base_of(setup.model)).__name__
    if changed or "Classification" not in name or "Token" in name:
        why = "with a loss of the Trainer's own" if changed else "which has not one label for each row"
        raise TypeError(
            f"what_if_trainer refits one output for each row, and the model is a {name}, {why}: use attribute_trainer, "
            "or WhatIf with the loss as a function of outputs."
        )
    config = getattr(setup.model, "config", None)
    return _LOSSES[getattr(config, "problem_type", None) or _problem_of(config, loader)]()


_LOSSES = {
    "regression": nn.MSELoss,
    "single_label_classification": nn.CrossEntropyLoss,
    "multi_label_classification": nn.BCEWithLogitsLoss,
}


def _problem_of(config: Any, loader: DataLoader[Any]) -> str:
    """The `problem_type` that transformers writes into a configuration without one when it sees the first labels."""
    if getattr(config, "num_labels", 2) == 1:
        return "regression"
    labels = next(iter(loader)).get("labels")
    classes = labels is None or labels.dtype in (torch.long, torch.int)
    return "single_label_classification" if classes else "multi_label_classification"
