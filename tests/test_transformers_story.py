"""From start to end: four sources, one with flipped labels, one shuffled; named, removed, and trained again."""

from __future__ import annotations

import copy

import pytest
import torch
from ggda_transformers import GroupTracker, TrainerSetup, attribute_trainer, what_if_trainer
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, default_data_collator
from transformers_cases import collate, examples, own_loss, sources, trainer_of
from transformers_cases import made as language_model

from ggda_ext import WhatIf, properties

SOURCES = ("wiki", "news", "flipped", "shuffled")


def made(n: int, source: str) -> list[dict]:
    """Rows whose label is whether the first token is a high one; wrong, or of another row, in the broken sources."""
    tokens = torch.randint(4, 40, (n, 6))
    labels = (tokens[:, 0] >= 22).long()
    if source == "flipped":
        labels = 1 - labels
    if source == "shuffled":
        labels = labels[torch.randperm(n)]
    return [
        {"input_ids": ids, "labels": label, "source": source}
        for ids, label in zip(tokens.tolist(), labels.tolist(), strict=True)
    ]


def fitted(rows, seed, folder, callbacks=()):
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    trainer = trainer_of(
        BertForSequenceClassification(config), rows, folder, callbacks=list(callbacks), max_steps=-1,
        num_train_epochs=4, per_device_train_batch_size=20, learning_rate=5e-3, logging_steps=10, seed=seed,
        data_collator=default_data_collator,
    )  # fmt: skip
    trainer.train()
    return trainer


def right(trainer, rows):
    batch = default_data_collator([{key: row[key] for key in ("input_ids", "labels")} for row in rows])
    model = trainer.model.eval()
    with torch.no_grad():
        return float((model(**batch).logits.argmax(1) == batch["labels"]).double().mean())


@pytest.mark.parametrize("seed", range(5))
def test_the_broken_source_is_named_while_training_and_after_and_its_removal_helps(seed, tmp_path):
    torch.manual_seed(100 + seed)
    rows = [row for source in SOURCES for row in made(60, source)]
    goal, tests = made(60, "goal"), made(300, "test")
    tracker = GroupTracker(rows, "source", eval_dataset=goal, every=2, show=False)
    trainer = fitted(rows, seed, tmp_path, [tracker])
    after = attribute_trainer(trainer, rows, "source", eval_dataset=goal)
    assert after.method.name == "influence"
    for result in (tracker.result, after):
        assert result.harmful().names[0] == "flipped"
    kept = [row for row in rows if row["source"] != "flipped"]
    again = fitted(kept, seed, tmp_path)
    assert right(again, tests) > right(trainer, tests)
    if seed == 0:
        check_what_if(trainer, again, rows, goal)


def check_what_if(trainer, again, rows, goal):
    """A refit tells that the loss falls without the broken source, and not without the others."""
    setup, other = TrainerSetup.of(trainer), TrainerSetup.of(again)
    loss = properties.mean_loss(setup.loader(goal), nn.CrossEntropyLoss())
    what_if = what_if_trainer(trainer, rows, "source", show_progress=False)
    predicted = float(what_if.without("flipped").change(loss))
    with torch.no_grad():
        real = float(loss(other.model) - loss(setup.model))
    assert real < 0
    assert predicted < 0
    assert predicted < min(float(what_if.without(name).change(loss)) for name in ("wiki", "news"))
    trainer.model.train()
    with pytest.raises(ValueError, match=r"call model.eval\(\) before asking what if"):
        what_if_trainer(trainer, rows, "source")


def test_what_if_refuses_models_with_an_output_for_each_token():
    rows = sources(examples("gpt2", 4))
    with pytest.raises(TypeError, match="the model is a GPT2LMHeadModel, which has not one label for each row"):
        what_if_trainer(language_model("gpt2"), rows, "source", data_collator=collate)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("kind", "count", "loss"),
    [
        ("regression", 1, nn.MSELoss()),
        ("single_label_classification", 3, nn.CrossEntropyLoss()),
        ("multi_label_classification", 3, nn.BCEWithLogitsLoss()),
    ],
)
def test_what_if_refits_the_loss_that_transformers_takes_for_these_labels(kind, count, loss, known):
    """Where the configuration does not say it yet, the labels do."""
    model = language_model("bert", torch.float32, num_labels=count, problem_type=kind if known else None)
    model.requires_grad_(False).classifier.requires_grad_(True)
    labels = {
        "regression": float,
        "single_label_classification": int,
        "multi_label_classification": lambda label: [float(label >= place) for place in range(count)],
    }
    rows = [row | {"labels": labels[kind](row["labels"])} for row in sources(examples("bert", 24))]
    what_if = what_if_trainer(model, rows, "source", data_collator=collate, weight_decay=0.1)
    assert model.config.problem_type == (kind if known else None)
    names = [row.pop("source") for row in rows]
    batch = collate(rows)
    torch.testing.assert_close(
        own_loss(copy.deepcopy(model), batch), loss(model(**batch).logits.squeeze(1), batch["labels"])
    )
    expected = WhatIf(model, loss, batch, names, weight_decay=0.1)
    goal = properties.mean_loss(batch, loss)
    torch.testing.assert_close(what_if.without("web").change(goal), expected.without("web").change(goal))
