"""Training losses as functions of the outputs: their values, slopes and curvatures for many counterfactuals at once.

A refit needs ℓ(z), ∂ℓ/∂z and (∂²ℓ/∂z²) t of every point, for outputs z `[n, c, s]` of s counterfactuals. Three families
have closed forms, with constants per point (`ggda_ext.counterfactual.known_losses` reads them off the loss):

* softmax   ℓ = w log Σ exp z − Σ_c q_c z_c      cross-entropy, with class weights, label smoothing, soft labels;
* logistic  ℓ = a log(1 + e^−z) + b log(1 + e^z)  binary cross-entropy; also softmax of two classes, of z₁ − z₀;
* squared   ℓ = w/2 (z − y)²                      squared error.

Anything else is differentiated by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ggda_ext.losses import example_losses

LossFn = Callable[..., Tensor] | None
_RADIUS = 10.0


class ConvexLoss:
    """The loss of every training point as a function of the *columns* of its outputs, which a refit moves.

    Args:
        constants: tensors that the closed form needs, with points along dim 0.
    """

    radius = math.inf
    """How far outputs may move, as a root mean square over points. Logits beyond it give probabilities of 0 or 1."""

    def __init__(self, *constants: Tensor) -> None:
        self.constants = constants

    def columns(self, outputs: Tensor) -> Tensor:
        """Map outputs `[n, C, …]` to columns `[n, c, …]`; the map is linear."""
        return outputs

    def each(self, outputs: Tensor) -> Tensor:
        """Return the losses `[n]` for outputs `[n, …]`, in double precision."""
        return self.value(self.columns(outputs.double().reshape(len(outputs), -1))[:, :, None])[:, 0]

    def of_columns(self, rows: Tensor) -> Tensor:
        """Apply the transposed map: turn a cotangent of columns `[n, c]` into a cotangent of outputs `[n, C]`."""
        return rows

    def take(self, at: slice | Tensor) -> ConvexLoss:
        """Return the loss of some of the points."""
        return type(self)(*(constant[at] for constant in self.constants))

    def to(self, dtype: torch.dtype) -> ConvexLoss:
        """Return the loss with constants of another precision."""
        return type(self)(*(constant.to(dtype) for constant in self.constants))

    @property
    def bends(self) -> Tensor:
        """The factor of every point's second derivatives that decides their sign."""
        raise NotImplementedError

    def state(self, z: Tensor) -> Tensor:
        """Compute the tensor that `slope` and `bend` need from columns z `[n, c, s]`; it has the same shape."""
        raise NotImplementedError

    def value(self, z: Tensor) -> Tensor:
        """Return the losses `[n, s]` for columns z `[n, c, s]`."""
        raise NotImplementedError

    def slope(self, state: Tensor) -> Tensor:
        """Return the first derivatives `[n, c, s]`."""
        raise NotImplementedError

    def bend(self, state: Tensor, t: Tensor) -> Tensor:
        """Return the second derivatives times t `[n, c, s]`."""
        raise NotImplementedError

    def root(self, state: Tensor) -> Tensor:
        """Return square roots B `[n, c, c]` of the second derivatives BᵀB for a state `[n, c, 1]`."""
        raise NotImplementedError

    def noise(self, state: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a random cotangent `[n, c]` for every point; its covariance is the second derivative."""
        signs = torch.randint(0, 2, state.shape[:2], generator=generator).to(state) * 2 - 1
        return torch.einsum("nab,na->nb", self.root(state), signs)


class SoftmaxLoss(ConvexLoss):
    """w log Σ exp z − Σ q z, with constants w `[n]` and q `[n, c]`."""

    radius = _RADIUS

    @property
    def bends(self) -> Tensor:
        return self.constants[0]

    def state(self, z: Tensor) -> Tensor:
        return torch.softmax(z, 1)

    def value(self, z: Tensor) -> Tensor:
        w, q = self.constants
        return w[:, None] * torch.logsumexp(z, 1) - (q[:, :, None] * z).sum(1)

    def slope(self, state: Tensor) -> Tensor:
        w, q = self.constants
        return torch.addcmul(-q[:, :, None], w[:, None, None], state)

    def bend(self, state: Tensor, t: Tensor) -> Tensor:
        moved = state * t
        return moved.sub_(state * moved.sum(1, keepdim=True)).mul_(self.constants[0][:, None, None])

    def root(self, state: Tensor) -> Tensor:
        p = state[:, :, 0]
        eye = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)
        return (self.constants[0][:, None] * p).sqrt()[:, :, None] * (eye - p[:, None, :])

    def noise(self, state: Tensor, generator: torch.Generator) -> Tensor:
        p = state[:, :, 0]  # use the slope for a label drawn from the model: it is nearer to real gradients than signs
        labels = torch.multinomial(p.cpu(), 1, generator=generator)[:, 0].to(p.device)
        return self.constants[0].clamp_min(0).sqrt()[:, None] * (p - F.one_hot(labels, p.shape[1]))


class LogisticLoss(ConvexLoss):
    """a log(1 + e^−z) + b log(1 + e^z) of every column, with constants a and b `[n, c]`."""

    radius = _RADIUS

    @property
    def bends(self) -> Tensor:
        return self.constants[0] + self.constants[1]

    def state(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z)

    def value(self, z: Tensor) -> Tensor:
        a, b = self.constants
        return (a[:, :, None] * F.softplus(-z) + b[:, :, None] * F.softplus(z)).sum(1)

    def slope(self, state: Tensor) -> Tensor:
        a, b = self.constants
        return torch.addcmul(-a[:, :, None], (a + b)[:, :, None], state)

    def bend(self, state: Tensor, t: Tensor) -> Tensor:
        a, b = self.constants
        return torch.addcmul(state, state, state, value=-1).mul_(t).mul_((a + b)[:, :, None])

    def root(self, state: Tensor) -> Tensor:
        a, b = self.constants
        p = state[:, :, 0]
        return torch.diag_embed(((a + b) * p * (1 - p)).clamp_min(0).sqrt())


class TwoClassLoss(LogisticLoss):
    """Softmax of two classes, in one column z₁ − z₀."""

    def columns(self, outputs: Tensor) -> Tensor:
        return outputs[:, 1:] - outputs[:, :1]

    def of_columns(self, rows: Tensor) -> Tensor:
        return torch.cat([-rows, rows], 1)


class SquaredLoss(ConvexLoss):
    """w/2 (z − y)² + e, with constants w and y `[n, c]`, e `[n]`."""

    @property
    def bends(self) -> Tensor:
        return self.constants[0]

    def state(self, z: Tensor) -> Tensor:
        return z

    def value(self, z: Tensor) -> Tensor:
        w, y, e = self.constants
        return (w[:, :, None] / 2 * (z - y[:, :, None]).square()).sum(1) + e[:, None]

    def slope(self, state: Tensor) -> Tensor:
        w, y, _ = self.constants
        return w[:, :, None] * (state - y[:, :, None])

    def bend(self, state: Tensor, t: Tensor) -> Tensor:
        return self.constants[0][:, :, None] * t

    def root(self, state: Tensor) -> Tensor:
        return torch.diag_embed(self.constants[0].clamp_min(0).sqrt())


class AnyLoss(ConvexLoss):
    """Any other loss, differentiated by autograd; its only constants are the targets.

    Args:
        loss_fn: the loss, a function of outputs and targets.
        targets: the target of every point, in the order of the points, or None.
        shape: the shape of one output.
        dtype: the precision in which the loss is computed, whatever the precision of the columns.
    """

    def __init__(
        self, loss_fn: LossFn, targets: Tensor | None, shape: torch.Size, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.loss_fn, self.shape, self.dtype = loss_fn, shape, dtype
        self.targets = targets.to(dtype) if targets is not None and targets.is_floating_point() else targets

    def take(self, at: slice | Tensor) -> AnyLoss:
        return AnyLoss(self.loss_fn, None if self.targets is None else self.targets[at], self.shape, self.dtype)

    def to(self, dtype: torch.dtype) -> AnyLoss:
        return self

    def state(self, z: Tensor) -> Tensor:
        return z

    def value(self, z: Tensor) -> Tensor:
        outputs = z.to(self.dtype).unbind(2)
        each = [example_losses(self.loss_fn, one.reshape(len(z), *self.shape), self.targets) for one in outputs]
        return torch.stack(each, 1).to(z)

    def slope(self, state: Tensor) -> Tensor:
        z = state.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self.value(z).sum(), z)[0]

    def bend(self, state: Tensor, t: Tensor) -> Tensor:
        z = state.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.value(z).sum(), z, create_graph=True)
            if not slope.requires_grad:  # a loss without curvature
                return torch.zeros_like(t)
            found = torch.autograd.grad(slope, z, t, allow_unused=True)[0]
        return torch.zeros_like(t) if found is None else found

    def root(self, state: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(self.curvature(state))
        return values.clamp_min(0).sqrt()[:, :, None] * vectors.transpose(1, 2)

    def curvature(self, state: Tensor) -> Tensor:
        """Return the second derivatives `[n, c, c]` for a state `[n, c, 1]`."""
        units = torch.eye(state.shape[1], dtype=state.dtype, device=state.device)
        columns = [self.bend(state, unit[None, :, None].expand_as(state))[:, :, 0] for unit in units]
        return torch.stack(columns, 2)
