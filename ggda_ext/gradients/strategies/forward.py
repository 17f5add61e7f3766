"""`forward`: the score of point i along v is d/dε ℓ(x_i; θ + εv), by forward-mode differentiation.

For any layer that supports forward mode. Fused attention and fused weight normalisation do not, so attention takes
the math kernel, and weight normalisation is written out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ggda_ext.gradients.plan import Request
from ggda_ext.model import ParameterSpace


def scores(request: Request, directions: Tensor) -> Tensor:
    """Inner products of directions `[m, p]` with the group-summed gradients `[m, k]`."""
    result = request.empty_scores(len(directions))
    moves = tangents(request.space, directions)
    for labels, batch in request.natural_batches():
        for row, tangent in zip(result, moves, strict=True):
            row.index_add_(0, labels, point_scores(request.loss_module, request.space, tangent, batch).to(row))
    return result


def tangents(space: ParameterSpace, directions: Tensor) -> list[dict[str, Tensor]]:
    """Directions `[m, p]` by parameter; an embedding's padding row, which gets no gradient, does not move."""
    still = {
        id(module.weight): module.padding_idx
        for module in space.model.modules()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None
    }
    moves = [space.split(direction) for direction in directions]
    for name, parameter in space.parameters.items():
        if id(parameter) in still:
            for move in moves:
                move[name] = move[name].clone()
                move[name][still[id(parameter)]] = 0
    return moves


def point_scores(loss_module: nn.Module, space: ParameterSpace, tangent: dict[str, Tensor], batch: Any) -> Tensor:
    """Derivative of every example's loss along one direction `[b]`."""
    unfused = sdpa_kernel(SDPBackend.MATH), _WeightNormWrittenOut()
    with space.require_gradients(of_chosen=False), torch.no_grad(), forward_ad.dual_level(), unfused[0], unfused[1]:
        duals = {
            f"model.{name}": forward_ad.make_dual(value.detach(), tangent[name])
            for name, value in space.parameters.items()
        }
        losses, derivative = forward_ad.unpack_dual(functional_call(loss_module, duals, (batch,)))
    return torch.zeros_like(losses) if derivative is None else derivative


class _WeightNormWrittenOut(TorchFunctionMode):
    """Replaces the fused g·v/‖v‖, which has no forward-mode derivative."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch._weight_norm:
            return func(*args, **(kwargs or {}))
        v, g, *rest = args
        dim = (rest or [(kwargs or {}).get("dim", 0)])[0]
        others = [d for d in range(v.dim()) if d != dim] if dim >= 0 else list(range(v.dim()))
        return v * (g / v.square().sum(others, keepdim=True).sqrt())
