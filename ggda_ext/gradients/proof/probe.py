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
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ggda_ext.data import IndexedData, batch_length, pick, to_device
from ggda_ext.gradients.layers import Layer, copied_parameter, known_layers
from ggda_ext.gradients.observation import Observer, hidden_hooks
from ggda_ext.gradients.plan import Facts
from ggda_ext.gradients.proof.captured_layers import CapturedLayers, strays, used_elsewhere
from ggda_ext.gradients.proof.descent import descent
from ggda_ext.gradients.proof.findings import LEAST_PLACES, MOST_PLACES, USUAL, Findings, recall, remember
from ggda_ext.gradients.proof.mixing import Mixed, check_batch, check_reduction
from ggda_ext.gradients.proof.sample import Members, Sample, runs_of
from ggda_ext.gradients.proof.truth import FAILS, Subject, Truth, beside, first_line, tolerance
from ggda_ext.gradients.strategies import BY_NAME
from ggda_ext.groups.partition import Groups
from ggda_ext.losses import ExampleLoss
from ggda_ext.model import ParameterSpace

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
        self._subject: Subject
        settings = batch_size, at_most, data.is_stream
        found = recall(space, loss, data, settings)
        if found is None:
            self._look(_members(groups), max(2, batch_size or at_most or LARGEST_BATCH))
            remember(self._found, space, loss, data, settings)
        else:
            self._found, self._subject = found, Subject(space, loss, tolerance(found.precision))
            space.changing = found.changing
        self.captured = CapturedLayers(self._subject, self._found)
        self._compare(strategy, fresh=found is None)
        copied = sum(space.parameters[name].numel() for name in self._found.copied) * space.dtype.itemsize
        self._bytes_per_point = _BYTES_PER_ACTIVATION * self._found.activation_bytes + copied
        fitting = _batch_size(self._bytes_per_point, max(self._found.work, 1.0), memory_budget)
        self._most_points = batch_size or min(fitting, at_most or fitting)
        self._even = batch_size is None and at_most is None
        self._room = min(memory_budget // self._bytes_per_point, LARGER * fitting)
        self._points, self._groups = int(groups.sizes.sum()), len(groups)

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
            batch_size=size, working_bytes=self._bytes_per_point * size, itemsize=self._space.dtype.itemsize,
            room=self._room if self._even else size,
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
        at_once = min(USUAL.examples, most)
        sample = Sample(self._space, self._loss, self._data, members, at_once)
        self._space.changing = sample.changing
        self._subject = Subject(self._space, self._loss, tolerance(sample.precision))
        mixed: Mixed | None = None

        def compare() -> None:
            if not self._data.is_stream:
                self._look_further(members, at_once)
            self._check_batches(self._layers(sample.output_dims))

        try:
            chosen = sample.chosen()
            self._begin(sample, chosen)
            sample.check_repeats(self._found.truth.losses)
            try:
                compare()
            except Mixed as error:  # or an activation is 0 but for rounding, and switches a unit on or off
                mixed = error
                try:
                    with beside(self._space):
                        self._begin(sample, chosen)
                        compare()
                except FAILS:
                    raise mixed from None
                self._found.truth = self._truth_now()
        except ValueError:
            sample.check_repeats()  # what is random may look like anything
            raise
        self._found.most_places = max(LEAST_PLACES, min(len(members) // 32, MOST_PLACES))
        most = most if sample.effort is USUAL else sample.effort.examples
        self._found.look_at(descent(self._subject, max(self._found.batches, key=batch_length), most))
        if mixed is not None and self._found.joins is not None:
            raise mixed
        if self._found.uncovered:
            self._found.work = self._counted_work()
        self._found.unseen = set(self._untouched())

    def _begin(self, sample: Sample, chosen: Sequence[tuple[Any, Sequence[Any]]]) -> None:
        """Findings about nothing but the truth about the chosen examples."""
        space, nothing = self._space, Truth.of_nothing(len(self._space.parameters))
        self._found = Findings(
            [], nothing, sample.precision, sample.bytes_per_example, sample.changing, effort=sample.effort
        )
        self._found.alters = hidden_hooks(space.model, list(space.parameters.values()))
        for batch, alone in chosen:
            self._add(batch, alone)

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
            if losses is None or not proven or bool(truth.other_losses(losses, self._subject.allowed).any()):
                run = check_batch(self._subject, batch, truth, self._data.name)
                found.told.add(run.told)
                found.alters = found.alters or run.alters
            with self._space.require_gradients(of_chosen=True):
                whole = self._loss.reduced(self._space.model, batch) if len(truth.losses) > 1 else None
            if whole is not None:
                check_reduction(float(whole.detach()), truth.losses, self._subject.allowed)

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
            why = compare(self._subject, found) or self._unproven()
            found.refused |= {} if why is None else {name: why}
            found.looked_at.add(name)

    def _truth_now(self) -> Truth:
        """The truth about the examples at the parameters that the model has now."""
        batches = self._found.batches
        return self._subject.truth([pick(batch, [at]) for batch in batches for at in range(batch_length(batch))])

    def _add(self, batch: Any, alone: Sequence[Any]) -> None:
        """Find the truth about the examples of a batch, and keep it to compare strategies with."""
        self._found.truth = self._found.truth.joined(self._subject.truth(alone))
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
                scores = self._subject.run(batch).total
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
        found.uncovered = self._strayed | used_elsewhere(self._subject, found.truth, scores)
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
                some, calls = self._subject.captured(layers, batch, work)
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
