"""The layers of a model, watched during a pass: what was proven on a few examples must also hold for every batch.

It holds only if the model treats all batches in the same way. So a pass checks three things:

* In the first batches: are the rows of some examples the same as in a batch without the others? (A model may reorder
  its batch, or cut it.)
* In every batch: is each layer called as often, with as many rows per example, as when it was compared? Does the model
  call the same functions? Are parameters used only by their layers? If a function may move rows, join examples or
  treat them by their places, all rows of the batch are checked.
* For parameters that no example touched so far: does an example touch them now?

Anything new is compared with autograd immediately. If it differs, the pass raises `Unproven` and gives no numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import compress
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ggda_ext.data import batch_length, pick
from ggda_ext.gradients.errors import NotForward, Unproven
from ggda_ext.gradients.layers import Layer, UnknownLayer
from ggda_ext.gradients.observation import Calls, Observation, Observer, Watch, observe
from ggda_ext.gradients.proof.descent import RANDOM, descent
from ggda_ext.gradients.proof.findings import Findings
from ggda_ext.gradients.proof.mixing import check_losses, check_sum, cuts, halves, splits
from ggda_ext.gradients.proof.truth import Subject, Tolerance, Truth, wide
from ggda_ext.model import ParameterSpace, all_finite

_TRIED = 64  # most examples of a batch that are tried to find one that touches a parameter
HOOKED = "the model puts hooks on gradients, which layers may see before they are changed"


class CapturedLayers:
    """The layers of a model to observe, with what has been proven about them.

    Args:
        subject: the model and its loss.
        found: what is known about the model and its loss; a pass adds to it.
    """

    def __init__(self, subject: Subject, found: Findings) -> None:
        self.subject, self.space, self.found = subject, subject.space, found
        self.layers = found.layers(self.space)
        self._holding, self._held = False, ExitStack()
        self._observation: Observation | None = None

    @contextmanager
    def held(self, wanted: bool) -> Iterator[None]:
        """Leave the hooks on the layers between batches inside this context, which saves time.

        Args:
            wanted: whether to do so; False if the user's code makes the batches, because it may run the model.
        """
        self._holding = wanted and not self.space.changing  # what a batch changes must be restored after it
        try:
            yield
        finally:
            self._holding = False
            self._release()

    def _release(self) -> None:
        """Take the hooks off the layers."""
        self._observation = None
        self._held.close()

    def _observe(self, batch: Any, observer: Observer) -> Calls:
        """Run a batch under observation; the hooks stay on if they are held."""
        if self._observation is None:
            unseen = [self.space.parameters[name] for name in self.found.unseen]
            self._observation = self._held.enter_context(
                Observation(self.space, self.layers, self.subject.loss, unseen).on()
            )
        try:
            with self._named():
                return self._observation.run(batch, observer, self._closely, self.subject.allowed.rows)
        finally:
            if not self._holding:
                self._release()

    def run(self, batch: Any, observer: Observer) -> None:
        """Run a batch forward and backward under an observer.

        Raises:
            Unproven: if the model treats the batch in a way that was not proven and that disagrees with autograd.
        """
        size = batch_length(batch)
        recorder = None
        places = self.found.new_places(size)
        if size > 1 and (places or self.found.rows_compared < self.found.effort.rows):
            positions = [*range(1, places), 0] if places else self._some(size)  # compared in other places
            recorder = _Recorder(positions, size, observer)
        calls = self._observe(batch, recorder or observer)
        new = bool(calls.touched) or calls.signature not in self.found.proven
        odd = calls.suspicious or self._mixes(calls.watch)
        if new or recorder is not None or odd:
            self._release()  # plain autograd runs without hooks
        if calls.strayed:
            raise Unproven(strays(self.space, calls))
        if odd:
            self._check_order(batch, calls)
        if new:
            self._prove(batch, calls)
        elif recorder is not None:
            self._compare(batch, recorder)

    def check_forward(self, batch: Any, tangent: dict[str, Tensor], scores: Tensor, watch: Watch) -> None:
        """Compare the scores `[b]` of `forward` along one direction with autograd, if `forward` may miss something.

        Args:
            batch: the examples.
            tangent: the direction, by parameter.
            scores: scores of the examples.
            watch: what the model did.

        Raises:
            NotForward: if a hook or an autograd function changes gradients, or the sum of the scores is not autograd's.
        """
        proven = watch.hooks is None and not watch.asks and watch.called in self.found.forward_proven
        finite = all_finite(scores)
        if proven and finite:
            return
        run = self.subject.run(batch, list(tangent.values()))
        if run.alters is not None:
            raise NotForward(f"{run.alters} changes gradients, which forward-mode differentiation does not see")
        total, room = float(run.total.double().sum()), float(wide(scores).double().abs().sum())
        if not finite and not isfinite(total):
            return  # an example without a finite gradient, which the scores will name
        if not abs(float(wide(scores).double().sum()) - total) <= 10 * self.subject.allowed.most * (room + abs(total)):
            raise NotForward("forward-mode differentiation of the model disagrees with its gradient")
        self.found.forward_proven.add(watch.called)

    def check_apart(self, batch: Any, losses: Tensor, watch: Watch) -> None:
        """Raise an error if a batch is not the sum of small batches; checked only if the model may mix its examples.

        Args:
            batch: the examples.
            losses: losses of the examples in this batch `[b]`.
            watch: what the model did.
        """
        places = self.found.new_places(watch.size)
        if places:
            self._check_parts(pick(batch, range(places)), losses[:places])
            self.found.places = places
        if not self._mixes(watch):
            return
        if watch.size > self.found.apart.get(watch.called, 0):
            self._check_parts(batch, losses)
            self.found.apart[watch.called] = watch.size
        else:
            check_losses(self.subject, batch, losses, halves(watch.size))
        if self.found.joins is not None:
            check_losses(self.subject, batch, losses, splits(watch.size))
        if watch.told not in self.found.told:
            self.found.look_at(descent(self.subject, batch, watch.size, watch.called))
            self.found.told.add(watch.told)

    def _check_parts(self, batch: Any, losses: Tensor) -> None:
        """Raise an error if a batch is not the sum of its parts, some of which are small."""
        for parts in cuts(len(losses)):
            check_losses(self.subject, batch, losses, parts)
            check_sum(self.subject, batch, parts)

    def _mixes(self, watch: Watch) -> bool:
        """Whether the model may mix the examples of a batch in a way that has not been checked."""
        if watch.size < 2:
            return self.found.joins == RANDOM
        return watch.moves is not None or self.found.joins is not None or watch.told not in self.found.told

    def _closely(self, watch: Watch) -> bool:
        """Whether to check which example each row belongs to."""
        return self.found.alters is not None or watch.moves is not None or self.found.joins is not None

    def _check_order(self, batch: Any, calls: Calls) -> None:
        """Raise `Unproven` if rows of a batch are not those of its examples, or another error if examples are mixed."""
        if calls.watch.hooks is not None:
            raise Unproven(dict.fromkeys(self.space.parameters, HOOKED))
        if calls.losses is not None and self._mixes(calls.watch):
            self.check_apart(batch, calls.losses, calls.watch)
        if calls.misplaced is not None:
            why = (
                f"the rows of layer {calls.misplaced!r} are not those of the examples in their order "
                f"(in a batch of {batch_length(batch)} examples)"
            )
            raise Unproven(dict.fromkeys(self.space.parameters, why))

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turn an `UnknownLayer` error into an `Unproven` for all parameters, as any of them may be affected."""
        try:
            yield
        except UnknownLayer as error:
            raise Unproven(dict.fromkeys(self.space.parameters, str(error))) from error

    def _some(self, size: int) -> list[int]:
        """Positions of examples in a batch: the first, the last, and others that vary from batch to batch."""
        others = torch.randperm(size, generator=torch.Generator().manual_seed(self.found.rows_compared)).tolist()
        return sorted({0, size - 1, *others[: self.found.effort.compared - 2]})

    def _compare(self, batch: Any, recorder: _Recorder) -> None:
        """Raise `Unproven` if the recorded rows of some examples differ from those in a batch without the others."""
        again = _Recorder(list(range(len(recorder.positions))), len(recorder.positions))
        with self._named():
            observe(self.space, self.layers, self.subject.loss, pick(batch, recorder.positions), again)
        why = recorder.difference(again, self.subject.allowed)
        if why is not None:
            raise Unproven(dict.fromkeys(self.space.parameters, why))
        self.found.rows_compared += recorder.size
        if recorder.positions[-1] == 0:  # the examples were compared in other places
            self.found.places = max(self.found.places, len(recorder.positions))

    def _prove(self, batch: Any, calls: Calls) -> None:
        """Compare examples of the batch with autograd, because the model treats the batch in a new way."""
        size = batch_length(batch)
        names = {id(self.space.parameters[name]): name for name in self.found.unseen}
        touched = {names[id(parameter)] for parameter in calls.touched}
        positions = self._telling(batch, touched) if touched else self._some(size)
        truth = self.subject.truth([pick(batch, [at]) for at in positions])
        with self._named():
            scores, _ = self.subject.captured(self.layers, pick(batch, positions), Observer())
        hidden = used_elsewhere(self.subject, truth, scores)
        if hidden:
            raise Unproven(hidden)
        recorder, allowed = _Recorder(positions, size), self.subject.allowed.rows
        again = observe(
            self.space, self.layers, self.subject.loss, batch, recorder, closely=lambda _: True, allowed=allowed
        )
        self._check_order(batch, again)
        self._compare(batch, recorder)
        self.found.proven.add(calls.signature)
        self.found.unseen -= touched

    def _telling(self, batch: Any, touched: set[str]) -> list[int]:
        """Positions of examples that touch the parameters `touched`, and of some others."""
        size = batch_length(batch)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(0)).tolist()[:_TRIED]
        missing, found = set(touched), []
        for at in order:
            seen = set(compress(self.space.parameters, self.subject.truth([pick(batch, [at])]).touched.tolist()))
            if missing & seen:
                found.append(at)
                missing -= seen
            if not missing:
                return sorted({*found, *self._some(size)})
        raise Unproven(
            dict.fromkeys(sorted(missing), "no example could be found to compare its gradient with autograd")
        )


