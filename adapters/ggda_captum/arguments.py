"""Convert Captum's arguments to the form the core needs. Errors about arguments that do not fit say how to fix them."""

from __future__ import annotations

import glob
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from os.path import join
from typing import Any

import torch
from captum._utils.sample_gradient import SUPPORTED_MODULES
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from ggda_ext.data import IndexedData
from ggda_ext.model import SavedState, inner_name, left_as_it_was, unwrapped

WORDS = {
    "parameters": "pass layers=, the names of the layers that count",
    "show_progress": "pass it to influence and self_influence",
    "data": "the training set is Captum's train_dataset",
}
"""Arguments of `ggda_ext.attribute` that have another name or place in Captum."""


def unwrapped_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Replacements for Captum's arguments if the model is wrapped in DistributedDataParallel.

    They are the model inside the wrapper and the names of its layers.
    """
    model = given["model"]
    inner: dict[str, Any] = {"model": unwrapped(model)}
    if given.get("layers") is not None:
        inner["layers"] = [inner_name(layer, model) for layer in given["layers"]]
    if isinstance(given.get("final_fc_layer"), str):
        inner["final_fc_layer"] = inner_name(given["final_fc_layer"], model)
    return inner


def count_points(train_dataset: Any) -> int | None:
    """Number of training points. Raise an error for a stream."""
    loader = train_dataset if isinstance(train_dataset, DataLoader) else DataLoader(train_dataset)  # as Captum reads it
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            "train_dataset is an IterableDataset, whose points have no index that groups could refer to: pass a "
            "map-style Dataset (a list of its examples is one)."
        )
    return IndexedData(loader, "train_dataset").n


def points_of(inputs: Any) -> IndexedData:
    """Test points by index, from a tuple or from any DataLoader that Captum could iterate over once."""
    if isinstance(inputs, DataLoader):
        batched = inputs.batch_sampler is not None and isinstance(inputs.sampler, SequentialSampler)
        if batched and not isinstance(inputs.dataset, IterableDataset):
            return IndexedData(inputs, "inputs")
        return IndexedData(tuple(torch.cat(field) for field in zip(*inputs, strict=True)), "inputs")
    if not isinstance(inputs, tuple | list):
        hint = ", or, for a property, property=" if callable(inputs) else ""
        raise TypeError(
            f"inputs is a {type(inputs).__name__}: pass a tuple (*inputs, labels) or a DataLoader of such tuples{hint}."
        )
    return IndexedData(tuple(inputs), "inputs")


class CheckpointLoader:
    """The user's `checkpoints_load_func`, with errors that name the checkpoint."""

    def __init__(self, load: Callable[[nn.Module, Any], float]) -> None:
        self.load: Callable[[nn.Module, Any], float] = load.load if isinstance(load, CheckpointLoader) else load
        self._before: SavedState | None = None

    @contextmanager
    def undone_on_failure(self, model: nn.Module) -> Iterator[None]:
        """Restore the model after an exception in this context. Its values are copied before the first load.

        Tensors that share memory with the checkpoint are not copied, because loading it cannot change them; an example
        is a checkpoint that is ``model.state_dict()`` itself.
        """
        with left_as_it_was(model, (), only_on_failure=True) as self._before:
            try:
                yield
            finally:
                self._before = None

    def __call__(self, model: nn.Module, checkpoint: Any) -> float:
        if self._before is not None:
            self._before.copy_values(but_for=checkpoint)
        try:
            return self.load(model, checkpoint)
        except Exception as error:
            path = isinstance(checkpoint, str | PathLike)
            what = repr(checkpoint) if path else f"of type {type(checkpoint).__name__}"
            raise ValueError(
                f"checkpoint {what} does not load ({type(error).__name__}: {error}): give checkpoints= only files "
                "of this model, or pass the checkpoints_load_func that reads them."
            ) from error


def check_checkpoints(checkpoints: Any) -> None:
    """Raise Captum's error, with some more words, for a folder or a list that holds no checkpoints."""
    empty = isinstance(checkpoints, list | tuple) and not checkpoints
    if empty or (isinstance(checkpoints, str) and not glob.glob(join(checkpoints, "*"))):
        raise ValueError(
            f"Invalid checkpoints provided for TracIn class: {checkpoints!r} holds no checkpoint; pass a folder with "
            "files in it, a list of paths, or any iterable of what checkpoints_load_func loads."
        )


def check_layers(model: nn.Module, layers: Sequence[str | nn.Module] | None) -> None:
    """Raise an error if layers, given by name or as modules, hold a parameter twice, which Captum counts twice."""
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen = [modules.get(layer) if isinstance(layer, str) else layer for layer in layers or ()]
    held = Counter(id(parameter) for module in chosen if module is not None for parameter in module.parameters())
    names = [name for name, parameter in model.named_parameters() if held[id(parameter)] > 1]
    if names:
        raise ValueError(
            f"layers hold {len(names)} parameters more than once, first {names[0]!r}, and Captum would count them as "
            "often: name each layer once, without layers inside it or layers that share its parameters."
        )


def warn_of_dropped(model: nn.Module, layers: list[nn.Module] | None, parameters: list[nn.Parameter]) -> None:
    """Warn about parameters that groups include and Captum, with ``sample_wise_grads_per_batch=True``, leaves out."""
    seen = {
        id(parameter)
        for module in model.modules()
        if (layers is None or module in layers) and isinstance(module, tuple(SUPPORTED_MODULES))
        for parameter in module.parameters(recurse=False)
    }
    dropped = {id(parameter) for parameter in parameters} - seen
    names = [name for name, parameter in model.named_parameters() if id(parameter) in dropped]
    if names:
        warnings.warn(
            f"{len(names)} parameters, first {names[0]!r}, are not in Linear or Conv2d layers: Captum's "
            "sample_wise_grads_per_batch=True leaves them out silently; scores of groups and properties count them. "
            "Pass layers= to choose the layers that count.",
            stacklevel=2,
        )
