"""Tiny Hugging Face models with data that has padding and ignored targets, and plain autograd to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from cases import gradient_rows
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY, LONGEST, CLASSES = 48, 9, 3
_SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2}
_TEXTS = _SMALL | {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16}


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=16))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**_TEXTS, num_key_value_heads=1))


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
                 decoder_start_token_id=0)
    )  # fmt: skip


def bert(**settings: Any) -> nn.Module:
    return BertForSequenceClassification(BertConfig(**_TEXTS | {"num_labels": CLASSES} | settings))


def bert_tokens() -> nn.Module:
    return BertForTokenClassification(BertConfig(**_TEXTS, num_labels=CLASSES))


def bert_answers() -> nn.Module:
    return BertForQuestionAnswering(BertConfig(**_TEXTS, num_labels=2))


def vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(**_SMALL, hidden_size=12, intermediate_size=16, image_size=6, patch_size=3, num_labels=CLASSES)
    )


MODELS: dict[str, Callable[..., nn.Module]] = {
    "gpt2": gpt2, "llama": llama, "t5": t5, "bert": bert, "bert_tokens": bert_tokens, "bert_answers": bert_answers,
    "vit": vit,
}  # fmt: skip


def made(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, **settings: Any) -> nn.Module:
    """A model in eval mode, with parameters that differ from their plain start (zeros and ones tell little)."""
    torch.manual_seed(seed)
    model = MODELS[name](**settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def examples(name: str, n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[dict[str, Any]]:
    """Examples of different lengths for a model, as a tokenizer leaves them: lists, not padded."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(n):
        length = int(torch.randint(4, LONGEST + 1, (1,), generator=generator))
        length = LONGEST if name == "bert_answers" else length  # its softmax is over positions, padding among them
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        if name == "vit":
            pixels = torch.randn(3, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
            found.append({"pixel_values": pixels, "labels": ids[0] % CLASSES})
            continue
        one: dict[str, Any] = {"input_ids": ids}
        if name == "bert":
            one["labels"] = ids[0] % CLASSES
        elif name == "bert_answers":
            one |= {"start_positions": ids[0] % 4, "end_positions": ids[1] % 4}
        elif name == "bert_tokens":
            one["labels"] = [-100, *(number % CLASSES for number in ids[1:])]
        elif name == "t5":
            one["labels"] = ids[: length // 2 + 1]
        else:
            one["labels"] = [*([-100] * (length % 3)), *ids[length % 3 :]]
        found.append(one)
    return found


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Examples as a batch: padded on the right, with an attention mask, and −100 for targets that are padding."""
    batch: dict[str, Tensor] = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        if isinstance(values[0], list):
            longest = max(map(len, values))
            pad = -100 if key == "labels" else 0
            batch[key] = torch.tensor([value + [pad] * (longest - len(value)) for value in values])
        else:
            batch[key] = torch.stack([torch.as_tensor(value) for value in values])
    if "input_ids" in batch:
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
    return batch


def gradients(
    model: nn.Module, losses: Callable[[nn.Module, dict[str, Tensor]], Tensor], rows: Sequence[dict[str, Any]]
) -> Tensor:
    """One backward pass for each example `[n, p]`, over the parameters that require a gradient."""
    parameters = [value for value in model.parameters() if value.requires_grad]
    return gradient_rows((losses(model, collate([row])) for row in rows), parameters)


def exactness(model: nn.Module) -> float:
    """How far two ways may be apart in float64: the T5 of transformers 4 takes its softmax in float32."""
    return 1e-6 if isinstance(model, T5ForConditionalGeneration) and transformers.__version__ < "5" else 1e-10


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """What the model returns."""
    return model(**batch).loss


def trainer_of(model: nn.Module, rows: Any, folder: Any, **settings: Any) -> Any:
    """A Trainer on the CPU that says little; `settings` of its arguments, or of the Trainer itself."""
    from transformers import Trainer, TrainingArguments

    own = {key: settings.pop(key) for key in ("callbacks", "eval_dataset", "compute_loss_func", "data_collator")
           if key in settings}  # fmt: skip
    kind = settings.pop("kind", Trainer)
    usual = {"per_device_train_batch_size": 4, "max_steps": 4, "save_strategy": "no", "logging_steps": 1,
             "learning_rate": 1e-2, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 3}  # fmt: skip
    arguments = TrainingArguments(output_dir=str(folder), **(usual | settings))
    return kind(model=model, args=arguments, train_dataset=rows, **({"data_collator": collate} | own))


def sources(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with a column that says where they come from."""
    names = ["web", "books", "forum"]
    return [row | {"source": names[(3 * i + i // 4) % 3]} for i, row in enumerate(rows)]
