"""TRAK's tasks in the form the core needs: outputs f(z_i, θ) as per-example losses, and mean reweighting terms Q̄_i.

TRAK's tasks are written for one example and run under vmap, which fails for Hugging Face models. So the model runs once
on the whole batch, and vmap is applied only to the task's arithmetic on the outputs. For TRAK's margin of image
classification this arithmetic is written out here, because vmap itself takes longer than a small model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from trak.modelout_functions import ImageClassificationModelOutput

from ggda_ext.checkpoints import load_state
from ggda_ext.losses import ExampleLoss
from ggda_ext.model import left_as_it_was
from ggda_trak.store import PointMeans

Route = Literal["batched", "margin", "staged", "vmap", "loop"]


class TaskOutputs(ExampleLoss):
    """Outputs `f(z_i)` of a TRAK task on batches.

    Args:
        task: a TRAK model output function.
        batched: whether the task's `get_output` takes whole batches, as iterative tasks do.
        model: the model that the task is called with.
        sample: a batch to try the task on. Its first two examples decide how the task is run:
            ``"margin"`` (written out), ``"staged"`` (the model on the batch, the rest of the task on each output),
            ``"vmap"``, or ``"loop"``.
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
        """Outputs of the task `[b]`."""
        return self._outputs(self.route, model, tuple(batch))

    def _outputs(self, route: Route, model: nn.Module, sample: tuple[Tensor, ...]) -> Tensor:
        if route == "batched":
            return self.task.get_output(model, None, None, *sample)
        if route == "margin":
            return margins(model(sample[0]), sample[1])
        weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        if route == "staged":
            model, weights, buffers = _OutsideOfVmap(model), {}, {}

        def alone(*example: Tensor) -> Tensor:
            return self.task.get_output(model, weights, buffers, *example)

        if route == "loop":
            return torch.stack([alone(*example) for example in zip(*sample, strict=True)])
        return torch.func.vmap(alone, randomness="different")(*sample)

    def _first_that_agrees(self, model: nn.Module, sample: tuple[Tensor, ...]) -> Route:
        with torch.no_grad():
            expected = self._outputs("loop", model, sample)
            routes: tuple[Route, ...] = ("margin", "staged", "vmap")
            for route in routes if _is_margin(self.task) else routes[1:]:
                try:
                    found = self._outputs(route, model, sample)
                except Exception:  # a model or task may fail under vmap in any way
                    continue
                if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=1e-5):
                    return route
        return "loop"


def _is_margin(task: Any) -> bool:
    """Whether a task computes its outputs by TRAK's code for image classification."""
    own = getattr(type(task), "get_output", None) is ImageClassificationModelOutput.get_output
    return own and "get_output" not in vars(task)


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-odds of the labels `[b]` under logits `[b, classes]`."""
    if logits.dim() != 2:
        raise TypeError(f"the model gives {list(logits.shape)}, not one row of logits per example")
    own = labels[:, None]
    others = logits.scatter(1, own, -torch.inf)
    return logits.gather(1, own)[:, 0] - others.logsumexp(1)


class _OutsideOfVmap(nn.Module):
    """Lets a task call the model once for one example under vmap; the model itself runs on the whole batch outside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._run = [model]  # in a list, so that it does not become a submodule
        self._shape: TreeSpec | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._shape is not None:
            raise TypeError("the task calls the model twice")
        flat, shape = tree_flatten((args, kwargs))
        outputs = _WholeBatch.apply(self, shape, *flat)
        assert self._shape is not None
        return tree_unflatten(outputs, self._shape)

    def on_batch(self, flat: list[Any], shape: TreeSpec) -> list[Any]:
        """The outputs for the whole batch."""
        args, kwargs = tree_unflatten(flat, shape)
        outputs, self._shape = tree_flatten(self._run[0](*args, **kwargs))
        return outputs


class _WholeBatch(torch.autograd.Function):
    """Runs the model in its vmap rule, which gets the whole batch; each example is a batch of one `[b, 1, …]`."""

    @staticmethod
    def forward(model: _OutsideOfVmap, shape: TreeSpec, *flat: Any) -> Any:
        raise TypeError("the task does not give the model an example")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        raise NotImplementedError  # never reached, because `forward` raises an error

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], model: _OutsideOfVmap, shape: TreeSpec, *flat: Any
    ) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        pairs = zip(flat, in_dims[2:], strict=True)
        whole = [value if dim is None else value.movedim(dim, 0).flatten(0, 1) for value, dim in pairs]
        outputs = model.on_batch(whole, shape)
        return tuple(value.unsqueeze(1) for value in outputs), (0,) * len(outputs)


class MeanWeights:
    """TRAK's reweighting terms averaged over checkpoints, Q̄_i = (1/M) Σ_m Q_{m,i}, computed with forward passes only.

    Args:
        model: the model, which is left as it was.
        gradient_computer: TRAK's gradient computer, which computes Q at the model's current parameters.
        checkpoints: all checkpoints as state dicts or paths, if there are several.
        means: keeps Q̄ of the points that are done, if there are several checkpoints.
    """

    def __init__(
        self, model: nn.Module, gradient_computer: Any, checkpoints: Sequence[Any], means: PointMeans | None
    ) -> None:
        self.model, self.gradient_computer = model, gradient_computer
        self.checkpoints, self.means = checkpoints, means

    def __call__(self, batch: tuple[Tensor, ...], indices: np.ndarray, at_once: int) -> Tensor:
        """Q̄ `[b]` of the points `indices` in a batch; the model runs on `at_once` of them at a time."""
        if self.means is None:
            weights = self._at_current_parameters(batch, at_once)
        else:
            weights = torch.from_numpy(self.means[indices])
            if bool(weights.isnan().any()):
                weights = torch.zeros(len(indices))
                with left_as_it_was(self.model):
                    for checkpoint in self.checkpoints:
                        load_state(self.model, checkpoint)
                        weights += self._at_current_parameters(batch, at_once).cpu() / len(self.checkpoints)
                self.means[indices] = weights.numpy()
        if not bool(weights.isfinite().all()):
            bad = indices[(~weights.isfinite()).cpu().numpy()]
            raise ValueError(
                f"the weight Q of {len(bad)} points is not finite, first {bad[:5].tolist()}: look for NaN or infinite "
                "inputs there."
            )
        return weights.to(batch[0].device)

    def _at_current_parameters(self, batch: tuple[Tensor, ...], at_once: int) -> Tensor:
        pieces = zip(*(tensor.split(at_once) for tensor in batch), strict=True)
        with torch.no_grad():
            found = [self.gradient_computer.compute_loss_grad(piece).detach().reshape(-1) for piece in pieces]
        return torch.cat(found).float()
