"""Properties: the numbers about a model that attribution explains.

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

The ready properties have their own `gradient` method. It is exact and keeps the graph of one batch at a time. A
property g may depend on all outputs f(θ) `[N, C]` of a test set without being a sum over points. Its gradient takes two
passes: first f without a graph, then ``∇g = Σ_batches (∂g/∂f_batch) · (∂f_batch/∂θ)`` with one vector-Jacobian product
per batch. A ready property that is called as a function returns its value; if grad is on, the value has a graph over
all batches.
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
