"""
Which clinic spoils the model?
==============================

We have a table of patients from seven clinics, and a model that predicts who is ill. In one clinic the labels were
entered the wrong way round. Starting from the trained model, a dozen lines find the name of this clinic, draw a
picture, write a page about the data, and prove the finding with models that are trained again without the clinic.
"""

import numpy as np
import pandas as pd
import torch
from torch import nn

from ggda_ext.training import Recipe, initial_model, train_one

# %%
# The patients
# ------------
# Use your own table here. The clinics are not in alphabetical order, and they differ in size.

random = np.random.default_rng(0)
clinics = ["Westgate", "Airport", "St. Mary", "Northside", "Lakeview", "Harbour", "Old Town"]
clinic = np.repeat(clinics, [300, 150, 250, 100, 200, 150, 250])
features = ["age", "weight", "pressure", "glucose", "heart_rate"]
df = pd.DataFrame(random.normal(size=(len(clinic), len(features))), columns=features)
risk = df["age"] + df["glucose"] - 0.5 * df["pressure"] + random.normal(scale=0.5, size=len(df))
df["ill"] = (risk > 0).astype(int)
df["clinic"] = clinic
df.loc[df["clinic"] == "Northside", "ill"] = 1 - df["ill"]  # the wrong way round
df = df.sample(frac=1, random_state=0)

fresh = random.normal(size=(500, len(features)))
fresh_risk = fresh[:, 0] + fresh[:, 3] - 0.5 * fresh[:, 2] + random.normal(scale=0.5, size=500)
validation = torch.tensor(fresh, dtype=torch.float32), torch.tensor(fresh_risk > 0).long()

# %%
# The model
# ---------
# Train your model in your own way. Here we use the training loop that also retrains the model below.


def make_model() -> nn.Module:
    """A small network."""
    return nn.Sequential(nn.Linear(len(features), 16), nn.Tanh(), nn.Linear(16, 2))


data = torch.tensor(df[features].to_numpy(), dtype=torch.float32), torch.tensor(df["ill"].to_numpy())
loss, recipe = nn.CrossEntropyLoss(), Recipe(epochs=15, learning_rate=0.01, batch_size=32, weight_decay=1e-3)
model = train_one(initial_model(make_model, 0), loss, data, recipe, seed=0).model

# %%
# From the model to names, a picture and a page
# ---------------------------------------------

from ggda_ext import attribute, properties

table = df[features], df["ill"]
goal = properties.named(properties.mean_loss(validation, loss), "validation loss")
result = attribute(model, loss, table, "clinic", goal, frame=df, intervals=True)
print(result)

result.plot.bars()
patients = attribute(model, loss, table, None, goal)  # each patient is a group: who causes the score of a clinic?
result.to_html("clinics.html", rows=df, labels=df["ill"], member_scores=patients)

# %%
# Is it true?
# -----------
# We train the model again without each of the three clinics that matter most, with three seeds, and compare it with
# models trained on all patients.

from ggda_ext.evaluation import Retrainer

retrain = Retrainer(make_model, loss, data, validation, recipe, seeds=range(3), measure="loss")
truth = result.verify(retrain, top=3)
print(truth)
