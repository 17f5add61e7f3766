"""TRL's `SFTTrainer`: rows as they were given to it, its loss, and packed rows, which are refused."""

from __future__ import annotations

import pytest
import torch
from cases import gradient_rows, relative_error
from ggda_transformers import GroupTracker, attribute_trainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from ggda_ext import Groups

WORDS = ["cat", "dog", "runs", "sits", "law", "court", "judge", "rules"]


def words_only():
    numbers = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    found = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )  # fmt: skip


def texts(n, seed=0):
    from datasets import Dataset

    draw = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(n):
        length = int(torch.randint(3, 8, (1,), generator=draw))
        half = 4 * (i % 2)
        chosen = torch.randint(half, half + 4, (length,), generator=draw).tolist()
        rows.append({"text": " ".join(WORDS[j] for j in chosen), "source": ("pets", "law")[i % 2]})
    return Dataset.from_list(rows)


def trainer_of(folder, callbacks=(), **settings):
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=1)
    ).double()
    arguments = SFTConfig(
        str(folder), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", bf16=False, max_length=16, **settings,
    )  # fmt: skip
    return SFTTrainer(
        model, arguments, train_dataset=texts(10), eval_dataset=texts(3, seed=1), processing_class=words_only(),
        callbacks=list(callbacks),
    )  # fmt: skip


def gradients(trainer, rows):
    kept = [{key: row[key] for key in ("input_ids", "labels") if key in row} for row in rows]
    losses = (trainer.model(**trainer.data_collator([row])).loss for row in kept)
    return gradient_rows(losses, trainer.model.parameters())


def test_texts_as_given_have_the_scores_of_one_backward_pass_for_each_row(tmp_path):
    given = texts(10)
    tracker = GroupTracker(given, "source", eval_dataset=None, show=False)
    trainer = trainer_of(tmp_path, [tracker])
    tracker.attach(trainer)
    trainer.train()
    assert set(tracker.result.names) == {"pets", "law"}
    result = attribute_trainer(trainer, given, "source", method="tracin")
    trainer.model.eval()
    groups = Groups(given["source"])
    goal = gradients(trainer, trainer.eval_dataset).mean(0)
    truth = groups.sum(gradients(trainer, trainer.train_dataset), 0) @ goal
    assert result.names == groups.names
    assert relative_error(result.scores[0], truth) <= 1e-6  # the model's loss is taken in float32
    with pytest.raises(ValueError, match=r"which is which cannot be told: pass trainer.train_dataset"):
        attribute_trainer(trainer, given.select(range(5)), "source", method="tracin")


def test_a_loss_that_trl_computes_otherwise_is_the_one_that_is_explained(tmp_path):
    from trl import SFTConfig

    if "loss_type" not in SFTConfig.__dataclass_fields__:
        pytest.skip("this version of TRL has one loss only")
    trainer = trainer_of(tmp_path, loss_type="dft")

    def loss(row):
        """The loss of each token times its probability, which has no gradient of its own."""
        batch = trainer.data_collator([{key: row[key] for key in ("input_ids", "labels") if key in row}])
        labels = batch["labels"][0, 1:]
        logits = trainer.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[0, :-1]
        told = logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0][labels != -100]
        return -(told.exp().detach() * told).mean()

    result = attribute_trainer(trainer, texts(10), "source", method="tracin")
    trainer.model.eval()
    train, test = (
        gradient_rows((loss(row) for row in rows), trainer.model.parameters())
        for rows in (trainer.train_dataset, trainer.eval_dataset)
    )
    truth = Groups(texts(10)["source"]).sum(train, 0) @ test.mean(0)
    assert relative_error(result.scores[0], truth) <= 1e-5


def test_packed_documents_are_refused_with_the_reason(tmp_path):
    tracker = GroupTracker(texts(10), "source", eval_dataset=texts(2), show=False)
    trainer = trainer_of(tmp_path, [tracker], packing=True)
    for ask in (trainer.train, lambda: attribute_trainer(trainer, texts(10), "source")):
        with pytest.raises(ValueError, match="packs several documents into a row"):
            ask()
