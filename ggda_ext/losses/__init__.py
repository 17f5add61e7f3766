"""The loss of each example, from a PyTorch loss, the user's own loss function, or the loss that the model returns."""

from ggda_ext.losses.example import (
    LABEL_KEYS,
    BatchLoss,
    ExampleLoss,
    FunctionalLoss,
    OutputLoss,
    as_example_loss,
    cannot_take,
    check_not_broadcast,
    example_losses,
    has_class_outside,
    ignored_targets,
    model_output,
    output_of,
    shape_of,
    training_loss,
)

__all__ = [
    "LABEL_KEYS",
    "BatchLoss",
    "ExampleLoss",
    "FunctionalLoss",
    "OutputLoss",
    "as_example_loss",
    "cannot_take",
    "check_not_broadcast",
    "example_losses",
    "has_class_outside",
    "ignored_targets",
    "model_output",
    "output_of",
    "shape_of",
    "training_loss",
]
