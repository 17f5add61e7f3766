"""The loss of each example, from a PyTorch loss, the user's own loss function, or the loss that the model returns."""

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
