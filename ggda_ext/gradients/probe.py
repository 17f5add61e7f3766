"""A look at a few examples before the work starts: what has an answer, which strategies give it, what they will cost.

The examples come from the whole data: the first, the last, those with a large loss (a gradient near zero tells
nothing), others at random. Each is run alone through plain autograd. Then the loss of a batch must be made of the losses
of its examples, and whatever a strategy says about them must be what autograd says. A parameter that no example
touched is looked for in more of them; a strategy that cannot be compared with autograd is not trusted.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ggda_ext.data import IndexedData, batch_length, pick, to_device
from ggda_ext.gradients.captured import CapturedLayers
from ggda_ext.gradients.checks import check_same_losses
from ggda_ext.gradients.cost import Facts
from ggda_ext.gradients.hooks import Layer, Observer, UnknownLayer, copied_parameter, known_layers
from ggda_ext.gradients.parameters import ParameterSpace
from ggda_ext.gradients.request import LossModule
from ggda_ext.gradients.strategies import forward, persample
from ggda_ext.gradients.truth import Truth, captured_scores, random_direction, tolerance, total_scores, truth_of
from ggda_ext.groups import Groups
from ggda_ext.losses import ExampleLoss
from ggda_ext.model_state import Buffers

LARGEST_BATCH = 16_384
CACHED_BYTES = 13 * 2**20  # a batch whose activations stay near the cache; more makes small models slower
ENOUGH_POINTS = 1024  # but no fewer points than this, if the budget allows
_BYTES_PER_ACTIVATION = 4  # an activation, its gradient, what autograd keeps of it, and a tangent
_EXAMPLES = 8  # compared with autograd
_MORE, _ROUNDS = 16, 2  # examples looked at, so many times, for a parameter that the first ones do not touch
_FAILS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError, AssertionError)


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
    ) -> None:
        self._space, self._loss, self._data = space, loss, data
        self._direction = random_direction(space)
        at_once = max(2, min(_EXAMPLES, batch_size or _EXAMPLES))
        members = None if data.is_stream else _members(groups)
        kept = Buffers(space.model)
        try:
            seen = _First(space, loss, data, members, at_once)
            space.changing = [buffer for buffer, _ in kept.changed()]
        finally:
            kept.restore()
        self._allowed = tolerance(seen.precision)
        self._batches: list[Any] = []
        self._truth = Truth.of_nothing(len(space.parameters))
        for batch, alone in seen.chosen():
            self._add(batch, alone)
        self._look_further(members, at_once)
        self._proven: set[tuple[tuple[str, int], ...]] = set()
        layers, uncovered, work = self._layers(seen)
        self.captured = CapturedLayers(space, layers, loss, self._allowed)
        self.captured.proven, self.captured.unseen = self._proven, self._untouched()
        points = int(groups.sizes.sum())
        copied = sum(layer.weight.numel() for layer in layers if layer.copied is not None and layer.weight is not None)
        self._bytes_per_point = _BYTES_PER_ACTIVATION * seen.bytes_per_point + copied * space.dtype.itemsize
        self._most_points = batch_size or _batch_size(self._bytes_per_point, memory_budget)
        self.facts = Facts(
            points=points,
            groups=len(groups),
            parameters=space.size,
            work_per_point=float(space.size) if uncovered else max(work.forward_pass, 1.0),
            uncovered=uncovered,
            not_ghost=work.not_ghost or _shared_parameter(layers),
            ghost_work=work.pairs,
            no_forward_mode=self._no_forward_mode() if uncovered or strategy == "forward" else None,
            no_vmap=self._no_vmap() if uncovered or strategy == "persample" else None,
            batch_size=min(self._most_points, points),
            working_bytes=self._bytes_per_point * min(self._most_points, points),
        )

    def on(self, groups: Groups) -> Probe:
        """The same model with other groups of more data of the same kind."""
        other = copy.copy(self)
        points = int(groups.sizes.sum())
        size = min(self._most_points, points)
        other.facts = replace(
            self.facts,
            points=points,
            groups=len(groups),
            batch_size=size,
            working_bytes=self._bytes_per_point * size,
        )
        return other

    def give_up(self, why: dict[str, str]) -> None:
        """Do without the layers of these parameters from now on: a pass found that they do not tell the gradient."""
        self.facts = replace(
            self.facts,
            uncovered=self.facts.uncovered | why,
            no_forward_mode=self._no_forward_mode(),
            no_vmap=self._no_vmap(),
        )

    # what has an answer at all

    def _add(self, batch: Any, alone: Sequence[Any]) -> None:
        """Compare a batch with its examples alone, and keep it to compare strategies with."""
        with self._space.gradients(enabled=False), torch.no_grad():
            losses = self._loss.each(self._space.model, batch)
        truth = self._alone(alone)
        self._check_sums(batch, losses, truth)
        self._check_reduction(batch, truth.losses)
        self._truth = self._truth.joined(truth)
        self._batches.append(batch)

    def _alone(self, alone: Sequence[Any]) -> Truth:
        try:
            return truth_of(self._space, self._loss, alone, self._direction)
        except _FAILS as error:
            if len(alone) == 1:
                raise
            raise ValueError(
                f"the loss of one example alone cannot be computed, though that of a batch can: {error} An example has a "
                "gradient of its own only if the model takes a batch of one: look for statistics of the batch, and for "
                "squeeze() without a dimension."
            ) from error

    def _check_sums(self, batch: Any, losses: Tensor, truth: Truth) -> None:
        """Refuse a batch whose losses or gradient are not those of its examples alone."""
        losses, expected = losses.detach().cpu().double(), truth.losses
        finite = truth.finite & losses.isfinite()
        if len(losses) != len(expected):
            raise ValueError(f"the loss gave {len(losses)} values for a batch of {len(expected)} examples.")
        if len(losses) < 2 or not bool(finite.any()):
            return
        scale = expected.abs() + expected[finite].abs().max()
        off = ((losses - expected).abs() > self._allowed.most * scale) & finite
        if not bool(off.any()) and bool(finite.all()):
            total = total_scores(self._space, self._loss, batch, self._direction)
            room = self._allowed.most * (truth.norms.sum(0) + 1e-3 * truth.norms.sum())
            if bool(((total - truth.scores.sum(0)).abs() <= 10 * room).all()):
                return
        worst = int(torch.where(off, (losses - expected).abs(), -1.0).argmax())
        if self._alike_in_batch(batch, truth):
            return  # rounding: a loss near 0 is a difference of larger numbers
        raise ValueError(
            f"the model or the loss mixes the examples of a batch: {self._data.name} has an example with a loss of "
            f"{float(losses[worst]):.6g} in a batch of {len(losses)} and of {float(expected[worst]):.6g} alone"
            f"{_who_mixes(self._space.model)}. So the gradient of a group has no fixed value: use statistics that do "
            "not depend on the batch, and a loss of each example by itself."
        )

    def _alike_in_batch(self, batch: Any, truth: Truth) -> bool:
        """Whether every example has the gradient in a batch that it has alone."""
        found = []
        parameters = list(self._space.parameters.values())
        for at in range(batch_length(batch)):
            with self._space.gradients(enabled=True):
                value = self._loss.each(self._space.model, batch)[at]
                gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
            row = torch.empty(self._space.size, dtype=self._space.dtype, device=self._space.device)
            parts = self._space.split(self._space.flatten(gradients, row) * self._direction[0])
            found.append(torch.stack([part.double().sum() for part in parts.values()]).cpu())
        return not bool(truth.differs(torch.stack(found), self._allowed).any())

    def _check_reduction(self, batch: Any, alone: Tensor) -> None:
        """Refuse a loss function whose value for a batch is neither the sum nor the mean of its examples' losses."""
        with self._space.gradients(enabled=False), torch.no_grad():
            value = self._loss.reduced(self._space.model, batch)
        if value is None or len(alone) < 2 or not bool(alone.isfinite().all()):
            return
        whole, room = float(value), self._allowed.most * float(alone.abs().max() + alone.abs().mean())
        if abs(whole - float(alone.mean())) <= room or abs(whole - float(alone.sum())) <= room * len(alone):
            return
        raise ValueError(
            f"loss_fn gives {whole:.6g} for a batch of {len(alone)} examples whose losses alone have the mean "
            f"{float(alone.mean()):.6g}: neither their mean nor their sum, so what an example adds to it depends on who "
            "shares the batch (a weighted or masked mean, a broadcast of target against output, a comparison of "
            "examples). Let loss_fn return one loss per example [b], or their sum."
        )

    def _look_further(self, members: np.ndarray | None, at_once: int) -> None:
        """Look for examples that touch the parameters which the first ones did not touch."""
        if members is None:
            return
        others = np.random.default_rng(1).permutation(len(members))
        for start in range(0, min(_ROUNDS * _MORE, len(others)), _MORE):
            missing = ~self._truth.touched
            if not bool(missing.any()):
                return
            some = members[others[start : start + _MORE]]
            runs = [some[low : low + at_once] for low in range(0, len(some), at_once)]
            device = self._space.device
            for run, batch in zip(runs, [to_device(b, device) for b in self._data.batches(runs)], strict=True):
                scores = total_scores(self._space, self._loss, batch, self._direction)
                if not bool((scores[missing] != 0).any()):
                    continue
                self._add(batch, [to_device(one, device) for one in self._data.batches([[at] for at in run])])

    # what the strategies can see

    def _layers(self, seen: _First) -> tuple[list[Layer], dict[str, str], _Work]:
        """The layers to observe, the parameters whose gradients they do not give (name → why), and their work."""
        layers, unknown = known_layers(self._space)
        if unknown and not self._loss.vectorized:
            layers, unknown = self._with_copies(layers, unknown, seen.output_dims)
        if unknown:
            return layers, unknown, _Work(1)
        self._proven.clear()  # what was tried with other layers does not count
        found, layers, work = self._captured(layers)
        if isinstance(found, str):
            return layers, dict.fromkeys(self._space.parameters, found), work
        wrong = self._truth.differs(found, self._allowed)
        uncovered = {
            name: f"{name!r} is used in a way its layer alone does not show"
            for name, is_wrong in zip(self._space.parameters, wrong.tolist(), strict=True)
            if is_wrong
        }
        return layers, uncovered, work

    def _captured(self, layers: list[Layer]) -> tuple[Tensor | str, list[Layer], _Work]:
        """Scores of all examples from the layers `[b, q]`, or why there are none."""
        work = _Work(batch_length(self._batches[0]))
        try:
            return self._scores(layers, work), layers, work
        except UnknownLayer as error:
            return str(error), layers, work
        except _FAILS as error:
            message = _first_line(error)
        copying = [replace(layer, copies_output=layer.copied is None) for layer in layers]
        work = _Work(work.size)
        try:
            return self._scores(copying, work), copying, work
        except _FAILS as error:  # an output that is overwritten in place was not the cause
            return message if not isinstance(error, UnknownLayer) else str(error), layers, work

    def _scores(self, layers: list[Layer], work: _Work) -> Tensor:
        found = []
        for number, batch in enumerate(self._batches):
            watcher = _Work(batch_length(batch)) if number else work
            scores, calls = captured_scores(self._space, layers, self._loss, batch, self._direction, watcher)
            self._proven.add(calls.signature)
            found.append(scores)
        return torch.cat(found)

    def _with_copies(
        self, layers: list[Layer], unknown: dict[str, str], output_dims: dict[str, int]
    ) -> tuple[list[Layer], dict[str, str]]:
        """Layers with those of the unknown parameters that may be given as copies, one per example."""
        by_kind: dict[type, list[Layer]] = {}
        owners = _owners(self._space, unknown)
        for parameter_name, (name, module, key) in owners.items():
            parameter = self._space.parameters[parameter_name]
            layer = copied_parameter(name, module, key, parameter, output_dims.get(name, 0))
            if layer is not None:
                by_kind.setdefault(type(module), []).append(layer)
        names = {id(value): name for name, value in self._space.parameters.items()}
        copied: list[Layer] = []
        for kind in by_kind.values():
            if not isinstance(self._captured([*kind])[0], str):
                copied += kind
        known = {names[id(layer.weight)] for layer in copied}
        return [*layers, *copied], {name: why for name, why in unknown.items() if name not in known}

    def _untouched(self) -> dict[str, nn.Parameter]:
        pairs = zip(self._space.parameters.items(), self._truth.touched.tolist(), strict=True)
        return {name: parameter for (name, parameter), is_touched in pairs if not is_touched}

    def _unproven(self) -> str | None:
        """Why no strategy can be compared with autograd, or None."""
        untouched = list(self._untouched())
        if not untouched:
            return None
        return (
            f"no example of {self._data.name} was found whose loss depends on parameter {untouched[0]!r}, so its gradient "
            "cannot be compared with autograd"
        )

    def _no_forward_mode(self) -> str | None:
        """Why forward-mode differentiation does not give the gradients of these examples, or None."""
        finite = self._truth.finite
        norms = self._truth.norms[finite].amax(0) if bool(finite.any()) else torch.ones(len(self._space.parameters))
        norms = norms + 1e-3 * norms.max() + torch.finfo(norms.dtype).tiny
        # every parameter of about equal weight, so that a small one counts
        moves = forward.tangents(self._space, self._direction)[0]
        scaled = {name: move / norm.to(move) for (name, move), norm in zip(moves.items(), norms, strict=True)}
        module = LossModule(self._space.model, self._loss)
        try:
            scores = [forward.point_scores(module, self._space, scaled, batch) for batch in self._batches]
        except _FAILS as error:
            return f"forward-mode differentiation of the model failed: {_first_line(error)}"
        found, expected = torch.cat(scores).cpu().to(self._truth.scores), (self._truth.scores / norms).sum(1)
        off = ((found - expected).abs() / (0.1 + (self._truth.norms / norms).square().sum(1).sqrt()))[finite]
        if len(off) and not (bool((off <= self._allowed.each).all()) and off.median() <= self._allowed.most):
            return "forward-mode differentiation of the model disagrees with its gradient"
        return self._unproven()

    def _no_vmap(self) -> str | None:
        """Why vmap(grad) does not give the gradients of these examples, or None."""
        module = LossModule(self._space.model, self._loss)
        rows = []
        try:
            for batch in self._batches:
                for at in range(0, batch_length(batch), 2):  # a row has p numbers
                    pair = pick(batch, range(at, min(at + 2, batch_length(batch))))
                    products = persample.point_gradients(module, self._space, pair) * self._direction
                    rows += [[part.double().sum() for part in self._space.split(row).values()] for row in products]
        except _FAILS as error:
            return f"vmap over the model failed: {_first_line(error)}"
        found = torch.stack([torch.stack(row) for row in rows]).cpu()
        wrong = self._truth.differs(found, self._allowed)
        if not bool(wrong.any()):
            return self._unproven()
        names = [name for name, is_wrong in zip(self._space.parameters, wrong.tolist(), strict=True) if is_wrong]
        return f"vmap over the model gives another gradient of parameter {names[0]!r} than autograd"


