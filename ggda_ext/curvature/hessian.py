"""Curvature of the training loss as products with many vectors at once: the Hessian and the Gauss–Newton matrix.

With L the mean training loss and H = ∇²L(θ), every product is ``H v = ∇⟨∇L(θ), v⟩``: one backward pass through
the graph of the gradient for each vector, the graph itself built once for all of them.

With z = f(x; θ) the model's outputs and J = ∂z/∂θ, H is Jᵀ (∂²ℓ/∂z²) J plus a term with the second derivatives of f,
which makes it indefinite. The Gauss–Newton matrix leaves that term out:

    G v = Σ_batches Jᵀ (∂²ℓ/∂z²) J v

It has no negative curvature for a convex loss, equals H where f is linear in θ, and comes close to it where the model
fits its data. Under several ranks (see `ggda_ext.sharing`) products are shared out by points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ggda_ext.data import IndexedData, batch_length, to_device
from ggda_ext.model import ParameterSpace, sums_on
from ggda_ext.sharing import adding_up, checksum

BatchLossFn = Callable[[nn.Module, Any], Tensor]

_CHUNK_BYTES = 8 * 2**20  # vectors worked on at once: few enough to stay near the cache, enough to share overheads


class Hessian:
    """The Hessian of a loss over a data set, with respect to some of the model's parameters.

    Args:
        space: the model and the parameters that count.
        loss: ``loss(model, batch)``, a scalar: the mean or the sum over the batch.
        data: the points the loss is taken over.
        batch_size: points per pass in products with the whole data.
        reduction: whether the loss of a batch is the mean or the sum over its points; found by trying if left out.
    """

    def __init__(
        self,
        space: ParameterSpace,
        loss: BatchLossFn,
        data: IndexedData,
        batch_size: int = 1024,
        *,
        reduction: Literal["mean", "sum"] | None = None,
    ) -> None:
        if data.n is None:
            raise TypeError(f"{data.name} is a stream without a length: pass a map-style data set for the Hessian.")
        self.space, self.loss, self.data, self.n, self.batch_size = space, loss, data, data.n, batch_size
        if reduction is not None:
            self.reduction = reduction

    def on_batch(self, batch: Any, vectors: Tensor) -> Iterator[tuple[slice, list[Tensor | None]]]:
        """Products of the Hessian on one batch with `vectors [m, p]`.

        Yields ``(rows, parts)`` for some vectors at a time: a part `[rows, *shape]` for every parameter, or None
        where it is zero. A vector is not read again after its product was given out.
        """
        parameters = list(self.space.parameters.values())
        with self.space.require_gradients(of_chosen=True), sdpa_kernel(SDPBackend.MATH):
            value = _one_number(self.loss(self.space.model, to_device(batch, self.space.device)))
            first = self.space.gradients_of(value, differentiable=True)
            used = [(g, p) for g, p in zip(first, parameters, strict=True) if g is not None and g.requires_grad]
            for rows in _chunks_of_vectors(vectors):
                if not used:
                    yield rows, [None] * len(parameters)
                    continue
                along, keep = [self.space.part(vectors[rows], p) for _, p in used], rows.stop < len(vectors)
                yield rows, _products_with_vectors([g for g, _ in used], parameters, along, keep=keep)

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Products `[m, p]` of the Hessian over the whole data with `vectors [m, p]`."""
        result = torch.zeros_like(vectors, dtype=torch.float64, device=sums_on(vectors.device))
        with adding_up(result, same=lambda: self.same(len(vectors))):
            for indices, batch in self.data.my_share(self.batch_size):
                weight = 1.0 if len(indices) == self.n or self.reduction == "sum" else len(indices) / self.n
                for rows, parts in self.on_batch(batch, vectors):
                    self.add(result[rows], parts, weight)
        return result.to(vectors)

    def same(self, m: int) -> dict[str, Any]:
        """What has to be the same on all ranks, so that their shares of a product add up."""
        parameters = checksum(self.space.model.parameters())
        return {"the vectors": m, "the points of the Hessian": self.n, "the parameters": parameters}

    def matrix(self) -> Tensor:
        """The Hessian itself `[p, p]`."""
        matrix = self @ torch.eye(self.space.size, dtype=self.space.dtype, device=self.space.device)
        return (matrix + matrix.T) / 2

    def add(self, target: Tensor, parts: list[Tensor | None], factor: float) -> None:
        """target `[rows, p]` += factor · parts."""
        for parameter, part in zip(self.space.parameters.values(), parts, strict=True):
            if part is not None:
                self.space.part(target, parameter).add_(part.to(target.device), alpha=factor)

    @cached_property
    def reduction(self) -> str:
        """Whether the loss of a batch is the ``"mean"`` or the ``"sum"`` over its points, found by trying two."""
        pair = to_device(self.data.first(2), self.space.device)
        ones = [to_device(batch, self.space.device) for batch in self.data.batches([[0], [min(1, self.n - 1)]])]
        with torch.no_grad():
            together = self.loss(self.space.model, pair) * batch_length(pair)
            alone = sum(self.loss(self.space.model, one) for one in ones[: batch_length(pair)])
        if torch.allclose(together, torch.as_tensor(alone), rtol=1e-4):
            return "mean"
        if torch.allclose(together / batch_length(pair), torch.as_tensor(alone), rtol=1e-4):
            return "sum"
        raise ValueError(
            f"the loss of two points together is {float(together) / 2:.6g}, which is neither the mean nor the sum of "
            f"their losses (sum {float(alone):.6g}), so batches cannot be put together to a Hessian of the whole data: "
            "use a loss with reduction='mean' or 'sum', or one batch that holds all the data."
        )


