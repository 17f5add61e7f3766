"""`forward`: the score of point i along v is d/dε ℓ(x_i; θ + εv), by forward-mode differentiation.

It works for any layer that supports forward mode. Fused attention and fused weight normalisation do not support it, so
attention uses the math kernel, and weight normalisation is computed step by step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from ggda_ext.data import batch_length
from ggda_ext.gradients.observation import Watch
from ggda_ext.gradients.plan import Cost, Request, Strategy
from ggda_ext.gradients.proof.findings import Findings
from ggda_ext.gradients.proof.truth import FAILS, Subject, first_line
from ggda_ext.losses import ExampleLoss
from ggda_ext.model import ParameterSpace, called_with


def scores(request: Request, directions: Tensor) -> Tensor:
    """Return the inner products `[m, k]` of directions `[m, p]` with the group-summed gradients."""
    result = request.empty_scores(len(directions))
    moves = [request.space.split(direction) for direction in directions]
    for points, batch in request.natural_batches():
        ids = request.ids_of(points)
        for number, (row, tangent) in enumerate(zip(result, moves, strict=True)):
            found, losses, watch = watched_scores(request.loss, request.space, tangent, batch)
            if number == 0:
                request.captured.check_forward(batch, tangent, found, watch)
                request.captured.check_apart(batch, losses, watch)
            row.index_add_(0, ids, found.to(row))
    return result


def watched_scores(
    loss: ExampleLoss, space: ParameterSpace, tangent: dict[str, Tensor], batch: Any
) -> tuple[Tensor, Tensor, Watch]:
    """Return the derivative of every loss along one direction `[b]`, the losses `[b]`, and what the model did."""
    watch = AsBackward(batch_length(batch))
    with space.require_gradients(of_chosen=False), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        duals = {name: forward_ad.make_dual(value.detach(), tangent[name]) for name, value in space.parameters.items()}
        with watch:
            found = called_with(space.model, duals, batch, function=loss.each)
        losses, derivative = forward_ad.unpack_dual(found)
    losses = losses.detach()
    return torch.zeros_like(losses) if derivative is None else derivative.detach(), losses, watch


class AsBackward(Watch):
    """Makes forward mode see what a backward pass sees.

    Values that the model computes without gradients have no tangent. An embedding of padding has none, either; its row
    has one only if a tied weight is also used elsewhere. The fused g·v/‖v‖, which has no forward-mode derivative, is
    computed step by step.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._weight_norm:
            return _weight_norm(*args, **(kwargs or {}))
        found = super().__torch_function__(func, types, args, kwargs)
        if func is F.embedding and torch.is_grad_enabled():
            return _embedded(found, *args, **(kwargs or {}))
        return found if torch.is_grad_enabled() else _constant(found)


def _constant(found: Any) -> Any:
    if isinstance(found, tuple | list) and type(found) in (tuple, list):
        return type(found)(map(_constant, found))
    moves = isinstance(found, Tensor) and forward_ad.unpack_dual(found).tangent is not None
    return found.detach() if moves else found


def _embedded(found: Tensor, ids: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> Tensor:
    """Return the rows of an embedding, without a tangent for the rows of padding."""
    if padding_idx is None:
        return found
    return torch.where((ids == padding_idx % len(weight))[..., None], _constant(found), found)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    others = [d for d in range(v.dim()) if d != dim] if dim >= 0 else list(range(v.dim()))
    return v * (g / v.square().sum(others, keepdim=True).sqrt())


def compare(subject: Subject, found: Findings) -> str | None:
    """The reason why forward-mode differentiation does not give autograd's result for some examples, or None."""
    space, truth, finite = subject.space, found.truth, found.truth.finite
    if found.alters is not None:
        return f"{found.alters} changes gradients, which forward-mode differentiation does not see"
    norms = truth.norms[finite].amax(0) if bool(finite.any()) else torch.ones(len(space.parameters))
    norms = norms + 1e-3 * norms.max() + torch.finfo(norms.dtype).tiny
    # scale every parameter to about equal weight, so that small ones count
    moves = space.split(subject.direction[0])
    scaled = {name: move / norm.to(move) for (name, move), norm in zip(moves.items(), norms, strict=True)}
    try:
        runs = [watched_scores(subject.loss, space, scaled, batch) for batch in found.batches]
    except FAILS as error:
        return f"forward-mode differentiation of the model failed: {first_line(error)}"
    found.forward_proven |= {watch.called for _, _, watch in runs}
    scores, expected = torch.cat([run[0] for run in runs]).cpu().to(truth.scores), (truth.scores / norms).sum(1)
    off = ((scores - expected).abs() / (0.1 + (truth.norms / norms).square().sum(1).sqrt()))[finite]
    if len(off) and not (bool((off <= subject.allowed.each).all()) and off.median() <= subject.allowed.most):
        return "forward-mode differentiation of the model disagrees with its gradient"
    return None


STRATEGY = Strategy("forward", scores, Cost(direction=1.3), compare=compare)
