"""Hugging Face models: cost of scores after training in forward+backward passes, and what a tracker adds to a training.

The models have random weights and a moderate size, because only the amount of work matters. A pass is the forward and
backward pass of training; for LoRA, the backward pass of its adapters. Half precision is compared with a pass in half
precision.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.speed.timing import Row, best_times
from ggda_ext import GroupGradients
from ggda_ext.losses.model_loss import OwnLoss

GOAL, TOKENS, BATCH, VOCABULARY, CLASSES = 1.3, 64, 8, 2000, 4
STEPS = (1, 4, 16)


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield rows with the cost after training for each model and precision, then with the overhead of the tracker."""
    n = 16 if quick else 32
    for dtype in (torch.float32,) if quick else (torch.float32, torch.bfloat16):
        for name, build in MODELS.items():
            yield from after_training(name, build, dtype, n)
    yield from while_training(48 if quick else 256)


def after_training(name: str, build: Callable[[], nn.Module], dtype: torch.dtype, n: int) -> Iterator[Row]:
    """Yield rows that compare the scores of one property with a pass over the same batches.

    The groups are of one point, of a batch, and of all points.
    """
    torch.manual_seed(0)
    model = build().to(dtype).eval()
    data = data_for(name, n, dtype)
    trained = [value for value in model.parameters() if value.requires_grad]
    directions = torch.randn(1, sum(value.numel() for value in trained), dtype=dtype)
    loss = OwnLoss()

    def one_pass() -> None:
        for low in range(0, n, BATCH):
            batch = {key: value[low : low + BATCH] for key, value in data.items()}
            torch.autograd.grad(loss.value(model, batch), trained)

    providers = {
        size: GroupGradients(model, None, data, [i // size for i in range(n)], batch_size=BATCH, show_progress=False)
        for size in (1, BATCH, n)
    }
    plans = {size: provider.plan(1) for size, provider in providers.items()}
    scores = {f"size {size}": lambda own=own: own.scores(directions) for size, own in providers.items()}
    times = best_times({"pass": one_pass} | scores, 3)
    kind = str(dtype).removeprefix("torch.")
    for size, plan in plans.items():
        seconds = times[f"size {size}"]
        yield Row(
            "transformers", name, f"{plan.strategy}, {kind}", size, seconds, "pass", seconds / times["pass"],
            "passes", GOAL, f"n = {n}, {TOKENS} tokens, {directions.shape[1]:,} parameters, batches of {BATCH}",
        )  # fmt: skip


def while_training(n: int) -> Iterator[Row]:
    """Yield rows with the time that a tracker adds to a training, for several values of `every`."""
    from ggda_transformers import GroupTracker
    from transformers import Trainer, TrainingArguments

    data = data_for("BERT", n, torch.float32)
    examples = [{key: value[i].tolist() for key, value in data.items()} for i in range(n)]

    def train(every: int | None) -> None:
        torch.manual_seed(0)
        goal = examples[:BATCH]
        labels = [i % 4 for i in range(n)]
        tracker = None if every is None else GroupTracker(examples, labels, eval_dataset=goal, every=every, show=False)
        arguments = TrainingArguments(
            tempfile.mkdtemp(), num_train_epochs=1, per_device_train_batch_size=BATCH, save_strategy="no",
            report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        callbacks: Any = [] if tracker is None else [tracker]
        Trainer(small("BERT"), arguments, train_dataset=examples, callbacks=callbacks).train()

    cases = {"training": lambda: train(None)} | {f"every {s}": lambda s=s: train(s) for s in STEPS}
    times = best_times(cases, 2)
    for every in STEPS:
        seconds = times[f"every {every}"]
        share = seconds / times["training"] - 1
        note = f"n = {n}, property of {BATCH} rows, share of the training's time"
        yield Row("transformers", "BERT", f"tracker, every {every} steps", None, seconds, "training", share, "times",
                  None, note)  # fmt: skip


def data_for(name: str, n: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return random examples for a model."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (n,), generator=generator)
    if name == "ViT":
        return {"pixel_values": torch.randn(n, 3, 64, 64, generator=generator).to(dtype), "labels": labels}
    ids = torch.randint(1, VOCABULARY, (n, TOKENS), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels if name == "BERT" else ids}


_LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 4}
_SMALL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("BertConfig", "BertForSequenceClassification",
             _LAYERS | {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 1024,
                        "max_position_embeddings": TOKENS, "num_labels": CLASSES}),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel",
              {"vocab_size": VOCABULARY, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": TOKENS}),
    "Llama": ("LlamaConfig", "LlamaForCausalLM",
              _LAYERS | {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 768,
                         "num_key_value_heads": 2, "max_position_embeddings": TOKENS}),
    "T5": ("T5Config", "T5ForConditionalGeneration",
           {"vocab_size": VOCABULARY, "d_model": 256, "d_kv": 64, "d_ff": 768, "num_layers": 3, "num_heads": 4,
            "decoder_start_token_id": 0}),
    "ViT": ("ViTConfig", "ViTForImageClassification",
            _LAYERS | {"hidden_size": 256, "intermediate_size": 1024, "image_size": 64, "patch_size": 8,
                       "num_labels": CLASSES}),
}  # fmt: skip
"""Name → its classes in `transformers`, and the settings of a small model."""


def small(name: str) -> nn.Module:
    """Return a small model with random weights."""
    import transformers

    config, kind, sizes = _SMALL[name]
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes))


def lora() -> nn.Module:
    """Return the small GPT-2 with LoRA on its attention and MLP."""
    import peft

    chosen = peft.LoraConfig(r=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    model: Any = small("GPT-2")
    adapted: nn.Module = peft.get_peft_model(model, chosen)
    return adapted


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(small, name) for name in ("GPT-2", "Llama", "BERT", "ViT", "T5")}, "GPT-2 LoRA": lora,
}  # fmt: skip