class NoCurvature(ValueError, TypeError):
    """A loss that is no curved function of one output of the model, so that it has no Gauss–Newton matrix."""


class GaussNewton(Hessian):
    """The Gauss–Newton matrix of a loss over a data set; products and solves as with a `Hessian`.

    The loss may call the model in any way, but once per batch, and must depend on the parameters through the model's
    output alone; anything else is refused.

    Args:
        space: the model, which returns one tensor, and the parameters that count.
        loss: ``loss(model, batch)``, a scalar: the mean or the sum over the batch.
        data: the points the loss is taken over.
        batch_size: points per pass in products with the whole data.
    """

    def on_batch(self, batch: Any, vectors: Tensor) -> Iterator[tuple[slice, list[Tensor | None]]]:
        """Products of the Gauss–Newton matrix on one batch with `vectors [m, p]`, see `Hessian.on_batch`."""
        parameters = list(self.space.parameters.values())
        with self.space.require_gradients(of_chosen=True), sdpa_kernel(SDPBackend.MATH):
            outputs, leaf, slope = self._linearized(to_device(batch, self.space.device))
            weights = torch.zeros_like(outputs, requires_grad=True)
            first = torch.autograd.grad(outputs, parameters, weights, create_graph=True, allow_unused=True)
            used = [(g, p) for g, p in zip(first, parameters, strict=True) if g is not None]
            for rows in _chunks_of_vectors(vectors):
                if slope is None or not used:
                    yield rows, [None] * len(parameters)
                    continue
                keep = rows.stop < len(vectors)
                along = [self.space.part(vectors[rows], p) for _, p in used]
                (moved,) = _products_with_vectors([g for g, _ in used], [weights], along, keep=True)  # J v
                assert moved is not None
                (bent,) = _products_with_vectors([slope], [leaf], [moved], keep=keep)  # ∂²ℓ/∂z² J v
                if bent is None:
                    yield rows, [None] * len(parameters)
                else:
                    yield rows, _products_with_vectors([outputs], parameters, [bent], keep=keep)

    def _linearized(self, batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """The outputs with their graph, the same as a leaf, and its gradient of the loss; None if that is constant."""
        seen: list[Tensor] = []
        leaves: list[Tensor] = []

        def cut(module: nn.Module, inputs: Any, output: Any) -> Any:
            logits = getattr(output, "logits", None)
            if isinstance(output, Mapping) and isinstance(logits, Tensor) and output.get("loss") is None:
                seen.append(logits)  # of Hugging Face, given inputs without labels
                leaves.append(logits.detach().requires_grad_())
                return type(output)(**{**output, "logits": leaves[-1]})
            if not isinstance(output, Tensor):
                raise NoCurvature(
                    f"the model returned a {type(output).__name__}: the Gauss–Newton matrix needs a model that returns "
                    "one tensor, and a loss of it. Wrap the model so that it returns its outputs, or use the Hessian."
                )
            seen.append(output)
            leaves.append(output.detach().requires_grad_())
            return leaves[-1]

        handle = self.space.model.register_forward_hook(cut)
        try:
            value = _one_number(self.loss(self.space.model, batch))
        finally:
            handle.remove()
        if len(seen) != 1:
            raise NoCurvature(
                f"the loss calls the model {len(seen)} times for a batch: the Gauss–Newton matrix needs one call, of "
                "the model itself. Use the Hessian."
            )
        found = self.space.gradients_of(value, leaves[0], differentiable=True)
        beside = [name for name, g in zip(self.space.parameters, found[1:], strict=True) if g is not None]
        if beside:
            raise ValueError(
                f"the loss depends on {beside[0]!r} beside the model's output (a penalty on weights?): the "
                "Gauss–Newton matrix is of a loss of the outputs. Leave the penalty out and pass it as regularization."
            )
        if value.requires_grad and (found[0] is None or not found[0].requires_grad):
            raise NoCurvature(
                "the loss is linear in the model's output, so its Gauss–Newton matrix is zero: let the model return "
                "outputs and the loss be a curved function of them (not a model that returns its loss), or use the "
                "Hessian."
            )
        return seen[0], leaves[0], found[0]


def _one_number(value: Tensor) -> Tensor:
    """The loss of a batch as a scalar, if it is one number."""
    if value.numel() != 1:
        raise ValueError(f"the loss of a batch has shape {list(value.shape)}: return one number, its mean or sum.")
    return value.reshape(())


def _chunks_of_vectors(vectors: Tensor) -> Iterator[slice]:
    """Rows of `vectors [m, p]` that are worked on at once."""
    chunk = max(1, _CHUNK_BYTES // (vectors.shape[1] * vectors.element_size()))
    return (slice(low, min(low + chunk, len(vectors))) for low in range(0, len(vectors), chunk))


def _products_with_vectors(
    of: list[Tensor], by: Sequence[Tensor], vectors: list[Tensor], *, keep: bool
) -> list[Tensor | None]:
    """∂⟨of, vectors⟩/∂by for some vectors at a time `[c, *shape]`; zero where None. `keep` keeps the graph."""
    if len(vectors[0]) == 1:
        single = [vector[0] for vector in vectors]
        found = torch.autograd.grad(of, by, single, retain_graph=keep, allow_unused=True)
        return [None if part is None else part[None] for part in found]
    return list(torch.autograd.grad(of, by, vectors, retain_graph=keep, allow_unused=True, is_grads_batched=True))


def direct_solve(matrix: Tensor, vectors: Tensor, regularization: float = 0.0) -> Tensor:
    """(matrix + regularization I)⁻¹ v for `vectors [m, p]`."""
    damped = matrix.clone()
    damped.diagonal().add_(regularization)
    try:
        return torch.linalg.solve(damped, vectors.T).T
    except torch.linalg.LinAlgError as error:
        raise ValueError(
            f"the Hessian is singular with regularization={regularization}: pass a positive regularization, e.g. "
            f"{round_up(1e-3 * max(float(matrix.diagonal().abs().mean()), 1e-12)):g}."
        ) from error


def round_up(value: float) -> float:
    """To two significant digits, upwards."""
    unit = 10.0 ** (np.floor(np.log10(value)) - 1)
    return float(f"{np.ceil(value / unit) * unit:.2g}")
