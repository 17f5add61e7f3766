"""A look at a few examples before a pass: do they have gradients of their own, do layers give them, what do they cost?

The examples come from the whole data: the first, the last, those with a large loss (a gradient near zero shows
nothing), and others at random. Each is run alone by plain autograd. Then two things are checked: the loss of a batch
must be made of the losses of its examples, and the layers must give the gradients that autograd gives. If no example
touched a parameter, more examples are looked at.

If a model takes seconds for eight examples, only two are run, a short and a long one, because padding and counts of
tokens are what such models may mix. The look then takes less time than a batch of eight. The exception is a model whose
losses are reduced by the user's own function: it may leave out any example, so all eight are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ggda_ext.data import IndexedData, batch_length, to_device
from ggda_ext.gradients.layers import Layer, copied_parameter, known_layers
from ggda_ext.gradients.observation import Observer, hidden_hooks
from ggda_ext.gradients.proof.captured_layers import strays, used_elsewhere
from ggda_ext.gradients.proof.descent import descent
from ggda_ext.gradients.proof.findings import LEAST_PLACES, MOST_PLACES, USUAL, Findings
from ggda_ext.gradients.proof.mixing import Mixed, check_batch, check_reduction
from ggda_ext.gradients.proof.sample import Members, Sample, runs_of
from ggda_ext.gradients.proof.truth import FAILS, Subject, Truth, beside, first_line, tolerance
from ggda_ext.groups.partition import Groups
from ggda_ext.losses import ExampleLoss
from ggda_ext.model import ParameterSpace

_ROUNDS = 2  # how often more examples are looked at for a parameter that the first ones do not touch


def look(space: ParameterSpace, loss: ExampleLoss, data: IndexedData, groups: Groups, most: int) -> Findings:
    """Look at a few examples and return the findings.

    Args:
        space: model and chosen parameters.
        loss: loss of the training points.
        data: the training points.
        groups: groups of the training points; points without a group are not looked at.
        most: most examples that may be run at once.
    """
    inside = range(groups.n) if int(groups.sizes.sum()) == groups.n else np.flatnonzero(groups.labels >= 0)
    return _Look(space, loss, data, inside, most).findings()


class _Look:
    """One look at a model, and what it has found so far.

    Args:
        space, loss, data, most: as in `look`.
        members: indices that the examples are drawn from.
    """

    def __init__(
        self, space: ParameterSpace, loss: ExampleLoss, data: IndexedData, members: Members, most: int
    ) -> None:
        self._space, self._loss, self._data, self._members, self._most = space, loss, data, members, most
        self._at_once = min(USUAL.examples, most)
        self._sample = Sample(space, loss, data, members, self._at_once)
        space.changing = self._sample.changing
        self._subject = Subject(space, loss, tolerance(self._sample.precision))
        self._found: Findings

    def findings(self) -> Findings:
        """Compare the layers, and the loss of a batch, with autograd on examples of the data; return the findings."""
        sample, mixed = self._sample, None
        try:
            chosen = sample.chosen()
            self._begin(chosen)
            sample.check_repeats(self._found.truth.losses)
            try:
                self._compare()
            except Mixed as error:  # it may also be an activation that is 0 up to rounding and switches a unit
                mixed = error
                try:
                    with beside(self._space):
                        self._begin(chosen)
                        self._compare()
                except FAILS:
                    raise mixed from None
                self._found.truth = self._subject.truth_of_each(self._found.batches)
        except ValueError:
            sample.check_repeats()  # a random loss can cause any of these errors
            raise
        found = self._found
        found.most_places = max(LEAST_PLACES, min(len(self._members) // 32, MOST_PLACES))
        most = self._most if sample.effort is USUAL else sample.effort.examples
        found.look_at(descent(self._subject, max(found.batches, key=batch_length), most))
        if mixed is not None and found.joins is not None:
            raise mixed
        if found.uncovered:
            found.work = self._counted_work()
        found.unseen = set(found.untouched(self._space))
        return found

    def _begin(self, chosen: Sequence[tuple[Any, Sequence[Any]]]) -> None:
        """Start new findings, which hold only the truth about the chosen examples."""
        space, sample, nothing = self._space, self._sample, Truth.of_nothing(len(self._space.parameters))
        self._found = Findings(
            [], nothing, self._subject.allowed, sample.bytes_per_example, sample.changing, effort=sample.effort
        )
        self._found.alters = hidden_hooks(space.model, list(space.parameters.values()))
        for batch, alone in chosen:
            self._add(batch, alone)

    def _compare(self) -> None:
        """Compare with autograd, on more examples if the first ones do not touch all parameters."""
        if not self._data.is_stream:
            self._look_further()
        self._check_batches(self._layers())

    def _check_batches(self, seen: list[Tensor] | None) -> None:
        """Raise an error if the loss of a batch is not made of the losses of its examples.

        Args:
            seen: losses of every batch `[b]`, if the layers gave the gradient that each example has alone. Then the
                gradient of the batch is their sum. None if plain autograd has to check this.
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

    def _add(self, batch: Any, alone: Sequence[Any]) -> None:
        """Find the truth about the examples of a batch, and keep it to compare strategies with."""
        self._found.truth = self._found.truth.joined(self._subject.truth(alone))
        self._found.batches.append(batch)

    def _look_further(self) -> None:
        """Look for examples that touch the parameters that the first examples did not touch."""
        if bool(self._found.truth.touched.all()):
            return
        more = self._found.effort.more
        members = self._members
        count = min(_ROUNDS * more, len(members))
        others = np.random.default_rng(1).choice(len(members), count, replace=False).tolist()
        for start in range(0, count, more):
            missing = ~self._found.truth.touched
            if not bool(missing.any()):
                return
            some = np.asarray([members[at] for at in others[start : start + more]])
            runs = runs_of(some, self._at_once)
            device = self._space.device
            for run, batch in zip(runs, [to_device(b, device) for b in self._data.batches(runs)], strict=True):
                scores = self._subject.run(batch).total
                if not bool((scores[missing] != 0).any()):
                    continue
                self._add(batch, [to_device(one, device) for one in self._data.batches([[at] for at in run])])

    # what the strategies can see

    def _layers(self) -> list[Tensor] | None:
        """Find out which layers can be observed, and compare their gradients with autograd.

        Returns:
            The losses of every batch `[b]`, if the layers give the gradients of all parameters; otherwise None.
        """
        found, space = self._found, self._space
        if found.hooked:
            found.uncovered = dict.fromkeys(space.parameters, f"{found.alters} changes gradients")
            return None
        _, unknown = known_layers(space)
        if unknown and not self._loss.vectorized:
            unknown = self._without_copied(unknown)
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
        """Multiplications of a forward pass over one example, counted by PyTorch, if the layers do not show them."""
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
        """Return the scores of all examples from the layers `[b, q]` and the losses, or the reason why there are none.

        Keeps the work that the layers do, and why `ghost` cannot be used.
        """
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

    def _without_copied(self, unknown: dict[str, str]) -> dict[str, str]:
        """Give unknown parameters as one copy per example where that works; return those that stay unknown."""
        by_kind: dict[type, dict[str, Layer]] = {}
        for parameter_name, (name, module, key) in _owners(self._space, unknown).items():
            parameter = self._space.parameters[parameter_name]
            layer = copied_parameter(name, module, key, parameter, self._sample.output_dims.get(name, 0))
            if layer is not None and not isinstance(module, torch.jit.ScriptModule):
                by_kind.setdefault(type(module), {})[parameter_name] = layer
        for layers in by_kind.values():
            if not isinstance(self._captured(list(layers.values())), str):
                for parameter_name, layer in layers.items():
                    assert layer.copied is not None
                    self._found.copied[parameter_name] = (layer.name, *layer.copied)
        return {name: why for name, why in unknown.items() if name not in self._found.copied}


