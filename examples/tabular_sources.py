"""
Which data source should I keep?
================================

A bank trains one model on customers from five sources. We ask two questions in one call: which source helps the
validation loss, and which source helps the F1 score of the rare class? The answer is a table with names and a picture.
"""

import numpy as np
import torch
from torch import nn

from ggda_ext import attribute, properties
from ggda_ext.training import Recipe, initial_model, train_one

# %%
# Five sources
# ------------
# Customers of one source are alike. The *broker* sends many customers with noisy labels, the *partner* sends few
# customers with correct labels.

random = np.random.default_rng(1)
sources = {
    "branch": (400, 0.05),
    "online": (400, 0.05),
    "broker": (300, 0.45),
    "partner": (100, 0.0),
    "phone": (200, 0.1),
}
rule = random.normal(size=8)


def customers(count, noise, shift):
    """Return inputs and labels; a share `noise` of the labels is drawn at random."""
    x = random.normal(size=(count, 8)) + shift
    y = (x @ rule + random.normal(scale=0.5, size=count) > 1.5).astype(int)
    wrong = random.random(count) < noise
    return x, np.where(wrong, random.integers(0, 2, count), y)


parts = {name: customers(*facts, random.normal(scale=0.4, size=8)) for name, facts in sources.items()}
x = torch.tensor(np.concatenate([part[0] for part in parts.values()]), dtype=torch.float32)
y = torch.tensor(np.concatenate([part[1] for part in parts.values()]))
source = np.repeat(list(parts), [len(part[1]) for part in parts.values()])
validation = customers(1000, 0.0, 0.0)
validation = torch.tensor(validation[0], dtype=torch.float32), torch.tensor(validation[1])

# %%
# The model
# ---------

loss = nn.CrossEntropyLoss()
recipe = Recipe(epochs=20, learning_rate=0.01, batch_size=64, weight_decay=1e-3)
make_model = lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
model = train_one(initial_model(make_model, 0), loss, (x, y), recipe, seed=0).model

# %%
# Two properties at once
# ----------------------
# Positive scores mean that the property rises without the source. That is bad for a loss and good for F1, so the result
# says *helps* and *hurts*.

goal = properties.stack(properties.mean_loss(validation, loss), properties.soft_f1(validation, average="binary"))
result = attribute(model, loss, (x, y), source, goal)
print(result)
result.plot.heatmap()

# %%
# Per member
# ----------
# Large sources have large scores. A score divided by the size of its source shows how much one customer matters.

print(result["mean_loss"].per_member.ranked())
result["mean_loss"].plot.bars()
