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


def states_of(model: nn.Module, models: Sequence[nn.Module]) -> list[Mapping[str, Any]]:
    """The states of a model, copied, and of others of the same kind, as checkpoints of the first."""
    own = unwrapped(model).state_dict()
    found: list[Mapping[str, Any]] = [{name: value.clone() for name, value in own.items()}]
    for number, other in enumerate(models):
        if not isinstance(other, nn.Module):
            raise TypeError(f"models[{number}] is a {type(other).__name__}: pass modules like the model.")
        state = unwrapped(other).state_dict()
        odd = [name for name in {**own, **state} if name not in own or name not in state]
        odd += [name for name in own if name in state and own[name].shape != state[name].shape]
        if odd:
            raise ValueError(f"models[{number}] differs from the model in {odd[0]}: pass models of the same kind.")
        found.append(state)
    return found


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
