"""TRAK's tasks (model output functions), under TRAK's names."""

from trak.modelout_functions import (
    TASK_TO_MODELOUT,
    AbstractModelOutput,
    CLIPModelOutput,
    ImageClassificationModelOutput,
    IterativeImageClassificationModelOutput,
    TextClassificationModelOutput,
)

__all__ = [
    "AbstractModelOutput",
    "ImageClassificationModelOutput",
    "CLIPModelOutput",
    "TextClassificationModelOutput",
    "IterativeImageClassificationModelOutput",
    "TASK_TO_MODELOUT",
]
