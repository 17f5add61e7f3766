"""
Which three sources should we drop?
===================================

There are eight sources of training data. Two of them, a blog and its mirror, say the same; one, spam, is wrong. Scores
of single sources are additive, so they cannot show that the blog and its mirror can replace each other. Each alone
seems unnecessary, and a ranking drops both. `WhatIf` refits the model without any choice of sources, in milliseconds,
and finds three better sources to drop. Models that are really trained again confirm it.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

from ggda_ext.training import Recipe, initial_model, train_one

# %%
# The sources
# -----------
# A point is about one of six topics. Its label is the sign of the feature of that topic. Every source has one topic.

TOPICS = {"blog": 0, "mirror": 0, "news": 1, "forum": 2, "books": 3, "code": 4, "wiki": 5, "spam": 1}
ASKED = torch.tensor([0.25, 0.2, 0.15, 0.15, 0.1, 0.15])  # how often each topic occurs in the test data


def about(topic, generator):
    """Return one point for each topic in the list, with labels."""
    x = 0.3 * torch.randn(len(topic), len(ASKED), generator=generator)
    x[torch.arange(len(topic)), topic] = 2 * torch.randn(len(topic), generator=generator)
    return x, (x.gather(1, topic[:, None])[:, 0] > 0).long()


def drawn(seed, each=100):
    """Return training data, the source of every training point, and test data."""
    generator = torch.Generator().manual_seed(seed)
    sources = [name for name in TOPICS for _ in range(each)]
    x, y = about(torch.tensor([TOPICS[name] for name in sources]), generator)
    wrong = torch.tensor([name == "spam" for name in sources])
    asked = torch.multinomial(ASKED, 1000, replacement=True, generator=generator)
    return (x, torch.where(wrong, 1 - y, y)), sources, about(asked, generator)


# %%
# The model
# ---------

LOSS, RECIPE = nn.CrossEntropyLoss(), Recipe(epochs=40, learning_rate=0.01, batch_size=32, weight_decay=1e-3)


def make_model():
    """A small network."""
    return nn.Sequential(nn.Linear(len(ASKED), 16), nn.Tanh(), nn.Linear(16, 2))


# %%
# What if?
# --------
# After one set-up we can ask any question. What happens without the blog, without its mirror, or without both? Which
# three sources should we drop, and which three would a ranking of single sources drop? The additive scores come from
# `attribute`, with the curvature. We check every answer with models that are really trained again.

from ggda_ext import WhatIf, attribute, properties
from ggda_ext.evaluation import Retrainer

COPIES = (("blog",), ("mirror",), ("blog", "mirror"))


def answers(seed):
    """Return the answers of what-if and the test losses of models that were really trained again, three seeds each."""
    data, sources, test = drawn(seed)
    test_loss = properties.mean_loss(test, LOSS)
    model = train_one(initial_model(make_model, seed), LOSS, data, RECIPE, seed=seed).model
    what_if = WhatIf(model, LOSS, data, sources, weight_decay=RECIPE.weight_decay)  # converged after 40 epochs
    predicted = {gone: what_if.without(gone).change(test_loss).item() for gone in COPIES}
    scores = attribute(model, LOSS, data, sources, test_loss, method="influence", recipe=RECIPE)
    added = {gone: sum(float(scores[name]) for name in gone) for gone in COPIES}
    best = what_if.search(test_loss, remove=3)

    choices = [(), *COPIES, best.removed, best.additive]
    kept = [np.flatnonzero([name not in gone for name in sources]) for gone in choices]
    retrain = Retrainer(make_model, LOSS, data, test, RECIPE, seeds=(100, 101, 102), measure="loss")
    losses = dict(zip(choices, retrain(kept).mean(1).tolist(), strict=True))
    return {
        "rise of the loss, what-if": predicted,
        "rise of the loss, added scores": added,
        "rise of the loss, retrained": {gone: losses[gone] - losses[()] for gone in COPIES},
        "what-if drops": best.removed,
        "a ranking drops": best.additive,
        "loss, retrained": {(): losses[()], best.removed: losses[best.removed], best.additive: losses[best.additive]},
        "interactions": what_if.interactions(test_loss),
    }


story = answers(0)
for drops in ("what-if drops", "a ranking drops"):
    print(f"{drops} {', '.join(story[drops])}: loss {story['loss, retrained'][story[drops]]:.3f}")
print(f"with all sources: loss {story['loss, retrained'][()]:.3f}")

figure, ax = plt.subplots(figsize=(6, 2.8), layout="constrained")
for place, (how, hatch) in enumerate({"what-if": "", "added scores": "//", "retrained": "xx"}.items()):
    rises = story[f"rise of the loss, {how}"]
    at = np.arange(len(COPIES)) + 0.27 * (1 - place)
    ax.barh(at, [rises[gone] for gone in COPIES], 0.25, label=how, hatch=hatch, color="#a8c4e5", edgecolor="black")
ax.set_yticks(range(len(COPIES)), ["without " + " and ".join(gone) for gone in COPIES])
ax.set_xlabel("rise of the test loss")
ax.legend()

# %%
# Which sources stand in for each other?
# --------------------------------------
# An interaction is the change without two sources, minus the sum of the changes without each of them. It is positive
# for the blog and its mirror, which can replace each other. It is most negative for news and spam: without news, spam
# is the only source about that topic, and without both there is no source about it.

interactions = story["interactions"]
one, other, rise = interactions.strongest(1)[0]
blog, mirror = (interactions.names.index(name) for name in ("blog", "mirror"))
print(f"{one} and {other}: {rise:+.2f}; blog and mirror: {interactions.matrix[blog, mirror]:+.2f}")
interactions.plot()
