"""The first run of some examples: how much they cost, and which of them will be compared with autograd.

Examples come from the whole data: the first, the last, those with a large loss, and others at random. If a model takes
seconds for eight examples, only two are used, a short and a long one, because padding and counts of tokens are what
such models may mix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.data import IndexedData, batch_length, pick, tensors_in, to_device
from ggda_ext.gradients.proof.descent import storage_of
from ggda_ext.gradients.proof.findings import LITTLE, USUAL
from ggda_ext.gradients.proof.truth import check_same_losses
from ggda_ext.losses import ExampleLoss
from ggda_ext.model import ParameterSpace, left_as_it_was, may_change

HEAVY = 2**30
"""Multiplications of a forward pass over one example; above this number a look at eight examples takes seconds."""
_IGNORED = -100  # the target that PyTorch's losses ignore

Members = np.ndarray | range
"""Indices of the points that are in a group."""


class Sample:
    """The first run of some examples: bytes, precision and shapes of activations, and the examples to compare.

    Attributes:
        effort: how much to compare; little if the model is expensive.
        changing: names of the buffers and parameters that `forward` changes.
    """

    def __init__(
        self, space: ParameterSpace, loss: ExampleLoss, data: IndexedData, members: Members, at_once: int
    ) -> None:
        self._space, self._loss, self._data, self._device = space, loss, data, space.device
        self._at_once = at_once
        self.precision = space.dtype
        self.output_dims: dict[str, int] = {}
        self._head = to_device(data.first(at_once), space.device) if data.is_stream else None
        self._candidates = (
            _spread(members, 2 * USUAL.examples) if self._head is None else np.arange(batch_length(self._head))
        )
        batches = self._fetch(self._runs(self._candidates))
        self.effort, losses = USUAL, None
        numbers = sum(part.numel() for part in tensors_in(batches[0])) / batch_length(batches[0])
        if space.size * numbers > HEAVY:  # an upper bound on the work of most models
            pair = _shortest_and_longest([length for batch in batches for length in _lengths(batch)])
            (two,) = self._fetch([self._candidates[pair]])
            losses = self._run([two])
            if self._work / len(pair) > HEAVY and self._is_reduced_as_known(two):
                self.effort, self._candidates, batches = LITTLE, self._candidates[pair], [two]
        if losses is None or self.effort is USUAL:
            losses = self._run(batches)
        self._first_losses, self._losses = losses[0], torch.cat(losses)
        self.bytes_per_example = max(1, self._seen // len(self._losses))

    def _is_reduced_as_known(self, batch: Any) -> bool:
        """Whether the reduction of a batch's losses is known; if it is the user's own, any example may be special."""
        model = self._space.model
        with left_as_it_was(model, may_change(model)), self._space.require_gradients(of_chosen=False):
            return self._loss.reduced(model, batch) is None

    def _fetch(self, runs: Sequence[Any]) -> list[Any]:
        """Return a batch for each run of indices."""
        if self._head is not None:
            return [pick(self._head, list(run)) for run in runs]
        return [to_device(batch, self._device) for batch in self._data.batches(runs)]

    def _run(self, batches: list[Any]) -> list[Tensor]:
        """Return the losses `[b]` of every batch; keep bytes, precision, shapes and work of the activations."""
        self._seen, self._work = 0, 0.0
        modules = dict(self._space.model.named_modules())
        hidden = any(isinstance(module, torch.jit.ScriptModule) for module in modules.values())
        leaves = {id(module) for module in modules.values() if next(module.children(), None) is None}
        handles = [
            module.register_forward_hook(self._hook(name, id(module) in leaves))
            for name, module in modules.items()
            if not isinstance(module, torch.jit.ScriptModule)
            and (id(module) in leaves or any(True for _ in module.named_parameters(recurse=False)))
        ]
        with left_as_it_was(self._space.model, may_change(self._space.model)) as saved:
            try:
                losses = [self._each(batch) for batch in batches]
            finally:
                for handle in handles:
                    handle.remove()
            saved.check_held()
            self.changing = saved.changed()
            if hidden:
                self._seen += self._saved_bytes(batches)
        return losses

    def _saved_bytes(self, batches: list[Any]) -> int:
        """Bytes that autograd keeps for a backward pass; used if the model has modules that take no hooks."""
        saved = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal saved
            saved += tensor.numel() * tensor.element_size()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
        with self._space.require_gradients(of_chosen=True), hooks:
            for batch in batches:
                self._loss.each(self._space.model, batch)
        return saved

    def _runs(self, indices: np.ndarray) -> list[np.ndarray]:
        return runs_of(indices, self._at_once)

    def _each(self, batch: Any) -> Tensor:
        with self._space.require_gradients(of_chosen=True):  # a loss may compute gradients itself
            losses = self._loss.each(self._space.model, batch).detach()
        if losses.shape != (batch_length(batch),):
            raise ValueError(
                f"the loss gave {list(losses.shape)} values for a batch of {batch_length(batch)} examples."
            )
        return losses

    def _hook(self, name: str, is_leaf: bool) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            first = _first_tensor(output)
            if first is None:
                return
            self.output_dims[name] = first.dim()
            if is_leaf and not _is_given(first, args):
                self._seen += first.numel() * first.element_size()
            self._work += _multiplications(module, first)
            if first.is_floating_point() and torch.finfo(first.dtype).eps > torch.finfo(self.precision).eps:
                self.precision = first.dtype

        return look

    def chosen(self) -> list[tuple[Any, list[Any]]]:
        """Return the examples to compare: batches, each with its examples alone.

        They are the first, the last, and those with a large loss.
        """
        ends = [0, len(self._candidates) - 1]
        large = torch.argsort(self._losses.detach().float().nan_to_num(-1, -1, -1), descending=True).tolist()
        self._picked = torch.tensor(list(dict.fromkeys([*ends, *large]))[: self.effort.examples])
        picked = self._candidates[self._picked.numpy()]
        runs = self._runs(picked)
        fetched = self._fetch([*runs, *[[index] for index in picked]])
        alone = iter(fetched[len(runs) :])
        return [(batch, [next(alone) for _ in run]) for batch, run in zip(fetched, runs, strict=False)]

    def check_repeats(self, alone: Tensor | None = None) -> None:
        """Raise an error if the loss gives two different results for the same examples.

        Args:
            alone: losses of the chosen examples alone; if they are the same as before, nothing is run again.
        """
        before = self._losses.cpu().double()
        if alone is not None and torch.allclose(before[self._picked], alone, rtol=1e-4, equal_nan=True):
            return
        (first,) = self._fetch(self._runs(self._candidates)[:1])
        check_same_losses(self._first_losses, self._each(first), self._data.name)


def runs_of(indices: np.ndarray, most: int) -> list[np.ndarray]:
    """Split indices into runs of at most `most`, of about equal length; a batch of one shows nothing about batches."""
    return np.array_split(indices, -(-len(indices) // most))


def _spread(members: Members, count: int) -> np.ndarray:
    """Choose `count` points: the first, the last, and others at random; return them in order."""
    if len(members) <= count:
        return np.asarray(members)
    inner = np.random.default_rng(0).choice(len(members) - 2, count - 2, replace=False) + 1
    return np.asarray([members[at] for at in (0, *np.sort(inner).tolist(), len(members) - 1)])


def _lengths(batch: Any) -> list[int]:
    """Lengths of the examples of a batch: the number of their integers that are neither 0 nor ignored labels."""
    size = batch_length(batch)
    parts = [
        part for part in tensors_in(batch)
        if part.layout is torch.strided and not part.is_nested and not part.is_floating_point()
        if part.dim() > 1 and len(part) == size
    ]  # fmt: skip
    found = torch.zeros(size, dtype=torch.int64)
    for part in parts:
        found += ((part != 0) & (part != _IGNORED)).flatten(1).sum(1).cpu()
    return found.tolist()


def _shortest_and_longest(lengths: list[int]) -> list[int]:
    """Positions of the shortest and the longest example; of the first and the last if all lengths are the same."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return sorted({order[0], order[-1]})


def _multiplications(module: nn.Module, output: Tensor) -> float:
    """Approximate number of multiplications that a module does with its own parameters."""
    own = [value for _, value in module.named_parameters(recurse=False)]
    if not own or isinstance(module, nn.Embedding | nn.EmbeddingBag) or not output.dim():
        return 0.0
    channels = output.shape[1] if max(value.dim() for value in own) > 2 and output.dim() > 1 else output.shape[-1]
    return sum(value.numel() for value in own) * output.numel() / max(channels, 1)


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output if isinstance(output, tuple | list) else ()
    return next((value for value in values if isinstance(value, Tensor)), None)


def _is_given(output: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a module returns the memory of an argument, as in-place activations and inactive dropout do."""
    where = storage_of(output)
    return where is not None and any(storage_of(given) == where for given in args if isinstance(given, Tensor))
