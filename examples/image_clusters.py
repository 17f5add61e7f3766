"""
Images without sources: find groups first
=========================================

Handwritten digits come without sources, so we make groups. Grad-K-Means puts images together that pull the model the
same way. Look for wrong labels in the groups that hurt most.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from ggda_ext import attribute, evaluation, grouping, properties
from ggda_ext.training import Recipe, initial_model, train_one

# %%
# Digits, some with a wrong label
# -------------------------------

digits = load_digits()
random = np.random.default_rng(0)
order = random.permutation(len(digits.target))
x = torch.tensor(digits.data[order] / 16, dtype=torch.float32)
y = torch.tensor(digits.target[order])
train, test = (x[:1200], y[:1200].clone()), (x[1200:], y[1200:])
wrong = torch.tensor(random.random(1200) < 0.15)
train[1][wrong] = (train[1][wrong] + torch.randint(1, 10, (int(wrong.sum()),), generator=torch.manual_seed(0))) % 10

loss = nn.CrossEntropyLoss()
recipe = Recipe(epochs=15, learning_rate=0.005, batch_size=64, weight_decay=1e-3)
make_model = lambda: nn.Sequential(nn.Linear(64, 60), nn.ReLU(), nn.Linear(60, 10))
model = train_one(initial_model(make_model, 0), loss, train, recipe, seed=0).model

# %%
# Groups by gradient, then scores
# -------------------------------

groups = grouping.GradKMeansGroups(model, loss, group_size=20, max_size=40, random_state=0).fit_groups(train)
result = attribute(model, loss, train, groups, properties.mean_loss(test, loss))
print(groups)
print(result.harmful().top(5))

# %%
# Where are the wrong labels?
# ---------------------------
# An area under the curve of 1 would mean that every wrong label is in a group that ranks below the groups of all clean
# labels.

found = evaluation.noisy_label_detection(result.per_member[0], groups, wrong)
print(f"area under the curve: {found.roc_auc:.2f}")

worst = groups[groups.id_of(result.harmful().names[0])]
figure, axes = plt.subplots(1, 6, figsize=(7, 1.6))
for ax, at in zip(axes, worst, strict=False):
    ax.imshow(train[0][at].reshape(8, 8), cmap="gray_r")
    ax.set_title(f"label {int(train[1][at])}", fontsize=8)
for ax in axes:
    ax.axis("off")
