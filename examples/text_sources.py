"""
Which source of text helps which domain?
========================================

A tiny GPT-2 is trained on three domains with Hugging Face's `Trainer`. While it trains, a callback adds up scores for
every source; afterwards one call gives a matrix: how much each training domain helps each evaluation domain.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

# %%
# Three domains
# -------------
# Your own corpora would stand here. Each domain counts upwards in its own step and in its own part of the vocabulary,
# so what one teaches is of little use for the others.

torch.manual_seed(0)
STEPS = {"law": 1, "recipes": 3, "sport": 5}


def sentences(domain: str, count: int) -> list[dict]:
    """Sequences of tokens of a domain, as a tokenizer would leave them."""
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
# A row for each evaluation domain, a column for each training domain; positive where the loss would rise without it.

matrix = attribute_trainer(trainer, rows, "domain", eval_dataset=held_out, method="tracin")
print(matrix.of_property("eval_loss of law"))
matrix.plot.heatmap(rows="properties")
