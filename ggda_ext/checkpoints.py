"""Several sets of parameters of one model: loaded one after the other, and the model's own given back at the end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias

import torch
from torch import nn

from ggda_ext.model import inner_names, left_as_it_was, unwrapped

LoadCheckpoint = Callable[[nn.Module, Any], Any]
Checkpoints: TypeAlias = str | PathLike[str] | Mapping[str, Any] | Iterable[Any]
"""One checkpoint, a path or a state dict, or several of them; with `load_checkpoint`, several of whatever it loads."""


def listed_checkpoints(checkpoints: Checkpoints) -> list[Any]:
    """Checkpoints as a list; a single path or state dict is one of them."""
    listed = [checkpoints] if isinstance(checkpoints, str | PathLike | Mapping) else list(checkpoints)
    if not listed:
        raise ValueError("checkpoints is empty: pass at least one, or leave it out.")
    return listed


def at_checkpoints(
    model: nn.Module, checkpoints: Sequence[Any] | None, load: LoadCheckpoint | None = None
) -> Generator[int, None, None]:
    """The number of every checkpoint, loaded into the model; without checkpoints, 0 for the current parameters.

    The model gets its own parameters back at the end, or when the generator is closed: use it with
    `contextlib.closing`, so that this happens at once if something fails.
    """
    if checkpoints is None:
        yield 0
        return
    with left_as_it_was(model):
        for number, checkpoint in enumerate(checkpoints):
            (load or load_state)(model, checkpoint)
            yield number


def load_state(model: nn.Module, checkpoint: Any) -> None:
    """Load a state dict, or the file that holds one; saved from a DistributedDataParallel or not."""
    unwrapped(model).load_state_dict(inner_names(state_of(checkpoint), model))


def state_of(checkpoint: Any) -> Mapping[str, Any]:
    """A state dict itself, or that of a file."""
    if isinstance(checkpoint, Mapping):
        return checkpoint
    return torch.load(checkpoint, map_location="cpu", weights_only=True)
