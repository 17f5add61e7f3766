"""Several sets of parameters of one model: loaded one after the other, and the model's own given back at the end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ggda_ext.model import inner_names, left_as_it_was, unwrapped

State = dict[str, Tensor]
LoadCheckpoint = Callable[[nn.Module, Any], Any]
Checkpoints: TypeAlias = str | PathLike[str] | Mapping[str, Any] | Iterable[Any]
"""One checkpoint, a path or a state dict, or several of them; with `load_checkpoint`, several of whatever it loads."""


def listed_checkpoints(checkpoints: Checkpoints) -> list[Any]:
    """Checkpoints as a list; a single path or state dict is one of them."""
    if isinstance(checkpoints, nn.Module):
        raise TypeError(_not_a_state("checkpoints", checkpoints))
    if isinstance(checkpoints, int | float):
        raise TypeError(f"checkpoints={checkpoints!r}: pass state dicts, or their paths.")
    listed = [checkpoints] if isinstance(checkpoints, str | PathLike | Mapping) else list(checkpoints)
    if not listed:
        raise ValueError("checkpoints is empty: pass at least one, or leave it out.")
    return listed


def states_of(model: nn.Module, models: Sequence[nn.Module]) -> list[Mapping[str, Any]]:
    """State dicts of a model, as a copy, and of other models like it, to be loaded into the first."""
    if isinstance(models, nn.Module):
        raise TypeError(f"models is a {type(models).__name__}: pass a list, [model].")
    own = unwrapped(model).state_dict()
    found: list[Mapping[str, Any]] = [state_on_cpu(unwrapped(model))]
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


def state_on_cpu(model: nn.Module) -> State:
    """A copy of the model's parameters and buffers, which `load_state` gives back."""
    return {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}


def at_checkpoints(
    model: nn.Module, checkpoints: Sequence[Any] | None, load: LoadCheckpoint | None = None
) -> Generator[int, None, None]:
    """Load one checkpoint after the other, and give its number; without checkpoints, 0 for the current parameters.

    The model gets its own parameters back at the end, or when the generator is closed: use it with
    `contextlib.closing`, so that this happens at once if something fails.
    """
    if checkpoints is None:
        yield 0
        return
    with left_as_it_was(model):
        for number, checkpoint in enumerate(checkpoints):
            if load is None:
                load_state(model, checkpoint, f"checkpoints[{number}]")
            else:
                load(model, checkpoint)
            yield number


def load_state(model: nn.Module, checkpoint: Any, name: str = "the checkpoint") -> None:
    """Load a state dict, or the file that holds one; saved from a DistributedDataParallel or not.

    Args:
        model: gets the state.
        checkpoint: a state dict, or its path.
        name: how errors call it.
    """
    if isinstance(checkpoint, nn.Module):
        raise TypeError(_not_a_state(name, checkpoint))
    if isinstance(checkpoint, int | float) or checkpoint is None:
        raise TypeError(f"{name} is {checkpoint!r}: pass a state dict or its path, or load_checkpoint= that loads it.")
    if isinstance(checkpoint, str | PathLike) and not Path(checkpoint).is_file():
        raise FileNotFoundError(
            f"{name} is {str(checkpoint)!r}, which is no file: pass the path of a saved state dict."
        )
    try:
        found = state_of(checkpoint)
    except (UnpicklingError, EOFError) as error:
        raise ValueError(
            f"{name} is {str(checkpoint)!r}, which holds no state dict alone: save one with "
            f"torch.save(model.state_dict(), path). torch.load says: {str(error).splitlines()[0]}"
        ) from error
    try:
        unwrapped(model).load_state_dict(inner_names(found, model))
    except RuntimeError as error:
        inside = next((key for key, value in found.items() if isinstance(value, Mapping)), None)
        hint = "" if inside is None else f" It holds a dict under {inside!r}: pass that, checkpoint[{inside!r}]."
        raise ValueError(f"{name} does not fit the model: {error}{hint}") from error


def _not_a_state(name: str, found: nn.Module) -> str:
    return (
        f"{name} is a {type(found).__name__}: pass a state dict, model.state_dict(), or its path; or models=[…] for "
        "more models trained the same way."
    )


def state_of(checkpoint: Any) -> Mapping[str, Any]:
    """A state dict itself, or that of a file."""
    if isinstance(checkpoint, Mapping):
        return checkpoint
    return torch.load(checkpoint, map_location="cpu", weights_only=True)
