"""The loss of each example, from whatever users have: a loss function, one of their own, or the model's own loss."""

from ggda_ext.losses.example import (
    LABEL_KEYS,
    BatchLoss,
    ExampleLoss,
    FunctionalLoss,
    OutputLoss,
    as_example_loss,
    cannot_take,
    example_losses,
    ignored_targets,
    model_output,
    shape_of,
)

__all__ = [
    "LABEL_KEYS",
    "BatchLoss",
    "ExampleLoss",
    "FunctionalLoss",
    "OutputLoss",
    "as_example_loss",
    "cannot_take",
    "example_losses",
    "ignored_targets",
    "model_output",
    "shape_of",
]
