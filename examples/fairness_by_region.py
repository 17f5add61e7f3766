"""
Which region makes the model unfair?
====================================

A model decides on loans. It accepts women less often, and we ask which part of the training data causes this. A
fairness gap is a property of a whole test set: it is not a sum over its points. It is still differentiated exactly.
"""

import numpy as np
import torch
from torch import nn

from ggda_ext import attribute, properties
from ggda_ext.counterfactual.leave_group_out import leave_group_out
from ggda_ext.training import Recipe, initial_model, train_one

# %%
# Loans of six regions
# --------------------
# In the south, women were refused a loan, no matter how high their income was.

random = np.random.default_rng(2)


def applicants(count):
    """Return income, debt and sex (1 for women), and whether the loan would be paid back."""
    income, debt, sex = random.normal(size=count), random.normal(size=count), random.integers(0, 2, count)
    paid = (income - 0.5 * debt + random.normal(scale=0.5, size=count) > 0).astype(int)
    return np.stack([income, debt, sex], 1), paid


regions = ["north", "coast", "centre", "south", "hills", "islands"]
x, y = applicants(1800)
region = np.array(regions)[random.integers(0, 6, 1800)]
y[(region == "south") & (x[:, 2] == 1)] = 0
test_x, test_y = applicants(1000)
data = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
test = torch.tensor(test_x, dtype=torch.float32), torch.tensor(test_y)

loss = nn.CrossEntropyLoss()
recipe = Recipe(epochs=15, learning_rate=0.01, batch_size=64, weight_decay=1e-3)
make_model = lambda: nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
model = train_one(initial_model(make_model, 0), loss, data, recipe, seed=0).model

# %%
# The gap between men and women, by region
# ----------------------------------------
# The test set is passed unchanged. The gap is the difference of the mean predicted probabilities.

gap = properties.demographic_parity_gap(test, sensitive=test_x[:, 2].astype(int))
print(f"gap of the model: {gap(model).item():.3f}")
result = attribute(model, loss, data, region, gap)
print(result)
result.plot.bars()

# %%
# Is it true?
# -----------
# We train the model again without each region and measure the same gap.

truth = leave_group_out(make_model, loss, data, region, gap, recipe, seeds=range(3)).attribution()
print(truth)