class _First:
    """The first run of some examples: bytes, precision and shapes of activations, and the examples to compare."""

    def __init__(
        self, space: ParameterSpace, loss: ExampleLoss, data: IndexedData, members: np.ndarray | None, at_once: int
    ) -> None:
        self._space, self._loss, self._data, self._device = space, loss, data, space.device
        self._members, self._at_once = members, at_once
        if members is None:
            self._batch = to_device(data.first(at_once), space.device)
            self._candidates = np.arange(batch_length(self._batch))
        else:
            self._candidates = _spread(members, at_once if at_once < _EXAMPLES else 2 * _EXAMPLES)
            self._batch = to_device(next(iter(data.batches([self._candidates]))), space.device)
        self.precision = space.dtype
        self.output_dims: dict[str, int] = {}
        self._seen = 0
        leaves = {id(m) for m in space.model.modules() if next(m.children(), None) is None}
        handles = [
            module.register_forward_hook(self._hook(name, id(module) in leaves))
            for name, module in space.model.named_modules()
            if id(module) in leaves or any(True for _ in module.named_parameters(recurse=False))
        ]
        try:
            with space.gradients(enabled=False), torch.no_grad():
                self._losses = loss.each(space.model, self._batch)
        finally:
            for handle in handles:
                handle.remove()
        self.bytes_per_point = max(1, self._seen // batch_length(self._batch))

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

    def _check_same(self, batch: Any) -> None:
        with self._space.gradients(enabled=False), torch.no_grad():
            again = self._loss.each(self._space.model, to_device(batch, self._device))
        check_same_losses(self._losses, again, self._data.name)

    def chosen(self) -> list[tuple[Any, list[Any]]]:
        """The examples to compare, as batches, each with its examples alone: the first, the last, some of large loss."""
        if self._members is None:
            self._check_same(self._batch)
            return [(self._batch, [pick(self._batch, [at]) for at in range(batch_length(self._batch))])]
        ends = [0, len(self._candidates) - 1]
        large = torch.argsort(self._losses.detach().float().nan_to_num(-1, -1, -1), descending=True).tolist()
        picked = self._candidates[list(dict.fromkeys([*ends, *large]))[:_EXAMPLES]]
        batches = [picked[low : low + self._at_once] for low in range(0, len(picked), self._at_once)]
        fetched = iter(self._data.batches([self._candidates, *batches, *[[index] for index in picked]]))
        self._check_same(next(fetched))
        runs = [to_device(next(fetched), self._device) for _ in batches]
        return [
            (run, [to_device(next(fetched), self._device) for _ in batch])
            for run, batch in zip(runs, batches, strict=True)
        ]


def _spread(members: np.ndarray, count: int) -> np.ndarray:
    """The first and the last of the points, and others at random, in order."""
    if len(members) <= count:
        return members
    inner = np.random.default_rng(0).choice(len(members) - 2, count - 2, replace=False) + 1
    return members[np.sort(np.concatenate([[0], inner, [len(members) - 1]]))]


def _members(groups: Groups) -> np.ndarray:
    return np.arange(groups.n) if int(groups.sizes.sum()) == groups.n else np.flatnonzero(groups.labels >= 0)


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output if isinstance(output, tuple | list) else ()
    return next((value for value in values if isinstance(value, Tensor)), None)


def _owners(space: ParameterSpace, names: dict[str, str]) -> dict[str, tuple[str, nn.Module, str]]:
    """The module of each parameter: its name, itself, and what it calls the parameter; none if there are several."""
    wanted = {id(space.parameters[name]): name for name in names}
    found: dict[str, list[tuple[str, nn.Module, str]]] = {}
    for module_name, module in space.model.named_modules():
        for key, value in module.named_parameters(recurse=False):
            if id(value) in wanted:
                found.setdefault(wanted[id(value)], []).append((module_name, module, key))
    return {name: places[0] for name, places in found.items() if len(places) == 1}


def _who_mixes(model: nn.Module) -> str:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            return f" ({type(module).__name__} {name!r} has no running statistics and takes those of the batch)"
    return ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _batch_size(bytes_per_point: int, memory_budget: int) -> int:
    wanted = max(CACHED_BYTES // bytes_per_point, ENOUGH_POINTS)
    size = int(max(1, min(wanted, memory_budget // bytes_per_point, LARGEST_BATCH)))
    return size - size % 16 if size > 16 else size


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
        if not isinstance(layer.module, nn.Linear) or layer.copied is not None:
            self.not_ghost = f"{type(layer.module).__name__} {layer.name!r} is not a Linear layer"
        elif kept.dim() != 2 or repeats != 1:
            self.not_ghost = f"Linear {layer.name!r} sees more than one token per example"


def _shared_parameter(layers: list[Layer]) -> str | None:
    seen = [id(value) for layer in layers for value in (layer.weight, layer.bias) if value is not None]
    return "two layers share a parameter" if len(set(seen)) < len(seen) else None
