"""Examples from the whole data to compare strategies on, and what a first run of them shows of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.data import IndexedData, batch_length, pick, to_device
from ggda_ext.gradients.checks import check_same_losses
from ggda_ext.gradients.parameters import ParameterSpace
from ggda_ext.losses import ExampleLoss

EXAMPLES = 8  # compared with autograd

Members = np.ndarray | range
"""Indices of the points that are in a group."""


class Sample:
    """The first run of some examples: bytes, precision and shapes of activations, and the examples to compare."""

    def __init__(
        self, space: ParameterSpace, loss: ExampleLoss, data: IndexedData, members: Members, at_once: int
    ) -> None:
        self._space, self._loss, self._data, self._device = space, loss, data, space.device
        self._at_once = at_once
        self.precision = space.dtype
        self.output_dims: dict[str, int] = {}
        self._seen = 0
        if data.is_stream:
            batches = [to_device(data.first(at_once), space.device)]
        else:
            self._candidates = _spread(members, 2 * EXAMPLES)
            batches = [to_device(batch, space.device) for batch in data.batches(self._runs(self._candidates))]
        modules = dict(space.model.named_modules())
        hidden = any(isinstance(module, torch.jit.ScriptModule) for module in modules.values())
        leaves = {id(module) for module in modules.values() if next(module.children(), None) is None}
        handles = [
            module.register_forward_hook(self._hook(name, id(module) in leaves))
            for name, module in modules.items()
            if not isinstance(module, torch.jit.ScriptModule)
            and (id(module) in leaves or any(True for _ in module.named_parameters(recurse=False)))
        ]
        try:
            losses = [self._each(batch) for batch in batches]
        finally:
            for handle in handles:
                handle.remove()
        if hidden:
            self._seen += self._saved_bytes(batches)
        self._batch, self._first_losses, self._losses = batches[0], losses[0], torch.cat(losses)
        self.bytes_per_example = max(1, self._seen // len(self._losses))

    def _saved_bytes(self, batches: list[Any]) -> int:
        """What autograd keeps for a backward pass, for modules that cannot be looked into."""
        saved = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal saved
            saved += tensor.numel() * tensor.element_size()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
        with self._space.gradients(enabled=True), hooks:
            for batch in batches:
                self._loss.each(self._space.model, batch)
        return saved

    def _runs(self, indices: np.ndarray) -> list[np.ndarray]:
        return runs_of(indices, self._at_once)

    def _each(self, batch: Any) -> Tensor:
        with self._space.gradients(enabled=False), torch.no_grad():
            return self._loss.each(self._space.model, batch)

    def _hook(self, name: str, is_leaf: bool) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            first = _first_tensor(output)
            if first is None:
                return
            self.output_dims[name] = first.dim()
            if is_leaf:
                self._seen += first.numel() * first.element_size()
            if first.is_floating_point() and torch.finfo(first.dtype).eps > torch.finfo(self.precision).eps:
                self.precision = first.dtype

        return look

    def chosen(self) -> list[tuple[Any, list[Any]]]:
        """The examples to compare, as batches, each with its examples alone: first, last, and those of large loss."""
        if self._data.is_stream:
            self._check_same(self._batch)
            return [(self._batch, [pick(self._batch, [at]) for at in range(batch_length(self._batch))])]
        ends = [0, len(self._candidates) - 1]
        large = torch.argsort(self._losses.detach().float().nan_to_num(-1, -1, -1), descending=True).tolist()
        picked = self._candidates[list(dict.fromkeys([*ends, *large]))[:EXAMPLES]]
        runs = self._runs(picked)
        asked: list[Any] = [self._runs(self._candidates)[0], *runs, *[[index] for index in picked]]
        first, *fetched = (to_device(batch, self._device) for batch in self._data.batches(asked))
        self._check_same(first)
        alone = iter(fetched[len(runs) :])
        return [(batch, [next(alone) for _ in run]) for batch, run in zip(fetched, runs, strict=False)]

    def _check_same(self, batch: Any) -> None:
        check_same_losses(self._first_losses, self._each(batch), self._data.name)


def runs_of(indices: np.ndarray, most: int) -> list[np.ndarray]:
    """Indices in runs of at most `most`, all about equally long: a batch of one would tell nothing about batches."""
    return np.array_split(indices, -(-len(indices) // most))


def _spread(members: Members, count: int) -> np.ndarray:
    """The first and the last of the points, and others at random, in order."""
    if len(members) <= count:
        return np.asarray(members)
    inner = np.random.default_rng(0).choice(len(members) - 2, count - 2, replace=False) + 1
    return np.asarray([members[at] for at in (0, *np.sort(inner).tolist(), len(members) - 1)])


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output if isinstance(output, tuple | list) else ()
    return next((value for value in values if isinstance(value, Tensor)), None)
