"""Property functions: what about the model is to be explained.

A *property* is any callable ``g(model) -> Tensor``: one number, or a vector `[m]` for m properties at
once. Attribution needs its gradient at the current parameters, a row ∇g `[p]` for each component:

>>> import torch
>>> from torch import nn
>>> from ggda_ext.properties import property_gradient, soft_f1
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

from ggda_ext.properties.attacks import fgsm, pgd
from ggda_ext.properties.class_outputs import class_probabilities
from ggda_ext.properties.classes import LinearProperty, OutputsProperty, stack, weighted_sum
from ggda_ext.properties.library import (
    accuracy,
    attacked_loss,
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
)
from ggda_ext.properties.property import MeanProperty, PointProperty, Property, named, property_gradient

__all__ = [
    "Property",
    "property_gradient",
    "point_losses",
    "mean_loss",
    "contrast",
    "attacked_loss",
    "fgsm",
    "pgd",
    "margins",
    "correct_logits",
    "accuracy",
    "f1",
    "soft_accuracy",
    "soft_f1",
    "demographic_parity_gap",
    "equalized_odds_gap",
    "soft_calibration_error",
    "of_outputs",
    "named",
    "stack",
    "weighted_sum",
    "class_probabilities",
    "PointProperty",
    "MeanProperty",
    "OutputsProperty",
    "LinearProperty",
]
