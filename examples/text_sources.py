"""
Which source of text helps which domain?
========================================

We train a tiny GPT-2 on three domains with Hugging Face's `Trainer`. During the training a callback adds up scores for
every source. Afterwards one call gives a matrix that shows how much each training domain helps each evaluation domain.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

# %%
# Three domains
# -------------
# Use your own corpora here. Each domain counts upwards with its own step and in its own part of the vocabulary, so one
# domain teaches the model little about the others.

torch.manual_seed(0)
STEPS = {"law": 1, "recipes": 3, "sport": 5}


def sentences(domain: str, count: int) -> list[dict]:
    """Return token sequences of a domain, in the form that a tokenizer gives."""
    first = 20 * list(STEPS).index(domain)
    starts = torch.randint(0, 20, (count, 1))
    tokens = first + (starts + STEPS[domain] * torch.arange(10)) % 20
    return [{"input_ids": row, "labels": row, "domain": domain} for row in tokens.tolist()]


rows = [row for domain in STEPS for row in sentences(domain, 48)]
held_out = {domain: sentences(domain, 12) for domain in STEPS}

# %%
# The training, with a tracker
# ----------------------------

from ggda_transformers import GroupTracker, attribute_trainer

config = GPT2Config(vocab_size=60, n_embd=32, n_layer=1, n_head=2, n_positions=10, bos_token_id=None, eos_token_id=None)
model = GPT2LMHeadModel(config)
settings = TrainingArguments(
    tempfile.mkdtemp(), num_train_epochs=3, per_device_train_batch_size=12, learning_rate=3e-3, logging_steps=6,
    save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
)  # fmt: skip
tracker = GroupTracker(rows, "domain", eval_dataset=held_out["law"], every=3, show=False)
trainer = Trainer(model, settings, train_dataset=rows, callbacks=[tracker])
trainer.train()
print(tracker.result)

# %%
# Every domain for every domain
# -----------------------------
# The matrix has a row for each evaluation domain and a column for each training domain. A score is positive if the loss
# would rise without the training domain.

matrix = attribute_trainer(trainer, rows, "domain", eval_dataset=held_out, method="tracin")
print(matrix.of_property("eval_loss of law"))
matrix.plot.heatmap(rows="properties")