def _owners(space: ParameterSpace, names: dict[str, str]) -> dict[str, tuple[str, nn.Module, str]]:
    """The module that owns each parameter, as (module name, module, parameter name there).

    Parameters with several modules are left out.
    """
    wanted = {id(space.parameters[name]): name for name in names}
    found: dict[str, list[tuple[str, nn.Module, str]]] = {}
    for module_name, module in space.model.named_modules():
        for key, value in module.named_parameters(recurse=False):
            if id(value) in wanted:
                found.setdefault(wanted[id(value)], []).append((module_name, module, key))
    return {name: places[0] for name, places in found.items() if len(places) == 1}


class _Work(Observer):
    """Counts the multiplications of a forward pass per example, and of `ghost` per pair of examples."""

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
    """The reason why `ghost` cannot be used with one of the layers, whether the examples use it or not; else None."""
    kinds = (layer for layer in layers if not isinstance(layer.module, nn.Linear) or layer.copied is not None)
    return next((f"{type(layer.module).__name__} {layer.name!r} is not a Linear layer" for layer in kinds), None)


def _shared_parameter(layers: list[Layer]) -> str | None:
    seen = [id(value) for layer in layers for value in (layer.weight, layer.bias) if value is not None]
    return "two layers share a parameter" if len(set(seen)) < len(seen) else None