def used_elsewhere(subject: Subject, truth: Truth, scores: Tensor) -> dict[str, str]:
    """Parameters for which the layers' scores of examples `[b, q]` differ from the truth: name → why."""
    wrong = truth.differs(scores, subject.allowed).tolist()
    return {
        name: f"{name!r} is used in a way its layer alone does not show"
        for name in compress(subject.space.parameters, wrong)
    }


def strays(space: ParameterSpace, calls: Calls) -> dict[str, str]:
    """Parameters that are also used outside of their layers: name → a sentence that says so."""
    found = {id(parameter) for parameter in calls.strayed}
    return {
        name: f"{name!r} is used outside of its layer too"
        for name, value in space.parameters.items()
        if id(value) in found
    }


class _Recorder(Observer):
    """Keeps the rows of some examples of a batch for every layer call, while another observer does the work."""

    def __init__(self, positions: list[int], size: int, worker: Observer | None = None) -> None:
        self.positions, self.size, self.worker = positions, size, worker or Observer()
        self.inputs: list[tuple[str, Tensor]] = []
        self.gradients: dict[int, tuple[Tensor, float]] = {}

    def forward(self, layer: Layer, a: Tensor) -> tuple[int, Any]:
        self.inputs.append((layer.name, self._rows(a)))
        return len(self.inputs) - 1, self.worker.forward(layer, a)

    def backward(self, layer: Layer, kept: tuple[int, Any], d: Tensor, repeats: int) -> None:
        number, own = kept
        before = self.gradients.get(number)
        rows = self._rows(d) if before is None else before[0] + self._rows(d)
        norm = float(wide(d).norm())
        if not isfinite(norm):
            norm = float(wide(d).nan_to_num(0, 0, 0).norm())
        self.gradients[number] = rows, norm / self.size**0.5
        self.worker.backward(layer, own, d, repeats)

    def _rows(self, values: Tensor) -> Tensor:
        return values.reshape(self.size, -1, *values.shape[1:])[self.positions]

    def difference(self, alone: _Recorder, allowed: Tolerance) -> str | None:
        """Say how these rows differ from those of the same examples in a batch of their own; None if they do not."""
        for number, (name, rows) in enumerate(self.inputs):
            if number >= len(alone.inputs) or alone.inputs[number][0] != name:
                return f"layer {name!r} is called otherwise in a batch of {self.size} than in one of {alone.size}"
            usual = self.gradients.get(number, (rows, 0.0))[1]
            pairs = [(rows, alone.inputs[number][1], 0.0)]
            if number in self.gradients or number in alone.gradients:
                zero = torch.zeros(())
                mine, other = (found.gradients.get(number, (zero, 0.0))[0] for found in (self, alone))
                pairs.append((mine, other, usual * len(self.positions) ** 0.5))
            for found, expected, floor in pairs:
                if not _alike(found, expected, floor, allowed.each):
                    return (
                        f"the rows of layer {name!r} are not those of the examples in their order "
                        f"(in a batch of {self.size} examples)"
                    )
        return None


def _alike(found: Tensor, expected: Tensor, floor: float, allowed: float) -> bool:
    if found.shape != expected.shape and found.dim() and expected.dim():
        return False
    if not found.is_floating_point():
        return bool((found == expected).all())
    found, expected = (wide(values).nan_to_num(0, 0, 0) for values in (found, expected.to(found.device)))
    return float((found - expected).norm()) <= allowed * (float(expected.norm()) + floor)
