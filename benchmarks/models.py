"""The models of the paper, at the paper's sizes, and made data of the right shape for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from ggda_ext import Groups

LossOfParameters = Callable[[dict[str, Tensor], Any], Tensor]


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers of the given widths with ReLU between them."""
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


logistic_regression = partial(mlp, 23, 2)
"""HELOC's logistic regression: 23 features, two classes."""
ann_s = partial(mlp, 23, 50, 50, 2)
"""HELOC's small network."""
ann_m = partial(mlp, 23, 200, 50, 2)
"""HELOC's medium network."""
ann_l = partial(mlp, 784, 150, 150, 150, 10)
"""MNIST's network."""


def tabular(n: int, features: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Made data with the shape of a tabular data set or of flattened images: normal features, uniform labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=generator)
    return x, torch.randint(0, classes, (n,), generator=generator)


def scattered(n: int, size: int) -> Groups:
    """Groups of one size whose points are spread over the data, like the groups of a clustering."""
    return Groups(np.random.default_rng(0).permutation(n) // size)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, and a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.norm2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += self.shortcut(x)
        return self.relu(out)


def resnet18(width: int = 64, classes: int = 10) -> nn.Module:
    """ResNet-18 with the 3x3 stem used for CIFAR-10; `width` channels in the first stage (64 in the paper)."""
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    blocks, inside = [], width
    for stage in range(4):
        for block in range(2):
            outside = width * 2**stage
            blocks.append(ResidualBlock(inside, outside, 2 if stage and not block else 1))
            inside = outside
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes)).eval()


def images(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Made data of CIFAR-10's shape."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 32, 32, generator=generator), torch.randint(0, 10, (n,), generator=generator)


def small_bert() -> nn.Module:
    """A BERT of four layers and width 128 with a classification head, randomly initialised."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512)
    return BertForSequenceClassification(config).eval()


def texts(n: int, length: int = 64, seed: int = 0) -> dict[str, Tensor]:
    """Made data of QNLI's shape: random tokens of a BERT vocabulary, with padding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(length // 2, length + 1, (n, 1), generator=generator)
    mask = (torch.arange(length) < lengths).long()
    ids = torch.randint(1000, 30_000, (n, length), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 2, (n,), generator=generator)}


class TextClassifier(nn.Module):
    """A BERT with a classification head that maps tokens `[b, 3, L]` to logits `[b, classes]`.

    Tokens are input ids, attention mask and token types, as `benchmarks.data` gives them. The layers get a mask with a
    value for every pair of tokens. BERT's own `forward` is not used: it looks at the values of the mask, which `vmap`
    forbids, and before transformers 5 it takes no mask for pairs. Attention is not fused, so that Hessian-vector
    products work as well.
    """

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[b, classes]`."""
        ids, mask, types = tokens.unbind(1)
        dtype = next(self.bert.parameters()).dtype
        away = (1 - mask).to(dtype)[:, None, None, :] * torch.finfo(dtype).min
        away = away.expand(-1, -1, tokens.shape[-1], -1)
        body: Any = self.bert.bert
        states = body.encoder(body.embeddings(input_ids=ids, token_type_ids=types), attention_mask=away)[0]
        return self.bert.classifier(self.bert.dropout(body.pooler(states)))


def pretrained_bert(folder: Path, classes: int = 2) -> TextClassifier:
    """BERT with the weights in `folder` and a random head that is drawn from torch's random state."""
    from transformers import BertForSequenceClassification
    from transformers.utils import logging

    shown = logging.get_verbosity()
    logging.set_verbosity_error()  # or transformers warns that the head is new, which is intended
    logging.disable_progress_bar()
    try:
        bert = BertForSequenceClassification.from_pretrained(folder, num_labels=classes, attn_implementation="eager")
    finally:
        logging.set_verbosity(shown)
        logging.enable_progress_bar()
    return TextClassifier(bert.float())


def random_bert(classes: int = 2) -> TextClassifier:
    """A stand-in for a pre-trained BERT: two layers of width 64, all weights drawn from torch's random state."""
    from transformers import BertConfig, BertForSequenceClassification

    settings: dict[str, Any] = {"num_labels": classes, "attn_implementation": "eager"}
    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, **settings
    )  # fmt: skip
    return TextClassifier(BertForSequenceClassification(config))


def loss_of(model: nn.Module) -> LossOfParameters:
    """Return the mean cross-entropy of a batch as a function of parameters, in the form that dattri needs."""

    def loss(parameters: dict[str, Tensor], pair: Any) -> Tensor:
        return cross_entropy(functional_call(model, parameters, (pair[0],)), pair[1].long())

    return loss


def loss_of_one(model: nn.Module) -> LossOfParameters:
    """Return the cross-entropy of one example without a batch dimension, as a function of parameters."""
    loss = loss_of(model)
    return lambda parameters, pair: loss(parameters, [value.unsqueeze(0) for value in pair])
