"""Train models on subsets of the data: one model, or many small models at once.

>>> import torch
>>> from torch import nn
>>> from ggda_ext.training import Recipe, train_many
>>> x, y = torch.randn(60, 4), torch.arange(60) % 3
>>> recipe = Recipe(epochs=2, learning_rate=0.01, batch_size=16)
>>> halves = [range(30), range(30, 60)]
>>> models = train_many(lambda: nn.Linear(4, 3), nn.CrossEntropyLoss(), (x, y), recipe, seeds=[0, 1], subsets=halves)
>>> models.outputs(x).shape
torch.Size([2, 60, 3])
"""

from ggda_ext.training.loop import Trained, initial_model, train_one
from ggda_ext.training.many_models import TrainedModels, train_many
from ggda_ext.training.recipe import Recipe

__all__ = ["Recipe", "train_one", "train_many", "Trained", "TrainedModels", "initial_model"]
