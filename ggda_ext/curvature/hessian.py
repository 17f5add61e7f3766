"""Products of the training loss's curvature with many vectors at once: the Hessian and the Gauss–Newton matrix.

Let L be the mean training loss and H = ∇²L(θ). Every product is ``H v = ∇⟨∇L(θ), v⟩``: one backward pass through the
graph of the gradient for each vector. The graph is built once for all vectors.

Let z = f(x; θ) be the model's outputs and J = ∂z/∂θ. Then H is Jᵀ (∂²ℓ/∂z²) J plus a term with the second derivatives
of f, which makes H indefinite. The Gauss–Newton matrix leaves this term out:

    G v = Σ_batches Jᵀ (∂²ℓ/∂z²) J v

It has no negative curvature for a convex loss. It equals H if f is linear in θ, and is close to H if the model fits its
data. With several ranks (see `ggda_ext.sharing`) each rank takes a share of the points for every product.
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
from ggda_ext.model import ParameterSpace, full_precision, sums_on
from ggda_ext.sharing import adding_up, checksum

BatchLossFn = Callable[[nn.Module, Any], Tensor]

_CHUNK_BYTES = 8 * 2**20  # vectors multiplied at once: few enough for the cache, enough to share overheads


class Hessian:
    """The Hessian of a loss over a data set, with respect to some of the model's parameters.

    Args:
        space: the model and the parameters that the Hessian is taken for.
        loss: ``loss(model, batch)`` returns a scalar: the mean or the sum over the batch.
        data: the points that the loss is taken over.
        batch_size: points per batch in products over the whole data.
        reduction: whether the loss of a batch is the mean or the sum over its points; if left out, it is found by a
            test on two points.
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
        """Yield the products of the Hessian on one batch with `vectors [m, p]`.

        Each item is ``(rows, parts)`` for some of the vectors, with one part `[rows, *shape]` for every parameter, or
        None if the part is zero. A vector is not read again after its product was yielded.
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
        """Return the products `[m, p]` of the Hessian over the whole data with `vectors [m, p]`."""
        result = torch.zeros_like(vectors, dtype=torch.float64, device=sums_on(vectors.device))
        with adding_up(result, same=lambda: self.same(len(vectors))):
            for indices, batch in self.data.my_share(self.batch_size):
                weight = 1.0 if len(indices) == self.n or self.reduction == "sum" else len(indices) / self.n
                for rows, parts in self.on_batch(batch, vectors):
                    self.add(result[rows], parts, weight)
        return result.to(vectors)

    def same(self, m: int) -> dict[str, Any]:
        """Return the values that must be the same on all ranks, so that the sum of their shares is the product."""
        parameters = checksum(self.space.model.parameters())
        return {"the vectors": m, "the points of the Hessian": self.n, "the parameters": parameters}

    def matrix(self) -> Tensor:
        """Return the Hessian as a matrix `[p, p]`."""
        matrix = self @ torch.eye(self.space.size, dtype=self.space.dtype, device=self.space.device)
        return (matrix + matrix.T) / 2

    def add(self, target: Tensor, parts: list[Tensor | None], factor: float) -> None:
        """Add factor · parts to target `[rows, p]`."""
        for parameter, part in zip(self.space.parameters.values(), parts, strict=True):
            if part is not None:
                self.space.part(target, parameter).add_(part.to(target.device), alpha=factor)

    @cached_property
    def reduction(self) -> str:
        """Whether the loss of a batch is the ``"mean"`` or the ``"sum"`` over its points; two points are tested."""
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
    """Raised if the loss is not a curved function of one output of the model and so has no Gauss–Newton matrix."""


class GaussNewton(Hessian):
    """The Gauss–Newton matrix of a loss over a data set; products and solves work as with a `Hessian`.

    The loss must call the model exactly once per batch, in any way, and must depend on the parameters only through the
    model's output. Any other loss raises an error.

    Args:
        space: the model, which returns one tensor, and the parameters that the matrix is taken for.
        loss: ``loss(model, batch)`` returns a scalar: the mean or the sum over the batch.
        data: the points that the loss is taken over.
        batch_size: points per batch in products over the whole data.
    """

    def on_batch(self, batch: Any, vectors: Tensor) -> Iterator[tuple[slice, list[Tensor | None]]]:
        """Yield the products of the Gauss–Newton matrix on one batch with `vectors [m, p]`; see `Hessian.on_batch`."""
        parameters = list(self.space.parameters.values())
        with self.space.require_gradients(of_chosen=True), sdpa_kernel(SDPBackend.MATH):
            outputs, leaf, slope = self._linearized(to_device(batch, self.space.device))
            weights = torch.zeros_like(outputs, requires_grad=True)
            with full_precision(outputs):
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
        """Return the outputs with their graph, a leaf copy, and the gradient of the loss there (None if constant)."""
        seen: list[Tensor] = []
        leaves: list[Tensor] = []

        def cut(module: nn.Module, inputs: Any, output: Any) -> Any:
            logits = getattr(output, "logits", None)
            if isinstance(output, Mapping) and isinstance(logits, Tensor) and output.get("loss") is None:
                seen.append(logits)  # a Hugging Face model that was given inputs without labels
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
                "Gauss–Newton matrix is of a loss of the outputs. Leave the penalty out of the loss, and pass its "
                "strength as damping= of attribute, weight_decay= of WhatIf, or the regularization of a drop-in."
            )
        if value.requires_grad and (found[0] is None or not found[0].requires_grad):
            raise NoCurvature(
                "the loss is linear in the model's output, so its Gauss–Newton matrix is zero: let the model return "
                "outputs and the loss be a curved function of them (not a model that returns its loss), or use the "
                "Hessian."
            )
        return seen[0], leaves[0], found[0]


def _one_number(value: Tensor) -> Tensor:
    """Return the loss of a batch as a scalar; raise an error if it is not one number."""
    if value.numel() != 1:
        raise ValueError(f"the loss of a batch has shape {list(value.shape)}: return one number, its mean or sum.")
    return value.reshape(())


def _chunks_of_vectors(vectors: Tensor) -> Iterator[slice]:
    """Yield slices of `vectors [m, p]`; the rows of a slice are multiplied at once."""
    chunk = max(1, _CHUNK_BYTES // (vectors.shape[1] * vectors.element_size()))
    return (slice(low, min(low + chunk, len(vectors))) for low in range(0, len(vectors), chunk))


def _products_with_vectors(
    of: list[Tensor], by: Sequence[Tensor], vectors: list[Tensor], *, keep: bool
) -> list[Tensor | None]:
    """Return ∂⟨of, vectors⟩/∂by for c vectors `[c, *shape]`; None means zero. `keep` says whether to keep the graph."""
    with full_precision(vectors[0]):
        if len(vectors[0]) == 1:
            single = [vector[0] for vector in vectors]
            found = torch.autograd.grad(of, by, single, retain_graph=keep, allow_unused=True)
            return [None if part is None else part[None] for part in found]
        return list(torch.autograd.grad(of, by, vectors, retain_graph=keep, allow_unused=True, is_grads_batched=True))


def direct_solve(matrix: Tensor, vectors: Tensor, regularization: float = 0.0) -> Tensor:
    """Return (matrix + regularization I)⁻¹ v for `vectors [m, p]`; raise an error if the matrix is singular."""
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
    """Round a positive number up to two significant digits."""
    unit = 10.0 ** (np.floor(np.log10(value)) - 1)
    return float(f"{np.ceil(value / unit) * unit:.2g}")
