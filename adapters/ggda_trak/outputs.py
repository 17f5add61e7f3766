"""TRAK's model output functions as per-example losses: w_i · f(z_i, θ), for any gradient strategy of the core.

TRAK's tasks are written for one example, to be run under vmap, which Hugging Face models do not survive. So the
model is run once on the whole batch, outside of vmap, and only the task's arithmetic on its outputs is vectorised.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ggda_ext.data import as_batch_of_one
from ggda_ext.losses import ExampleLoss

Route = Literal["batched", "staged", "vmap", "loop"]


class TaskOutputs(ExampleLoss):
    """Weighted outputs `w_i f(z_i)` of a TRAK task on batches ``(*sample, w)``.

    Args:
        task: a TRAK model output function.
        batched: whether its `get_output` takes whole batches, as iterative tasks do.
        model: the model the task is called with.
        sample: a batch to try the task on; the first two examples decide how it is run:
            ``"staged"`` (model on the batch, then the task on each output), ``"vmap"``, or ``"loop"``.
    """

    def __init__(self, task: Any, batched: bool, model: nn.Module, sample: tuple[Tensor, ...]) -> None:
        self.task = task
        self.route: Route = "batched"
        if not batched:
            self.route = self._first_that_agrees(model, tuple(tensor[:2] for tensor in sample))

    @property
    def vectorized(self) -> bool:  # type: ignore[override]
        """Whether the model itself runs under vmap."""
        return self.route == "vmap"

    def each(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Weighted outputs `[b]`."""
        *sample, weights = batch
        return weights * self._outputs(self.route, model, tuple(sample))

    def _outputs(self, route: Route, model: nn.Module, sample: tuple[Tensor, ...]) -> Tensor:
        if route == "batched":
            return self.task.get_output(model, None, None, *sample)
        if route == "staged":
            return self._staged(model, sample)
        weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())

        def alone(*example: Tensor) -> Tensor:
            return self.task.get_output(model, weights, buffers, *example)

        if route == "vmap":
            return torch.func.vmap(alone, randomness="different")(*sample)
        return torch.stack([alone(*example) for example in zip(*sample, strict=True)])

    def _staged(self, model: nn.Module, sample: tuple[Tensor, ...]) -> Tensor:
        call = _Call()

        def inputs(*example: Tensor) -> tuple[Tensor, ...]:
            return call.record(lambda: self.task.get_output(call, {}, {}, *example))

        tensors = torch.func.vmap(inputs)(*sample)
        args, kwargs = call.arguments([tensor.flatten(0, 1) for tensor in tensors])
        outputs = model(*args, **kwargs)

        def output(of_model: Any, *example: Tensor) -> Tensor:
            return self.task.get_output(_Answer(as_batch_of_one(of_model)), {}, {}, *example)

        return torch.func.vmap(output)(outputs, *sample)

    def _first_that_agrees(self, model: nn.Module, sample: tuple[Tensor, ...]) -> Route:
        with torch.no_grad():
            expected = self._outputs("loop", model, sample)
            routes: tuple[Route, Route] = ("staged", "vmap")
            for route in routes:
                try:
                    found = self._outputs(route, model, sample)
                except Exception:  # whatever a model or a task does not support under vmap
                    continue
                if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=1e-5):
                    return route
        return "loop"


class _Called(Exception):
    """Ends a task at its call of the model."""


class _Call(nn.Module):
    """Stands in for the model to learn what a task calls it with."""

    def record(self, run: Any) -> tuple[Tensor, ...]:
        """Run a task up to its call of the model; the tensors it passes."""
        try:
            run()
        except _Called:
            return tuple(value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor))
        raise TypeError("the task does not call the model")

    def arguments(self, tensors: list[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """The recorded arguments, with the tensors replaced in order."""
        following = iter(tensors)

        def new(value: Any) -> Any:
            return next(following) if isinstance(value, Tensor) else value

        return [new(value) for value in self.args], {key: new(value) for key, value in self.kwargs.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        raise _Called


class _Answer(nn.Module):
    """Stands in for the model with an output that is already known."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output
