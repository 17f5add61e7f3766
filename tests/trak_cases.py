"""Small models, data and the user's loop for the tests of `ggda_trak`, the same for `trak` and for the drop-in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from trak.gradient_computers import IterativeGradientComputer

N, TARGETS = 400, 5


class Text(nn.Module):
    """Embedding, mean over the tokens that are not masked, Linear: called as a Hugging Face classifier is."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.types, self.head = nn.Embedding(30, 8), nn.Embedding(2, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = (self.tokens(input_ids) + self.types(token_type_ids)).tanh() * attention_mask.unsqueeze(-1)
        return self.head(hidden.sum(1) / attention_mask.sum(1, keepdim=True))


@dataclass
class Case:
    """A task with a model, `N` training points, `TARGETS` targets and three checkpoints."""

    task: str
    model: nn.Module
    train: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    options: dict[str, Any]

    def checkpoints(self, count: int) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        return [
            {
                name: value.clone() + 0.3 * j * torch.randn(value.shape, generator=generator)
                for name, value in self.model.state_dict().items()
            }
            for j in range(count)
        ]


def case(task: str) -> Case:
    torch.manual_seed(3)
    options: dict[str, Any] = {"device": "cpu", "use_half_precision": False, "proj_dim": 104, "logging_level": 100}
    if task == "text_classification":
        ids = torch.randint(0, 30, (N + TARGETS, 7))
        mask = (torch.arange(7) < torch.randint(2, 8, (N + TARGETS, 1))).long()
        every: tuple[Tensor, ...] = (ids, ids % 2, mask, torch.randint(0, 3, (N + TARGETS,)))
        model: nn.Module = Text()
    else:
        every = (torch.randn(N + TARGETS, 1, 5, 5), torch.randint(0, 4, (N + TARGETS,)))
        model = nn.Sequential(nn.Conv2d(1, 6, 2), nn.ReLU(), nn.Flatten(), nn.Linear(96, 8), nn.Tanh(), nn.Linear(8, 4))
    if task.startswith("iterative"):
        options["gradient_computer"] = IterativeGradientComputer
    train, targets = (tuple(tensor[at] for tensor in every) for at in (slice(N), slice(N, None)))
    return Case(task, model.eval(), train, targets, options)


def uneven_labels() -> np.ndarray:
    """Groups of uneven sizes whose members are spread over the data set."""
    labels = np.random.default_rng(0).integers(0, 14, N) ** 2 % 14
    return np.unique(labels, return_inverse=True)[1]


def batches(size: int = 50, seed: int | None = 0) -> Iterator[np.ndarray]:
    """Training indices in batches, in random order if a seed is given."""
    order = np.arange(N) if seed is None else np.random.default_rng(seed).permutation(N)
    yield from (order[low : low + size] for low in range(0, N, size))


def take(tensors: tuple[Tensor, ...], at: np.ndarray) -> list[Tensor]:
    return [tensor[torch.tensor(at)] for tensor in tensors]


def featurize(traker: Any, case: Case, checkpoints: list[Any], size: int = 50, seed: int | None = 0) -> None:
    for model_id, checkpoint in enumerate(checkpoints):
        traker.load_checkpoint(checkpoint, model_id=model_id)
        for at in batches(size, seed):
            traker.featurize(take(case.train, at), inds=at)


def scores(kind: Any, case: Case, folder: Path, models: int = 1, size: int = 50, **options: Any) -> np.ndarray:
    """The user's loop, from the constructor to the scores."""
    checkpoints = case.checkpoints(models)
    arguments = case.options | options
    if "groups" in options and models > 1:
        arguments["checkpoints"] = checkpoints
    traker = kind(case.model, case.task, N, save_dir=folder, **arguments)
    featurize(traker, case, checkpoints, size)
    return scored(traker, case, checkpoints)


def scored(traker: Any, case: Case, checkpoints: list[Any]) -> np.ndarray:
    traker.finalize_features()
    for model_id, checkpoint in enumerate(checkpoints):
        traker.start_scoring_checkpoint("test", checkpoint, model_id, num_targets=TARGETS)
        traker.score(case.targets, num_samples=TARGETS)
    return np.array(traker.finalize_scores("test"))


def summed(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Scores `[n, t]` added up by group."""
    total = np.zeros((labels.max() + 1, values.shape[1]))
    np.add.at(total, labels, values)
    return total


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, relative to the largest score."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
