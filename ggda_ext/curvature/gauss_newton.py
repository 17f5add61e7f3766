"""The Gauss–Newton matrix of the training loss: curvature that is never negative for a convex loss.

With z = f(x; θ) the model's outputs and J = ∂z/∂θ, the Hessian of a loss ℓ(z) is Jᵀ (∂²ℓ/∂z²) J plus a term with the
second derivatives of f, which makes it indefinite. The Gauss–Newton matrix leaves that term out:

    G v = Σ_batches Jᵀ (∂²ℓ/∂z²) J v

It equals the Hessian where f is linear in θ, and comes close to it where the model fits its data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ggda_ext.curvature.hessian import Hessian, chunks_of_vectors, one_number, products_with_vectors
from ggda_ext.data import to_device


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
            for rows in chunks_of_vectors(vectors):
                if slope is None or not used:
                    yield rows, [None] * len(parameters)
                    continue
                keep = rows.stop < len(vectors)
                along = [self.space.part(vectors[rows], p) for _, p in used]
                (moved,) = products_with_vectors([g for g, _ in used], [weights], along, keep=True)  # J v
                assert moved is not None
                (bent,) = products_with_vectors([slope], [leaf], [moved], keep=keep)  # ∂²ℓ/∂z² J v
                if bent is None:
                    yield rows, [None] * len(parameters)
                else:
                    yield rows, products_with_vectors([outputs], parameters, [bent], keep=keep)

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
            value = one_number(self.loss(self.space.model, batch))
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
