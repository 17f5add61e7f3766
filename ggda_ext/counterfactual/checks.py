"""Checks of the arguments of `WhatIf`: names of groups, weights, counts, penalties. Errors say what to pass instead."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.checkpoints import Checkpoints, listed_checkpoints, load_state
from ggda_ext.data import IndexedData
from ggda_ext.groups.naming import no_group
from ggda_ext.groups.partition import Groups
from ggda_ext.model import only_thread
from ggda_ext.tables import aligned, is_table, tensor_of

Names = Hashable | Iterable[Hashable]


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise an error if a value is not a whole number of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: pass a whole number, at least {least}.")


def check_penalty(name: str, value: Any) -> None:
    """Raise an error if a penalty is not a finite number, 0 or more."""
    if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise ValueError(f"{name}={value!r}: pass a number, 0 or more.")


def check_folder(folder: str | Path | None) -> None:
    """Raise an error if a folder does not exist."""
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"folder={str(folder)!r} is no folder: make it first, or leave it out for a temporary one.")


def checked_models(model: nn.Module, models: Any, checkpoints: Checkpoints | None) -> list[nn.Module]:
    """Return the model and further models, or copies of the model at its checkpoints."""
    if isinstance(models, nn.Module) or not isinstance(models, Sequence):
        raise TypeError(f"models is a {type(models).__name__}: pass a list of further models, models=[second, third].")
    for j, one in enumerate(models):
        if not isinstance(one, nn.Module):
            raise TypeError(f"models[{j}] is a {type(one).__name__}: pass a list of further models, nn.Modules.")
    if checkpoints is None:
        return [model, *models]
    if models:
        raise ValueError("models and checkpoints are both given: pass one of them.")
    found = []
    for number, checkpoint in enumerate(listed_checkpoints(checkpoints)):
        with only_thread(model):
            found.append(copy.deepcopy(model))
        load_state(found[-1], checkpoint, f"checkpoints[{number}]")
    return found


def checked_point_weights(weights: Any, data: IndexedData) -> Tensor:
    """Return the weights of training points `[n]`, 1 if none are given; raise an error if they cannot be weights.

    The rows of a pandas column are put in the order of the training data, if that has an index too.
    """
    n = data.n or 0
    given = np.ones(n) if weights is None else aligned(weights, data.index, "point_weights", data.name)
    if is_table(given):
        given = tensor_of(given, "point_weights")
    try:
        found = torch.as_tensor(given if isinstance(given, Tensor) else np.array(given)).double()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"point_weights holds what is no number: pass one for each of {n} points.") from None
    remedy = f"pass one finite number, 0 or more, for each of {n} points"
    if found.shape != (n,):
        raise ValueError(f"point_weights has shape {list(found.shape)}: {remedy}.")
    wrong = torch.nonzero(~(torch.isfinite(found) & (found >= 0)))[:, 0]
    if len(wrong):
        raise ValueError(f"point_weights[{wrong[0]}] is {found[wrong[0]]:g}, of {len(wrong)} such weights: {remedy}.")
    if not bool(found.any()):
        raise ValueError(f"point_weights are all 0, so nothing is left to train on: {remedy}, not all 0.")
    return found


def ids_of(names: Names, known: Sequence[Hashable]) -> list[int]:
    """Return the ids of groups given by name; `known` are the names of all groups."""
    if isinstance(names, Mapping):
        raise TypeError("names is a dict: pass names of groups, or give groups other weights by with_weights.")
    places = {name: j for j, name in enumerate(known)}
    listed = list(names) if isinstance(names, Iterable) and not isinstance(names, str | bytes) else [names]
    if isinstance(names, tuple) and names in places:
        listed = [names]
    if not listed:
        raise ValueError("no group is named: pass at least one name.")
    for name in listed:
        if name not in places:
            raise ValueError(no_group(name, known))
    return [places[name] for name in listed]


def weights_by_name(weights: Any, known: Sequence[Hashable]) -> np.ndarray:
    """Return the weights of all groups `[k]`; groups that `weights` does not name get 1."""
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"weights is a {type(weights).__name__}: pass a dict of names and weights, e.g. {{'web': 0.5}}."
        )
    found = np.ones(len(known))
    for name, weight in weights.items():
        if not isinstance(weight, Real) or not 0 <= float(weight) < math.inf:
            raise ValueError(f"weights[{name!r}]={weight!r}: a weight is a finite number, 0 or more.")
        found[ids_of([name], known)] = float(weight)
    return found


def checked_kept(
    kept: Any, groups: Groups, masses: Callable[[np.ndarray], np.ndarray], argument: str = "kept"
) -> Tensor:
    """Return weights of groups `[s, k]` as a tensor; raise an error if a row leaves nothing to train on.

    Args:
        kept: booleans or weights `[s, k]`. The columns of a pandas table are found by name, in any order.
        groups: the groups.
        masses: returns the total weight of the points that every row leaves in the training set `[s]`.
        argument: the name of `kept` in errors.
    """
    given = kept.detach().cpu().numpy() if isinstance(kept, Tensor) else _in_order(kept, groups.all_names, argument)
    try:
        found = np.asarray(given, dtype=float)
    except (TypeError, ValueError):
        raise TypeError(
            f"{argument} holds what is no number: pass booleans or weights [subsets, {len(groups)}]."
        ) from None
    k = len(groups)
    if found.ndim != 2 or found.shape[1] != k or not len(found):
        raise ValueError(f"{argument} has shape {list(found.shape)}: pass [subsets, {k}], a column per group.")
    if not (np.isfinite(found) & (found >= 0)).all():
        raise ValueError(f"{argument} holds negative, NaN or infinite numbers: a weight is 0 or more.")
    empty = np.flatnonzero(masses(found) <= 0)
    if len(empty):
        raise ValueError(
            f"{len(empty)} of {len(found)} choices of groups leave nothing to train on, first number "
            f"{int(empty[0])}: keep at least one group."
        )
    return torch.from_numpy(np.ascontiguousarray(found))


def _in_order(kept: Any, known: Sequence[Hashable], argument: str) -> Any:
    """Return a table with its columns in the order of the groups; return data without column names unchanged."""
    if not is_table(kept) or not hasattr(kept, "columns") or list(kept.columns) == list(range(len(known))):
        return kept
    for name in kept.columns:
        if name not in known:
            raise ValueError(f"{argument} has a column {name!r}: {no_group(name, known)}")
    if len(kept.columns) != len(known) or kept.columns.has_duplicates:
        raise ValueError(f"{argument} has {len(kept.columns)} columns: pass one for each of the {len(known)} groups.")
    return kept[list(known)]


def one_number(values: Tensor | np.ndarray) -> np.ndarray:
    """Return values `[s]` of a property as an array; raise an error if the property has several numbers `[s, m]`."""
    found = np.asarray(values)
    if found.ndim > 1:
        raise ValueError(f"property gives {found.shape[1]} numbers: ask this of one number at a time.")
    return found
