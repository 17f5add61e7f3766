"""QNLI from four sources, one with flipped labels and one with shuffled sentences: prediction against retraining.

A small BERT is fine-tuned with a Trainer; the tracker and the scores after training say which source hurts the test
loss, then the model is trained again without it. Needs the QNLI file and the weights of a folder of data:

    python -m benchmarks.qnli_sources --data-dir FOLDER --seeds 5 --out results.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from ggda_transformers import GroupTracker, attribute_trainer
from transformers import AutoTokenizer, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.data.data_collator import DataCollatorWithPadding

SOURCES = ("clean a", "clean b", "flipped", "shuffled")


def pairs_of(path: Path, split: str, count: int, seed: int) -> list[tuple[str, str, int]]:
    """Some rows of a split: question, sentence, label."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    found = [(row[4], row[5], int(row[1])) for row in rows if row[0] == split and row[1] in "01"]
    return random.Random(seed).sample(found, count)


def made(pairs: list[tuple[str, str, int]], tokenizer: Any, seed: int, longest: int) -> list[dict[str, Any]]:
    """Rows by source; the labels of one are flipped, the sentences of another shuffled among its rows."""
    share, found = len(pairs) // len(SOURCES), []
    for j, source in enumerate(SOURCES):
        part = pairs[j * share : (j + 1) * share]
        sentences = [sentence for _, sentence, _ in part]
        if source == "shuffled":
            random.Random(seed).shuffle(sentences)
        for (question, _, label), sentence in zip(part, sentences, strict=True):
            encoded = tokenizer(question, sentence, truncation=True, max_length=longest, padding=False)
            label = 1 - label if source == "flipped" else label
            found.append(dict(encoded) | {"labels": label, "source": source})
    return found


def trained(folder: Path, rows: list[Any], tokenizer: Any, seed: int, epochs: int, callbacks: list[Any]) -> Trainer:
    """A Trainer after training."""
    torch.manual_seed(seed)
    model = BertForSequenceClassification.from_pretrained(folder, num_labels=2, dtype=torch.float32)
    arguments = TrainingArguments(
        tempfile.mkdtemp(), num_train_epochs=epochs, per_device_train_batch_size=16, learning_rate=1e-4, seed=seed,
        logging_steps=10, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    collator = DataCollatorWithPadding(tokenizer)
    trainer = Trainer(model, arguments, data_collator=collator, train_dataset=rows, callbacks=callbacks)
    trainer.train()
    return trainer


def measured(trainer: Trainer, tests: list[Any]) -> tuple[float, float]:
    """Loss and accuracy on the tests."""
    model: Any = trainer.model
    model.eval()
    losses, right = 0.0, 0
    with torch.no_grad():
        for low in range(0, len(tests), 50):
            rows = [{k: v for k, v in row.items() if k != "source"} for row in tests[low : low + 50]]
            batch = trainer.data_collator(rows)
            output = model(**batch)
            losses += float(output.loss) * len(rows)
            right += int((output.logits.argmax(1) == batch["labels"]).sum())
    return losses / len(tests), right / len(tests)


def run(data_dir: Path, seed: int, rows_each: int, epochs: int, longest: int) -> dict[str, Any]:
    """One seed: scores of the tracker and after training, and the truth without the source that comes last."""
    weights = data_dir / "bert-minilm-l6"
    tokenizer = AutoTokenizer.from_pretrained(weights)
    pairs = pairs_of(data_dir / "qnli.tsv.gz", "train", rows_each * len(SOURCES), seed)
    rows = made(pairs, tokenizer, seed, longest)
    held = pairs_of(data_dir / "qnli.tsv.gz", "dev", 364, seed)
    plain = [dict(tokenizer(q, s, truncation=True, max_length=longest)) | {"labels": y} for q, s, y in held]
    goal, tests = plain[:64], plain[64:]
    tracker = GroupTracker(rows, "source", eval_dataset=goal, every=8, show=False)
    begin = time.process_time()
    trainer = trained(weights, rows, tokenizer, seed, epochs, [tracker])
    seconds = time.process_time() - begin
    before = measured(trainer, tests)
    after = {
        method: attribute_trainer(trainer, rows, "source", eval_dataset=goal, method=method)
        for method in ("tracin", "ekfac")
    }
    scores = {name: dict(zip(found.names, found.scores[0].tolist(), strict=True)) for name, found in after.items()}
    scores["tracker"] = dict(zip(tracker.result.names, tracker.result.scores[0].tolist(), strict=True))
    last = {name: min(found, key=found.__getitem__) for name, found in scores.items()}
    kept = [row for row in rows if row["source"] != "flipped"]
    again = measured(trained(weights, kept, tokenizer, seed, epochs, []), tests)
    return {
        "seed": seed, "scores": scores, "last": last, "tracker overhead": tracker.overhead,
        "loss, accuracy with all": before, "loss, accuracy without flipped": again, "training CPU s": seconds,
    }  # fmt: skip


def main() -> None:
    """Run all seeds and keep what came out after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=250, help="rows of each source")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--longest", type=int, default=48, help="tokens of a row")
    parser.add_argument("--out", type=Path, default=Path("qnli_sources.json"))
    given = parser.parse_args()
    found = []
    for seed in range(given.seeds):
        found.append(run(given.data_dir, seed, given.rows, given.epochs, given.longest))
        print(json.dumps(found[-1], indent=1), flush=True)
        given.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
