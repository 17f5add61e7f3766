"""
Which source should we fine-tune without?
=========================================

We fine-tune a BERT with Hugging Face's `Trainer` on reviews from four sources. It predicts whether a review is good.
One source has its labels the wrong way round. In another source the texts were shuffled among the rows. A callback
watches the sources during the training, and `attribute_trainer` scores them afterwards. Then we train again without
each source to see which of the two was right.
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments

# %%
# The rows
# --------
# Your own rows would be tokenized text. Here the first token of a review tells whether the review is good. The BERT is
# tiny and starts from random weights, so the example runs in seconds.

SOURCES = ("wiki", "news", "flipped", "shuffled")


def reviews(count, source, draw):
    """Return rows of one source: a review, and whether it is good."""
    tokens = torch.randint(0, 36, (count, 6), generator=draw)
    labels = (tokens[:, 0] >= 18).long()
    if source == "flipped":
        labels = 1 - labels
    if source == "shuffled":
        tokens = tokens[torch.randperm(count, generator=draw)]
    pairs = zip(tokens.tolist(), labels.tolist(), strict=True)
    return [{"input_ids": row, "labels": label, "source": source} for row, label in pairs]


draw = torch.Generator().manual_seed(0)
rows = [row for source in SOURCES for row in reviews(60, source, draw)]
held_out, tests = reviews(60, "held out", draw), reviews(400, "tests", draw)


# %%
# The training, with a tracker
# ----------------------------


def fine_tuned(rows, callbacks=()):
    """Train a model on the rows and return its Trainer."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=36, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    settings = TrainingArguments(
        tempfile.mkdtemp(), num_train_epochs=4, per_device_train_batch_size=20, learning_rate=5e-3, logging_steps=10,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=held_out, callbacks=list(callbacks))
    trainer.remove_callback(PrinterCallback)  # its lines would hide the tables
    trainer.train()
    return trainer


from ggda_transformers import GroupTracker, attribute_trainer

tracker = GroupTracker(rows, "source", eval_dataset=held_out, every=2, show=False)
trainer = fine_tuned(rows, [tracker])
tracker.plot()

# %%
# After the training
# ------------------

result = attribute_trainer(trainer, rows, "source")
print(result)

# %%
# And in truth
# ------------
# We leave out each source in turn and train the model again. The predicted number is the change of the loss on the
# held-out rows.


def reached(trainer):
    """Return the loss on the held-out rows and the accuracy on the tests."""
    found = trainer.predict(tests)
    right = (found.predictions.argmax(1) == found.label_ids).mean()
    return trainer.evaluate()["eval_loss"], float(right)


with_all = reached(trainer)
without = {source: reached(fine_tuned([row for row in rows if row["source"] != source])) for source in SOURCES}
predicted = dict(zip(result.names, result.scores[0].tolist(), strict=True))
print(f"{'without':10} {'loss, predicted':>16} {'loss, real':>11} {'accuracy':>9}   (with all {with_all[1]:.1%})")
for source, (loss, accuracy) in without.items():
    print(f"{source:10} {predicted[source]:>+16.3f} {loss - with_all[0]:>+11.3f} {accuracy:>9.1%}")
