"""Load several sets of parameters into one model, one after the other, and restore its own parameters at the end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ggda_ext.model import inner_names, left_as_it_was, named_values, unwrapped

State = dict[str, Tensor]
LoadCheckpoint = Callable[[nn.Module, Any], Any]
Checkpoints: TypeAlias = str | PathLike[str] | Mapping[str, Any] | Iterable[Any]
"""One path or state dict, or several of them; with `load_checkpoint`, several objects of any kind that it can load."""


def listed_checkpoints(checkpoints: Checkpoints) -> list[Any]:
    """Return the checkpoints as a list; a single path or state dict gives a list of one."""
    if isinstance(checkpoints, nn.Module):
        raise TypeError(_not_a_state("checkpoints", checkpoints))
    if isinstance(checkpoints, int | float):
        raise TypeError(f"checkpoints={checkpoints!r}: pass state dicts, or their paths.")
    listed = [checkpoints] if isinstance(checkpoints, str | PathLike | Mapping) else list(checkpoints)
    if not listed:
        raise ValueError("checkpoints is empty: pass at least one, or leave it out.")
    return listed


def states_of(model: nn.Module, models: Sequence[nn.Module]) -> list[Mapping[str, Any]]:
    """Return state dicts that fit the model: a copy of its own on the CPU, then the state dicts of the other models."""
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
    """Return a copy of the model's parameters and buffers on the CPU; `load_state` can load it again."""
    return {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}


def at_checkpoints(
    model: nn.Module, checkpoints: Sequence[Any] | None, load: LoadCheckpoint | None = None
) -> Generator[int, None, None]:
    """Load one checkpoint after the other and yield its number; without checkpoints, yield 0 and load nothing.

    The model gets its own parameters back at the end, or when the generator is closed. Use the generator with
    `contextlib.closing`, so that it is closed at once if something fails.
    """
    if checkpoints is None:
        yield 0
        return
    with left_as_it_was(model):
        own = {_memory(value) for value in named_values(model).values()} - {0}
        for number, checkpoint in enumerate([_apart(checkpoint, own) for checkpoint in checkpoints]):
            if load is None:
                load_state(model, checkpoint, f"checkpoints[{number}]")
            else:
                load(model, checkpoint)
            yield number


def _apart(checkpoint: Any, own: set[int]) -> Any:
    """Return a checkpoint with copies of tensors in the memory `own`, the model's, which a load would overwrite."""
    if isinstance(checkpoint, Tensor):
        return checkpoint.detach().clone() if _memory(checkpoint) in own else checkpoint
    if not isinstance(checkpoint, Mapping):
        return checkpoint
    apart = {key: _apart(value, own) for key, value in checkpoint.items()}
    return apart if any(apart[key] is not value for key, value in checkpoint.items()) else checkpoint


def _memory(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor is in, which views share; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def load_state(model: nn.Module, checkpoint: Any, name: str = "the checkpoint") -> None:
    """Load a state dict, or a file that holds one, into a model; it may come from a DistributedDataParallel.

    Args:
        model: the model to load into.
        checkpoint: a state dict, or its path.
        name: the name of the checkpoint in error messages.
    """
    found = state_of(checkpoint, name)
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


def state_of(checkpoint: Any, name: str = "the checkpoint") -> Mapping[str, Any]:
    """Return a state dict: the checkpoint itself if it is one, else the content of the file with this path.

    Args:
        checkpoint: a state dict, or its path.
        name: the name of the checkpoint in error messages.
    """
    if isinstance(checkpoint, nn.Module):
        raise TypeError(_not_a_state(name, checkpoint))
    if not isinstance(checkpoint, str | PathLike | Mapping) and not hasattr(checkpoint, "read"):
        what = repr(checkpoint) if isinstance(checkpoint, int | float | None) else f"a {type(checkpoint).__name__}"
        raise TypeError(f"{name} is {what}: pass a state dict or its path, or load_checkpoint= that loads it.")
    found = checkpoint if isinstance(checkpoint, Mapping) else _content(checkpoint, name)
    odd = next((key for key in found if not isinstance(key, str)), None)
    if odd is not None:
        raise ValueError(f"{name} has a key {odd!r}, which names no parameter: pass a state dict, model.state_dict().")
    return found


def _content(path: Any, name: str) -> Mapping[str, Any]:
    """Return the state dict in a file; `name` is the name of the checkpoint in error messages."""
    if isinstance(path, str | PathLike) and not Path(path).is_file():
        raise FileNotFoundError(f"{name} is {str(path)!r}, which is no file: pass the path of a saved state dict.")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(found, Mapping):
            raise TypeError(f"it holds a {type(found).__name__}")
        return found
    except (OSError, MemoryError):
        raise
    except Exception as error:  # if the file is of another kind, torch.load raises errors of almost any kind
        raise ValueError(
            f"{name} is {str(path)!r}, which holds no state dict alone: save one with torch.save(model.state_dict(), "
            f"path). {type(error).__name__}: {next(iter(str(error).splitlines()), 'it ends too early')}"
        ) from error
