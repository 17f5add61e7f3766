"""A look at a few examples before the work starts: what has an answer, which strategies give it, what they will cost.

The examples come from the whole data: the first, the last, those with a large loss (a gradient near zero tells
nothing), others at random. Each is run alone through plain autograd. Then the loss of a batch must be made of the
losses of its examples, and whatever a strategy says about them must be what autograd says. For a parameter that no
example touched, more of them are looked at; a strategy that cannot be compared with autograd is not trusted.

Of a model that takes seconds for eight examples only two are run, a short and a long one (padding and counts of tokens
are what examples of such models may mix), so that all this takes less than a batch of eight. Not so where the user's
own function reduces the losses of a batch, which may leave out any of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ggda_ext.data import IndexedData, batch_length, pick, tensors_in, to_device
from ggda_ext.gradients.descent import descent, storage_of
from ggda_ext.gradients.layers import Layer, copied_parameter, known_layers
from ggda_ext.gradients.mixing import check_batch, check_reduction
from ggda_ext.gradients.observation import Observer, hidden_hooks
from ggda_ext.gradients.plan import Facts
from ggda_ext.gradients.proof import (
    LEAST_PLACES,
    LITTLE,
    MOST_PLACES,
    USUAL,
    CapturedLayers,
    Findings,
    recall,
    remember,
    strays,
)
from ggda_ext.gradients.strategies import BY_NAME
from ggda_ext.gradients.truth import (
    FAILS,
    Truth,
    captured_scores,
    check_same_losses,
    first_line,
    random_direction,
    tolerance,
    total_scores,
    truth_alone,
)
from ggda_ext.groups.partition import Groups
from ggda_ext.losses import ExampleLoss
from ggda_ext.model import ParameterSpace, SavedState, may_change

LARGEST_BATCH = 2**17
CACHED_BYTES = 26 * 2**20  # of activations of a batch, near the cache
ENOUGH_WORK = 2**27  # multiplications; a batch of fewer may be twice as large: what is done once per batch counts there
LARGER = 3  # times a batch that is near the cache, where something is read once per batch
ENOUGH_POINTS = 1024  # but no fewer points than this, if the budget allows
_BYTES_PER_ACTIVATION = 4  # an activation, its gradient, what autograd keeps of it, and a tangent
_ROUNDS = 2  # of looking at more examples for a parameter that the first ones do not touch


class Probe:
    """The layers to observe and the facts the choice of a strategy depends on.

    Args:
        space: model and chosen parameters.
        loss: of the training points.
        data: the training points.
        groups: of them.
        batch_size: asked for, or None.
        memory_budget: bytes for a batch's activations.
        strategy: asked for, or ``"auto"``.
        at_most: points that the user's own batches have; more are not run at once unless asked for.
    """

    def __init__(
        self,
        space: ParameterSpace,
        loss: ExampleLoss,
        data: IndexedData,
        groups: Groups,
        batch_size: int | None,
        memory_budget: int,
        strategy: str,
        at_most: int | None = None,
    ) -> None:
        self._space, self._loss, self._data = space, loss, data
        self._found: Findings
        settings = batch_size, at_most, data.is_stream
        found = recall(space, loss, data, settings)
        if found is None:
            self._look(_members(groups), max(2, batch_size or at_most or LARGEST_BATCH))
            remember(self._found, space, loss, data, settings)
        else:
            self._found, self._allowed = found, tolerance(found.precision)
            space.changing = found.changing
        self.captured = CapturedLayers(space, self._found, loss, self._allowed)
        self._compare(strategy, fresh=found is None)
        copied = sum(space.parameters[name].numel() for name in self._found.copied) * space.dtype.itemsize
        self._bytes_per_point = _BYTES_PER_ACTIVATION * self._found.activation_bytes + copied
        fitting = _batch_size(self._bytes_per_point, max(self._found.work, 1.0), memory_budget)
        self._most_points = batch_size or min(fitting, at_most or fitting)
        self._even = batch_size is None and at_most is None
        self._room = min(memory_budget // self._bytes_per_point, LARGER * fitting)
        self._points, self._groups = int(groups.sizes.sum()), len(groups)

    @cached_property
    def _direction(self) -> Tensor:
        """Along which gradients are compared `[1, p]`."""
        return random_direction(self._space)

    @property
    def facts(self) -> Facts:
        """What the choice of a strategy depends on."""
        found, size = self._found, min(self._most_points, self._points)
        if self._even and size:  # a last batch of a few points is slow for its size
            size = ceil(self._points / ceil(self._points / size))
        return Facts(
            points=self._points, groups=self._groups, parameters=self._space.size,
            work_per_point=max(found.work, 1.0),
            ghost_work=found.ghost_work, uncovered=found.uncovered, refused=dict(found.refused),
            compared=frozenset(found.looked_at),
            batch_size=size, working_bytes=self._bytes_per_point * size, room=self._room if self._even else size,
        )  # fmt: skip

    def on(self, groups: Groups) -> Probe:
        """The same model with other groups of more data of the same kind."""
        other = copy.copy(self)
        other._points, other._groups = int(groups.sizes.sum()), len(groups)
        return other

    def give_up(self, why: Mapping[str, str], refused: Mapping[str, str]) -> None:
        """Do without what a pass found not to tell the gradient, as an `Unproven` says.

        Args:
            why: parameters whose layers do not: name → why.
            refused: strategies that do not: name → why.
        """
        self._found.refused |= refused
        self._found.uncovered = {**self._found.uncovered, **why}
        self._compare("auto")

    def _look(self, members: Members, most: int) -> None:
        """Compare the layers, and what makes up the loss of a batch, with autograd on examples of the data.

        Args:
            members: where the examples are drawn from.
            most: examples that may be run at once.
        """
        space, nothing = self._space, Truth.of_nothing(len(self._space.parameters))
        at_once = min(USUAL.examples, most)
        sample = Sample(space, self._loss, self._data, members, at_once)
        space.changing = sample.changing
        self._found = Findings(
            [], nothing, sample.precision, sample.bytes_per_example, space.changing, effort=sample.effort
        )
        self._found.alters = hidden_hooks(space.model, list(space.parameters.values()))
        self._allowed = tolerance(sample.precision)
        try:
            for batch, alone in sample.chosen():
                self._add(batch, alone)
            sample.check_repeats(self._found.truth.losses)
            if not self._data.is_stream:
                self._look_further(members, at_once)
            self._check_batches(self._layers(sample.output_dims))
        except ValueError:
            sample.check_repeats()  # what is random may look like anything
            raise
        self._found.most_places = max(LEAST_PLACES, min(len(members) // 32, MOST_PLACES))
        most = most if sample.effort is USUAL else sample.effort.examples
        self._found.look_at(descent(space, self._loss, max(self._found.batches, key=batch_length), most))
        if self._found.uncovered:
            self._found.work = self._counted_work()
        self._found.unseen = set(self._untouched())

    def _check_batches(self, seen: list[Tensor] | None) -> None:
        """Refuse a loss of batches that is not made of the losses of their examples.

        Args:
            seen: losses of every batch `[b]`, if the layers gave the gradient of each of its examples alone. Then the
                batch has the sum of them; else plain autograd tells.
        """
        found, low = self._found, 0
        for number, batch in enumerate(found.batches):
            truth = found.truth.at(slice(low, low + batch_length(batch)))
            low += batch_length(batch)
            losses = None if seen is None else seen[number].cpu().double()
            proven = losses is not None and bool((truth.finite & losses.isfinite()).all())
            if losses is None or not proven or bool(truth.other_losses(losses, self._allowed).any()):
                run = check_batch(
                    self._space, self._loss, batch, truth, self._direction, self._allowed, self._data.name
                )
                found.told.add(run.told)
                found.alters = found.alters or run.alters
            with self._space.require_gradients(of_chosen=True):
                whole = self._loss.reduced(self._space.model, batch) if len(truth.losses) > 1 else None
            if whole is not None:
                check_reduction(float(whole.detach()), truth.losses, self._allowed)

    def _compare(self, strategy: str, *, fresh: bool = False) -> None:
        """Compare strategies that do without layers with autograd, if they may be needed.

        Args:
            strategy: asked for, or ``"auto"``.
            fresh: whether the truth was found at the parameters that the model has now.
        """
        found = self._found
        missing = [name for name in BY_NAME if found.uncovered or name == strategy if name not in found.looked_at]
        for name in missing:
            compare = BY_NAME[name].compare
            if compare is None:
                continue
            if not fresh:
                found.truth, fresh = self._truth_now(), True
            why = compare(self.captured, self._direction) or self._unproven()
            found.refused |= {} if why is None else {name: why}
            found.looked_at.add(name)

    def _truth_now(self) -> Truth:
        """The truth about the examples at the parameters that the model has now."""
        alone = [pick(batch, [at]) for batch in self._found.batches for at in range(batch_length(batch))]
        return truth_alone(self._space, self._loss, alone, self._direction)

    def _add(self, batch: Any, alone: Sequence[Any]) -> None:
        """Find the truth about the examples of a batch, and keep it to compare strategies with."""
        truth = truth_alone(self._space, self._loss, alone, self._direction)
        self._found.truth = self._found.truth.joined(truth)
        self._found.batches.append(batch)

    def _look_further(self, members: Members, at_once: int) -> None:
        """Look for examples that touch the parameters which the first ones did not touch."""
        if bool(self._found.truth.touched.all()):
            return
        more = self._found.effort.more
        count = min(_ROUNDS * more, len(members))
        others = np.random.default_rng(1).choice(len(members), count, replace=False).tolist()
        for start in range(0, count, more):
            missing = ~self._found.truth.touched
            if not bool(missing.any()):
                return
            some = np.asarray([members[at] for at in others[start : start + more]])
            runs = runs_of(some, at_once)
            device = self._space.device
            for run, batch in zip(runs, [to_device(b, device) for b in self._data.batches(runs)], strict=True):
                scores = total_scores(self._space, self._loss, batch, self._direction)
                if not bool((scores[missing] != 0).any()):
                    continue
                self._add(batch, [to_device(one, device) for one in self._data.batches([[at] for at in run])])

    # what the strategies can see

    def _layers(self, output_dims: dict[str, int]) -> list[Tensor] | None:
        """Find out which layers can be observed, and compare what they say with autograd.

        Returns:
            The losses of every batch `[b]`, if the layers say all there is to say.
        """
        found, space = self._found, self._space
        if found.hooked:
            found.uncovered = dict.fromkeys(space.parameters, f"{found.alters} changes gradients")
            return None
        _, unknown = known_layers(space)
        if unknown and not self._loss.vectorized:
            unknown = self._without_copied(unknown, output_dims)
        found.uncovered = unknown
        if unknown:
            return None
        seen = self._captured(found.layers(space))
        if isinstance(seen, str):
            found.copies_output = True  # perhaps an output is overwritten in place
            again = self._captured(found.layers(space))
            if isinstance(again, str):
                found.copies_output = False
                found.uncovered = dict.fromkeys(space.parameters, seen)
                return None
            seen = again
        scores, losses = seen
        wrong = found.truth.differs(scores, self._allowed).tolist()
        found.uncovered = self._strayed | {
            name: f"{name!r} is used in a way its layer alone does not show"
            for name, is_wrong in zip(space.parameters, wrong, strict=True)
            if is_wrong
        }
        return None if found.uncovered else losses

    def _counted_work(self) -> float:
        """Multiplications of a forward pass over one example, where the layers do not tell: as PyTorch counts them."""
        batch, least = self._found.batches[0], float(self._space.size)
        try:
            with (
                self._space.require_gradients(of_chosen=False),
                torch.no_grad(),
                FlopCounterMode(display=False) as counter,
            ):
                self._loss.each(self._space.model, batch)
        except FAILS:  # nested tensors, for one, cannot be counted
            return least
        return max(counter.get_total_flops() / 2 / batch_length(batch), least)

    def _captured(self, layers: list[Layer]) -> tuple[Tensor, list[Tensor]] | str:
        """Scores of all examples from the layers `[b, q]`, with losses, or why there are none; keeps what they cost."""
        found, scores, losses = self._found, [], []
        found.proven.clear()
        self._strayed: dict[str, str] = {}
        work = _Work(sum(map(batch_length, found.batches)))
        try:
            for batch in found.batches:
                some, calls = captured_scores(self._space, layers, self._loss, batch, self._direction, work)
                found.alters = found.alters or calls.alters
                if found.hooked:
                    return f"{found.alters} changes gradients"
                if calls.misplaced is not None or calls.losses is None:
                    return f"the rows of layer {calls.misplaced!r} are not those of the examples in their order"
                found.proven.add(calls.signature)
                found.told.add(calls.watch.told)
                self._strayed |= strays(self._space, calls)
                scores.append(some)
                losses.append(calls.losses)
        except FAILS as error:
            return first_line(error)
        found.work, found.ghost_work = work.forward_pass, work.pairs
        not_ghost = _other_layer(layers) or work.not_ghost or _shared_parameter(layers)
        found.refused = {} if not_ghost is None else {"ghost": not_ghost}
        return torch.cat(scores), losses

    def _without_copied(self, unknown: dict[str, str], output_dims: dict[str, int]) -> dict[str, str]:
        """The unknown parameters that cannot be given as copies, one per example."""
        by_kind: dict[type, dict[str, Layer]] = {}
        for parameter_name, (name, module, key) in _owners(self._space, unknown).items():
            parameter = self._space.parameters[parameter_name]
            layer = copied_parameter(name, module, key, parameter, output_dims.get(name, 0))
            if layer is not None and not isinstance(module, torch.jit.ScriptModule):
                by_kind.setdefault(type(module), {})[parameter_name] = layer
        for layers in by_kind.values():
            if not isinstance(self._captured(list(layers.values())), str):
                for parameter_name, layer in layers.items():
                    assert layer.copied is not None
                    self._found.copied[parameter_name] = (layer.name, *layer.copied)
        return {name: why for name, why in unknown.items() if name not in self._found.copied}

    def _untouched(self) -> dict[str, nn.Parameter]:
        pairs = zip(self._space.parameters.items(), self._found.truth.touched.tolist(), strict=True)
        return {name: parameter for (name, parameter), is_touched in pairs if not is_touched}

    def _unproven(self) -> str | None:
        """Why no strategy can be compared with autograd, or None."""
        untouched = list(self._untouched())
        if not untouched:
            return None
        return (
            f"no example of {self._data.name} was found whose loss depends on parameter {untouched[0]!r}, so its "
            "gradient cannot be compared with autograd"
        )


def _members(groups: Groups) -> Members:
    """The points that are in a group."""
    return range(groups.n) if int(groups.sizes.sum()) == groups.n else np.flatnonzero(groups.labels >= 0)


def _owners(space: ParameterSpace, names: dict[str, str]) -> dict[str, tuple[str, nn.Module, str]]:
    """The module of each parameter: its name, itself, and what it calls the parameter; none if there are several."""
    wanted = {id(space.parameters[name]): name for name in names}
    found: dict[str, list[tuple[str, nn.Module, str]]] = {}
    for module_name, module in space.model.named_modules():
        for key, value in module.named_parameters(recurse=False):
            if id(value) in wanted:
                found.setdefault(wanted[id(value)], []).append((module_name, module, key))
    return {name: places[0] for name, places in found.items() if len(places) == 1}


def _batch_size(bytes_per_point: int, work_per_point: float, memory_budget: int) -> int:
    light = min(2 * CACHED_BYTES / bytes_per_point, ENOUGH_WORK / work_per_point)
    wanted = max(CACHED_BYTES // bytes_per_point, ENOUGH_POINTS, light)
    size = int(max(1, min(wanted, memory_budget // bytes_per_point, LARGEST_BATCH)))
    step = 16 if size > 64 else 4 if size > 16 else 1
    return size - size % step


class _Work(Observer):
    """Multiplications per example, of a forward pass and of a pair of examples in `ghost`."""

    def __init__(self, size: int) -> None:
        self.size, self.forward_pass, self.pairs = size, 0.0, 0.0
        self.not_ghost: str | None = None

    def backward(self, layer: Layer, kept: Tensor, d: Tensor, repeats: int) -> None:
        if isinstance(layer.module, nn.Embedding | nn.EmbeddingBag) or layer.weight is None or layer.weight.dim() < 2:
            self.forward_pass += d.numel() / self.size
        else:
            channels = d.shape[-1] if isinstance(layer.module, nn.Linear) else d.shape[1]
            self.forward_pass += layer.weight.numel() * d.numel() / channels / self.size
        self.pairs += (kept.numel() + d.numel()) / self.size
        if kept.dim() != 2 or repeats != 1:
            self.not_ghost = f"Linear {layer.name!r} sees more than one token per example"


def _other_layer(layers: list[Layer]) -> str | None:
    """Why a layer is not for `ghost`, whether the examples reach it or not."""
    kinds = (layer for layer in layers if not isinstance(layer.module, nn.Linear) or layer.copied is not None)
    return next((f"{type(layer.module).__name__} {layer.name!r} is not a Linear layer" for layer in kinds), None)


def _shared_parameter(layers: list[Layer]) -> str | None:
    seen = [id(value) for layer in layers for value in (layer.weight, layer.bias) if value is not None]
    return "two layers share a parameter" if len(set(seen)) < len(seen) else None


HEAVY = 2**30
"""Multiplications of a forward pass over one example, from which on a look at eight examples takes seconds."""
_IGNORED = -100  # what losses of PyTorch leave out

Members = np.ndarray | range
"""Indices of the points that are in a group."""


class Sample:
    """The first run of some examples: bytes, precision and shapes of activations, and the examples to compare.

    Attributes:
        effort: how much is to be compared; little where the model is expensive.
        changing: names of what `forward` changes.
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
        if space.size * numbers > HEAVY:  # most models use a parameter less often than an example has numbers
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
        """Whether it is known what makes up the loss of a batch: any example may show a function of the user's own."""
        with self._put_back(), self._space.require_gradients(of_chosen=False):
            return self._loss.reduced(self._space.model, batch) is None

    @contextmanager
    def _put_back(self) -> Iterator[SavedState]:
        """Give the model back what it changes."""
        saved = SavedState(self._space.model, may_change(self._space.model))
        try:
            yield saved
        finally:
            saved.restore()

    def _fetch(self, runs: Sequence[Any]) -> list[Any]:
        """The batches of some runs of indices."""
        if self._head is not None:
            return [pick(self._head, list(run)) for run in runs]
        return [to_device(batch, self._device) for batch in self._data.batches(runs)]

    def _run(self, batches: list[Any]) -> list[Tensor]:
        """Losses `[b]` of batches; keeps what their activations show."""
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
        with self._put_back() as saved:
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
        """What autograd keeps for a backward pass, for modules that cannot be looked into."""
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
        with self._space.require_gradients(of_chosen=True):  # a loss may take gradients of its own
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
        """The examples to compare, as batches, each with its examples alone: first, last, and those of large loss."""
        ends = [0, len(self._candidates) - 1]
        large = torch.argsort(self._losses.detach().float().nan_to_num(-1, -1, -1), descending=True).tolist()
        self._picked = torch.tensor(list(dict.fromkeys([*ends, *large]))[: self.effort.examples])
        picked = self._candidates[self._picked.numpy()]
        runs = self._runs(picked)
        fetched = self._fetch([*runs, *[[index] for index in picked]])
        alone = iter(fetched[len(runs) :])
        return [(batch, [next(alone) for _ in run]) for batch, run in zip(fetched, runs, strict=False)]

    def check_repeats(self, alone: Tensor | None = None) -> None:
        """Refuse a loss that gives two answers for the same examples.

        Args:
            alone: losses of the chosen examples alone: where they are as before, nothing needs to run again.
        """
        before = self._losses.cpu().double()
        if alone is not None and torch.allclose(before[self._picked], alone, rtol=1e-4, equal_nan=True):
            return
        (first,) = self._fetch(self._runs(self._candidates)[:1])
        check_same_losses(self._first_losses, self._each(first), self._data.name)


