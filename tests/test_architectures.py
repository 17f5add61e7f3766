"""Real architectures: a residual network and Hugging Face transformers on every strategy that can serve them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import gradient_rows, relative_error
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
    masking_utils,
)

from ggda_ext import GroupGradients, Groups
from ggda_ext.gradients.proof.findings import USUAL

N = 9
LABELS = [0, 1, 0, 2, 2, 1, 0, 2, 2]
LOSS = nn.CrossEntropyLoss()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += x
        return self.relu(out)


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), Block(4), nn.Flatten(), nn.Linear(64, 3)
    )


_SMALL = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "num_labels": 3}
_TEXTS = _SMALL | {"vocab_size": 40, "max_position_embeddings": 10}


def bert() -> nn.Module:
    return BertForSequenceClassification(BertConfig(**_TEXTS))


def gpt2() -> nn.Module:
    return GPT2ForSequenceClassification(
        GPT2Config(vocab_size=40, n_embd=12, n_layer=2, n_head=2, n_positions=10, num_labels=3, pad_token_id=0)
    )


def llama() -> nn.Module:
    return LlamaForSequenceClassification(LlamaConfig(**_TEXTS, num_key_value_heads=2, pad_token_id=0))


def vit() -> nn.Module:
    return ViTForImageClassification(ViTConfig(**_SMALL, image_size=6, patch_size=3, num_channels=3))


def text() -> dict[str, Tensor]:
    lengths = torch.randint(3, 7, (N,))
    mask = (torch.arange(7) < lengths[:, None]).long()
    return {
        "input_ids": torch.randint(1, 40, (N, 7)) * mask,
        "attention_mask": mask,
        "labels": torch.randint(0, 3, (N,)),
    }


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(N, 3, 6, 6, dtype=torch.float64), "labels": torch.randint(0, 3, (N,))}


def images() -> dict[str, Tensor]:
    return {"input": torch.randn(N, 3, 6, 6, dtype=torch.float64), "labels": torch.randint(0, 3, (N,))}


def gradients(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    def loss(i: int) -> Tensor:
        one = {key: value[i : i + 1] for key, value in data.items()}
        target = one.pop("labels")
        output = model(**one)
        return F.cross_entropy(getattr(output, "logits", output), target)

    return gradient_rows(map(loss, range(N)), model.parameters())


@pytest.mark.parametrize("strategy", ["directional", "forward", "segmented", "backward", "persample"])
@pytest.mark.parametrize(
    ("build", "inputs"),
    [(resnet, images), (bert, text), (gpt2, text), (llama, text), (vit, pixels)],
    ids=["resnet", "bert", "gpt2", "llama", "vit"],
)
def test_every_strategy_gives_the_gradients(build, inputs, strategy):
    if (build, strategy) in {(bert, "persample"), (gpt2, "persample"), (llama, "persample")}:
        return  # data-dependent masks do not run under vmap; see the next test
    model, data = build().double().eval(), inputs()
    if build is resnet:
        model = WithKeyword(model)
    truth = Groups(LABELS).sum(gradients(model, data), 0)
    found = GroupGradients(model, LOSS, data, LABELS, strategy=strategy, batch_size=4)
    directions = torch.randn(2, found.p, dtype=torch.float64)
    bound = 1e-5 if build is llama else 1e-12  # its normalisation goes through float32
    assert relative_error(found.scores(directions), directions @ truth.T) <= bound
    if strategy not in ("directional", "forward"):
        assert relative_error(found.rows(), truth) <= bound


class WithKeyword(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, input: Tensor) -> Tensor:
        return self.body(input)


def test_a_model_that_vmap_cannot_run_is_refused_by_name_and_served_by_auto():
    model, data = bert().double().eval(), text()
    with pytest.raises(ValueError, match="strategy='persample' cannot be used here: vmap over the model failed"):
        GroupGradients(model, LOSS, data, LABELS, strategy="persample").rows()
    assert GroupGradients(model, LOSS, data, LABELS).plan(1).strategy == "directional"
    truth = Groups(LABELS).sum(gradients(model, data), 0)
    assert relative_error(GroupGradients(model, LOSS, data, LABELS).rows(), truth) <= 1e-12


@pytest.mark.parametrize("build", [bert, gpt2, llama])
def test_a_padded_batch_is_run_once(build):
    """Transformers indexes its padding masks by example: rows stay where they are, which nothing else has to prove."""
    torch.manual_seed(0)
    model, data = build().double().eval(), text()
    provider = GroupGradients(model, nn.CrossEntropyLoss(), data, Groups.singletons(N), batch_size=4)
    v = torch.randn(1, provider.p, dtype=torch.float64)
    for _ in range(USUAL.rows // 8 + 1):  # the first batches are compared with smaller ones
        first = provider.scores(v)
    assert provider.plan(1).strategy == "directional"
    runs: list[int] = []
    handle = model.register_forward_hook(lambda module, args, output: runs.append(1))
    again = provider.scores(v)
    handle.remove()
    assert torch.equal(first, again)
    under_vmap = hasattr(
        masking_utils, "_vmap_for_bhqkv"
    )  # transformers 4 makes causal masks so: nothing can be followed
    assert (len(runs) == -(-N // 4)) != (under_vmap and build is llama)
