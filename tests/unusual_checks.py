"""What the tests of unusual models, settings and data share: strategies, batch sizes, refusals."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn

from ggda_ext import STRATEGIES

CE = nn.CrossEntropyLoss()
BATCH_SIZES = (1, 5, None)
DENSE = [strategy for strategy in STRATEGIES if strategy != "ghost"]


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@contextmanager
def refusal_by_name(strategy: str):
    """A strategy that was asked for by name may be refused, if the error says so."""
    try:
        yield
    except ValueError as error:
        if strategy == "auto" or "cannot be used here" not in str(error):
            raise