def runs_of(indices: np.ndarray, most: int) -> list[np.ndarray]:
    """Indices in runs of at most `most`, all about equally long: a batch of one would tell nothing about batches."""
    return np.array_split(indices, -(-len(indices) // most))


def _spread(members: Members, count: int) -> np.ndarray:
    """The first and the last of the points, and others at random, in order."""
    if len(members) <= count:
        return np.asarray(members)
    inner = np.random.default_rng(0).choice(len(members) - 2, count - 2, replace=False) + 1
    return np.asarray([members[at] for at in (0, *np.sort(inner).tolist(), len(members) - 1)])


def _lengths(batch: Any) -> list[int]:
    """How long the examples of a batch are: entries of their integers that are neither 0 nor ignored labels."""
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
    """Positions of two examples; of the first and the last if all are alike."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return sorted({order[0], order[-1]})


def _multiplications(module: nn.Module, output: Tensor) -> float:
    """About how many a module makes with its own parameters."""
    own = [value for _, value in module.named_parameters(recurse=False)]
    if not own or isinstance(module, nn.Embedding | nn.EmbeddingBag) or not output.dim():
        return 0.0
    channels = output.shape[1] if max(value.dim() for value in own) > 2 and output.dim() > 1 else output.shape[-1]
    return sum(value.numel() for value in own) * output.numel() / max(channels, 1)


def _is_given(output: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a module returns the memory it was given, as activations in place and dropout that is off do."""
    where = storage_of(output)
    return where is not None and any(storage_of(given) == where for given in args if isinstance(given, Tensor))


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output if isinstance(output, tuple | list) else ()
    return next((value for value in values if isinstance(value, Tensor)), None)
